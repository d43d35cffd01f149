"""The GPU runner, one step ahead, with KV pages in RAM below its pool: what left the pool comes back over a link that
is as late as it may be, and tokens are transformers' own."""

from __future__ import annotations

import pytest
import torch
from simulated_copies import SimulatedCopies
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.streaming.copies import Copies, CudaCopies
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.tiers.gpu import GpuPageCopies, HostMemory
from holdfast.kvcache import KVCache, Tier, TierLimits
from holdfast.records import SamplingParams
from holdfast.scheduler import Scheduler

PAGES = 32


def links(device: torch.device) -> tuple[Copies, Copies]:
    if device.type == "cuda":
        return CudaCopies(device), CudaCopies(device)
    return SimulatedCopies(1), SimulatedCopies(2)


def with_ram(core: EngineCore, device: torch.device, blocks: int) -> EngineCore:
    runner, page = core.runner, core.scheduler.kv.layout.page_bytes
    assert page * PAGES % 4096 == 0
    if device.type == "cuda":
        memory = PinnedMemory([page * PAGES], device, background=[0])
    else:
        memory = PinnedMemory([page * PAGES], device, pin=lambda at, nbytes: 0, unpin=lambda at, one: None)
    memory.wait(0)
    runner.use_tiers(GpuPageCopies(lambda: runner.kv.pages, page, *links(device), HostMemory(memory, page), None))
    kv = KVCache(core.scheduler.kv.layout, blocks, True, TierLimits(spare_pages=blocks, most_storing=8))
    return EngineCore(Scheduler(core.scheduler.limits, kv), runner, steps_ahead=1)


@pytest.mark.usefixtures("few_programs")
def test_what_left_the_pool_comes_back(tiny: Tiny, device: torch.device) -> None:
    blocks = 1 + 7 * len(tiny.layout().groups)
    core = with_ram(tiny.core(device, gpu=True, blocks=blocks, slots=2, step=32), device, blocks)
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)]
    for number in (1, 2, 1):
        asked = prompt(number, 21)
        (outputs,) = run(core, [asked], params)
        tiny.assert_greedy(asked, tokens_of(outputs))
    tiers = core.scheduler.kv.tiers
    assert tiers is not None
    assert tiers.stored_pages[Tier.HOST] > 0
    windowed = tiny.spec.layers[0].window is not None  # Its pages may all have stayed in the pool.
    assert windowed or core.scheduler.kv.below_hits_total[Tier.HOST] >= 8
    core.close()
