"""A range of GPU addresses that is longer than the memory behind it: memory is mapped into it piece by piece.

Graphs keep the addresses they were captured with, so the KV pool must not move when it grows: its whole range is
reserved first, a few pages are backed for the profile run, and the rest when it is known how much is left.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from holdfast.errors import EngineError


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


class ReservedRange:
    """`nbytes`: of addresses. Nothing is backed at first. `driver`: CUDA's; a fake with the calls used here will do."""

    def __init__(self, nbytes: int, device: torch.device, driver: Any = None) -> None:
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
        self.reserved_bytes = self._whole(nbytes)
        self.mapped_bytes = 0
        self._address: int | None = int(
            _check(driver.cuMemAddressReserve(self.reserved_bytes, 0, 0, 0), "a range of addresses")
        )
        self._handles: list[tuple[Any, int]] = []

    def _whole(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def back(self, nbytes: int) -> None:
        """Memory behind at least the first `nbytes`. Raises RangeError and changes nothing when there is too little."""
        wanted = self._whole(nbytes) - self.mapped_bytes
        if wanted <= 0:
            return
        if self._address is None or self.mapped_bytes + wanted > self.reserved_bytes:
            raise EngineError("the KV range is closed, or shorter than that", needed=f"{nbytes:,} bytes")
        driver = self._driver
        handle = _check(driver.cuMemCreate(wanted, self._properties, 0), f"{wanted:,} bytes of memory")
        at, mapped = self._address + self.mapped_bytes, False
        try:
            _check(driver.cuMemMap(at, wanted, 0, handle, 0), "to map memory")
            mapped = True
            access = driver.CUmemAccessDesc()
            access.location = self._properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _check(driver.cuMemSetAccess(at, wanted, [access], 1), "access to its memory")
        except BaseException:
            if mapped:  # Else its memory stays taken, and nothing can be mapped there again.
                driver.cuMemUnmap(at, wanted)
            driver.cuMemRelease(handle)
            raise
        self._handles.append((handle, wanted))
        self.mapped_bytes += wanted

    def bytes_view(self) -> torch.Tensor:
        """All addresses, the unbacked ones included, as one tensor of bytes. It must not outlive the range."""
        assert self._address is not None
        return torch.as_tensor(_Addresses(self._address, self.reserved_bytes), device=self.device)

    def close(self) -> None:
        if self._address is None:
            return
        driver, address, offset = self._driver, self._address, 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for handle, size in self._handles:
            driver.cuMemUnmap(address + offset, size)
            driver.cuMemRelease(handle)
            offset += size
        driver.cuMemAddressFree(address, self.reserved_bytes)
        self._address, self._handles, self.mapped_bytes = None, [], 0

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
