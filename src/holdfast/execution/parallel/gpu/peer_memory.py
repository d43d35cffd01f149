"""GPU memory that several processes map: each allocates its own piece and opens those of the others (CUDA IPC).

Knows the driver, and nothing of what lies there. A piece is gone with the process that allocated it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.module import DriverError, driver_call

HANDLE_BYTES = 64
"""CUipcMemHandle"""
_WITH_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS"""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """`nbytes` of this rank, zeroed. `handle` goes to the other ranks; `open_peers` takes theirs."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # The driver's calls need torch's context to be current.
        self.nbytes, self.device = nbytes, device
        self._own, self._opened = ctypes.c_uint64(), list[ctypes.c_uint64]()
        driver_call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(nbytes))
        try:
            driver_call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
            torch.cuda.synchronize(device)
            handle = _Handle()
            driver_call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except DriverError:
            self.close()
            raise
        self.handle = bytes(bytearray(handle))

    def open_peers(self, handles: Sequence[bytes], rank: int) -> list[int]:
        """Where the memory of each rank lies for this process, its own at `rank`. Raises DriverError where the driver
        does not map it."""
        found = list[int]()
        for number, handle in enumerate(handles):
            if number == rank:
                found.append(self._own.value)
                continue
            if len(handle) != HANDLE_BYTES:
                raise EngineError(f"rank {number} has sent no handle of its memory", found=f"{len(handle)} bytes")
            place = ctypes.c_uint64()
            given = _Handle.from_buffer_copy(handle)
            driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(place), given, ctypes.c_uint(_WITH_PEER_ACCESS))
            self._opened.append(place)
            found.append(place.value)
        return found

    def close(self) -> None:
        """Nothing that was launched may still use it."""
        opened, self._opened = self._opened, []
        for place in opened:
            driver_call("cuIpcCloseMemHandle", place, fails=False)
        if self._own.value:
            driver_call("cuMemFree_v2", self._own, fails=False)
        self._own = ctypes.c_uint64()

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None and not sys.is_finalizing():
            self.close()
