"""Host memory that a GPU's copy engine reads straight from: an exact mapping, touched by several threads and registered
with the driver piece by piece. torch's own pinned memory is rounded up to powers of two.

The system takes it back however the process ends. Knows nothing of layers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.errors import EngineError
from holdfast.hardware import processor
from holdfast.units import format_bytes

TOUCHED_BYTES = 32 << 20
"""By one thread at a time."""
MOST_THREADS = 16
POPULATE_WRITE = 23
"""Of madvise, on Linux: the pages are there when it returns."""
NOT_PINNED = "HF444"
MAPPED = 2
"""cudaHostRegisterMapped: kernels may read it too."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

Pinning = Callable[[int, int], int]
"""(address, bytes): CUDA's error, 0 where there is none."""
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def register(address: int, nbytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, MAPPED))


def unregister(addresses: Sequence[int], device: torch.device) -> None:
    if addresses:
        torch.cuda.synchronize(device)  # Something may still be copied from there.
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


class PinnedMemory:
    """`sizes`: of pieces, each whole pages; `pieces` are tensors of bytes. `device`: which reads them. `pin` and
    `unpin`: for tests."""

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        progress: Progress | None = None,
        pin: Pinning = register,
        unpin: Callable[[Sequence[int], torch.device], None] = unregister,
    ) -> None:
        self.nbytes, self._pin = 0, pin
        self.pieces: list[torch.Tensor] = []
        self._pinned: list[int] = []
        self._end = weakref.finalize(self, unpin, self._pinned, device)  # Loading may fail in the middle.
        self._end.atexit = False  # The driver does it then.
        try:
            self._take(sizes, progress)
        except BaseException:
            self.close()
            raise

    def add(self, nbytes: int) -> torch.Tensor:
        """One piece more. Raises EngineError where the system or the driver does not give it."""
        self._take([nbytes], None)
        return self.pieces[-1]

    def _take(self, sizes: Sequence[int], progress: Progress | None) -> None:
        total, done = sum(sizes), 0
        if not total:
            return
        memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # A fork must not share pages that the GPU reads.
            if hasattr(mmap, advice):
                _advise(memory, getattr(mmap, advice))
        pieces = list(torch.frombuffer(memory, dtype=torch.uint8).split(list(sizes)))
        with _touching() as threads:
            touched = [[threads.submit(_touch, part) for part in piece.split(TOUCHED_BYTES)] for piece in pieces]
            for piece, parts in zip(pieces, touched, strict=True):
                for part in parts:
                    part.result()
                if error := self._pin(piece.data_ptr(), piece.nbytes):
                    raise _not_pinned(total, done, error)
                self._pinned.append(piece.data_ptr())
                self.pieces.append(piece)
                done += piece.nbytes
                self.nbytes += piece.nbytes
                if progress is not None:
                    progress(done, total)

    def close(self) -> None:
        """When nothing copies from it any more."""
        self._end()
        self.pieces = []


def _not_pinned(total: int, done: int, error: int) -> EngineError:
    return EngineError(
        "the driver did not pin host memory for layers that do not fit in the GPU",
        code=NOT_PINNED,
        needed=f"{format_bytes(total)}, of which {format_bytes(done)} were pinned",
        found=f"CUDA error {error}",
        fix="--device cuda with a smaller --ram and --nvme-path, or a larger limit of the container",
    )


def as_device_memory(piece: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes as kernels of the GPU see them, over the link. It must not outlive the pinned memory."""
    if device.type != "cuda":
        return piece
    from cuda.bindings import driver

    with torch.cuda.device(device):
        address = device_address(piece, torch.cuda.current_device(), driver)
    return torch.as_tensor(_Mapped(piece, address), device=device)


def device_address(piece: torch.Tensor, gpu: int, driver: Any) -> int:
    """Where the GPU, the current one, finds what is registered: most have the host's own address for it."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    if _told(driver.cuDeviceGetAttribute(attribute, _told(driver.cuDeviceGet(gpu), piece)), piece):
        return piece.data_ptr()
    return int(_told(driver.cuMemHostGetDevicePointer(piece.data_ptr(), 0), piece))


def _told(result: tuple[Any, ...], piece: torch.Tensor) -> Any:
    """The value of a driver call."""
    status, value = int(result[0]), result[-1]
    if status:
        raise EngineError(
            "the driver did not say where the GPU finds pinned host memory",
            code=NOT_PINNED,
            needed=f"an address for {format_bytes(piece.nbytes)}",
            found=f"CUDA error {status}",
            fix="another GPU, or settings with which all layers and the embedding stay on it",
        )
    return value


class _Mapped:
    """What torch asks of memory that it did not allocate. `address`: the GPU's."""

    def __init__(self, piece: torch.Tensor, address: int) -> None:
        self._piece = piece  # torch keeps this object, and the memory stays with it.
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (piece.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


@contextmanager
def _touching() -> Iterator[ThreadPoolExecutor]:
    """Threads for it. What they have not begun is not waited for when this is left early, by Ctrl-C too."""
    threads = ThreadPoolExecutor(min(MOST_THREADS, processor().cores), "pinned-memory")
    try:
        yield threads
    except BaseException:
        threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def _touch(part: torch.Tensor) -> None:
    """Other threads run meanwhile. Kernels before 5.14 do not do it at once: then every byte is written once more."""
    if not _libc.madvise(part.data_ptr(), part.nbytes, POPULATE_WRITE):
        return
    if (error := ctypes.get_errno()) != errno.EINVAL:
        raise EngineError(
            "the system did not give host memory for layers that do not fit in the GPU",
            code=NOT_PINNED,
            needed=f"{format_bytes(part.nbytes)} more",
            found=os.strerror(error),
            fix="--device cuda with a smaller --ram and --nvme-path, or a larger memory limit of the container",
        )
    ctypes.memset(part.data_ptr(), 0, part.nbytes)


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # A kernel without huge pages.
        return
