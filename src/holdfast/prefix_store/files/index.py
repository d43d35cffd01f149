"""What is in the slots of a slab, in a file that several processes change, and what this process knows of it. Locks are
held by whoever calls; knows nothing of the pages themselves.

    [header 4 KiB][changes 4 KiB: counter, ring of changed slots][record of slot 0][record of slot 1]...

A record is 64 bytes: key, check, generation, last use. The check is that of the page's bytes together with key, model
and generation: whatever becomes of record or page, torn, flipped, or overwritten by another process, they no longer
match.

    free        generation 0                        `used` not 0: its slot still takes space on the disk
    writing     generation, no check yet            `used`: since when
    there       generation and check                `used`: when last
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.prefix_store.files.calls import Calls

BLOCK_BYTES = 4096
KEY_BYTES = 32
"""Shorter ones are padded with zeros."""
RECORD = np.dtype([("key", "V32"), ("check", "<u8", (2,)), ("generation", "<u8"), ("used", "<u8")])
_MAGIC = b"holdfast kv 1\n\0\0"
_HEADER = struct.Struct("<16sQQ32s256s")
_CHANGES = struct.Struct("<Q1022I")
_RING = 1022
_COUNTERS = 1 << 62
_RECORDS_AT = 2 * BLOCK_BYTES
_USED_AT = 56
_READ_BYTES = 16 << 20

Records = NDArray[Any]


class DamagedIndexError(Exception):
    """Its header is not one: everything in it is forgotten."""


class PageIndex:
    """`records`: what this process knows. Threads may look up; changes of the file need the lock of the folder."""

    def __init__(self, path: Path, calls: Calls, flags: int) -> None:
        """Opens what is there. DamagedIndexError, FileNotFoundError, OSError."""
        self.path, self._calls = path, calls
        self._file = calls.open(path, flags)
        try:
            self._read_header()
            # Nobody removes files that are in use.
            calls.try_lock(self._file, fcntl.LOCK_SH)
        except BaseException:
            calls.close(self._file)
            raise
        self._mutex = threading.Lock()
        self._changing = threading.RLock()
        """Nobody applies what was read before another thread changed it."""
        self._counter = -1
        self._buffer: Records = np.zeros(0, RECORD)
        self.records: Records = self._buffer
        self.slots: dict[bytes, int] = {}
        """Of pages that are there. Replaced as a whole or changed under the mutex; looked up without."""
        self._bad: dict[int, int] = {}
        """Generations that were not what they should be, by slot, until the file forgets them."""

    @staticmethod
    def create(path: Path, calls: Calls, model: bytes, page_bytes: int, label: str) -> None:
        """Anew, whatever is there. Under the lock of the folder."""
        file = calls.open(path, os.O_RDWR | os.O_CREAT)
        try:
            calls.truncate(file, 0)
            calls.write(file, _header(model, page_bytes, label), 0)
            calls.write(file, bytes(BLOCK_BYTES), BLOCK_BYTES)
        finally:
            calls.close(file)

    def _read_header(self) -> None:
        header = self._calls.read(self._file, BLOCK_BYTES, 0)
        if len(header) < BLOCK_BYTES or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
            raise DamagedIndexError
        magic, page_bytes, slot_bytes, model, label = _HEADER.unpack_from(header)
        if magic != _MAGIC or not 0 < page_bytes <= slot_bytes or slot_bytes % BLOCK_BYTES:
            raise DamagedIndexError
        self.page_bytes, self.slot_bytes, self.model = int(page_bytes), int(slot_bytes), bytes(model)
        self.label = bytes(label).rstrip(b"\0").decode("utf-8", "replace")

    def lock_alone(self) -> bool:
        """Whether no other process uses it. Under the lock of the folder, so that none begins to."""
        if self._calls.try_lock(self._file, fcntl.LOCK_EX):
            return True
        self._calls.try_lock(self._file, fcntl.LOCK_SH)  # Trying gave it up.
        return False

    def sync(self) -> None:
        self._calls.sync(self._file)

    def close(self) -> None:
        self._calls.close(self._file)

    def taken_bytes(self) -> int:
        """On the disk, pages that are being written and free slots that were not given back included."""
        return int(np.count_nonzero((self.records["generation"] != 0) | (self.records["used"] != 0))) * self.slot_bytes

    def held(self) -> list[int]:
        """Free slots that still take space on the disk."""
        return np.flatnonzero((self.records["generation"] == 0) & (self.records["used"] != 0)).tolist()

    def find(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Slot, generation and check."""
        with self._mutex:
            slot = self.slots.get(key)
            if slot is None:
                return None
            record = self.records[slot]
            return slot, int(record["generation"]), record["check"].tobytes()

    def is_generation(self, slot: int, generation: int) -> bool:
        """As far as is known."""
        with self._mutex:
            return slot < len(self.records) and int(self.records[slot]["generation"]) == generation

    def load(self) -> None:
        """All of it."""
        with self._changing:
            self._load()

    def _load(self) -> None:
        counter = self._read_counter()[0]
        size = max(0, self._calls.size(self._file) - _RECORDS_AT) // RECORD.itemsize
        records = np.zeros(size, RECORD)
        view = records.view(np.uint8).data
        at = 0
        while at < len(view):
            piece = self._calls.read_into(self._file, [view[at : at + _READ_BYTES]], _RECORDS_AT + at)
            if not piece:
                break
            at += piece
        if self._knows(records):
            with self._mutex:
                self.records["used"] = records["used"]
                self._counter = counter
            return
        there = np.flatnonzero(pages_in(records))
        slots = dict(zip(records["key"][there].tolist(), there.tolist(), strict=True))
        with self._mutex:
            self._bad = {
                slot: bad for slot, bad in self._bad.items() if slot < size and int(records[slot]["generation"]) == bad
            }
            for slot in self._bad:
                if slots.get(records[slot]["key"].tobytes()) == slot:
                    del slots[records[slot]["key"].tobytes()]
            self._buffer = self.records = records
            self.slots, self._counter = slots, counter

    def _knows(self, records: Records) -> bool:
        """All but when pages were used: so it is at most evictions, and to name all pages anew keeps other threads
        waiting."""
        known = self.records
        return (
            self._counter >= 0
            and len(records) == len(known)
            and all(np.array_equal(records[column], known[column]) for column in ("generation", "check"))
        )

    def changed(self) -> bool:
        """Whether others changed something since."""
        return self._read_counter()[0] != self._counter

    def refresh(self) -> None:
        """What other processes changed since. Under the lock of the folder: else `load`."""
        with self._changing:
            self._refresh()

    def _refresh(self) -> None:
        counter, ring = self._read_counter()
        behind = counter - self._counter
        if behind == 0:
            return
        if self._counter < 0 or not 0 < behind <= _RING:
            self._load()
            return
        changed = sorted({ring[number % _RING] for number in range(self._counter, counter)})
        for first, count in runs(changed):
            data = self._calls.read(self._file, count * RECORD.itemsize, _RECORDS_AT + first * RECORD.itemsize)
            self._apply(first, np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD))
        self._counter = counter

    def current(self, slot: int) -> Records | None:
        """Its record as it is in the file now."""
        data = self._calls.read(self._file, RECORD.itemsize, _RECORDS_AT + slot * RECORD.itemsize)
        return np.frombuffer(data, RECORD)[0] if len(data) == RECORD.itemsize else None

    def change(self, slots: Sequence[int], records: Records) -> None:
        """Of these slots, in ascending order. Under the lock of the folder."""
        with self._changing:
            self._change(slots, records)

    def _change(self, slots: Sequence[int], records: Records) -> None:
        counter, ring = self._read_counter()
        at = 0
        for first, count in runs(slots):
            part = records[at : at + count]
            self._calls.write(self._file, part.tobytes(), _RECORDS_AT + first * RECORD.itemsize)
            self._apply(first, part)
            at += count
        changed = list(ring)
        for number, slot in enumerate(slots[-_RING:], counter + max(0, len(slots) - _RING)):
            changed[number % _RING] = slot
        known = self._counter == counter
        counter = (counter + len(slots)) % _COUNTERS
        self._calls.write(self._file, _CHANGES.pack(counter, *changed), BLOCK_BYTES)
        if known:
            self._counter = counter

    def free(self, slots: Sequence[int]) -> None:
        """Their pages are forgotten; they keep their space for others. Under the lock of the folder."""
        if not slots:
            return
        slots = sorted(slots)
        records = np.zeros(len(slots), RECORD)
        records["used"] = 1
        self.change(slots, records)

    def forget(self, key: bytes, slot: int, generation: int) -> None:
        """In this process: the page is not what it should be."""
        with self._mutex:
            self._bad[slot] = generation
            if self.slots.get(key) == slot and int(self.records[slot]["generation"]) == generation:
                del self.slots[key]

    def stamp(self, used: Iterable[tuple[int, int]]) -> None:
        """Slot and when, in microseconds. Others are not told: they look when they evict. Under the lock of the folder,
        after `refresh`: of a page that is being written, `used` says since when."""
        for slot, when in used:
            with self._mutex:
                if slot >= len(self.records) or not pages_in(self.records[slot : slot + 1])[0]:
                    continue
                self.records["used"][slot] = when
            self._calls.write(self._file, when.to_bytes(8, "little"), _RECORDS_AT + slot * RECORD.itemsize + _USED_AT)

    def _read_counter(self) -> tuple[int, tuple[int, ...]]:
        data = self._calls.read(self._file, BLOCK_BYTES, BLOCK_BYTES)
        if len(data) < BLOCK_BYTES:
            return 0, (0,) * _RING
        counter, *ring = _CHANGES.unpack(data)
        return counter % _COUNTERS, tuple(ring)

    def _apply(self, first: int, new: Records) -> None:
        if not len(new):  # Beyond the end of the file.
            return
        with self._mutex:
            end = first + len(new)
            if end > len(self._buffer):  # For more at once: pages come one after the other.
                grown = np.zeros(2 * end, RECORD)
                grown[: len(self.records)] = self.records
                self._buffer = grown
            self.records = self._buffer[: max(end, len(self.records))]
            for slot, key in zip(range(first, end), self.records["key"][first:end].tolist(), strict=True):
                if self.slots.get(key) == slot:
                    del self.slots[key]
            self.records[first:end] = new
            for position in np.flatnonzero(pages_in(new)).tolist():
                if self._bad.get(first + position) != int(new["generation"][position]):
                    self.slots[new["key"][position].tobytes()] = first + position


def _header(digest: bytes, page_bytes: int, label: str) -> bytes:
    slot_bytes = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
    fields = _HEADER.pack(_MAGIC, page_bytes, slot_bytes, digest, label.encode(errors="replace")[:255])
    block = fields.ljust(BLOCK_BYTES - 4, b"\0")
    return block + zlib.crc32(block).to_bytes(4, "little")


def pages_in(records: Records) -> NDArray[np.bool_]:
    return np.asarray((records["generation"] != 0) & records["check"].any(axis=1))


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and length of each row of slots that follow each other; `slots` ascend."""
    first, count = -1, 0
    for slot in slots:
        if count and slot == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count
