"""Pages written behind, by one thread, from a queue that is bounded in bytes: what finds no place in it is dropped and
counted. A page is there for everybody only after its bytes are in the file. Knows nothing of reading.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.folder import BusyError, Control, StoreFolder
from holdfast.prefix_store.files.index import BLOCK_BYTES, RECORD, runs
from holdfast.prefix_store.files.memory import PIECES_AT_ONCE, AlignedMemory, CopyPool, address
from holdfast.prefix_store.files.slab import Slab
from holdfast.prefix_store.health import DiskHealth
from holdfast.prefix_store.room import Room
from holdfast.prefix_store.stats import Counts, DropReason, Rate
from holdfast.prefix_store.turns import AtOnce, Turns
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

BATCH_BYTES, BATCH_PART = 8 << 20, 16
"""Written under one reservation, which needs the lock of the folder twice; and no more than this part of the store: it
is nobody's until it is written, or until it is clear that its process ended."""
RESERVE_BYTES, RESERVE_PART = 1 << 30, 50
"""Of the disk stays free for others: this, or this part where that is less."""
CHAIN_US, CHAIN_PART = 10_000_000, 4
"""Pages that are written within this are taken for one chain, up to this part of the store: else what is new would
leave before what is old."""
HANGS_S = 10.0
"""That a batch may take: then nobody need wait for places in the queue."""

Source = Callable[[memoryview], None] | memoryview


@dataclass(slots=True)
class _Write:
    key: bytes
    source: Source
    done: Callable[[bool], None] | None
    copy: memoryview | None = None
    """The source, where it is of the pool."""
    slot: int = -1
    generation: int = 0
    check: bytes = b""
    wanted: bool = True
    """It was not forgotten since."""


