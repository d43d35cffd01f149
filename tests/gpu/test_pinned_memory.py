"""Host memory that the driver has pinned: what it refuses is nobody else's error, and addresses that are used again
bring what lies there then."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from holdfast.errors import EngineError
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.pinned_memory import PinnedMemory, register, unregister
from holdfast.units import MIB

ROUNDS, NBYTES = 40, 64 * MIB


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def counted(gpu: torch.device) -> list[float]:
    """By a kernel, which is checked when it is launched."""
    return torch.ones(3, device=gpu).add_(1).tolist()


def test_what_the_driver_refuses_is_no_kernels_error(gpu: torch.device) -> None:
    assert counted(gpu) == [2, 2, 2]
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert unregister([address], gpu) == [address], "it never was pinned"
    assert counted(gpu) == [2, 2, 2]
    assert register(address, 4 * mmap.PAGESIZE, gpu) == 0
    assert register(address, 4 * mmap.PAGESIZE, gpu) != 0, "it is already"
    assert counted(gpu) == [2, 2, 2]
    assert unregister([address], gpu) == []


def test_more_that_is_not_given_changes_nothing(gpu: torch.device) -> None:
    """As of a layer that leaves for RAM that is not there: steps go on."""
    memory = PinnedMemory([MIB], gpu)
    with pytest.raises(EngineError, match="HF444"):
        memory.add(1 << 62)
    assert counted(gpu) == [2, 2, 2]
    memory.close()


def test_addresses_that_are_used_again_bring_what_lies_there_then(gpu: torch.device) -> None:
    """Given back while it is still copied from, and taken again at once: by what is pinned, and by what is not."""
    copies = CudaCopies(gpu)
    first, second = (torch.zeros(NBYTES, dtype=torch.uint8, device=gpu) for _ in range(2))
    for number in range(ROUNDS):
        memory, after, done = PinnedMemory([NBYTES], gpu), copies.mark(), copies.mark()
        memory.pieces[0].fill_(number)
        copies.after_launched(after)
        copies.copy(memory.pieces[0], first, after, [done])
        memory.close()
        del memory
        again = torch.full((NBYTES,), 100 + number, dtype=torch.uint8)
        second.copy_(again, non_blocking=True)
        copies.await_copy(done)
        assert (int(first.min()), int(first.max())) == (number, number)
        assert (int(second.min()), int(second.max())) == (100 + number, 100 + number)
    copies.close()
