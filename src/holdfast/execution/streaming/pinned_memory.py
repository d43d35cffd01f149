"""Host memory that a GPU's copy engine reads straight from: an exact mapping, touched by several threads and registered
with the driver piece by piece. torch's own pinned memory is rounded up to powers of two.

What is touched is taken from the system at once, so no more than a piece or two is touched ahead of the driver, and
where that is asked for none that RAM has no room for by then. The system takes it back however the process ends. Knows
nothing of layers.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from holdfast.errors import DoesNotFitError, EngineError
from holdfast.hardware import processor
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

TOUCHED_BYTES = 32 << 20
"""By one thread at a time."""
MOST_THREADS = 16
AHEAD_PIECES, AHEAD_BYTES = 2, MOST_THREADS * TOUCHED_BYTES
"""Touched and not pinned yet: so many pieces, and more small ones, as many as there is work for all threads."""
PROGRESS_S = 0.25
"""Between two calls of it while pinning is waited for."""
DONT_NEED, REMOVE = 4, 9
"""Of madvise: the system has its pages back; those of a file as well."""
POPULATE_WRITE = 23
"""Of madvise, on Linux: the pages are there when it returns."""
NOT_PINNED = "HF444"
NO_ROOM = "HF114"
MAPPED = 2
"""cudaHostRegisterMapped: kernels may read it too."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p

Pinning = Callable[[int, int], int]
"""(address, bytes): CUDA's error, 0 where there is none."""
Unpinning = Callable[[Sequence[int], torch.device], Sequence[int] | None]
"""When this returns nothing is copied from these addresses. Which of them the driver still has, if any."""
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def register(address: int, nbytes: int, device: torch.device) -> int:
    with torch.cuda.device(device):
        if error := int(torch.cuda.cudart().cudaHostRegister(address, nbytes, MAPPED)):
            forget_error(device)
    return error


def forget_error(device: torch.device) -> None:
    """CUDA's last one of this thread, which was told: the next kernel would be blamed for it."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


_kept: list[torch.Tensor] = []
"""What the driver did not unpin, or could not be asked to. Whoever was given the same addresses next, be it for numbers
that are copied to a GPU once, would have the old pages copied in place of its own, without an error: so nobody is."""


def unregister(addresses: Sequence[int], device: torch.device) -> list[int]:
    if addresses:
        try:
            torch.cuda.synchronize(device)  # Something may still be copied from there.
        except RuntimeError as broken:
            log.warning("host memory stays pinned, since the GPU does not answer: %s", str(broken).splitlines()[0])
            return list(addresses)
    kept = []
    with torch.cuda.device(device) if addresses else nullcontext():  # Whoever collects garbage may be on another.
        for address in addresses:
            if error := int(torch.cuda.cudart().cudaHostUnregister(address)):
                log.warning("the driver did not unpin host memory, which stays taken therefore: CUDA error %d", error)
                forget_error(device)
                kept.append(address)
    return kept


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Of somebody else's, all of which was registered at once."""
    if unregister([memory.data_ptr()], device):
        _kept.append(memory)


