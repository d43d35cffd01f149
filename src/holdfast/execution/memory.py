"""How much memory a piece of work needed as the system saw it, and tensors that take exactly what they are long.

Measures on Linux only; elsewhere it reports nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from holdfast.errors import EngineError
from holdfast.hardware import resident

ALIGNED_BYTES = 256
"""Where tensors begin that lie beside others: what kernels ask for at most."""

OWN_PAGES_BYTES = 256 * 1024
"""Tensors from this size on get pages of their own."""

MAP_NORESERVE = 0x4000
"""Of Linux, on x86 and on Arm."""

OVERCOMMIT, NEVER = Path("/proc/sys/vm/overcommit_memory"), "2"

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


MakeTensor = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""As `exact_tensor` does it, or somewhere else."""


class Arena:
    """Tensors one behind the other in `memory`, a tensor of bytes. Nothing is given back but all of it at once."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.used_bytes = memory, 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        first = -(-self.used_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        last = first + prod(shape) * dtype.itemsize
        if device != self._memory.device or last > len(self._memory):
            raise EngineError(
                "a layer does not fit the memory that was set aside for it",
                needed=f"{last:,} bytes on {device}",
                found=f"{len(self._memory):,} on {self._memory.device}",
            )
        self.used_bytes = last
        return self._memory[first:last].view(dtype).view(tuple(shape))


def reserved_memory(nbytes: int) -> mmap.mmap | None:
    """Addresses for so many bytes, which take memory as they are touched; None: the system does not give them, or
    counts them as if they were touched (ulimit -v, vm.overcommit_memory=2), and others would go short of them."""
    return _anonymous(nbytes, MAP_NORESERVE) if _addresses_are_free() else None


def own_memory(nbytes: int) -> mmap.mmap | None:
    """Pages that can be given back one by one; None: not on this system."""
    return _anonymous(nbytes, 0)


def _anonymous(nbytes: int, flags: int) -> mmap.mmap | None:
    if not sys.platform.startswith("linux"):
        return None
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError:
        return None


def _addresses_are_free() -> bool:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        return OVERCOMMIT.read_text().strip() != NEVER
    except OSError:
        return True


def is_host_shortage(error: BaseException) -> bool:
    """Whether it says that the system gave no memory: Python's way, the system's, or that of torch's allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


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
