"""The pages of one model in two files: `.pages` has a slot for each, `.index` says what is in it. Several processes use
both at once. Which page makes room for another is decided in `room`; locks are held by whoever calls.

    .index ─► [header 4 KiB][changes 4 KiB: counter, ring of changed slots][record of slot 0][record of slot 1]...
    .pages ─► [slot 0][slot 1]...     whole blocks of 4 KiB, so that they can be read past the page cache

A record is 64 bytes: key, check, generation, last use. The check is that of the page's bytes together with key, model
and generation: whatever becomes of record or page, torn, flipped, or overwritten by another process, they no longer
match.

    free        generation 0                        `used` not 0: its slot still takes space on the disk
    writing     generation, no check yet            `used`: since when
    there       generation and check                `used`: when last
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.prefix_store.calls import Calls
from holdfast.prefix_store.checksum import page_check

BLOCK_BYTES = 4096
KEY_BYTES = 32
"""Shorter ones are padded with zeros."""
MAGIC = b"holdfast kv 1\n\0\0"
RECORD = np.dtype([("key", "V32"), ("check", "<u8", (2,)), ("generation", "<u8"), ("used", "<u8")])
NO_CHECK = bytes(16)
_HEADER = struct.Struct("<16sQQ32s256s")
_CHANGES = struct.Struct("<Q1022I")
_RING = 1022
_RECORDS_AT = 2 * BLOCK_BYTES
_USED_AT = RECORD.fields["used"][1] if RECORD.fields else 0
_READ_BYTES = 16 << 20

Records = NDArray[Any]


class DamagedIndexError(Exception):
    """Its header is not one: everything in it is forgotten."""


def slab_name(model: bytes, page_bytes: int) -> str:
    return blake2b(model + page_bytes.to_bytes(8, "little"), digest_size=12, person=b"holdfast-kv-slab").hexdigest()


def padded(key: bytes) -> bytes:
    assert len(key) <= KEY_BYTES
    return key if len(key) == KEY_BYTES else key.ljust(KEY_BYTES, b"\0")


def model_digest(model: bytes) -> bytes:
    return blake2b(model, digest_size=32, person=b"holdfast-kvmodel").digest()


class Slab:
    """`records`: what this process knows of the index. Threads may look up and refresh; changes of the files need the
    lock of the folder."""

    def __init__(self, folder: Path, name: str, calls: Calls, *, writable: bool) -> None:
        """Opens what is there. DamagedIndexError, FileNotFoundError, OSError."""
        self.name, self._calls, self.writable = name, calls, writable
        self.index_path, self.pages_path = folder / f"{name}.index", folder / f"{name}.pages"
        flags = os.O_RDWR if writable else os.O_RDONLY
        with contextlib.ExitStack() as opened:
            self._index = calls.open(self.index_path, flags)
            opened.callback(calls.close, self._index)
            self._read_header()
            self._pages = calls.open(self.pages_path, flags)
            opened.callback(calls.close, self._pages)
            self._direct, self.buffered_reason = self._open_direct(flags)
            self.direct = self._direct is not None
            """Reads and writes go past the page cache."""
            # Nobody removes files that are in use.
            calls.try_lock(self._index, fcntl.LOCK_SH)
            opened.pop_all()
        self._mutex = threading.Lock()
        self._changing = threading.RLock()
        """Nobody applies what was read before another thread changed it."""
        self._counter = -1
        self._buffer: Records = np.zeros(0, RECORD)
        self.records: Records = self._buffer
        self.slots: dict[bytes, int] = {}
        """Of pages that are there. Replaced as a whole or changed under the mutex; looked up without."""
        self._bad: dict[int, int] = {}
        """Generations that were not what they should be, by slot, until the index forgets them."""

    @classmethod
    def create(cls, folder: Path, calls: Calls, model: bytes, page_bytes: int, label: str) -> Slab:
        """Or opens it. Under the lock of the folder. What is damaged begins anew."""
        name = slab_name(model, page_bytes)
        digest = model_digest(model)
        try:
            slab = cls(folder, name, calls, writable=True)
            if slab.model == digest and slab.page_bytes == page_bytes:
                return slab
            slab.close()
        except (DamagedIndexError, FileNotFoundError):
            pass
        index = calls.open(folder / f"{name}.index", os.O_RDWR | os.O_CREAT)
        try:
            calls.truncate(index, 0)
            calls.write(index, _header(digest, page_bytes, label), 0)
            calls.write(index, bytes(BLOCK_BYTES), BLOCK_BYTES)
        finally:
            calls.close(index)
        pages = calls.open(folder / f"{name}.pages", os.O_RDWR | os.O_CREAT)
        try:
            calls.truncate(pages, 0)
        finally:
            calls.close(pages)
        return cls(folder, name, calls, writable=True)

    def _read_header(self) -> None:
        header = self._calls.read(self._index, BLOCK_BYTES, 0)
        if len(header) < BLOCK_BYTES or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
            raise DamagedIndexError
        magic, page_bytes, slot_bytes, model, label = _HEADER.unpack_from(header)
        if magic != MAGIC:
            raise DamagedIndexError
        self.page_bytes, self.slot_bytes, self.model = int(page_bytes), int(slot_bytes), bytes(model)
        self.label = bytes(label).rstrip(b"\0").decode("utf-8", "replace")

    def _open_direct(self, flags: int) -> tuple[int | None, str]:
        """And why not, where not. Some file systems open files for it, and refuse to read then."""
        if not hasattr(os, "O_DIRECT"):
            return None, "this system has none"
        direct = None
        try:
            direct = self._calls.open(self.pages_path, flags | os.O_DIRECT)
            self._calls.read_into(direct, [memoryview(mmap.mmap(-1, BLOCK_BYTES))], 0)
        except OSError as error:
            if direct is not None:
                self._calls.close(direct)
            return None, error.strerror or str(error)
        return direct, ""

    def lock_alone(self) -> bool:
        """Whether no other process uses it. Under the lock of the folder, so that none begins to."""
        if self._calls.try_lock(self._index, fcntl.LOCK_EX):
            return True
        self._calls.try_lock(self._index, fcntl.LOCK_SH)  # Trying gave it up.
        return False

    def close(self) -> None:
        for file in (self._index, self._pages, self._direct):
            if file is not None:
                with contextlib.suppress(OSError):
                    self._calls.close(file)

    # What is there

    @property
    def pages_there(self) -> int:
        return len(self.slots)

    def taken_bytes(self) -> int:
        """On the disk, pages that are being written and free slots that were not given back included."""
        return int(np.count_nonzero((self.records["generation"] != 0) | (self.records["used"] != 0))) * self.slot_bytes

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

    def identity(self, key: bytes, generation: int) -> bytes:
        return self.model + padded(key) + generation.to_bytes(8, "little") + self.page_bytes.to_bytes(8, "little")

    def check(self, page: memoryview, key: bytes, generation: int) -> bytes:
        return page_check(page, self.identity(key, generation))

    # The index

    def load(self) -> None:
        """All of it."""
        with self._changing:
            self._load()

    def _load(self) -> None:
        counter = self._read_counter()[0]
        size = max(0, self._calls.size(self._index) - _RECORDS_AT) // RECORD.itemsize
        records = np.zeros(size, RECORD)
        view = records.view(np.uint8).data
        at = 0
        while at < len(view):
            piece = self._calls.read_into(self._index, [view[at : at + _READ_BYTES]], _RECORDS_AT + at)
            if not piece:
                break
            at += piece
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
            data = self._calls.read(self._index, count * RECORD.itemsize, _RECORDS_AT + first * RECORD.itemsize)
            self._apply(first, np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD))
        self._counter = counter

    def current(self, slot: int) -> Records | None:
        """Its record as it is in the file now."""
        data = self._calls.read(self._index, RECORD.itemsize, _RECORDS_AT + slot * RECORD.itemsize)
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
            self._calls.write(self._index, part.tobytes(), _RECORDS_AT + first * RECORD.itemsize)
            self._apply(first, part)
            at += count
        changed = list(ring)
        for number, slot in enumerate(slots[-_RING:], counter + max(0, len(slots) - _RING)):
            changed[number % _RING] = slot
        known = self._counter == counter
        counter += len(slots)
        self._calls.write(self._index, _CHANGES.pack(counter, *changed), BLOCK_BYTES)
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

    def give_back(self) -> int:
        """The space of free slots goes back to the file system, where it can take it; returns how much did, in bytes.
        Under the lock of the folder."""
        given = 0
        for first, count in runs(
            np.flatnonzero((self.records["generation"] == 0) & (self.records["used"] != 0)).tolist()
        ):
            try:
                self._calls.punch(self._pages, first * self.slot_bytes, count * self.slot_bytes)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    break
                raise
            self.change(range(first, first + count), np.zeros(count, RECORD))
            given += count * self.slot_bytes
        return given

    def forget(self, key: bytes, slot: int, generation: int) -> None:
        """In this process: the page is not what it should be."""
        with self._mutex:
            self._bad[slot] = generation
            if self.slots.get(key) == slot and int(self.records[slot]["generation"]) == generation:
                del self.slots[key]

    def stamp(self, used: Iterable[tuple[int, int]]) -> None:
        """Slot and when, in microseconds. Neither needs the lock nor tells others: they look when they evict."""
        for slot, when in used:
            with self._mutex:
                if slot >= len(self.records) or not self.records[slot]["generation"]:
                    continue
                self.records["used"][slot] = when
            self._calls.write(self._index, when.to_bytes(8, "little"), _RECORDS_AT + slot * RECORD.itemsize + _USED_AT)

    def _read_counter(self) -> tuple[int, tuple[int, ...]]:
        data = self._calls.read(self._index, BLOCK_BYTES, BLOCK_BYTES)
        if len(data) < BLOCK_BYTES:
            return 0, (0,) * _RING
        counter, *ring = _CHANGES.unpack(data)
        return counter, tuple(ring)

    def _apply(self, first: int, new: Records) -> None:
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

    # The pages

    def read_into(self, buffers: Sequence[memoryview], slot: int) -> int:
        file = self._direct if self.direct and self._direct is not None else self._pages
        try:
            return self._calls.read_into(file, buffers, slot * self.slot_bytes)
        except OSError as error:
            if not self._refused_direct(error):
                raise
        return self._calls.read_into(self._pages, buffers, slot * self.slot_bytes)

    def write_from(self, buffers: Sequence[memoryview], slot: int) -> None:
        file = self._direct if self.direct and self._direct is not None else self._pages
        needed = sum(len(buffer) for buffer in buffers)
        try:
            written = self._calls.write_from(file, buffers, slot * self.slot_bytes)
        except OSError as error:
            if not self._refused_direct(error):
                raise
            written = self._calls.write_from(self._pages, buffers, slot * self.slot_bytes)
        if written != needed:
            raise OSError(errno.ENOSPC, f"{written} of {needed} bytes were written")

    def _refused_direct(self, error: OSError) -> bool:
        """From now on without. Another thread may have found out just now."""
        if self._direct is None or error.errno != errno.EINVAL:
            return False
        self.direct, self.buffered_reason = False, error.strerror or str(error)
        return True

    def sync(self) -> None:
        self._calls.sync(self._pages)
        self._calls.sync(self._index)

    def removed(self) -> bool:
        """Somebody deleted the files: nothing that is written to them would be found again."""
        return not (self._calls.exists(self.index_path) and self._calls.exists(self.pages_path))


def _header(digest: bytes, page_bytes: int, label: str) -> bytes:
    slot_bytes = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
    fields = _HEADER.pack(MAGIC, page_bytes, slot_bytes, digest, label.encode()[:255])
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
