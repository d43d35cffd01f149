"""Memory that a GPU reads from, without one: exact, given back whatever happens, and found where the driver says."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deadlines import PATIENCE_S

from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution.lora.upload import PlaceSender
from holdfast.execution.streaming import pinned_memory
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.pinned_memory import PinnedMemory, device_address, register, unregister
from holdfast.execution.tiers.gpu import HostMemory
from holdfast.observability.codes import explain

GPU = torch.device("cuda", 1)
PAGE = mmap.PAGESIZE


def test_pinned_memory_is_exact_and_given_back() -> None:
    pinned, seen = dict[int, int](), list[tuple[int, int]]()

    def pin(address: int, nbytes: int) -> int:
        pinned[address] = nbytes
        return 0

    def unpin(addresses: Sequence[int], device: torch.device) -> None:
        assert device == GPU
        for address in addresses:
            del pinned[address]

    sizes = [PAGE, 3 * PAGE, 40 << 20]
    memory = PinnedMemory(sizes, GPU, lambda done, total: seen.append((done, total)), pin, unpin)
    assert list(pinned.values()) == sizes == [piece.nbytes for piece in memory.pieces]
    assert [done for done, _ in seen] == [PAGE, 4 * PAGE, 4 * PAGE + (40 << 20)]
    assert seen[-1][1] == memory.nbytes
    memory.close()
    memory.close()
    assert pinned == {}


def test_memory_that_is_not_pinned_is_refused_and_what_was_is_given_back() -> None:
    pinned: list[int] = []

    def pin(address: int, nbytes: int) -> int:
        if len(pinned) == 2:
            return 2
        pinned.append(address)
        return 0

    freed: list[int] = []
    with pytest.raises(EngineError, match="HF444") as caught:
        PinnedMemory([PAGE] * 3, GPU, pin=pin, unpin=lambda addresses, device: freed.extend(addresses))
    assert "CUDA error 2" in str(caught.value)
    assert "--device cuda with a smaller --ram" in str(caught.value.fix), "which alone would choose the CPU"
    assert explain("HF444").phase == "load"
    assert freed == pinned


class FakeLibrary:
    """An madvise that fails with this."""

    def __init__(self, error: int) -> None:
        self._error = error

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(self._error)
        return -1


def ignored(addresses: Sequence[int], device: torch.device) -> None:
    pass


def test_an_old_kernel_has_its_pages_written_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "_libc", FakeLibrary(errno.EINVAL))
    part = torch.ones(PAGE, dtype=torch.uint8)
    pinned_memory._touch(part)
    assert not part.any()


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_the_system_does_not_give_is_refused(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to it would end the process instead."""
    monkeypatch.setattr(pinned_memory, "_libc", FakeLibrary(error))
    with pytest.raises(EngineError, match="HF444"):
        PinnedMemory([PAGE], GPU, pin=lambda address, nbytes: 0, unpin=ignored)


