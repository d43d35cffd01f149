"""Pages read in the background by threads of their own, each proven before it counts. A page that is not what it should
be is a miss, and forgotten. Knows nothing of room and of writing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from holdfast.prefix_store.files.index import BLOCK_BYTES
from holdfast.prefix_store.files.memory import PIECES_AT_ONCE, AlignedMemory, address
from holdfast.prefix_store.files.slab import Slab, padded
from holdfast.prefix_store.stats import DAMAGED, Counts, MissReason, Rate
from holdfast.prefix_store.turns import AtOnce, Turns

log = logging.getLogger("holdfast")

DEPTH = 12
"""Pieces on their way at once: eight keep a disk busy, while others are being checked."""
PIECE_BYTES, LEAST_PIECE_BYTES = 4 << 20, 512 << 10
"""Pages that lie beside each other are read at once, so many bytes at most and at least, or less where turns say so."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    valid: tuple[bool, ...]
    """Of each page, in the order asked: its bytes are there and proven. What the others' memory holds is undefined."""
    missed: dict[MissReason, int]

    @property
    def first_valid(self) -> int:
        """How many of the first in a row."""
        return self.valid.index(False) if False in self.valid else len(self.valid)


@dataclass(frozen=True, slots=True)
class _Page:
    position: int
    """Among those asked."""
    key: bytes
    view: memoryview
    slot: int
    generation: int
    check: bytes


