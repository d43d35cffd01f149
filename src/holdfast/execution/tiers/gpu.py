"""Pages between the pool of a GPU, pinned RAM and a store on disk, beside what the GPU computes. Decides nothing.

    to the pool      launched before a step's rows, begins when all that was launched so far is computed: its readers
    from the pool    launched after a step's rows, begins when these are computed: its writer
    over             when its mark is passed, as the host sees it: nobody is given a page before, and so no row waits

Pages that lie beside each other at both ends are one copy, and some copies one piece. Where weights come over the same
link, what comes to the pool has no deadline beside them: it goes behind, a bit at a time.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.execution.streaming.copies import Copies, Piece
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.tiers.disk import DiskReads, Store
from holdfast.footprint.cpu import staging_stride
from holdfast.held_interrupts import interrupts_put_off
from holdfast.kvcache.pool import Tier
from holdfast.records import BlockCopy, StepPlan

log = logging.getLogger("holdfast")

WAIT_S = 0.005
"""For a page from disk, where there is nothing to compute."""
CLOSE_S = 5.0
PIECE_BYTES = 256 << 20
"""Of RAM, pinned at once."""
MOST_RUN = 32
"""Pages in one piece: it is over as a whole. A mark, a wait and a time for each page would be more work for the host
than to copy them, and behind a long step more than a stream takes before the host has to wait for it."""

Over = tuple[list[int], list[int]]
_SOURCE, _TARGET = attrgetter("source"), attrgetter("target")


class HostMemory:
    """Pages in pinned RAM, in pieces that a thread pins one after the other while the server serves."""

    def __init__(self, pinned: PinnedMemory, page_bytes: int) -> None:
        self._pinned, self._page_bytes = pinned, page_bytes
        self._ready_pieces = self.ready = 0
        """`ready`: pages that may be used."""

    @classmethod
    def pinned(
        cls,
        nbytes: int,
        page_bytes: int,
        device: torch.device,
        file: int | None = None,
        room: Callable[[], int] | None = None,
    ) -> HostMemory:
        """In pieces of whole pages, of the system and of the pool; what is left over is not taken. `file`: whose memory
        it is. `room`: bytes of RAM that there are for it still; None: all."""
        piece = piece_bytes(nbytes, page_bytes)
        pieces = max(1, nbytes // piece)
        return cls(PinnedMemory([piece] * pieces, device, background=range(pieces), file=file, room=room), page_bytes)

    @property
    def nbytes(self) -> int:
        return self._pinned.nbytes

    def to_come_bytes(self) -> int:
        """Of RAM, that will still be taken."""
        return self._pinned.to_come_bytes

    def look(self) -> int:
        """How many are ready by now."""
        while self._ready_pieces < len(self._pinned.pieces):
            try:
                if not self._pinned.is_pinned(self._ready_pieces):
                    break
            except (HoldfastError, RuntimeError) as error:  # It is served from what there is.
                log.warning("the KV tier in RAM stays at %d pages: %s", self.ready, str(error).splitlines()[0])
                self._ready_pieces = len(self._pinned.pieces)
                break
            self.ready += self._pinned.pieces[self._ready_pieces].nbytes // self._page_bytes
            self._ready_pieces += 1
        return self.ready

    @property
    def settled(self) -> bool:
        """As it was looked at last: no more pages will be ready, because all are, or because pinning failed."""
        return self._ready_pieces == len(self._pinned.pieces)

    def run(self, first: int, pages: int) -> torch.Tensor:
        """So many pages as one tensor of bytes; all of one piece."""
        per_piece = self._pinned.pieces[0].nbytes // self._page_bytes
        piece, place = divmod(first, per_piece)
        begin = place * self._page_bytes
        return self._pinned.pieces[piece][begin : begin + pages * self._page_bytes]

    def beside(self, one: int, other: int) -> bool:
        """Whether the second comes right behind the first, in the same piece."""
        per_piece = self._pinned.pieces[0].nbytes // self._page_bytes
        return other == one + 1 and other % per_piece != 0

    def close(self) -> None:
        self._pinned.close()


def piece_bytes(nbytes: int, page_bytes: int) -> int:
    """Of RAM for KV pages that is pinned at once: whole pages of both kinds, one unit of them at least."""
    unit = page_bytes * (mmap.PAGESIZE // math.gcd(page_bytes, mmap.PAGESIZE))
    return max(1, min(PIECE_BYTES, nbytes) // unit) * unit


class DiskPlaces:
    """A store on disk, and pinned memory that pages come and go through: so many places each way."""

    def __init__(
        self,
        store: Store,
        reads: DiskReads,
        memory: torch.Tensor,
        page_bytes: int,
        stride: int,
        owner: PinnedMemory | None = None,
    ) -> None:
        self.store, self.reads, self._owner = store, reads, owner
        count = len(reads.views)
        places = [memory[at * stride : at * stride + page_bytes] for at in range(memory.nbytes // stride)]
        self.reading, self._writing = places[:count], places[count:]
        self._free = list(range(len(self._writing)))

    @classmethod
    def pinned(cls, store: Store, page_bytes: int, places: int, device: torch.device) -> DiskPlaces:
        """`places`: each way."""
        stride = staging_stride(page_bytes)
        memory = PinnedMemory([2 * places * stride], device)
        (piece,) = memory.pieces
        reads = DiskReads(store, page_bytes, places, piece.numpy().data[: places * stride])
        return cls(store, reads, piece, page_bytes, stride, memory)

    def take(self) -> int | None:
        """A place for a page that is to be written; None: all are taken."""
        return self._free.pop() if self._free else None

    def place(self, number: int) -> torch.Tensor:
        return self._writing[number]

    def write_nothing(self) -> None:
        """Of what lies in places: all are free."""
        self._free = list(range(len(self._writing)))

    def close(self) -> None:
        self.reads.give_up()
        self.store.close(CLOSE_S)
        if self._owner is not None:
            self._owner.close()

    def write(self, key: bytes, number: int) -> bool:
        """What lies there; the place is free again."""
        taken = self.store.write(key, self._writing[number].numpy().data)
        self._free.append(number)
        return taken


@dataclass(slots=True)
class _Piece:
    mark: Any
    copies: list[BlockCopy]
    reads: int | None = None
    """The place of a page that came from disk."""
    writes: int | None = None
    """The place of a page that goes to disk."""


class GpuPageCopies:
    """`pool`: its pages, at addresses that stay. `link`: closed with this, which is right for who shares it as well.
    `behind_weights`: whether weights come over it now. `host` and `disk`: None: there is no such tier."""

    def __init__(
        self,
        pool: Callable[[], torch.Tensor],
        page_bytes: int,
        link: Copies,
        behind_weights: Callable[[], bool],
        host: HostMemory | None,
        disk: DiskPlaces | None,
    ) -> None:
        self._pool, self._page_bytes = pool, page_bytes
        self.link, self._behind_weights, self._host, self._disk = link, behind_weights, host, disk
        self._coming: deque[_Piece] = deque()
        self._going: deque[_Piece] = deque()
        self._failed: list[int] = []
        self._timed, self._byte_s, self._come_bytes = (0.0, 0), 0.0, 0
        """What the link has timed, what it took for a byte of late, and what came from RAM since `loading_s`."""
        self._from_disk = False
        """Pages came from there since `loading_s` was asked last."""

    @property
    def tiers(self) -> tuple[int, ...]:
        there = ((Tier.HOST, self._host), (Tier.DISK, self._disk))
        return tuple(tier for tier, one in there if one is not None)

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._host is None else self._host.nbytes

    def host_pages(self) -> int:
        return 0 if self._host is None else self._host.look()

    def host_settled(self) -> bool:
        """No more of them will come than `host_pages` said last."""
        return self._host is None or self._host.settled

    def loading_s(self) -> float:
        """That the link took for the pages that have come from RAM since this was asked last; 0: it is not known, since
        weights come too, or pages from disk. Of more pieces than it times some tell for all."""
        before, self._timed = self._timed, self.link.timed()
        come, self._come_bytes = self._come_bytes, 0
        others, self._from_disk = self._from_disk, any(piece.reads is not None for piece in self._coming)
        if others or self._from_disk or self._behind_weights():
            return 0.0
        if self._timed[1] > before[1]:
            self._byte_s = (self._timed[0] - before[0]) / (self._timed[1] - before[1])
        return come * self._byte_s

    def begin(self, plan: StepPlan) -> None:
        """Before the rows of the plan are launched."""
        coming = [copy for copy in plan.copies if copy.source_tier == Tier.HOST]
        if coming:
            assert self._host is not None
            after = self._launched()
            for runs in self._pieces(coming, loads=True):
                pairs = [
                    (self._host.run(run[0].source, len(run)), self._pages(run[0].target, len(run))) for run in runs
                ]
                self._load(pairs, after, [copy for run in runs for copy in run])
        if self._disk is not None:
            self._disk.reads.begin([copy for copy in plan.copies if copy.source_tier == Tier.DISK])

    def launch_stores(self, plan: StepPlan) -> None:
        """After the rows of the plan are launched."""
        going = [copy for copy in plan.copies if copy.target_tier]
        if not going:
            return
        after = self._launched()
        for runs in self._pieces([copy for copy in going if copy.target_tier == Tier.HOST], loads=False):
            assert self._host is not None
            pairs = [(self._pages(run[0].source, len(run)), self._host.run(run[0].target, len(run))) for run in runs]
            self._store(pairs, after, [copy for run in runs for copy in run])
        for copy in going:
            if copy.target_tier == Tier.DISK:
                place = None if self._disk is None else self._disk.take()
                if place is None or self._disk is None:
                    self._failed.append(copy.copy_id)
                    continue
                self._store([(self._pages(copy.source, 1), self._disk.place(place))], after, [copy], place)

    def _pieces(self, copies: Sequence[BlockCopy], *, loads: bool) -> Iterator[list[list[BlockCopy]]]:
        """Runs that are launched together. Behind weights each goes by itself, when there is time for it."""
        piece, pages = list[list[BlockCopy]](), 0
        most = 0 if loads and self._behind_weights() else MOST_RUN
        for run in self._runs(copies, loads=loads):
            if piece and pages + len(run) > most:
                yield piece
                piece, pages = [], 0
            piece.append(run)
            pages += len(run)
        if piece:
            yield piece

    def _runs(self, copies: Sequence[BlockCopy], *, loads: bool) -> Iterator[list[BlockCopy]]:
        """Of copies from RAM or to it: those that lie beside each other at both ends."""
        assert self._host is not None or not copies
        if self._host is None:
            return
        run: list[BlockCopy] = []
        host = pool = 0
        for copy in sorted(copies, key=_SOURCE if loads else _TARGET):
            source, target = copy.source, copy.target
            next_host, next_pool = (source, target) if loads else (target, source)
            if run and not (next_pool == pool + 1 and self._host.beside(host, next_host) and len(run) < MOST_RUN):
                yield run
                run = []
            run.append(copy)
            host, pool = next_host, next_pool
        if run:
            yield run

    def _pages(self, first: int, pages: int) -> torch.Tensor:
        whole = self._pool().view(torch.uint8).view(-1)
        return whole[first * self._page_bytes : (first + pages) * self._page_bytes]

    def _launched(self) -> Any:
        """Passed when all that was launched so far is computed."""
        mark = self.link.mark()
        self.link.after_launched(mark)
        return mark

    def _load(self, pairs: Sequence[Piece], after: Any, copies: list[BlockCopy], reads: int | None = None) -> None:
        mark = self.link.mark()
        with interrupts_put_off():  # A copy that nobody knows would come to a page that is another's by then.
            self._coming.append(_Piece(mark, copies, reads=reads))
            if self._behind_weights():
                ((source, target),) = pairs
                self.link.copy_later(source, target, after, [mark])
            else:
                self.link.copy_pieces(pairs, after, [mark])

    def _store(self, pairs: Sequence[Piece], after: Any, copies: list[BlockCopy], writes: int | None = None) -> None:
        mark = self.link.mark()
        with interrupts_put_off():  # A mark that was never set counts as passed.
            self._going.append(_Piece(mark, copies, writes=writes))
            self.link.copy_back(pairs, after, [mark])

    def over(self, wait: bool) -> Over:
        """Copies that are over since the last time. `wait`: for one of them at least, a little."""
        finished, failed = list[int](), self._failed
        self._failed = []
        wait = wait and not failed
        if wait and not (self._disk is not None and self._disk.reads.under_way):
            for line in (self._coming, self._going):
                if line:
                    self.link.wait(line[0].mark)
                    break
        self._collect_disk(failed, WAIT_S if wait else 0.0)
        for line in (self._coming, self._going):
            while line and self.link.passed(line[0].mark):
                self._end(line.popleft(), finished, failed)
        return finished, failed

    def _collect_disk(self, failed: list[int], wait_s: float) -> None:
        """Pages that have come from the disk go on to the pool."""
        if self._disk is None:
            return
        after = None
        for copy, place in self._disk.reads.collect(0.0 if self._coming or self._going else wait_s):
            if place is None:
                failed.append(copy.copy_id)
                continue
            after = self._launched() if after is None else after
            self._load([(self._disk.reading[place], self._pages(copy.target, 1))], after, [copy], place)
            self._from_disk = True

    def _end(self, piece: _Piece, finished: list[int], failed: list[int]) -> None:
        numbers = [copy.copy_id for copy in piece.copies]
        if piece.copies[0].source_tier == Tier.HOST:
            self._come_bytes += len(numbers) * self._page_bytes
        if piece.reads is not None and self._disk is not None:
            self._disk.reads.release(piece.reads)
        if piece.writes is not None and self._disk is not None:
            (finished if self._disk.write(piece.copies[0].key, piece.writes) else failed).extend(numbers)
        else:
            finished += numbers

    def give_up_reads(self) -> list[int]:
        """Pages on their way from the disk are nobody's from now on. Returns which copies will never be over."""
        return [] if self._disk is None else [copy.copy_id for copy in self._disk.reads.give_up()]

    def abandon(self) -> None:
        """What is on its way is nobody's; when this returns the pool is not written to. Nothing of it goes to the disk:
        where something failed before a copy, an older page may lie in its place."""
        self.give_up_reads()
        for piece in (*self._coming, *self._going):
            self.link.wait(piece.mark)
        self.link.settle()  # What was interrupted may be on its way without its mark.
        while self._coming:
            piece = self._coming.popleft()
            if piece.reads is not None and self._disk is not None:
                self._disk.reads.release(piece.reads)
        self._going.clear()
        self._failed = []
        if self._disk is not None:
            self._disk.write_nothing()

    def close(self) -> None:
        self.link.close()
        if self._disk is not None:
            self._disk.close()
        if self._host is not None:
            self._host.close()
