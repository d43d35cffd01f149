"""A range of GPU addresses that is longer than the memory behind it: memory is mapped into it piece by piece.

Graphs keep the addresses they were captured with, so the KV pool must not move when its size changes: its whole range
is reserved first, a few pages are backed for the profile run, and the rest when it is known how much is left. What the
driver maps at once it unmaps at once, so memory comes in pieces, and the last of them can go again:

    0    2    4         8                   16    ...   64    128   192    MiB; a piece begins at a multiple of its size
    ├────┼────┼─────────┼───────────────────┼───  ...  ──┼──────┼─────┤- - - - - - - - reserved - - - - - - -┤
                                                           ▲          ▲ mapped
                                                           └ cut(100 MiB) leaves all of this piece

Ctrl-C waits until the books say what the driver has: who goes on would unmap a piece twice, or lose one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from holdfast.errors import EngineError
from holdfast.held_interrupts import interrupts_put_off


def _driver(device: torch.device) -> Any:
    from cuda.bindings import driver

    torch.cuda.init()
    torch.zeros(1, device=device)  # The driver's calls need torch's context to be current.
    return driver


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or an error that names the call."""
    status, *values = result
    if int(status) != 0:
        raise RangeError(what, int(status))
    return values[0] if values else None


OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""


class RangeError(EngineError):
    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"the GPU driver refused {what}", code="HF440", found=f"CUDA error {status}")
        self.out_of_memory = status == OUT_OF_MEMORY


PIECE_BYTES = 64 << 20
"""The largest piece. Smaller ones are given back more exactly, and take the driver longer: 90 GiB were mapped in 90 ms,
in 200 ms with half of it (H200), and read as fast."""