def test_ctrl_c_while_pinning_does_not_wait_for_what_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, interrupted, pieces, threads = list[int](), threading.Event(), 100, 2

    def touch(part: torch.Tensor) -> None:
        begun.append(part.data_ptr())
        if len(begun) > 1:  # The first is pinned at once.
            interrupted.wait(PATIENCE_S)

    class Threads(pinned_memory.ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            interrupted.set()
            super().shutdown(wait=wait)

    def pin(address: int, nbytes: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pinned_memory, "_touch", touch)
    monkeypatch.setattr(pinned_memory, "MOST_THREADS", threads)
    monkeypatch.setattr(pinned_memory, "ThreadPoolExecutor", Threads)
    with pytest.raises(KeyboardInterrupt):
        PinnedMemory([PAGE] * pieces, GPU, pin=pin, unpin=ignored)
    assert len(begun) <= 1 + threads


def test_no_more_than_a_piece_or_two_is_touched_ahead_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives what is touched at once: a driver that refuses, or RAM that others take, is seen before."""
    monkeypatch.setattr(pinned_memory, "AHEAD_BYTES", 4 * PAGE)
    touched, pinned, most = list[int](), list[int](), list[int]()

    class AtOnce(pinned_memory.ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
            done = super().submit(fn, *given, **named)
            done.result(PATIENCE_S)
            return done

    monkeypatch.setattr(pinned_memory, "ThreadPoolExecutor", AtOnce)

    def pin(address: int, nbytes: int) -> int:
        pinned.append(nbytes)
        most.append(sum(touched) - sum(pinned[:-1]))
        return 0

    monkeypatch.setattr(pinned_memory, "_touch", lambda part: touched.append(part.nbytes))
    for sizes, ahead in (([PAGE] * 20, 4 * PAGE), ([8 * PAGE] * 10, 16 * PAGE)):
        PinnedMemory(sizes, GPU, pin=pin, unpin=ignored)
        assert max(most) == ahead
        for seen in (touched, pinned, most):
            seen.clear()


def there(piece: torch.Tensor) -> int:
    return piece.nbytes - pinned_memory._absent_bytes(piece)


@pytest.mark.parametrize("in_file", [False, True])
def test_what_is_not_pinned_after_all_is_given_back(in_file: bool) -> None:
    """But for what a file held before: the next process may find it."""
    file, size = os.memfd_create("test", os.MFD_CLOEXEC), 16 * PAGE
    if in_file:
        os.pwrite(file, b"x" * PAGE, 5 * size + PAGE)
    mapped, go = list[PinnedMemory](), threading.Event()

    def pin(address: int, nbytes: int) -> int:
        assert go.wait(PATIENCE_S)
        return 2 if address >= mapped[0].pieces[2].data_ptr() else 0

    def begun() -> PinnedMemory:
        return PinnedMemory(
            [size] * 8, GPU, pin=pin, unpin=ignored, background=range(8), file=file if in_file else None
        )

    mapped.append(memory := begun())
    assert memory.to_come_bytes == 8 * size
    go.set()
    with pytest.raises(EngineError, match="HF444"):
        memory.wait(7)
    assert memory.to_come_bytes == 0
    found = [there(piece) for piece in memory.pieces]
    assert found[:5] == [size, size, 0, 0, 0]
    assert (found[5] >= PAGE) == in_file
    assert not in_file or os.pread(file, PAGE, 5 * size + PAGE) == b"x" * PAGE
    assert not in_file or os.fstat(file).st_blocks * 512 == sum(found)
    memory.close()
    os.close(file)


def test_what_a_file_held_and_the_system_swapped_out_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    file, size = os.memfd_create("test", os.MFD_CLOEXEC), 16 * PAGE
    os.pwrite(file, b"x" * size, 3 * size)
    monkeypatch.setattr(pinned_memory, "_absent_bytes", lambda piece: piece.nbytes)
    mapped, go = list[PinnedMemory](), threading.Event()

    def pin(address: int, nbytes: int) -> int:
        assert go.wait(PATIENCE_S)
        return 2 if address >= mapped[0].pieces[2].data_ptr() else 0

    mapped.append(
        PinnedMemory([size] * 6, GPU, pin=pin, unpin=ignored, background=range(6), file=file, room=lambda: 100 * size)
    )
    go.set()
    with pytest.raises(EngineError, match="HF444"):
        mapped[0].wait(5)
    assert os.pread(file, size, 3 * size) == b"x" * size
    assert os.fstat(file).st_blocks * 512 == 3 * size, "two that are pinned, and this one"
    mapped[0].close()
    os.close(file)


def test_a_piece_that_a_huge_page_has_reached_is_given_back_whole() -> None:
    mapped, go, size = list[PinnedMemory](), threading.Event(), 16 * PAGE

    def pin(address: int, nbytes: int) -> int:
        assert go.wait(PATIENCE_S)
        return 2 if address >= mapped[0].pieces[2].data_ptr() else 0

    def room() -> int:
        assert go.wait(PATIENCE_S)
        return 100 * size

    mapped.append(PinnedMemory([size] * 6, GPU, pin=pin, unpin=ignored, background=range(6), room=room))
    mapped[0].pieces[3][:PAGE] = 1
    go.set()
    with pytest.raises(EngineError, match="HF444"):
        mapped[0].wait(5)
    assert [there(piece) for piece in mapped[0].pieces] == [size, size, 0, 0, 0, 0]
    mapped[0].close()


@pytest.mark.parametrize("in_file", [False, True])
def test_a_tier_settles_at_what_ram_has_room_for_by_then(in_file: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is there already takes no room: pages that were kept while an engine slept."""
    file, piece, mapped, go = (
        os.memfd_create("test", os.MFD_CLOEXEC),
        16 * PAGE,
        list[PinnedMemory](),
        threading.Event(),
    )
    if in_file:
        os.pwrite(file, b"x" * piece, 0)

    def room() -> int:
        assert go.wait(PATIENCE_S)
        return (50 + in_file * 16) * PAGE - sum(there(one) for one in mapped[0].pieces)

    sizes, of_file = [piece] * 8, file if in_file else None
    mapped.append(
        PinnedMemory(sizes, GPU, pin=lambda *_: 0, unpin=ignored, background=range(8), file=of_file, room=room)
    )
    go.set()
    with pytest.raises(DoesNotFitError, match=r"RAM has room for 8\.00 KiB more") as caught:
        mapped[0].wait(7)
    assert caught.value.code == "HF114", "which is planned again"
    host = HostMemory(mapped[0], PAGE)
    assert (host.look(), host.settled) == (16 * (3 + in_file), True)
    assert "the KV tier in RAM stays at" in caplog.text
    assert sum(there(one) for one in mapped[0].pieces) == host.ready * PAGE
    host.close()
    os.close(file)


def test_copies_on_its_own_gpu_are_waited_for_before_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the driver does not take back is said."""
    order = list[object]()

    def give_back(address: int) -> int:
        order.append(address)
        return 713 if address == 8 else 0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append(device))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=give_back))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(order.append("on it")))
    monkeypatch.setattr(pinned_memory, "forget_error", lambda device: order.append(f"{device} forgets"))
    assert unregister([7], GPU) == []
    assert (order, caplog.text) == ([GPU, "on it", 7], "")
    order.clear()
    assert unregister([8, 9], GPU) == [8]
    assert order == [GPU, "on it", 8, "cuda:1 forgets", 9], "or the next kernel would be blamed for it"
    assert "did not unpin host memory, which stays taken therefore: CUDA error 713" in caplog.text


def test_what_is_not_pinned_is_no_kernels_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may do without pinned memory goes on, and its next kernel is launched by the same thread."""
    order = list[object]()

    def pin(address: int, nbytes: int, flags: int) -> int:
        order.append(nbytes)
        return 2 if nbytes > PAGE else 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=pin))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(pinned_memory, "forget_error", order.append)
    assert [register(PAGE, nbytes, GPU) for nbytes in (PAGE, 2 * PAGE)] == [0, 2]
    assert order == [PAGE, 2 * PAGE, GPU]