class Ticket:
    """Of one `read`. The memory of its pages belongs to the store until `done` was called."""

    def __init__(self, pages: int, done: Callable[[ReadResult], None]) -> None:
        self.cancelled, self.since_s = False, time.monotonic()
        self._valid = [False] * pages
        self._missed: dict[MissReason, int] = {}
        self._done = done
        self._lock = threading.Lock()
        self._pieces = 0
        self._over = threading.Event()

    def cancel(self) -> None:
        """What has not begun is not read any more; `done` is called all the same."""
        self.cancelled = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until `done` was called. False: not in this time."""
        return self._over.wait(timeout_s)

    def expect(self, pieces: int) -> None:
        self._pieces = pieces

    def miss(self, reason: MissReason, pages: int = 1) -> None:
        with self._lock:
            self._missed[reason] = self._missed.get(reason, 0) + pages

    def proven(self, position: int) -> None:
        self._valid[position] = True

    def piece_done(self) -> None:
        with self._lock:
            self._pieces -= 1
            if self._pieces:
                return
        try:
            self._done(ReadResult(tuple(self._valid), dict(self._missed)))
        except Exception:
            log.exception("KV store: what was called after a read failed")
        finally:
            self._over.set()


class PageReader:
    """`suspect`: is told of a page that was not what it should be, by key, slot and generation. `damaged`: of one that
    nobody changed or removed meanwhile, with what was found."""

    def __init__(
        self,
        slab: Slab,
        counts: Counts,
        rate: Rate,
        suspect: Callable[[bytes, int, int], None],
        damaged: Callable[[MissReason], None] = lambda _found: None,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns or AtOnce()
        self._slab, self._counts, self._rate, self._suspect, self._damaged = slab, counts, rate, suspect, damaged
        self._pieces: queue.SimpleQueue[tuple[Ticket, list[_Page]] | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        """Nothing is asked for behind the word that all is over."""
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name="kv-store-read", daemon=True) for _ in range(DEPTH)]
        for thread in self._threads:
            thread.start()

    def read(self, pages: Sequence[tuple[bytes, memoryview]], done: Callable[[ReadResult], None]) -> Ticket:
        ticket = Ticket(len(pages), done)
        found: list[_Page] = []
        for position, (key, view) in enumerate(pages):
            assert len(view) * view.itemsize >= self._slab.page_bytes
            place = self._slab.index.find(padded(key))
            if place is None:
                self._miss(ticket, "absent")
            else:
                found.append(_Page(position, padded(key), view.cast("B"), *place))
        pieces = self._cut(found) or [[]]  # `done` is always called by one of the threads.
        ticket.expect(len(pieces))
        with self._asking:
            if not self._closing:
                for piece in pieces:
                    self._pieces.put((ticket, piece))
                return ticket
        self._miss(ticket, "closing", len(found))
        ticket.expect(1)
        threading.Thread(target=ticket.piece_done, daemon=True).start()
        return ticket

    def _cut(self, pages: list[_Page]) -> list[list[_Page]]:
        pages.sort(key=lambda page: page.slot)
        slot_bytes = self._slab.slot_bytes
        part = max(LEAST_PIECE_BYTES, len(pages) * slot_bytes // DEPTH)
        most = min(PIECE_BYTES, self._turns.piece_bytes, part)
        pieces: list[list[_Page]] = []
        for page in pages:
            last = pieces[-1] if pieces else None
            beside = last is not None and page.slot == last[-1].slot + 1
            if last and beside and (len(last) + 1) * slot_bytes <= most and len(last) < PIECES_AT_ONCE:
                last.append(page)
            else:
                pieces.append([page])
        return pieces

    def _run(self) -> None:
        bounce = AlignedMemory()
        while (piece := self._pieces.get()) is not None:
            ticket, pages = piece
            try:
                if pages and not self._given_up(ticket, pages):
                    self._read(ticket, pages, bounce)
            except Exception:
                log.exception("KV store: reading failed")
                self._miss(ticket, "I/O error", len(pages))
            finally:
                ticket.piece_done()

    def _given_up(self, ticket: Ticket, pages: list[_Page]) -> bool:
        if ticket.cancelled or self._closing:
            self._miss(ticket, "closing" if self._closing else "cancelled", len(pages))
            return True
        return False

    def _read(self, ticket: Ticket, pages: list[_Page], bounce: AlignedMemory) -> None:
        slab = self._slab
        straight = slab.page_bytes == slab.slot_bytes and not (
            slab.direct and any(address(page.view) % BLOCK_BYTES for page in pages)
        )
        if straight:
            memory = [page.view[: slab.page_bytes] for page in pages]
        else:
            memory = bounce.pieces(len(pages), slab.slot_bytes)
        with ExitStack() as turn:
            turn.enter_context(self._turns.pages("read", len(pages) * slab.slot_bytes, ticket.since_s))
            if self._given_up(ticket, pages):  # While it waited.
                return
            valid = 0
            self._rate.begin()
            try:
                valid = self._read_now(ticket, pages, memory, turn, copied=not straight)
            finally:
                self._rate.end(valid * slab.page_bytes)
                self._counts.add(pages_read=valid, bytes_read=valid * slab.page_bytes)

    def _read_now(
        self, ticket: Ticket, pages: list[_Page], memory: list[memoryview], turn: ExitStack, *, copied: bool
    ) -> int:
        """How many are proven, and where they are wanted. `turn`: is over with the disk. `copied`: `memory` is not
        theirs."""
        slab, valid = self._slab, 0
        try:
            with turn:
                found = slab.read_into(memory, pages[0].slot)
        except OSError:
            for page in pages:
                self._miss(ticket, "I/O error")
                self._suspect(page.key, page.slot, page.generation)
            return 0
        for number, page in enumerate(pages):
            there = number * slab.slot_bytes + slab.page_bytes <= found
            if self._proven(ticket, page, memory[number][: slab.page_bytes] if there else None):
                if copied:
                    page.view[: slab.page_bytes] = memory[number][: slab.page_bytes]
                ticket.proven(page.position)
                valid += 1
        return valid

    def _proven(self, ticket: Ticket, page: _Page, memory: memoryview | None) -> bool:
        """`memory`: None where the file ends before."""
        if memory is not None and self._slab.check(memory, page.key, page.generation) == page.check:
            return True
        try:
            now = self._slab.index.current(page.slot)
            other = now is None or int(now["generation"]) != page.generation
        except OSError:
            other = False
        self._miss(ticket, "evicted" if other else "truncated" if memory is None else "checksum")
        self._suspect(page.key, page.slot, page.generation)
        return False

    def _miss(self, ticket: Ticket, reason: MissReason, pages: int = 1) -> None:
        ticket.miss(reason, pages)
        self._counts.miss(reason, pages)
        if reason in DAMAGED:
            for _ in range(pages):
                self._damaged(reason)

    def close(self) -> None:
        """What waits is not read any more."""
        with self._asking:
            self._closing = True
            for _ in self._threads:
                self._pieces.put(None)

    def join(self, timeout_s: float) -> bool:
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)
