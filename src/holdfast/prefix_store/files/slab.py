"""The pages of one model: a file with a slot for each, whole blocks of 4 KiB, so that they can be read past the page
cache, and the index that says what is in them. Which page makes room for another is decided in `room`.

    NAME.index      see `index`
    NAME.pages      [slot 0][slot 1]...
    NAME.uses       see `uses`
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.checksum import page_check
from holdfast.prefix_store.files.index import BLOCK_BYTES, KEY_BYTES, RECORD, DamagedIndexError, PageIndex, runs


def slab_name(model: bytes, page_bytes: int) -> str:
    return blake2b(model + page_bytes.to_bytes(8, "little"), digest_size=12, person=b"holdfast-kv-slab").hexdigest()


def model_digest(model: bytes) -> bytes:
    return blake2b(model, digest_size=32, person=b"holdfast-kvmodel").digest()


def padded(key: bytes) -> bytes:
    assert len(key) <= KEY_BYTES
    return key if len(key) == KEY_BYTES else key.ljust(KEY_BYTES, b"\0")


class Slab:
    def __init__(self, folder: Path, name: str, calls: Calls, *, writable: bool) -> None:
        """Opens what is there. DamagedIndexError, FileNotFoundError, OSError."""
        self.name, self._calls, self.writable = name, calls, writable
        self.pages_path, self.uses_path = folder / f"{name}.pages", folder / f"{name}.uses"
        flags = os.O_RDWR if writable else os.O_RDONLY
        with contextlib.ExitStack() as opened:
            self.index = PageIndex(folder / f"{name}.index", calls, flags)
            opened.callback(self.index.close)
            self.page_bytes, self.slot_bytes = self.index.page_bytes, self.index.slot_bytes
            self._pages = calls.open(self.pages_path, flags)
            opened.pop_all()
        self._direct, self.buffered_reason = self._open_direct(flags)
        self.direct = self._direct is not None
        """Reads and writes go past the page cache."""

    @classmethod
    def create(cls, folder: Path, calls: Calls, model: bytes, page_bytes: int, label: str) -> Slab:
        """Or opens it. Under the lock of the folder. What is damaged begins anew."""
        name = slab_name(model, page_bytes)
        with contextlib.suppress(DamagedIndexError, FileNotFoundError):
            slab = cls(folder, name, calls, writable=True)
            if slab.is_of(model, page_bytes):
                return slab
            slab.close()
        PageIndex.create(folder / f"{name}.index", calls, model_digest(model), page_bytes, label)
        pages = calls.open(folder / f"{name}.pages", os.O_RDWR | os.O_CREAT)
        try:
            calls.truncate(pages, 0)
        finally:
            calls.close(pages)
        return cls(folder, name, calls, writable=True)

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

    def is_of(self, model: bytes, page_bytes: int) -> bool:
        return self.index.model == model_digest(model) and self.page_bytes == page_bytes

    def check(self, page: memoryview, key: bytes, generation: int) -> bytes:
        numbers = generation.to_bytes(8, "little") + self.page_bytes.to_bytes(8, "little")
        return page_check(page, self.index.model + padded(key) + numbers)

    def read_into(self, buffers: Sequence[memoryview], slot: int) -> int:
        """How much there is: less only where the file ends. A read may bring less than that (a signal, a network): the
        rest is asked for once more, through the page cache, since it may begin anywhere."""
        found = self._read_once(buffers, slot)
        wanted = sum(len(buffer) for buffer in buffers)
        while found < wanted:
            more = self._calls.read_into(self._pages, _behind(buffers, found), slot * self.slot_bytes + found)
            if not more:
                break
            found += more
        return found

    def _read_once(self, buffers: Sequence[memoryview], slot: int) -> int:
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

    def give_back(self) -> int:
        """The space of free slots goes back to the file system, where it can take it; returns how much did, in bytes.
        Under the lock of the folder."""
        given = 0
        for first, count in runs(self.index.held()):
            try:
                self._calls.punch(self._pages, first * self.slot_bytes, count * self.slot_bytes)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    break
                raise
            self.index.change(range(first, first + count), np.zeros(count, RECORD))
            given += count * self.slot_bytes
        return given

    def sync(self) -> None:
        self._calls.sync(self._pages)
        self.index.sync()

    def removed(self) -> bool:
        """Somebody deleted the files: nothing that is written to them would be found again."""
        return not (self._calls.exists(self.index.path) and self._calls.exists(self.pages_path))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.index.close()
        for file in (self._pages, self._direct):
            if file is not None:
                with contextlib.suppress(OSError):
                    self._calls.close(file)


def _behind(buffers: Sequence[memoryview], place: int) -> list[memoryview]:
    """Without so many of the first bytes."""
    left = list[memoryview]()
    for buffer in buffers:
        if place < len(buffer):
            left.append(buffer[max(0, place) :])
        place -= len(buffer)
    return left