def test_a_gpu_that_does_not_answer_keeps_nobody_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what was said first, and its memory, would be lost."""

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def broken(device: torch.device | None = None) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    kept, copies = list[torch.Tensor](), torch.zeros((2, PAGE))
    monkeypatch.setattr(pinned_memory, "_kept", kept)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0))
    CudaCopies(GPU).close()
    PlaceSender(copies, torch.zeros((3, PAGE))).close()
    assert [one.data_ptr() for one in kept] == [copies.data_ptr()]


def test_memory_of_a_gpu_that_does_not_answer_stays_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(device: torch.device | None = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert unregister([8, 9], GPU) == [8, 9]
    assert "does not answer: CUDA error: an illegal memory access was encountered" in caplog.text


def is_mapped(address: int) -> bool:
    """Whether this process has anything there."""
    with open("/proc/self/maps") as lines:
        ranges = (line.split(" ", 1)[0].split("-") for line in lines)
        return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


@pytest.mark.parametrize("way", ["close", "drop", "forget"])
def test_addresses_that_the_driver_still_has_are_nobodys_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would give them to the next that asks, whose numbers a GPU would never get: the driver copies from the
    pages that were there before."""
    kept = list[torch.Tensor]()
    monkeypatch.setattr(pinned_memory, "_kept", kept)

    def at(refused: bool) -> int:
        memory = PinnedMemory([16 * PAGE] * 2, GPU, pin=lambda *_: 0, unpin=lambda given, _: given if refused else [])
        address = memory.add(8 * PAGE).data_ptr()
        if way == "drop":
            memory.drop(memory.pieces[-1])
        if way == "close":
            memory.close()
        return address

    assert not is_mapped(at(refused=False))
    address = at(refused=True)
    assert is_mapped(address)
    assert address in [piece.data_ptr() for piece in kept]