class PinnedMemory:
    """`sizes`: of pieces, each whole pages; `pieces` are tensors of bytes. `device`: which reads them. `background`:
    the numbers of all pieces in the order in which a thread pins them, and each may be used once it was waited for;
    None: all are pinned when this returns. `file`: the memory is its own, and what it holds stays; None: it is
    nobody else's. `room`: bytes of RAM that it may still take, asked before each piece; None: as many as it has. `pin`
    and `unpin`: for tests."""

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        progress: Progress | None = None,
        pin: Pinning | None = None,
        unpin: Unpinning = unregister,
        background: Sequence[int] | None = None,
        file: int | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        self.nbytes, self._progress = sum(sizes), progress
        self._unpin, self._device = unpin, device
        self._pin = partial(register, device=device) if pin is None else pin
        self.pieces = _mapped(sizes, file)
        self._pinned: list[int] = []
        self._done = [Future[None]() for _ in sizes]
        stop, threads = threading.Event(), list[threading.Thread]()
        # Loading may fail in the middle.
        self._end = weakref.finalize(self, _give_back, stop, threads, unpin, self._pinned, device, self.pieces)
        self._end.atexit = False  # The driver does it then.
        order = range(len(sizes)) if background is None else background
        held = None if file is None else _with_content(sizes, file)
        work = partial(
            _pin_all, self.pieces, list(order), self._pin, self._pinned, self._done, stop, held=held, room=room
        )
        if background is not None and sizes:
            threads.append(threading.Thread(target=work, name="pinning", daemon=True))
            threads[0].start()
            return
        try:
            work(self._tell)
            self.wait(*range(len(sizes)))
        except BaseException:
            self.close()
            raise

    def wait(self, *numbers: int) -> None:
        """Until these pieces are pinned."""
        for number in numbers:
            while wait([self._done[number]], PROGRESS_S).not_done:
                self._tell()
            self._done[number].result()

    def is_pinned(self, number: int) -> bool:
        """This piece, by now. Raises what stopped it."""
        if not self._done[number].done():
            return False
        self._done[number].result()
        return True

    @property
    def to_come_bytes(self) -> int:
        """Of pieces that are not pinned yet, and may still be."""
        return sum(piece.nbytes for piece, one in zip(self.pieces, self._done, strict=False) if not one.done())

    def _tell(self) -> None:
        if self._progress is not None:
            done = sum(piece.nbytes for piece, one in zip(self.pieces, self._done, strict=False) if one.done())
            self._progress(done, self.nbytes)

    def add(self, nbytes: int) -> torch.Tensor:
        """One piece more. Raises EngineError where the system or the driver does not give it."""
        (piece,), done = _mapped([nbytes]), Future[None]()
        _pin_all([piece], [0], self._pin, self._pinned, [done], threading.Event())
        done.result()
        self.pieces.append(piece)
        self.nbytes += nbytes
        return piece

    def drop(self, piece: torch.Tensor) -> None:
        """Gives one of them back, which nothing copies from any more, nor ever will: reading it is a fault of whoever
        does."""
        if self._unpin([piece.data_ptr()], self._device):
            _kept.append(piece)
        self._pinned.remove(piece.data_ptr())
        self.pieces[:] = [one for one in self.pieces if one.data_ptr() != piece.data_ptr()]
        self.nbytes -= piece.nbytes
        _libc.madvise(piece.data_ptr(), piece.nbytes, DONT_NEED)

    def close(self) -> None:
        """When nothing copies from it any more."""
        self._end()
        self.pieces = []


def _mapped(sizes: Sequence[int], file: int | None = None) -> list[torch.Tensor]:
    if not sum(sizes):
        return []
    try:
        if file is None:
            memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            os.ftruncate(file, max(os.fstat(file).st_size, sum(sizes)))
            memory = mmap.mmap(file, sum(sizes), flags=mmap.MAP_SHARED)
    except OSError as error:  # ulimit -v, or vm.overcommit_memory=2.
        raise _not_given(sum(sizes), error.errno or 0) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # A fork must not share pages that the GPU reads.
        if hasattr(mmap, advice):
            _advise(memory, getattr(mmap, advice))
    return list(torch.frombuffer(memory, dtype=torch.uint8).split(list(sizes)))


