"""Pages that come from a store on disk, through memory of their own: what a hung disk may still write to is nobody's
page. Knows nothing of the pool.

    begin ──► staging (a page each) ──► collect: its place, or None where it did not come whole or in time ──► release
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from holdfast.footprint.cpu import staging_stride
from holdfast.records import BlockCopy

BATCH, BATCHES = 16, 4
"""The most pages that are asked for at once, those beside each other in one piece; and how many such questions there
are place for: while pages of one go on to the pool, the disk reads those of others."""
LATE_S = 10.0
"""After which nobody waits for a page any more."""


class Valid(Protocol):
    @property
    def valid(self) -> Sequence[bool]: ...


class Store(Protocol):
    """As `holdfast.prefix_store` has it."""

    def read(self, wanted: Sequence[tuple[bytes, memoryview]], done: Callable[[Any], None]) -> Any:
        """`done` is called once, on a thread of its own, with what is `valid`."""

    def write(self, key: bytes, page: memoryview) -> bool:
        """Copied before this returns; False: dropped."""

    def close(self, timeout_s: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Batch:
    copies: list[BlockCopy]
    places: list[int]
    began_s: float
    ticket: Any = None
    over: bool = False
    """It was given up."""
    valid: Sequence[bool] = field(default_factory=tuple)


class DiskReads:
    """`places`: pages that may be on their way at once. `memory`: for them, each at a multiple of `staging_stride`;
    None: its own."""

    def __init__(
        self,
        store: Store,
        page_bytes: int,
        places: int,
        memory: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stride = staging_stride(page_bytes)
        whole = memoryview(mmap.mmap(-1, places * stride)) if memory is None else memory
        self.views = [whole[place * stride : place * stride + page_bytes] for place in range(places)]
        self._store, self._clock = store, clock
        self._free = list(range(places))
        self._batch = max(1, min(BATCH, places // BATCHES))
        self._under_way: list[_Batch] = []
        self._over: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._come = deque[_Batch]()
        """Taken from there, and not collected yet."""
        self._refused: list[BlockCopy] = []

    @property
    def under_way(self) -> bool:
        return bool(self._under_way or self._refused)

    def begin(self, copies: Sequence[BlockCopy]) -> None:
        self._look(0.0)  # A pool that was resized gave up what was on its way: its places may be free by now.
        for first in range(0, len(copies), self._batch):
            part = list(copies[first : first + self._batch])
            if len(self._free) < len(part):  # Others hang.
                self._refused += part
                continue
            batch = _Batch(part, [self._free.pop() for _ in part], self._clock())
            self._under_way.append(batch)
            wanted = [(copy.key, self.views[place]) for copy, place in zip(part, batch.places, strict=True)]
            batch.ticket = self._store.read(wanted, partial(self._done, batch))

    def _done(self, batch: _Batch, result: Valid) -> None:
        """On a thread of the store."""
        batch.valid = tuple(result.valid)
        self._over.put(batch)

    def collect(self, wait_s: float = 0.0) -> Iterator[tuple[BlockCopy, int | None]]:
        """What is over since the last time: the page is in this one of `views`, until it is released."""
        refused, self._refused = self._refused, []
        for copy in refused:
            yield copy, None
        self._look(wait_s if self._under_way and not refused and not self._come else 0.0)
        while self._come:
            batch = self._come.popleft()
            self._under_way.remove(batch)
            self._free += [place for place, valid in zip(batch.places, batch.valid, strict=True) if not valid]
            for copy, place, valid in zip(batch.copies, batch.places, batch.valid, strict=True):
                yield copy, place if valid else None
        late_s = self._clock() - LATE_S
        for batch in [one for one in self._under_way if one.began_s < late_s]:
            self._give_up(batch)
            for copy in batch.copies:
                yield copy, None

    def release(self, place: int) -> None:
        """Its page has been copied."""
        self._free.append(place)

    def _look(self, wait_s: float) -> None:
        """What is over by now; `wait_s`: until something is. Places of what was given up are free again."""
        with contextlib.suppress(queue.Empty):
            while True:
                batch = self._over.get(timeout=wait_s) if wait_s > 0 else self._over.get_nowait()
                wait_s = 0.0
                if batch.over:
                    self._free += batch.places
                else:
                    self._come.append(batch)

    def _give_up(self, batch: _Batch) -> None:
        """Its memory is the store's until it has said that it is done."""
        batch.over = True
        batch.ticket.cancel()
        self._under_way.remove(batch)
        if batch in self._come:
            self._come.remove(batch)
            self._free += batch.places

    def give_up(self) -> list[BlockCopy]:
        """Nobody wants what is on its way, whether the disk answers or not. Returns what it was."""
        given_up, self._refused = self._refused, []
        for batch in list(self._under_way):
            self._give_up(batch)
            given_up += batch.copies
        return given_up
