"""Whether the disk takes pages: what it said when it did not, when it is tried again, and that people are told once; of
pages that were not as they were written at most once a minute.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections import Counter
from pathlib import Path

from holdfast.units import counted

log = logging.getLogger("holdfast")

RETRY_S = 30.0
TROUBLE = "HFW10"
DAMAGE = "HFW11"
TELL_DAMAGE_S = 60.0
"""A disk that fails has thousands of such pages."""


class DiskHealth:
    def __init__(self, folder: Path, retry_s: float = RETRY_S, tell_damage_s: float = TELL_DAMAGE_S) -> None:
        self._folder, self._retry_s, self._tell_damage_s = folder, retry_s, tell_damage_s
        self._lock = threading.Lock()
        self._failing: str | None = None
        self._retry_at = 0.0
        self._told: set[str] = set()
        self._damaged: Counter[str] = Counter()
        """Pages that were not told of yet, by what was found."""
        self._tell_damage_at = 0.0

    @property
    def failing(self) -> str | None:
        return self._failing

    def able(self) -> bool:
        """Also when it is time to try again."""
        return self._failing is None or time.monotonic() >= self._retry_at

    def failed(self, doing: str, error: OSError) -> None:
        """Nothing is written for a while."""
        reason = error.strerror or str(error)
        with self._lock:
            self._failing = reason
            self._retry_at = time.monotonic() + self._retry_s
        self.tell(f"{doing}: {reason}")

    def tell(self, what: str) -> None:
        """Once in the life of the process."""
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        log.warning("KV store %s: %s; serving goes on [%s]", self._folder, what, TROUBLE)

    def damaged(self, found: str, pages: int = 1) -> None:
        """Pages that were read and are not what was written."""
        with self._lock:
            self._damaged[found] += pages
        self.tell_damaged()

    def tell_damaged(self) -> None:
        """Of those since the last time, where that is long enough ago."""
        with self._lock:
            if not self._damaged or time.monotonic() < self._tell_damage_at:
                return
            self._tell_damage_at = time.monotonic() + self._tell_damage_s
            found, self._damaged = self._damaged, Counter()
        log.warning(
            "KV store %s: %s read and not as written (%s), computed instead; holdfast kv-store verify %s [%s]",
            self._folder,
            counted(found.total(), "page"),
            ", ".join(f"{reason}: {pages:,}" for reason, pages in found.most_common()),
            shlex.quote(str(self._folder)),
            DAMAGE,
        )

    def wrote(self) -> None:
        with self._lock:
            self._failing = None