def _pin_all(
    pieces: Sequence[torch.Tensor],
    order: Sequence[int],
    pin: Pinning,
    pinned: list[int],
    done: Sequence[Future[None]],
    stop: threading.Event,
    tell: Callable[[], None] = lambda: None,
    *,
    held: Container[int] | None = None,
    room: Callable[[], int] | None = None,
) -> None:
    """One by one, while threads touch those that come next. Whatever goes wrong is the result of all that are left, and
    what was touched of them is given back; an interruption is raised as well. `held`: pieces of a file that had content
    before; None: the memory is no file's."""
    finished, left, coming = 0, deque(order), deque[tuple[int, list[Future[None]]]]()
    begun, of_file = list[int](), held is not None
    touch = _touch_kept if of_file else _touch
    try:
        with _touching() as threads:
            while left or coming:
                while left and _is_near(pieces, left[0], [at for at, _ in coming]):
                    if room is not None:
                        needed = sum(_absent_bytes(pieces[at]) for at in (left[0], *(at for at, _ in coming)))
                        if needed > (there := room()):
                            if coming:  # It is known better when they are there.
                                break
                            raise _no_room(needed, there)
                    begun.append(at := left.popleft())
                    coming.append((at, [threads.submit(touch, part) for part in pieces[at].split(TOUCHED_BYTES)]))
                at, parts = coming.popleft()
                for part in parts:
                    part.result()
                if stop.is_set():
                    raise EngineError("pinning was given up")
                if error := pin(pieces[at].data_ptr(), pieces[at].nbytes):
                    raise _not_pinned(sum(piece.nbytes for piece in pieces), finished, error)
                pinned.append(pieces[at].data_ptr())
                finished += pieces[at].nbytes
                done[at].set_result(None)
                tell()
    except BaseException as error:
        for at in begun:
            # What a file held before may be what the process after this one is to find.
            if not done[at].done() and (held is None or at not in held):
                _libc.madvise(pieces[at].data_ptr(), pieces[at].nbytes, REMOVE if of_file else DONT_NEED)
        for one in done:
            if not one.done():
                one.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _is_near(pieces: Sequence[torch.Tensor], number: int, coming: Sequence[int]) -> bool:
    """Whether this one is touched beside those that are not pinned yet."""
    return len(coming) < AHEAD_PIECES or sum(pieces[at].nbytes for at in (number, *coming)) <= AHEAD_BYTES


def _with_content(sizes: Sequence[int], file: int) -> set[int]:
    """Which pieces of it hold something, in RAM or swapped out: of the latter mincore knows nothing."""
    found, begin = set[int](), 0
    for number, size in enumerate(sizes):
        with suppress(OSError):  # ENXIO: nothing from there on.
            if os.lseek(file, begin, os.SEEK_DATA) < begin + size:
                found.add(number)
        begin += size
    return found


def _absent_bytes(piece: torch.Tensor) -> int:
    """What the system would have to give for it now."""
    pages = torch.empty(-(-piece.nbytes // mmap.PAGESIZE), dtype=torch.uint8, device="cpu")
    if _libc.mincore(piece.data_ptr(), piece.nbytes, pages.data_ptr()):
        return piece.nbytes
    return int((pages & 1 == 0).sum()) * mmap.PAGESIZE


def _give_back(
    stop: threading.Event,
    threads: Sequence[threading.Thread],
    unpin: Unpinning,
    pinned: Sequence[int],
    device: torch.device,
    pieces: Sequence[torch.Tensor],
) -> None:
    stop.set()
    if threading.current_thread() in threads:  # The collector runs there, maybe amid a piece: nobody can wait for it.
        _kept.extend(pieces)
        return
    for thread in threads:
        thread.join()
    if unpin(pinned, device):
        _kept.extend(pieces)


def _not_pinned(total: int, done: int, error: int) -> EngineError:
    return EngineError(
        "the driver did not pin host memory, from which the GPU would copy",
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
        raise _not_given(part.nbytes, error)
    ctypes.memset(part.data_ptr(), 0, part.nbytes)


def _touch_kept(part: torch.Tensor) -> None:
    """As `_touch`, of memory whose content stays: an older kernel brings its pages while they are pinned."""
    if _libc.madvise(part.data_ptr(), part.nbytes, POPULATE_WRITE) and (error := ctypes.get_errno()) != errno.EINVAL:
        raise _not_given(part.nbytes, error)


def _not_given(nbytes: int, error: int) -> EngineError:
    return EngineError(
        "the system did not give host memory, from which the GPU would copy",
        code=NOT_PINNED,
        needed=f"{format_bytes(nbytes)} more",
        found=os.strerror(error),
        fix="--device cuda with a smaller --ram and --nvme-path, or a larger memory limit of the container",
    )


def _no_room(nbytes: int, room: int) -> DoesNotFitError:
    """It may be planned again, with what is free by now."""
    left = format_bytes(max(0, room))
    return DoesNotFitError(
        f"RAM has room for {left} more by now",
        code=NO_ROOM,
        needed=f"{format_bytes(nbytes)}, to be pinned",
        found=f"{left}, beside what stays free",
        fix="stop what else takes RAM, or --nvme-path DIR on a fast disk with room for what waits there",
        field="nvme_path",
    )


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # A kernel without huge pages.
        return
