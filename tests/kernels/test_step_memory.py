"""Steps that find no memory: done in parts with the same answers, or the one request that has none ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_faults import MemoryFaults, Site, memory_faults
from prompt_scores import assert_scores
from tiny_gpu import Tiny, prompt, run, tokens_of, told_of

from holdfast.execution.gpu.decoder import GpuDecoder
from holdfast.records import SamplingParams

pytestmark = pytest.mark.usefixtures("few_programs")


def test_a_step_without_memory_is_done_in_parts(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of more than three tokens fails once it has written its keys; answers are the same all the same."""
    forward, sizes = GpuDecoder.forward, list[int]()

    def fails(self: GpuDecoder, rows: Any, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        stream = forward(self, rows, pages, layers)
        sizes.append(len(rows.slots))
        if len(rows.slots) > 3:
            raise torch.OutOfMemoryError("as if there were none left")
        return stream

    monkeypatch.setattr(GpuDecoder, "forward", fails)
    prompts = [prompt(number, length) for number, length in enumerate((7, 1))]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=2)] * 2
    core = tiny.core(device, gpu=True, graphs=False)
    for asked, outputs in zip(prompts, run(core, prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))
        with torch.inference_mode():
            assert_scores(tiny.model(torch.tensor([asked])).logits[0], asked, told_of(outputs), 2)
    assert max(sizes) == 8
    assert 0 < sizes.count(1) + sizes.count(2) + sizes.count(3) < len(sizes)


def test_only_the_request_without_memory_ends(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is never memory for the sequence of a certain token, however small the step."""
    forward, poor = GpuDecoder.forward, 207

    def fails(self: GpuDecoder, rows: Any, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        if (self._slots.tokens[rows.slots.clamp(min=0).long(), rows.positions.long()] == poor).any():
            raise torch.OutOfMemoryError("as if there were none left")
        return forward(self, rows, pages, layers)

    monkeypatch.setattr(GpuDecoder, "forward", fails)
    prompts = [prompt(0, 3), [poor, 5, 6], prompt(2, 4)]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)] * 3
    first, ended, last = run(tiny.core(device, gpu=True, graphs=False), prompts, params)
    assert [output.failure and output.failure.code for output in ended] == ["HF441"]
    tiny.assert_greedy(prompts[0], tokens_of(first))
    tiny.assert_greedy(prompts[2], tokens_of(last))
    assert [len(told_of(outputs)) for outputs in (first, ended, last)] == [2, 0, 3]


def test_running_out_of_memory_at_any_place_changes_no_answer(tiny: Tiny, device: torch.device) -> None:
    """At each place where torch allocates or a kernel is loaded in a step, in turn; here at some of them, on a GPU at
    all. Graphs would hide the places from the second step on."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        pytest.skip("the places are the same with a window, and the interpreter takes long for each")
    asked = [prompt(0, 5), prompt(1, 3)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2),
    ]

    def answers(site: Site | None, times: int) -> tuple[list[list[int]], MemoryFaults]:
        core = tiny.core(device, gpu=True, graphs=False)
        with memory_faults(site, times) as faults:
            found = run(core, asked, params)
        assert not any(output.failure for outputs in found for output in outputs)
        told = [entry.token_ids for outputs in found for entry in told_of(outputs)]
        return [*(tokens_of(outputs) for outputs in found), *told], faults

    expected, seen = answers(None, 0)
    assert len(seen.seen) > 12
    for number, site in enumerate(seen.seen):
        if device.type == "cuda" or number % 7 == 3:
            found, faults = answers(site, 1 + number % 2)
            assert found == expected, site
            assert faults.left == 0, site


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has graphs")
@pytest.mark.parametrize("moment", ["capture_begin", "capture_end"])
def test_graphs_that_find_no_memory_are_done_without(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = getattr(torch.cuda.CUDAGraph, moment)

    def fails(self: torch.cuda.CUDAGraph, *args: Any, **more: Any) -> None:
        if moment == "capture_end":
            real(self)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda.CUDAGraph, moment, fails)
    prompts = [prompt(number, 4) for number in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 3
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has graphs")
@pytest.mark.parametrize("launches", [0, 3], ids=["the first", "a later one"])
def test_graphs_that_find_no_memory_when_they_are_launched_are_done_without(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch, launches: int
) -> None:
    real, left = torch.cuda.CUDAGraph.replay, [launches]

    def fails(self: torch.cuda.CUDAGraph) -> None:
        if not left[0]:
            raise RuntimeError("CUDA error: out of memory")
        left[0] -= 1
        real(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", fails)
    prompts = [prompt(number, 4) for number in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, repetition_penalty=1.1)] * 3
    expected = run(tiny.core(device, gpu=True, graphs=False), prompts, params)
    found = run(tiny.core(device, gpu=True), prompts, params)
    assert [tokens_of(outputs) for outputs in found] == [tokens_of(outputs) for outputs in expected]
    assert left == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has graphs")
def test_a_capture_that_breaks_off_in_the_middle_is_done_without(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GpuDecoder.forward

    def fails(self: GpuDecoder, rows: Any, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        stream = forward(self, rows, pages, layers)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("as if there were none left")
        return stream

    monkeypatch.setattr(GpuDecoder, "forward", fails)
    prompts = [prompt(number, 4) for number in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 3
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))
