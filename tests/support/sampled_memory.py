"""What an engine in this process holds beyond its budgets of VRAM and RAM, looked at again and again by a thread."""

from __future__ import annotations

import threading
from typing import Any

import torch

from holdfast.engine.core.loop import EngineCore
from holdfast.hardware import memory, resident
from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES
from holdfast.units import MIB

SAMPLED_S = 0.02


def unfiled_bytes() -> int:
    """Of RAM, by this process: RssAnon and RssShmem, pinned memory among them."""
    found = resident()
    assert found is not None
    return found.now_bytes - found.files_bytes


class SampledMemory:
    """`allowed`: the budget of VRAM now; while it changes the larger one counts. `ram_bytes`: of RAM, that tiers may
    take: the process's own come on top, as a plan counts them. `others_bytes`: of the GPU, that processes beside this
    one hold, where the driver does not tell them apart; None: they hold what they held when the engine came.
    """

    def __init__(self, core: EngineCore, budget: int, ram_bytes: int) -> None:
        vram: Any = core._vram
        self.allowed, self.most_over, self.samples, self._memory = budget, 0, 0, vram.memory
        self.others_bytes: int | None = None
        self._ram_budget, self.most_ram_over, self.most_ram = ram_bytes + HOST_ENGINE_BYTES, 0, 0
        self._available = memory().available_bytes
        self.most_taken = 0
        """Of RAM that the system could give, since this began."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def held(self) -> int:
        found: int | None = self._memory.told_bytes()
        if found is not None:
            return found
        free, total = torch.cuda.mem_get_info()
        return int(self._memory._free_before - free if self.others_bytes is None else total - free - self.others_bytes)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLED_S):
            before = self.allowed
            self.most_over = max(self.most_over, self.held() - max(before, self.allowed))
            self.most_ram = max(self.most_ram, unfiled_bytes())
            self.most_ram_over = max(self.most_ram_over, self.most_ram - self._ram_budget)
            self.most_taken = max(self.most_taken, self._available - memory().available_bytes)
            self.samples += 1

    def end(self) -> str:
        """What is to be printed."""
        self._ended.set()
        self._thread.join()
        return (
            f"{self.samples} samples: VRAM at most {self.most_over:,} bytes over its budget; RAM at most"
            f" {self.most_ram // MIB:,} MiB of {self._ram_budget // MIB:,},"
            f" {self.most_taken // MIB:,} taken of the system"
        )
