"""KV pages in RAM below the pool of a model whose layers are streamed over the same link: 32 answers are those of a
model that stays and has room for all, while budgets change, and both directions of the link are counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from many_streams import STREAMS, run

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.startup.build import build_core, find_model
from holdfast.kvcache import Tier
from holdfast.records import VramBudget
from holdfast.units import GIB, MIB

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 1024,
    "max_num_seqs": STREAMS, "max_num_batched_tokens": 512,
    "cpu_compute": "off",  # The host's sums are in another order: with it tokens of random weights are others.
}  # fmt: skip
BLOCKS = 160
"""Of the pool: a fifth of what all answers want at once."""


def built(folder: str, **more: Any) -> EngineCore:
    config = EngineConfig.from_arguments(model=folder, **SETTINGS, **more)
    core = build_core(config, find_model(config), lambda stage, done, total: None)[0]
    core._kv_balance = None
    return core


def timed(core: EngineCore, between: Callable[[], None] = lambda: None) -> tuple[Any, float]:
    begin_s = time.perf_counter()
    return run(core, between), time.perf_counter() - begin_s


@pytest.mark.timeout(900)
def test_answers_are_those_of_a_model_that_stays(shape: Callable[..., str]) -> None:
    folder = shape("1B")
    core = built(folder, vram="12GiB")
    assert core.runner.link is None  # type: ignore[attr-defined]
    plain = run(core)
    core.close()
    core = built(folder, vram="4GiB", kv_ram="2GiB")
    runner: Any = core.runner
    layers, tiers, page = runner.movable_layers, core.scheduler.kv.tiers, core.scheduler.kv.layout.page_bytes
    assert tiers is not None
    assert layers.streamed
    assert runner.link is layers.link is runner._page_copies.link
    _, roomy_s = timed(core)
    core.resize_kv(BLOCKS)
    answers, seconds = timed(core)
    assert answers == plain
    loaded, stored = tiers.loaded_pages[Tier.HOST], tiers.stored_pages[Tier.HOST]
    preempted, (to_gpu, to_host) = core.stats().preemptions_total, core.stats().links
    print(
        f"{seconds:.1f} s ({roomy_s:.1f} s with room); {preempted} preemptions, {loaded} pages loaded, {stored} stored"
    )
    print(to_gpu, to_host)
    assert min(loaded, preempted) > 0
    assert to_host.copied_bytes >= stored * page
    assert to_gpu.copied_bytes > loaded * page
    assert to_gpu.busy_s > 0 < to_host.busy_s
    dice, changes = random.Random(5), 0

    def between() -> None:
        nonlocal changes
        if dice.random() < 0.05:
            core.set_vram(VramBudget(budget_bytes=dice.choice([3 * GIB, 10 * GIB, dice.randrange(3 * GIB, 10 * GIB)])))
            core.resize_kv(min(BLOCKS + dice.randrange(100), core.scheduler.kv.blocks_total + 1))
            changes += 1

    assert run(core, between) == plain
    print(f"{changes} budgets, {tiers.loaded_pages[Tier.HOST] - loaded} pages loaded meanwhile")
    assert changes > 5
    assert run(core) == plain
    core.close()
    assert torch.cuda.memory_allocated() < 64 * MIB
