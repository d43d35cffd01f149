"""Which prefixes were computed once: a bounded record that processes share and that outlives them, so that a second use
is known as one whoever made the first. Knows nothing of pages; a wrong entry costs one page that is written too early.

    [header 4 KiB: magic, counter, time of the last note][ring of 8-byte marks of keys]

In memory the marks are a table of sets of eight, the newest first. The file is a ring that is only appended to, so that
a note wears a disk by 8 bytes, and what others noted is read from where it was read last.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.index import BLOCK_BYTES

MARKS = 1 << 18
"""That are remembered: 2 MiB, 4 million tokens of pages of 16."""
KEPT_S = 7 * 86400
"""After the last note, a record of a model without pages is kept for so long."""
AT_ONCE, PAUSE_S = 1024, 1e-3
"""Marks of others that are put into the table before whoever asks meanwhile gets a turn: the engine's thread does. And
how long it has for that."""
_WAYS = 8
_SETS = MARKS // _WAYS
_SET_SHIFT = 64 - (_SETS - 1).bit_length()
_COUNTERS = 1 << 62
_MAGIC = b"holdfast uses 1\n"
_HEADER = struct.Struct("<16sQQ")
_MARK_BYTES = 8


class FirstUses:
    """Thread-safe; `exchange` alone touches the disk."""

    def __init__(self, path: Path, calls: Calls) -> None:
        self._path, self._calls = path, calls
        self._file = -1
        self._counter = 0
        """Marks of the file that are in the table, since it was made."""
        self._table: NDArray[np.uint64] = np.zeros((_SETS, _WAYS), np.uint64)
        self._new: list[int] = []
        """Not yet in the file."""
        self._mutex = threading.Lock()

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of them in a row, from the first on, were noted."""
        with self._mutex:
            for number, key in enumerate(keys):
                mark = _mark(key)
                if mark not in self._table[mark >> _SET_SHIFT].tolist():
                    return number
        return len(keys)

    def note(self, keys: Sequence[bytes]) -> None:
        with self._mutex:
            for mark in map(_mark, keys):
                if self._insert(mark) and len(self._new) < MARKS:
                    self._new.append(mark)

    @property
    def noted(self) -> bool:
        """There is something to tell others."""
        return bool(self._new)

    def _insert(self, mark: int) -> bool:
        """False: it was there."""
        found = self._table[mark >> _SET_SHIFT]
        marks = found.tolist()
        if mark in marks:
            return False
        found[:] = [mark, *marks[:-1]]
        return True

    def load(self) -> None:
        """What was noted before, by anybody who could write it. OSError."""
        try:
            file = self._calls.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            self._read_new(file, _read_header(file, self._calls)[0])
        finally:
            self._calls.close(file)

    def exchange(self) -> None:
        """Takes what others noted, and tells them what was noted here. Under the lock of the folder. OSError: what is
        new here is told the next time."""
        try:
            self._exchange()
        except OSError:
            self.close()  # The next time it may be another file.
            raise

    def _exchange(self) -> None:
        if self._file < 0:
            self._file = self._calls.open(self._path, os.O_RDWR | os.O_CREAT)
        counter, _ = _read_header(self._file, self._calls)
        self._read_new(self._file, counter)
        with self._mutex:
            new = list(self._new)
        if not new:
            return
        at = counter % MARKS
        for first, part in ((at, new[: MARKS - at]), (0, new[MARKS - at :])):
            if part:
                data = np.array(part, np.uint64).tobytes()
                self._calls.write(self._file, data, BLOCK_BYTES + first * _MARK_BYTES)
        _write_header(self._file, self._calls, counter + len(new))
        self._counter = counter + len(new)
        with self._mutex:
            del self._new[: len(new)]

    def _read_new(self, file: int, counter: int) -> None:
        """What the file has beyond what is known; all of it where it began anew, or is more than a ring ahead."""
        if counter == self._counter:
            return
        if self._counter > counter:
            with self._mutex:
                self._table[:] = 0
            self._counter = 0
        first = max(self._counter, counter - MARKS)
        marks = np.concatenate([self._read(file, *part) for part in _parts(first, counter)])
        at_once = AT_ONCE if self._counter else len(marks)  # Of the first nobody asks before they are there.
        for place in range(0, len(marks), at_once or 1):
            if place:
                time.sleep(PAUSE_S)  # A lock that is taken again at once is nobody else's in between.
            with self._mutex:
                self._insert_many(marks[place : place + at_once])
        self._counter = counter

    def _read(self, file: int, first: int, count: int) -> NDArray[np.uint64]:
        data = self._calls.read(file, count * _MARK_BYTES, BLOCK_BYTES + first * _MARK_BYTES)
        return np.frombuffer(data[: len(data) // _MARK_BYTES * _MARK_BYTES], np.uint64)

    def _insert_many(self, marks: NDArray[np.uint64]) -> None:
        """The oldest first. What is in the table already counts as older than all of them. Sets that get none of them
        are left alone."""
        touched = np.unique(marks >> np.uint64(_SET_SHIFT)).astype(np.int64)
        every = np.concatenate([marks[::-1], self._table[touched].reshape(-1)])
        every = every[np.sort(np.unique(every, return_index=True)[1])]
        every = every[every != 0]
        sets = (every >> np.uint64(_SET_SHIFT)).astype(np.int64)
        order = np.argsort(sets, kind="stable")
        ordered = sets[order]
        rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        kept = rank < _WAYS
        self._table[touched] = 0
        self._table[ordered[kept], rank[kept]] = every[order][kept]

    def close(self) -> None:
        if self._file >= 0:
            self._calls.close(self._file)
        self._file = -1


def clear_uses(path: Path, calls: Calls) -> None:
    """Nothing is remembered; servers that use it begin anew. Under the lock of the folder. OSError."""
    try:
        file = calls.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        calls.truncate(file, BLOCK_BYTES)
        _write_header(file, calls, 0)
    finally:
        calls.close(file)


def remembers(path: Path, calls: Calls) -> bool:
    """Whether something was noted there lately. One that cannot be read may have been: it is left to whoever can."""
    try:
        file = calls.open(path, os.O_RDONLY)
        try:
            counter, when_us = _read_header(file, calls)
        finally:
            calls.close(file)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return counter > 0 and calls.now() - when_us / 1e6 < KEPT_S


def _read_header(file: int, calls: Calls) -> tuple[int, int]:
    """Counter, and when it was set, in microseconds; 0 where it is no record: it begins anew."""
    data = calls.read(file, _HEADER.size, 0)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return 0, 0
    _, counter, when_us = _HEADER.unpack(data)
    return (counter, when_us) if counter < _COUNTERS else (0, 0)


def _write_header(file: int, calls: Calls, counter: int) -> None:
    calls.write(file, _HEADER.pack(_MAGIC, counter, int(calls.now() * 1e6)), 0)


def _parts(first: int, end: int) -> list[tuple[int, int]]:
    """Places of the ring and how many from each on, for the marks with these numbers."""
    at, count = first % MARKS, end - first
    return [(at, min(count, MARKS - at)), (0, max(0, count - (MARKS - at)))]


def _mark(key: bytes) -> int:
    """Never 0."""
    return int.from_bytes(blake2b(key, digest_size=_MARK_BYTES, person=b"holdfast-kv-uses").digest(), "little") | 1
