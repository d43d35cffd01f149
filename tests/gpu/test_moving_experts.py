"""Experts that come to stay on the GPU, and leave it, while 32 answers are computed: in float32 the same tokens as of a
model whose experts all stay, within a budget that changes at random, with graphs, and nothing leaks."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_engines import LAYERS, SHAPE, SMALL, built
from many_streams import Answers, Scores, run
from sampled_memory import SampledMemory
from weight_digests import differing, first_differences, weight_digests

from holdfast.engine.core.loop import EngineCore
from holdfast.records import VramBudget
from holdfast.units import GIB, MIB

LARGE, RAM = 6 * GIB, 5 * GIB
SLACK = 32 * MIB
"""Of what else may come or go meanwhile; torch's own pieces of memory among it."""


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def story(folder: Path, core: EngineCore, plain: Answers, found: Answers, weights: dict[str, dict[str, int]]) -> str:
    """Of answers that differ: which weights do, whose answers are the same once more, with the engines built in the
    other order, and by how much the first tokens' log-probabilities differ: rounding, or another number. Closes it."""
    weights["placed, at its end"] = weight_digests(core)
    weights["placed, at its end, as the host reads it"] = weight_digests(core, by_host=True)
    scores, others = Scores(), Scores()
    placed_again = run(core, scores=scores)
    core.close()
    whole = built(folder, vram="12GiB")
    weights["whole, loaded once more"] = weight_digests(whole)
    plain_again = run(whole, scores=others)
    pairs = {
        "plain and found": (plain, found),
        "plain and the same once more": (plain, plain_again),
        "that and the same engine once more": (plain_again, run(whole)),
        "found and the same engine once more": (found, placed_again),
        "both once more": (plain_again, placed_again),
    }
    whole.close()
    first, *rest = weights
    lines = [f"{name}: first differences by stream {first_differences(*pair)}" for name, pair in pairs.items()]
    lines += [f"{first} and {name}: {differing(weights[first], weights[name])}" for name in rest]
    apart = {name: abs(scores[name][0] - others[name][0]) for name in others}
    return "\n".join((*lines, f"log-probabilities of first tokens, once more, differ by {apart}"))


@pytest.mark.parametrize("compute", ["off", "auto"])
def test_the_budget_changes_at_random_while_experts_wait(compute: str, tmp_path: Path) -> None:
    """What the host's cores compute is summed in another order: then tokens are only counted."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    whole, weights = built(tmp_path, vram="12GiB"), dict[str, dict[str, int]]()
    assert whole.runner.decoder.experts is None  # type: ignore[attr-defined]
    weights["whole, loaded"] = weight_digests(whole)
    plain = run(whole)
    weights["whole, at its end"] = weight_digests(whole)
    whole.close()
    core = built(tmp_path, vram=str(SMALL), ram=str(RAM), cpu_compute=compute)
    weights["placed, loaded"] = weight_digests(core)
    runner: Any = core.runner
    experts = runner.movable_experts
    assert experts is not None
    first = sum(experts.resident_counts)
    assert 0 < first < experts.most_resident
    dice, counts, seconds = random.Random(5), list[int](), list[float]()
    sampled = SampledMemory(core, SMALL, RAM)

    def between() -> None:
        if dice.random() > 0.08:
            return
        budget = dice.choice([1900 * MIB, LARGE, dice.randrange(1900 * MIB, LARGE)])
        sampled.allowed = max(sampled.allowed, budget)
        begin_s = time.perf_counter()
        granted = core.set_vram(VramBudget(budget_bytes=budget))
        sampled.allowed = granted.budget_bytes
        seconds.append(time.perf_counter() - begin_s)
        assert granted.experts is not None
        assert granted.experts.resident == experts.resident_counts
        assert core.stats().device_bytes <= granted.budget_bytes + SLACK
        counts.append(sum(experts.resident_counts))

    try:
        found = run(core, between)
    finally:
        print(sampled.end())
    print(f"{len(counts)} budgets, experts that stay {sorted(set(counts))}")
    print(f"{statistics.median(seconds):.2f} s each, {max(seconds):.2f} s at most; {experts.expert_use()}")
    assert sampled.most_over <= SLACK
    assert sampled.most_ram_over <= 0
    assert len(counts) > 5
    assert max(counts) == experts.most_resident > min(counts)
    if compute == "off" and found != plain:
        raise AssertionError(story(tmp_path, core, plain, found, weights))
    assert {name: len(one) for name, one in found.items()} == {name: len(one) for name, one in plain.items()}
    core.set_vram(VramBudget(budget_bytes=SMALL))
    held, before = experts.pinned_bytes, free()
    for budget in (LARGE, SMALL):
        core.set_vram(VramBudget(budget_bytes=budget))
    assert (experts.pinned_bytes, sum(experts.resident_counts)) == (held, pytest.approx(first, abs=2 * LAYERS))
    assert before - free() <= SLACK
    core.close()
    gc.collect()
    assert torch.cuda.memory_allocated() < 64 * MIB