class DriverMemory:
    """The driver's calls for addresses of a device and memory behind them. `driver`: CUDA's; a fake with the calls used
    here will do."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self._driver = driver = _driver(device) if driver is None else driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index or 0
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            _check(driver.cuMemGetAllocationGranularity(self._properties, minimum), "to say its page size")
        )
        self.device = device

    def whole(self, nbytes: int) -> int:
        """In whole pages of the driver."""
        return -(-nbytes // self.granularity) * self.granularity

    def reserve(self, nbytes: int) -> int:
        return int(_check(self._driver.cuMemAddressReserve(nbytes, 0, 0, 0), "a range of addresses"))

    def free_addresses(self, address: int, nbytes: int) -> None:
        self._driver.cuMemAddressFree(address, nbytes)

    def create(self, nbytes: int) -> Any:
        """Memory, which may then be mapped at any number of addresses. It is gone when it is released and no longer
        mapped."""
        return _check(self._driver.cuMemCreate(nbytes, self._properties, 0), f"{nbytes:,} bytes of memory")

    def release(self, handle: Any) -> None:
        _check(self._driver.cuMemRelease(handle), "to take memory back")

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """All of it. Nothing can be read or written there before `allow`."""
        _check(self._driver.cuMemMap(address, nbytes, 0, handle, 0), "to map memory")

    def allow(self, address: int, nbytes: int) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _check(self._driver.cuMemSetAccess(address, nbytes, [access], 1), "access to its memory")

    def unmap(self, address: int, nbytes: int) -> None:
        """What was mapped at once. Nothing that was launched may still use it."""
        _check(self._driver.cuMemUnmap(address, nbytes), "to unmap memory")

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """These addresses as a tensor of bytes. It must not outlive them. torch takes none that nothing lies behind."""
        return torch.as_tensor(_Addresses(address, nbytes), device=self.device)

    def wait(self) -> None:
        """For all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ReservedRange:
    """`nbytes`: of addresses. Nothing is backed at first. `driver`: CUDA's, or a fake."""

    def __init__(self, nbytes: int, device: torch.device, driver: Any = None) -> None:
        self._memory = DriverMemory(device, driver)
        self.granularity, self.device = self._memory.granularity, device
        self.reserved_bytes = self._memory.whole(nbytes)
        self.mapped_bytes = 0
        self._address: int | None = self._memory.reserve(self.reserved_bytes)
        self._pieces: list[tuple[Any, int]] = []
        """(handle, bytes), side by side from the first address on."""

    def mapped_for(self, nbytes: int) -> int:
        """Bytes that `back` or `cut` to `nbytes` would leave mapped."""
        if nbytes >= self.mapped_bytes:
            return self._memory.whole(nbytes)
        return next(end for end in (0, *self._ends()) if end >= nbytes)

    def largest_within(self, nbytes: int) -> int:
        """The most that can be mapped without being more than `nbytes`."""
        if nbytes >= self.mapped_bytes:
            return min(self.reserved_bytes, nbytes // self.granularity * self.granularity)
        return max((end for end in self._ends() if end <= nbytes), default=0)

    def _ends(self) -> Iterator[int]:
        return accumulate(size for _, size in self._pieces)

    @interrupts_put_off()
    def back(self, nbytes: int) -> None:
        """Memory behind at least the first `nbytes`. Raises RangeError and changes nothing when there is too little."""
        first, end = self.mapped_bytes, self._memory.whole(nbytes)
        if end <= first:
            return
        if self._address is None or end > self.reserved_bytes:
            raise EngineError("the KV range is closed, or shorter than that", needed=f"{nbytes:,} bytes")
        try:
            while self.mapped_bytes < end:
                self._map(self._piece_bytes(end))
            self._memory.allow(self._address + first, end - first)
        except BaseException:
            self._unmap_to(first)  # Else its memory stays taken, and nothing can be mapped there again.
            raise

    def _piece_bytes(self, end: int) -> int:
        """Of the next piece on the way to `end`: so large that it begins at a multiple of its size."""
        size = self.granularity
        while 2 * size <= min(PIECE_BYTES, end - self.mapped_bytes) and self.mapped_bytes % (2 * size) == 0:
            size *= 2
        return size

    def _map(self, nbytes: int) -> None:
        assert self._address is not None
        handle = self._memory.create(nbytes)
        try:
            self._memory.map(self._address + self.mapped_bytes, nbytes, handle)
        except BaseException:
            self._memory.release(handle)
            raise
        self._pieces.append((handle, nbytes))
        self.mapped_bytes += nbytes

    @interrupts_put_off()
    def cut(self, nbytes: int) -> None:
        """Gives back every piece that lies behind the first `nbytes`; what it held is lost. Nothing that was launched
        may still use it: it is waited for. Reading or writing there is a fault from then on."""
        if self._address is None or self.mapped_for(nbytes) >= self.mapped_bytes:
            return
        self._memory.wait()
        self._unmap_to(nbytes)

    def _unmap_to(self, nbytes: int) -> None:
        assert self._address is not None
        while self._pieces and self.mapped_bytes - self._pieces[-1][1] >= nbytes:
            handle, size = self._pieces[-1]
            self._memory.unmap(self._address + self.mapped_bytes - size, size)
            self._pieces.pop()
            self.mapped_bytes -= size
            self._memory.release(handle)

    def bytes_view(self) -> torch.Tensor:
        """All addresses, the unbacked ones included, as one tensor of bytes. It must not outlive the range."""
        assert self._address is not None
        return self._memory.view(self._address, self.reserved_bytes)

    @interrupts_put_off()
    def close(self) -> None:
        if self._address is None:
            return
        # A device that has failed takes nothing back; it ends with the process.
        with contextlib.suppress(RangeError, RuntimeError):
            self.cut(0)
        self._memory.free_addresses(self._address, self.reserved_bytes)
        self._address, self._pieces, self.mapped_bytes = None, [], 0

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None and not sys.is_finalizing():
            self.close()


class _Addresses:
    """What torch asks of memory that it did not allocate."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }
