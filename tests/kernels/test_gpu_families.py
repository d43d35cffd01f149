"""Every family the engine runs, on the GPU runner under the real scheduler, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gpu import FAMILIES, Tiny, prompt, run, tokens_of

from holdfast.execution.gpu.layers.linear import DenseGpuLinear
from holdfast.records import SamplingParams


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("few_programs")
def test_greedy_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, mixed steps and single tokens. Which kernel gates is said of those that ask a product to."""
    gated, asked_to_gate = DenseGpuLinear.gated, list[DenseGpuLinear]()

    def noted(self: DenseGpuLinear, *args: Any) -> None:
        asked_to_gate.append(self)
        gated(self, *args)

    monkeypatch.setattr(DenseGpuLinear, "gated", noted)
    tiny = Tiny(tmp_path, **FAMILIES[name])
    lengths = (5, 40, 1, 9, 22) if device.type == "cuda" else (18, 6)
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    count = 20 if device.type == "cuda" else 2
    params = [
        SamplingParams(temperature=0.0, max_tokens=count + number, ignore_eos=True) for number in range(len(lengths))
    ]
    core = tiny.core(device, gpu=True)
    found = run(core, prompts, params)
    for asked, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))
    said = [decision for decision in core.runner.decisions if decision.field == "gated_product"]
    assert bool(said) == bool(asked_to_gate)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("few_programs")
@pytest.mark.long
def test_pages_run_out_and_prompts_share_theirs(name: str, tmp_path: Path, device: torch.device) -> None:
    tiny = Tiny(tmp_path, **FAMILIES[name])
    prompts = [prompt(0, 12) + prompt(number, 8) for number in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)] * 4
    core = tiny.core(device, gpu=True, blocks=20 * len(tiny.layout().groups))
    for asked, outputs in zip(prompts, run(core, prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))
