"""In which order one disk is asked, by all who read from it and write to it in this process. It does many things at
once, each of them slower for the others, and what was asked of it cannot be taken back:

    layers               at once, and in the order of need: whoever reads them asks for no more than there are buffers
    KV pages that are    beside layers PAGES_BYTES at once, or one larger page, always, so that nobody waits for ever:
    read                 the earliest deadline first, which is when they were wanted
    KV pages that are    the same, with a deadline that is a little later: what is wanted meanwhile goes before them.
    written              Until then they go only while no layer is being read
    no layers            everything at once

So a layer finds so much before it, and pages have no more than SHARE of the disk. Knows no files.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary

from holdfast.hardware.disks import whole_disk

PAGES_BYTES = 4 << 20
"""Of pages, on their way at once beside layers; or one piece that is larger."""
PIECE_BYTES = PAGES_BYTES // 2
"""Read or written at once, or a page that is larger: while a thread hears that it is over, and the next one that it is
its turn, the disk has another."""
SHARE = 1 / 9
"""That pages have beside layers, at most: of what is on its way then, eight pieces are of layers. On busy cores it may
be half of that, since one piece goes when a thread has heard of the end of another."""
CALM_S = 0.1
"""After which no layer is expected any more: between those of a step there are pauses, while it computes."""
WRITE_BEHIND_S = 0.1
"""That a write lets layers, and pages that are wanted, go before it."""

Use = Literal["read", "write"]


@dataclass(order=True, slots=True)
class _Turn:
    due_s: float
    number: int
    nbytes: int = field(compare=False)
    overdue: bool = field(compare=False)
    """Its deadline has passed."""
    begun: threading.Event = field(compare=False, default_factory=threading.Event)


class DiskTurns:
    """Of one disk. By any thread."""

    piece_bytes = PIECE_BYTES

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers = self._pages_bytes = 0
        """Reads of layers, and bytes of pages, that are on their way."""
        self._last_layer_s = float("-inf")
        self._waiting: list[_Turn] = []
        self._numbers = itertools.count()
        self._waited_s: dict[Use, float] = {"read": 0.0, "write": 0.0}

    @contextmanager
    def layer(self) -> Iterator[None]:
        """Within, a piece of a layer is read. Waits for nothing."""
        with self._lock:
            self._layers += 1
        try:
            yield
        finally:
            with self._lock:
                self._layers -= 1
                self._last_layer_s = time.monotonic()
                if not self._layers:
                    self._begin_next()

    @contextmanager
    def pages(self, use: Use, nbytes: int, since_s: float) -> Iterator[None]:
        """Within, so many bytes of pages are read or written, in one piece, which were asked for at `since_s` (as
        `time.monotonic` has it). Waits for its turn."""
        due_s = since_s if use == "read" else since_s + WRITE_BEHIND_S
        with self._lock:
            turn = _Turn(due_s, next(self._numbers), nbytes, due_s <= time.monotonic())
            heapq.heappush(self._waiting, turn)
            self._begin_next()
        self._wait(turn, use)
        try:
            yield
        finally:
            with self._lock:
                self._pages_bytes -= nbytes
                self._begin_next()

    def _wait(self, turn: _Turn, use: Use) -> None:
        if turn.begun.is_set():
            return
        began_s = time.monotonic()
        if not turn.overdue and not turn.begun.wait(max(0.0, turn.due_s - began_s)):
            with self._lock:
                turn.overdue = True
                self._begin_next()
        turn.begun.wait()
        with self._lock:
            self._waited_s[use] += time.monotonic() - began_s

    def waits(self) -> dict[str, float]:
        """Seconds that pages waited for their turn, by what for; of several threads at once, all of it."""
        with self._lock:
            return {str(use): waited_s for use, waited_s in self._waited_s.items()}

    def _begin_next(self) -> None:
        """All who may, in their order. While something waits a piece of pages is on its way, or a deadline is to come:
        the end of either comes here again."""
        beside = self._layers > 0 or time.monotonic() < self._last_layer_s + CALM_S
        while self._waiting:
            first = self._waiting[0]
            if beside and self._pages_bytes and self._pages_bytes + first.nbytes > PAGES_BYTES:
                return
            if self._layers and not first.overdue:
                return
            heapq.heappop(self._waiting)
            self._pages_bytes += first.nbytes
            first.begun.set()


_disks: WeakValueDictionary[str, DiskTurns] = WeakValueDictionary()
_disks_lock = threading.Lock()


def turns_of(device: int) -> DiskTurns:
    """Of the disk that this is on, the same for all in this process. `device`: as `st_dev` has it."""
    with _disks_lock:
        return _disks.setdefault(whole_disk(device), DiskTurns())