class PageWriter:
    """`suspect`: is told of a page that was written and is not wanted, by key, slot and generation."""

    def __init__(
        self, folder: StoreFolder, slab: Slab, room: Room, calls: Calls, counts: Counts, rate: Rate, health: DiskHealth,
        *, size_bytes: int, daily_write_bytes: int | None, queue_bytes: int, suspect: Callable[[bytes, int, int], None],
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self._turns = turns or AtOnce()
        self._folder, self._slab, self._room, self._calls = folder, slab, room, calls
        self._counts, self._rate, self._health = counts, rate, health
        self._size_bytes, self._daily_write_bytes, self._queue_bytes = size_bytes, daily_write_bytes, queue_bytes
        self._most = min(PIECES_AT_ONCE, max(1, min(BATCH_BYTES, size_bytes // BATCH_PART) // slab.slot_bytes))
        self._queue: deque[_Write] = deque()
        self._pending: dict[bytes, _Write] = {}
        """Those that are wanted, of the queue and of the batch that is being written."""
        self._places = 0
        """That these take, and those that were forgotten since."""
        self._suspect = suspect
        self._changed = threading.Condition()
        self._closing, self._stopping = False, False
        self._counted = 0
        """Pages of the queue that are in the folder's numbers already."""
        self._began_s: float | None = None
        """When the batch began that is being written."""
        self._last_generation = 0
        self._chain_us = self._chain_pages = 0
        self._staging = AlignedMemory()
        self._copies = CopyPool(slab.slot_bytes)
        self._thread = threading.Thread(target=self._run, name="kv-store-write", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._places * self._slab.slot_bytes

    def write(self, key: bytes, source: Source, done: Callable[[bool], None] | None) -> bool:
        with self._changed:
            reason = self._refusal(key)
            if reason is not None:
                self._counts.drop(reason)
                return False
            write = self._pending[key] = _Write(key, source, done)
            self._places += 1
        if done is None and not callable(source):
            # The caller's memory is theirs again when this returns.
            write.copy = write.source = self._copies.copy(source[: self._slab.page_bytes])
        with self._changed:
            if not self._stopping:
                self._queue.append(write)
                self._changed.notify_all()
                return True
            self._leave([write])
        self._counts.drop("closing")
        return False

    def forget(self, keys: Sequence[bytes]) -> None:
        """Those that wait are not written; of one that is just being written nobody reads. Both may come anew."""
        with self._changed:
            for key in keys:
                if (write := self._pending.pop(key, None)) is not None:
                    write.wanted = False

    def _leave(self, writes: Sequence[_Write]) -> None:
        """Their places are free."""
        self._places -= len(writes)
        for write in writes:
            if self._pending.get(write.key) is write:
                del self._pending[write.key]

    def takes(self) -> bool:
        """Whether there is any sense in writing: not whether the queue has a place."""
        today = self._folder.seen.on(self._calls.now())
        if self._closing or self._hangs or self._slab.slot_bytes > self._queue_bytes:
            return False
        return self._health.able() and not self._over_budget(today, self._slab.slot_bytes)

    @property
    def _hangs(self) -> bool:
        return (began_s := self._began_s) is not None and time.monotonic() - began_s > HANGS_S

    def room(self) -> int:
        """Pages that the queue has places for."""
        return max(0, (self._queue_bytes - self.queued_bytes) // self._slab.slot_bytes)

    def awaits(self, key: bytes) -> bool:
        """It waits, or is there; asked in this order, since it waits until it is there."""
        return key in self._pending or key in self._slab.index.slots

    def _refusal(self, key: bytes) -> DropReason | None:
        if self._closing:
            return "closing"
        if self.awaits(key):
            return "already there"
        if not self._health.able():
            return "store failing"
        if self.queued_bytes + self._slab.slot_bytes > self._queue_bytes:
            return "queue full"
        waiting = (self._places - self._counted + 1) * self._slab.slot_bytes
        if self._over_budget(self._folder.seen.on(self._calls.now()), waiting):
            return "write budget"
        return None

    def _over_budget(self, control: Control, more_bytes: int) -> bool:
        return self._daily_write_bytes is not None and control.written_bytes + more_bytes > self._daily_write_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                batch = [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))]
            self._began_s = time.monotonic()
            try:
                written = self._write_batch(batch)
            except Exception:  # Whatever it is, pages are only a cache.
                log.exception("KV store: writing failed")
                written = []
                self._counts.drop("store failing", len(batch))
            self._began_s = None
            self._finish(batch, written)

    def _finish(self, batch: Sequence[_Write], written: Sequence[_Write]) -> None:
        with self._changed:
            unwanted = [write for write in written if not write.wanted]
            there = {id(write) for write in written if write.wanted}
            self._leave(batch)
            self._counted = 0
            self._changed.notify_all()
        for write in unwanted:
            self._suspect(write.key, write.slot, write.generation)
        for write in batch:
            if write.copy is not None:
                self._copies.give_back(write.copy)
            if write.done is not None:
                try:
                    write.done(id(write) in there)
                except Exception:
                    log.exception("KV store: what was called after a write failed")

    def _write_batch(self, batch: list[_Write]) -> list[_Write]:
        try:
            reserved = self._reserve(batch)
        except BusyError:
            self._counts.drop("store busy", len(batch))
            return []
        except OSError as error:
            self._health.failed("pages cannot be written", error)
            self._counts.drop("store failing", len(batch))
            return []
        if not reserved:
            return []
        began_s = time.monotonic()
        filled: dict[int, memoryview] = {}
        try:
            filled = self._fill_all(reserved)
            stored = [write for write in reserved if write.slot in filled]
            most = max(1, self._turns.piece_bytes // self._slab.slot_bytes)
            for first, count in runs(sorted(filled)):
                for slot in range(first, first + count, most):
                    self._write_piece(filled, slot, min(most, first + count - slot), began_s)
            published = self._publish(stored)
        except OSError as error:
            self._health.failed("pages cannot be written", error)
            self._counts.drop("store failing", len(filled))
            self._release(reserved)
            return []
        self._health.wrote()
        self._counts.add(pages_written=len(published), bytes_written=len(published) * self._slab.page_bytes)
        return published

    def _write_piece(self, filled: Mapping[int, memoryview], first: int, count: int, since_s: float) -> None:
        """`since_s`: when it could have been written."""
        written = 0
        with self._turns.pages("write", count * self._slab.slot_bytes, since_s):
            self._rate.begin()
            try:
                self._slab.write_from([filled[slot] for slot in range(first, first + count)], first)
                written = count
            finally:
                self._rate.end(written * self._slab.page_bytes)

    def _reserve(self, batch: Sequence[_Write]) -> list[_Write]:
        """Slots for those that shall be written, ascending."""
        slab = self._slab
        with self._folder.locked():
            slab.index.refresh()
            control = self._folder.control()
            if control.total_bytes < 0:
                self._room.tidy()
                control = self._folder.control()
            wanted: list[_Write] = []
            for write in batch:
                if write.key in slab.index.slots:
                    self._counts.drop("already there")
                elif not write.wanted:
                    self._counts.drop("forgotten")
                elif self._over_budget(control, (len(wanted) + 1) * slab.slot_bytes):
                    self._counts.drop("write budget")
                else:
                    wanted.append(write)
            if not wanted:
                return []
            able_bytes = self._able_bytes(control, len(wanted) * slab.slot_bytes)
            slots, evicted = self._room.take(len(wanted), able_bytes)
            self._counts.drop("no room", len(wanted) - len(slots))
            self._counts.add(pages_evicted=evicted)
            wanted = wanted[: len(slots)]
            before = slab.index.taken_bytes()
            self._take(wanted, slots, able_bytes // slab.slot_bytes // CHAIN_PART)
            control = self._folder.control()
            control = replace(
                control,
                total_bytes=control.total_bytes + slab.index.taken_bytes() - before,
                written_bytes=control.written_bytes + len(wanted) * slab.slot_bytes,
            )
            with self._changed:
                self._counted = len(batch)
            self._folder.set_control(control)
        return wanted

    def _able_bytes(self, control: Control, wanted_bytes: int) -> int:
        """What the store may take: its size, or less where the disk has less."""
        free, disk = self._calls.disk_space(self._folder.path)
        able = control.total_bytes + max(0, free - min(RESERVE_BYTES, disk // RESERVE_PART))
        if able < min(self._size_bytes, control.total_bytes + wanted_bytes):
            self._health.tell(f"its disk is almost full, so it stays at {format_bytes(control.total_bytes)}")
        return min(self._size_bytes, able)

    def _take(self, writes: Sequence[_Write], slots: Sequence[int], longest_chain: int) -> None:
        records = np.zeros(len(slots), RECORD)
        now_s = self._calls.now()
        first = max(int(now_s * 1e9), self._last_generation + 1)
        for number, (write, slot) in enumerate(zip(writes, slots, strict=True)):
            write.slot, write.generation = slot, first + number
            records[number]["key"] = write.key
            records[number]["generation"] = write.generation
        records["used"] = self._first_use(int(now_s * 1e6), len(slots), longest_chain)
        self._last_generation = first + len(slots)
        self._slab.index.change(slots, records)

    def _first_use(self, now_us: int, pages: int, longest_chain: int) -> NDArray[np.uint64]:
        """As if all of a chain had been used at once, its end first to leave: it comes in several batches, in order."""
        if not 0 <= now_us - self._chain_us < CHAIN_US or self._chain_pages + pages > longest_chain:
            self._chain_us, self._chain_pages = now_us, 0
        first = self._chain_us - self._chain_pages
        self._chain_pages += pages
        return np.arange(first, first - pages, -1).astype(np.uint64)

    def _fill_all(self, writes: Sequence[_Write]) -> dict[int, memoryview]:
        """What is to be written, by slot. Those whose source failed are left out, and their slots given free."""
        slab = self._slab
        filled: dict[int, memoryview] = {}
        failed: list[_Write] = []
        for write, staging in zip(writes, self._staging.pieces(len(writes), slab.slot_bytes), strict=True):
            try:
                memory = self._fill(write, staging)
                write.check = slab.check(memory[: slab.page_bytes], write.key, write.generation)
                filled[write.slot] = memory
            except Exception as error:
                self._health.tell(f"a page could not be had from where it was: {error}")
                self._counts.drop("source failed")
                failed.append(write)
        if failed:
            self._release(failed)
        return filled

    def _fill(self, write: _Write, staging: memoryview) -> memoryview:
        slab, source = self._slab, write.source
        if callable(source):
            source(staging[: slab.page_bytes])
            return staging
        if len(source) == slab.slot_bytes and not (slab.direct and address(source) % BLOCK_BYTES):
            return source
        staging[: slab.page_bytes] = source[: slab.page_bytes]
        return staging

    def _publish(self, writes: Sequence[_Write]) -> list[_Write]:
        slab = self._slab
        published: list[_Write] = []
        if not writes:
            return published
        with self._folder.locked():
            slab.index.refresh()
            twice = []
            for write in writes:
                if not slab.index.is_generation(write.slot, write.generation):
                    self._counts.drop("slot lost")
                elif write.key in slab.index.slots:  # Another process wrote it in the meantime.
                    self._counts.drop("already there")
                    twice.append(write.slot)
                else:
                    published.append(write)
            slots = [write.slot for write in published]
            records = slab.index.records[slots]
            for number, write in enumerate(published):
                records[number]["check"] = np.frombuffer(write.check, "<u8")
            slab.index.change(slots, records)
            if twice:
                slab.index.free(twice)
        return published

    def _release(self, writes: Sequence[_Write]) -> None:
        """Their slots are free again. Where that fails, another finds them abandoned later."""
        slab = self._slab
        with contextlib.suppress(OSError), self._folder.locked():
            slab.index.refresh()
            slab.index.free([write.slot for write in writes if slab.index.is_generation(write.slot, write.generation)])

    def drain(self, timeout_s: float) -> None:
        """Nothing new is taken; what waits is written, as far as there is time, and the rest dropped."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._places, timeout_s)
            self._stopping = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._counts.drop("closing", len(left))
        self._finish(left, [])

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
