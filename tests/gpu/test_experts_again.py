"""Engines whose experts do not all stay, built again and again in one process behind engines whose layers are streamed
and behind processes that are killed while they copy: memory that is taken again brings nothing along. Weights are
looked at as the GPU reads them, as copies bring them and as the host reads them, and told where one is wrong."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_engines import SHAPE, SMALL, built
from many_streams import requests
from msgspec.structs import replace
from weight_digests import KnownWeights

from holdfast.engine.core.loop import EngineCore
from holdfast.records import VramBudget
from holdfast.units import GIB

ROUNDS, BUILDS = 3, 5
"""Streamed layers before each round, and engines with waiting experts in each."""
PROMPTS = 6
APART = 1e-3
"""In log-probabilities: rounding is a hundredth of it, and one wrong matrix a hundred times as much."""

COPYING = """
import torch
vram = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").fill_(63)
ram = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True).fill_(63)
print("here", flush=True)
while True:
    for first in range(0, len(vram), len(ram)):
        vram[first : first + len(ram)].copy_(ram, non_blocking=True)
        ram.copy_(vram[first : first + len(ram)], non_blocking=True)
    torch.cuda.synchronize()
"""
"""What another process does until it is killed: its memory is the next one's then."""
OF_ANOTHER = {"another process": torch.full((64,), 63, dtype=torch.uint8)}

Tokens = list[tuple[str, list[int], list[float]]]


def first_tokens(core: EngineCore) -> Tokens:
    """Of some prompts, each computed in a step of its own or beside others, and of the step behind it."""
    core.scheduler.reset_prefix_cache()
    waiting = [replace(one, params=replace(one.params, max_tokens=2, logprobs=0)) for one in requests()[:PROMPTS]]
    tokens, scores = ({one.request_id: list[Any]() for one in waiting} for _ in range(2))
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop())
        for output in core.step():
            assert output.failure is None, output.failure
            tokens[output.request_id] += output.token_ids
            scores[output.request_id] += [one.logprobs[0] for one in output.logprobs or []]
    return [(name, tokens[name], scores[name]) for name in tokens]


def apart(one: Tokens, other: Tokens) -> list[str]:
    """What two engines differ in, by prompt."""
    return [
        f"prompt {name}: tokens {tokens} and {others}, log-probabilities {scores} and {other_scores}"
        for (name, tokens, scores), (_, others, other_scores) in zip(one, other, strict=True)
        if tokens != others or max(abs(a - b) for a, b in zip(scores, other_scores, strict=True)) > APART
    ]


def stream_layers(folder: str) -> dict[str, torch.Tensor]:
    """An engine whose layers come and go, and that is closed then; what it had in pinned memory."""
    core = built(folder, vram=str(4 * GIB), cpu_compute="off")
    layers = core.runner.movable_layers  # type: ignore[attr-defined]
    assert layers.streamed
    first_tokens(core)
    for budget in (10 * GIB, 3 * GIB, 4 * GIB):
        core.set_vram(VramBudget(budget_bytes=budget))
        first_tokens(core)
    kept = {f"layer {layer} of streamed layers": piece.clone() for layer, piece in layers._in_ram.items()}
    core.close()
    return kept


def kill_while_it_copies() -> None:
    with subprocess.Popen([sys.executable, "-c", COPYING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            time.sleep(0.2)
        finally:
            process.kill()


@pytest.mark.long
def test_experts_that_wait_are_the_same_however_often_they_are_loaded(
    shape: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    streamed, wrong = shape("1B"), list[str]()
    core = built(tmp_path, vram="12GiB")
    known, wanted = KnownWeights(core), first_tokens(core)
    core.close()

    def look(name: str, **more: Any) -> None:
        began_s = time.perf_counter()
        core = built(tmp_path, **more)
        built_s = time.perf_counter() - began_s
        lines = [f"before its first step: {line}" for line in known.wrong(core)]
        lines += apart(wanted, first_tokens(core))
        if lines:
            lines += [f"after its first steps: {line}" for line in known.wrong(core)]
            lines += [f"once more: {line}" for line in apart(wanted, first_tokens(core))]
        core.close()
        print(f"{name}: built in {built_s:.1f} s, looked at within {time.perf_counter() - began_s:.1f} s", flush=True)
        for line in lines:
            print(f"{name}: {line}", flush=True)
        wrong.extend(f"{name}: {line}" for line in lines)

    for number in range(ROUNDS):
        known.others = stream_layers(streamed) | OF_ANOTHER
        kill_while_it_copies()
        look(f"all stay, {number}", vram="12GiB")
        kill_while_it_copies()
        for again in range(BUILDS):
            look(f"experts wait, {number}.{again}", vram=str(SMALL), cpu_compute="off")
    gc.collect()
    assert wrong == []
