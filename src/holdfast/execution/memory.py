"""How much memory a piece of work needed as the system saw it, and tensors that take exactly what they are long.

Measures on Linux only; elsewhere it reports nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Sequence
from math import prod
from types import TracebackType

import torch

from holdfast.hardware import resident

OWN_PAGES_BYTES = 256 * 1024
"""Tensors from this size on get pages of their own."""

MAP_NORESERVE = 0x4000
"""Of Linux, on x86 and on Arm."""

ARM_KEEPS_S, ARM_LARGE_BYTES = 0.11, 64 << 20


def exact_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.empty, for what is kept: on a CPU it lies in pages of its own, which go back to the system with it.

    torch's allocator rounds pieces of some megabytes up and keeps what was freed: a model of many such matrices held
    up to 74% more than their bytes.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_PAGES_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def reserved_memory(nbytes: int) -> mmap.mmap | None:
    """Addresses for so many bytes, which take memory as they are touched; None: the system does not give them, as under
    a limit of addresses (ulimit -v) or without overcommit."""
    if not sys.platform.startswith("linux"):
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        return mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except OSError:
        return None


class PeakMemory:
    """Around pieces of work, one after the other: `grown_bytes` is the peak of resident memory in all of them so far,
    beyond what was resident before the first."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._before_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        try:
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # 5: the peak starts again from what is resident now
        except OSError:
            pass
        if self._before_bytes is None:
            self._before_bytes = self.resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = resident()
        if held is not None and self._before_bytes is not None:
            self.grown_bytes = max(self.grown_bytes, held.peak_bytes - self._before_bytes)

    @property
    def given_back_bytes(self) -> int:
        """Of what it grew by, what is not resident now."""
        return max(0, self.grown_bytes - (self.resident_bytes() - (self._before_bytes or 0)))

    @staticmethod
    def resident_bytes() -> int:
        """What the process holds now."""
        held = resident()
        return 0 if held is None else held.now_bytes


def trim_memory() -> None:
    """Hands freed memory back to the system, where the C library or torch's allocator keeps it for itself.

    On Arm that allocator is mimalloc, which gives back what has been free for a tenth of a second, and looks for it
    only when a large piece is freed: it is waited for and given one, which is never touched and so takes nothing.
    """
    if platform.machine() in ("aarch64", "arm64"):
        time.sleep(ARM_KEEPS_S)
        torch.empty(ARM_LARGE_BYTES, dtype=torch.uint8)
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return
