"""What the store did, in numbers: counts by reason, and bytes a second as measured. Knows nothing of files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DropReason = Literal[
    "already there", "queue full", "write budget", "no room", "store failing", "store busy", "read only",
    "source failed", "slot lost", "closing", "forgotten",
]  # fmt: skip
"""Why a page was not written. "slot lost": it took so long that another process took its place. "forgotten": what it
holds turned out to be wrong while it waited."""
MissReason = Literal["absent", "evicted", "checksum", "truncated", "I/O error", "cancelled", "closing"]
"""Why a page was not read."""
DAMAGED: frozenset[MissReason] = frozenset({"checksum", "truncated", "I/O error"})
"""Of these: the disk has not what was written."""

_FORGET = 0.5
_MEASURED_S = 0.25
"""Of reading or writing: then what was measured before counts half."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    pages: int
    """Of this model, as far as this process knows."""
    nbytes: int
    """Of these."""
    total_bytes: int
    """Of all models in the folder."""
    size_bytes: int
    """The most that these may be."""
    pages_read: int
    bytes_read: int
    pages_written: int
    bytes_written: int
    pages_evicted: int
    """By this process, of any model."""
    queued_bytes: int
    dropped: Mapping[DropReason, int]
    missed: Mapping[MissReason, int]
    read_bytes_per_second: float | None
    write_bytes_per_second: float | None
    """None: nothing was read or written yet, by any process."""
    written_today_bytes: int
    """By all processes, since midnight UTC."""
    daily_write_bytes: int | None
    """None: no budget."""
    direct: bool
    """Reads and writes go past the page cache."""
    read_only: bool
    failing: str | None
    """What the disk said, while nothing is written because of it."""


class Counts:
    """Shared by the threads of a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        self._missed: Counter[MissReason] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def drop(self, reason: DropReason, pages: int = 1) -> None:
        with self._lock:
            if pages:
                self._dropped[reason] += pages

    def miss(self, reason: MissReason, pages: int = 1) -> None:
        with self._lock:
            if pages:
                self._missed[reason] += pages

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def reasons(self) -> tuple[dict[DropReason, int], dict[MissReason, int]]:
        with self._lock:
            return dict(self._dropped), dict(self._missed)


class Rate:
    """Bytes a second of the time in which anything was on its way. `begin` and `end` around each piece."""

    def __init__(self, before: float | None = None) -> None:
        self._lock = threading.Lock()
        self._before = before
        """What another process measured."""
        self._bytes, self._busy_s = 0.0, 0.0
        self._under_way, self._since = 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = time.monotonic()
            self._under_way += 1

    def end(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._busy_s += now - self._since
            self._since = now
            self._bytes += nbytes
            self._under_way -= 1
            if self._busy_s > 2 * _MEASURED_S:
                self._bytes, self._busy_s = self._bytes * _FORGET, self._busy_s * _FORGET

    @property
    def bytes_per_second(self) -> float | None:
        with self._lock:
            if self._bytes and self._busy_s:
                return self._bytes / self._busy_s
            return self._before
