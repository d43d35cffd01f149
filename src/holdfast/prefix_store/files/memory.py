"""Memory as direct reads and writes need it: whole pages of the machine, used again. Knows nothing of files."""

from __future__ import annotations

import mmap
import threading

import numpy as np

PIECES_AT_ONCE = 512
"""The system reads or writes no more than 1,024 pieces of memory in one call."""


class AlignedMemory:
    """Of one thread. Grows."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def pieces(self, count: int, nbytes: int) -> list[memoryview]:
        if len(self._memory) < count * nbytes:
            self._memory = memoryview(mmap.mmap(-1, count * nbytes))
        return [self._memory[number * nbytes : (number + 1) * nbytes] for number in range(count)]


class CopyPool:
    """Copies of pages that wait to be written. What was given back is used again: memory that is new to a process costs
    more than the copy itself."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def copy(self, page: memoryview) -> memoryview:
        """Of the size of a slot."""
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = memoryview(mmap.mmap(-1, self._slot_bytes))
        # Not by slices, which would keep Python's lock.
        np.copyto(np.frombuffer(memory, np.uint8)[: len(page)], np.frombuffer(page, np.uint8))
        return memory

    def give_back(self, memory: memoryview) -> None:
        with self._lock:
            self._free.append(memory)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
