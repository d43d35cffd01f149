"""A GPU's link with work that has deadlines and work that has none, both ways at once: everything arrives, once."""

from __future__ import annotations

import random
import time

import pytest
import torch

from holdfast.execution.link.schedule import LinkSchedule
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.pinned_memory import PinnedMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a link to a GPU")

SIZE, DEADLINE_S = 1 << 20, 30.0


def test_all_of_it_arrives(device: torch.device) -> None:
    rng, device = random.Random(0), torch.device("cuda", torch.cuda.current_device())
    copies = CudaCopies(device, LinkSchedule(piece_bytes=1 << 16, idle_bytes=1 << 18))
    memory = PinnedMemory([SIZE] * 24, device)
    for number, piece in enumerate(memory.pieces):
        piece.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)))
    wanted = [piece.clone() for piece in memory.pieces[:16]]
    there = [torch.zeros(SIZE, dtype=torch.uint8, device=device) for _ in range(16)]
    later, weights = [copies.mark() for _ in range(16)], torch.zeros(SIZE, dtype=torch.uint8, device=device)
    computed = copies.mark()
    copies.after_launched(computed)
    for number in range(16):
        copies.copy_later(memory.pieces[number], there[number], computed, [later[number]])
        for _ in range(rng.randrange(4)):
            copies.copy(memory.pieces[16], weights, computed, [copies.mark()])
    copies.await_copy(later[9])
    torch.testing.assert_close(there[9].cpu(), wanted[9])
    begin_s = time.monotonic()
    while not all(copies.passed(mark) for mark in later) and time.monotonic() - begin_s < DEADLINE_S:
        pass
    assert copies.waiting_bytes == 0
    back = copies.mark()
    copies.after_launched(computed)
    for number in range(7):
        copies.copy_back([(there[number], memory.pieces[17 + number])], computed, [back])
        copies.copy(memory.pieces[16], weights, computed, [copies.mark()])
    copies.wait(back)
    for number in range(16):
        assert torch.equal(there[number].cpu(), wanted[number]), number
    for number in range(7):
        assert torch.equal(memory.pieces[17 + number], wanted[number]), number
    copies.close()
    memory.close()
