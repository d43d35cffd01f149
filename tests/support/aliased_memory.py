"""The driver's memory of a GPU over the system's: what is mapped at several addresses is the same memory at all of
them, as on a GPU. What nothing lies behind reads as NaN, what is new as something else."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch
from simulated_copies import QueuedCopies

from holdfast.execution.gpu.memory.virtual_memory import OUT_OF_MEMORY, DriverMemory, RangeError

POISON, NEW = 0xFF, 0x11
READ_WRITE, FIXED, NO_RESERVE = mmap.PROT_READ | mmap.PROT_WRITE, 0x10, 0x4000
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
FAILED = ctypes.c_void_p(-1).value


class AliasedMemory(DriverMemory):
    """`memory_bytes`: of all handles together. Keeps the books of CUDA, and refuses what it refuses. `computing`: what
    reads and writes it, of which nothing may be left when memory goes from an address."""

    computing: QueuedCopies | None = None

    def __init__(self, memory_bytes: int = 1 << 40) -> None:
        self.granularity, self.device, self.memory_bytes = mmap.PAGESIZE, torch.device("cpu"), memory_bytes
        self.handles: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int, bool]] = {}
        """(bytes, handle, whether it may be read) by address."""
        self.most_bytes = 0

    def _map_at(self, address: int | None, nbytes: int, flags: int, file: int = -1) -> int:
        fixed = 0 if address is None else FIXED
        found = _libc.mmap(address, nbytes, READ_WRITE, flags | fixed, file, 0)
        assert found not in (None, FAILED), os.strerror(ctypes.get_errno())
        return int(found)

    def reserve(self, nbytes: int) -> int:
        address = self._map_at(None, nbytes, PRIVATE | NO_RESERVE)
        ctypes.memset(address, POISON, nbytes)
        self.reserved[address] = nbytes
        return address

    def free_addresses(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped), "nothing is mapped there any more"
        _libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> Any:
        assert nbytes % self.granularity == 0
        if sum(self.handles.values()) + nbytes > self.memory_bytes:
            raise RangeError(f"{nbytes} bytes", OUT_OF_MEMORY)
        file = os.memfd_create("handle")
        os.ftruncate(file, nbytes)
        os.pwrite(file, bytes([NEW]) * nbytes, 0)
        self.handles[file] = nbytes
        self.most_bytes = max(self.most_bytes, sum(self.handles.values()))
        return file

    def release(self, handle: Any) -> None:
        assert handle not in {held for _, held, _ in self.mapped.values()}, "its memory would not come back"
        del self.handles[handle]
        os.close(handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        assert self.handles[handle] == nbytes, "all of it"
        taken = any(at < address + nbytes and address < at + size for at, (size, _, _) in self.mapped.items())
        assert not taken, "something is mapped there"
        self.mapped[address] = nbytes, handle, False

    def allow(self, address: int, nbytes: int) -> None:
        size, handle, _ = self.mapped[address]
        assert size == nbytes
        self.mapped[address] = size, handle, True
        self._map_at(address, nbytes, mmap.MAP_SHARED, handle)

    def wait(self) -> None:
        if self.computing is not None:
            self.computing.run_all()

    def unmap(self, address: int, nbytes: int) -> None:
        assert self.computing is None or self.computing.idle, "what was launched may still use it"
        assert self.mapped.pop(address)[0] == nbytes
        self._map_at(address, nbytes, PRIVATE)
        ctypes.memset(address, POISON, nbytes)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        assert self.mapped[address][2], "torch takes no address that nothing lies behind"
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
