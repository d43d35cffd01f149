"""A step's few numbers, to the GPU and back, past copy engines that are busy with pages."""

from __future__ import annotations

import numpy
import pytest
import torch

from holdfast.execution.gpu.memory.pinned_staging import PACKETS, PacketRing, carry

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a link to a GPU")


def pinned(words: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")


@pytest.mark.parametrize("count", [1, 7, 1024, 1025, 9000])
def test_words_arrive_and_nothing_else_changes(count: int, device: torch.device) -> None:
    said = pinned(count + 8, device)
    said[:] = torch.arange(1, count + 9, dtype=torch.int32)
    there = torch.zeros(count + 8, dtype=torch.int32, device=device)
    carry(there[:count], said[:count], beside_pages=True)
    told = pinned(count + 8, device)
    carry(told[:count], there[:count], beside_pages=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert torch.equal(told[:count], said[:count])
    assert not told[count:].any()
    assert not there[count:].any()


@pytest.mark.parametrize("beside_pages", [False, True])
def test_packets_arrive_in_order_however_they_go(beside_pages: bool, device: torch.device) -> None:
    ring = PacketRing(256, device)
    ring.beside_pages = beside_pages
    for number in range(3 * PACKETS):
        arrays = [numpy.arange(number, number + length, dtype=numpy.int32) for length in (3, 0, 40)]
        for view, array in zip(ring.send(arrays), arrays, strict=True):
            assert view.cpu().tolist() == array.tolist()
    assert ring.send([numpy.zeros(0, dtype=numpy.int32)])[0].numel() == 0


@on_gpu
@pytest.mark.parametrize("to_host", [False, True], ids=["to the GPU", "to the host"])
def test_no_word_waits_for_pages(to_host: bool, device: torch.device) -> None:
    """The pages that are on their way in the same direction take 20 ms or more."""
    pages, ram = torch.empty(1 << 30, dtype=torch.uint8, device=device), torch.empty(1 << 30, dtype=torch.uint8)
    ram = ram.pin_memory()
    words, host_words = torch.zeros(64, dtype=torch.int32, device=device), pinned(64, device)
    target, source = (host_words, words) if to_host else (words, host_words)
    carry(target, source, beside_pages=True)  # Compiled and loaded.
    torch.cuda.synchronize(device)
    side, moved, arrived = torch.cuda.Stream(device), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        (ram if to_host else pages).copy_(pages if to_host else ram, non_blocking=True)
        moved.record()
    carry(target, source, beside_pages=True)
    arrived.record()
    arrived.synchronize()
    assert not moved.query(), "the words came behind the pages"
    moved.synchronize()