def test_what_is_collected_by_the_thread_that_pins_it_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an engine whose start failed may be. The thread cannot wait for itself, and is amid a piece."""
    kept, freed, failed = list[torch.Tensor](), list[int](), list[object]()
    monkeypatch.setattr(pinned_memory, "_kept", kept)
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    cycles, go, addresses = list[object](), threading.Event(), list[int]()

    def pin(address: int, nbytes: int) -> int:
        assert go.wait(PATIENCE_S)
        addresses.append(address)
        if cycles:
            cycles.clear()
            gc.collect()
        return 0

    def begun() -> PinnedMemory:
        return PinnedMemory(
            [16 * PAGE] * 4, GPU, pin=pin, unpin=lambda given, _: freed.extend(given), background=range(4)
        )

    cycles += [cycles, begun()]
    (pinning,) = (one for one in threading.enumerate() if one.name == "pinning")
    go.set()
    pinning.join(PATIENCE_S)
    assert not pinning.is_alive()
    gc.collect()
    assert (freed, failed) == ([], [])
    assert len(kept) == 4
    assert set(addresses) <= {piece.data_ptr() for piece in kept}
    assert all(is_mapped(address) for address in addresses)


@pytest.mark.parametrize("closed", [True, False])
def test_memory_of_adapters_is_unpinned_once_by_whoever_has_it_last(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a start fails, and nobody closes it: its addresses are others' then."""
    freed, copies, cpu = list[int](), torch.zeros((2, PAGE)), torch.device("cpu")
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda at: freed.append(at) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    sender = PlaceSender(copies, torch.zeros((3, PAGE), device=cpu))
    if closed:
        sender.close()
        sender.close()
    del sender
    assert freed == [copies.data_ptr()]


class FakeDriver:
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM=91)

    def __init__(self, same: int, status: int = 0) -> None:
        self._same, self._status = same, status

    def cuDeviceGet(self, gpu: int) -> tuple[int, str]:
        return 0, f"GPU {gpu}"

    def cuDeviceGetAttribute(self, attribute: int, gpu: str) -> tuple[int, int]:
        assert (attribute, gpu) == (91, "GPU 1")
        return 0, self._same

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        assert not self._same
        return self._status, address + (1 << 40)


def test_kernels_read_it_where_the_driver_says() -> None:
    piece = torch.empty(PAGE, dtype=torch.uint8)
    assert device_address(piece, 1, FakeDriver(same=1)) == piece.data_ptr()
    assert device_address(piece, 1, FakeDriver(same=0)) == piece.data_ptr() + (1 << 40)
    with pytest.raises(EngineError, match="HF444"):
        device_address(piece, 1, FakeDriver(same=0, status=801))


