"""KV pages in FP8 under the GPU runner, against the CPU runner: the same scales, the same codes, the same tokens.

On a GPU as it is used, graphs included; elsewhere its kernels run in the interpreter, without graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.execution import kv_scales
from holdfast.records import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "stored", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.long)], ids=str
)
def test_tokens_are_those_of_a_cpu(
    tiny: Tiny, device: torch.device, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, mixed steps and single tokens, with a prefix that is shared: its pages hold codes as any others."""
    lengths, least = ((5, 21, 1, 26), 4) if device.type == "cuda" else ((18, 3), 2)
    if device.type == "cpu":
        if tiny.spec.layers[0].window is not None:
            pytest.skip("attention has tests of its own with windows, and the interpreter takes long")
        monkeypatch.setattr(kv_scales, "SEQUENCES", 2)
        monkeypatch.setattr(kv_scales, "TOKENS", 7)
    prompts = [prompt(0, length) for length in lengths]
    params = [SamplingParams(temperature=0.0, max_tokens=least, ignore_eos=True, logprobs=1)] * len(prompts)
    cores: list[Any] = [
        tiny.core(device, gpu=True, kv_dtype=stored),
        tiny.core(CPU, gpu=False, kv_dtype=stored),
    ]
    gpu, cpu = (core.runner.kv_scales for core in cores)
    assert gpu.keys == cpu.keys
    assert gpu.values == cpu.values
    for one, other in zip(gpu.centers, cpu.centers, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)
    here, there = (run(core, prompts, params) for core in cores)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=5e-3)
