"""What an engine holds on a GPU where the driver does not tell processes apart; torch's answers are made up."""

from __future__ import annotations

import pytest
import torch

from holdfast.execution.gpu.memory import accounting
from holdfast.execution.gpu.memory.accounting import GpuMemory

CPU, MIB, TOTAL = torch.device("cpu"), 1 << 20, 1000 << 20


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 MiB of it are free; torch keeps 50 MiB, 8 of which are tensors."""
    monkeypatch.setattr(accounting, "process_bytes", lambda uuid, pid: None)
    for name, answer in (("mem_get_info", (400 * MIB, TOTAL)), ("synchronize", None), ("memory_reserved", 50 * MIB),
                         ("memory_allocated", 8 * MIB), ("reset_peak_memory_stats", None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, told=answer: told)


def test_what_has_become_less_is_an_engines_that_is_alone() -> None:
    """Of ranks of one engine each has its part."""
    alone, one_of_three = GpuMemory(CPU, "GPU-0", TOTAL), GpuMemory(CPU, "GPU-0", TOTAL, 0, 3)
    assert (alone.held().own_bytes, alone.own_bytes()) == (600 * MIB, 600 * MIB)
    assert one_of_three.held().own_bytes == 200 * MIB


def test_beside_other_engines_what_is_held_is_added_up() -> None:
    """What these take meanwhile is not this one's."""
    memory = GpuMemory(CPU, "GPU-0", TOTAL, context_bytes=300 * MIB)
    assert memory.held().own_bytes == 350 * MIB
    memory.watch_tensors()
    memory.beside_torch = lambda: 64 * MIB
    assert memory.held().own_bytes == memory.own_bytes() == (300 + 50 - 8 + 64) * MIB