def test_pieces_are_pinned_in_the_background_in_the_order_of_need() -> None:
    order, go = list[int](), threading.Event()

    def pin(address: int, nbytes: int) -> int:
        assert go.wait(PATIENCE_S)
        order.append(nbytes // PAGE)
        return 0

    freed = list[int]()
    memory = PinnedMemory(
        [PAGE, 2 * PAGE, 3 * PAGE],
        GPU,
        pin=pin,
        unpin=lambda addresses, device: freed.extend(addresses),
        background=[2, 0, 1],
    )
    assert order == []
    go.set()
    memory.wait(2)
    assert order[0] == 3
    memory.wait(0, 1)
    assert order == [3, 1, 2]
    assert len(memory.add(PAGE)) == PAGE
    memory.close()
    assert len(freed) == 4


def test_what_fails_in_the_background_is_raised_by_who_waits_and_all_is_given_back() -> None:
    freed = list[int]()
    memory = PinnedMemory(
        [PAGE] * 4,
        GPU,
        pin=lambda address, nbytes: 2 if address % (2 * PAGE) else 0,
        unpin=lambda addresses, device: freed.extend(addresses),
        background=range(4),
    )
    with pytest.raises(EngineError, match="HF444"):
        memory.wait(*range(4))
    memory.close()
    assert len(freed) <= 1


def test_closing_does_not_wait_for_what_is_not_begun() -> None:
    begun, go = list[int](), threading.Event()

    def pin(address: int, nbytes: int) -> int:
        begun.append(address)
        assert go.wait(PATIENCE_S)
        return 0

    memory = PinnedMemory([PAGE] * 50, GPU, pin=pin, unpin=ignored, background=range(50))
    (pinning,) = (one for one in threading.enumerate() if one.name == "pinning")
    join = pinning.join
    pinning.join = lambda: (go.set(), join(PATIENCE_S))  # type: ignore[method-assign, assignment, func-returns-value]
    memory.close()
    assert not pinning.is_alive()
    assert len(begun) <= 1


def test_memory_that_the_system_does_not_map_is_refused() -> None:
    """A limit on addresses, as `ulimit -v` sets: what may do without pinned memory then does."""
    with pytest.raises(EngineError, match="HF444") as caught:
        PinnedMemory([1 << 62], GPU, pin=lambda address, nbytes: 0, unpin=ignored)
    assert caught.value.found == "Cannot allocate memory"
    memory = PinnedMemory([PAGE], GPU, pin=lambda address, nbytes: 0, unpin=ignored)
    with pytest.raises(EngineError, match="HF444"):
        memory.add(1 << 62)
    assert memory.nbytes == PAGE
    memory.close()


@pytest.mark.parametrize("populates", [True, False], ids=["at once", "older kernel"])
def test_what_memory_of_a_file_holds_stays_for_who_maps_it_next(
    monkeypatch: pytest.MonkeyPatch, populates: bool
) -> None:
    """Of an engine that sleeps: another process pins the same pages, in the background."""
    if not populates:
        monkeypatch.setattr(pinned_memory, "POPULATE_WRITE", 9999)
    file, sizes = os.memfd_create("test", os.MFD_CLOEXEC), [3 * PAGE, 3 * PAGE]

    def mapped(sizes: Sequence[int]) -> PinnedMemory:
        made = PinnedMemory(
            sizes, GPU, pin=lambda *_: 0, unpin=lambda *_: None, background=range(len(sizes)), file=file
        )
        made.wait(*range(len(sizes)))
        return made

    first = mapped(sizes)
    first.pieces[0].fill_(3)
    first.pieces[1].fill_(4)
    first.close()
    again = mapped([*sizes, PAGE])
    assert [set(piece.tolist()) for piece in again.pieces] == [{3}, {4}, {0}]
    again.close()
    os.close(file)
