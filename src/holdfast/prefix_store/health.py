"""Whether the disk takes pages: what it said when it did not, when it is tried again, and that people are told once."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

log = logging.getLogger("holdfast")

RETRY_S = 30.0
TROUBLE = "HFW10"


class DiskHealth:
    def __init__(self, folder: Path, retry_s: float = RETRY_S) -> None:
        self._folder, self._retry_s = folder, retry_s
        self._lock = threading.Lock()
        self._failing: str | None = None
        self._retry_at = 0.0
        self._told: set[str] = set()

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

    def wrote(self) -> None:
        with self._lock:
            self._failing = None
