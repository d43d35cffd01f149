"""The GPU runner under the real scheduler, one step ahead, against transformers and against the CPU runner.

On a GPU as it is used, graphs included; elsewhere its kernels run in the interpreter, without graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_scores import assert_scores
from tiny_gpu import Tiny, TinyGguf, prompt, run, tokens_of, told_of

from holdfast.execution.gpu import runner as gpu_runner
from holdfast.execution.gpu.batch_sizes import padded_sizes
from holdfast.execution.gpu.memory import oom
from holdfast.execution.gpu.sampling import Work
from holdfast.records import SamplingParams

CPU = torch.device("cpu")


def test_greedy_tokens_are_those_of_transformers(
    tiny: Tiny, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Chunks, mixed steps and single tokens, sequences of all lengths coming and going."""
    if tiny.spec.layers[0].window is not None:
        request.getfixturevalue("few_programs")
    lengths, least = ((5, 21, 1, 9), 3) if device.type == "cuda" else ((18, 3), 1)
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    params = [SamplingParams(temperature=0.0, max_tokens=least + number, ignore_eos=True) for number in range(4)]
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params[: len(prompts)]), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_pages_run_out_and_answers_stay_the_same(tiny: Tiny, device: torch.device) -> None:
    prompts = [prompt(number, 20) for number in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4
    core = tiny.core(device, gpu=True, blocks=20)
    found = run(core, prompts, params)
    if len(tiny.layout().groups) == 1 and tiny.spec.layers[0].window is None:
        assert core.stats().preemptions_total > 0
    for asked, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


OPTIONS = {
    "drawn": {"temperature": 0.8, "seed": 3},
    "cut": {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "seed": 4},
    "floor": {"temperature": 1.0, "min_p": 0.05, "seed": 5},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "biased": {"temperature": 0.0, "logit_bias": {17: 30.0, 23: -100.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(3, 60, 2)), "seed": 6},
    "bad words": {"temperature": 0.0},
    "late end": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(3, 100))},
}


@pytest.mark.usefixtures("few_programs")
def test_every_option_chooses_what_it_chooses_on_a_cpu(tiny: Tiny, device: torch.device) -> None:
    """All of them beside each other; there are fewer slots than requests, so that some take the slots of others."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        pytest.skip("sampling knows nothing of windows, and the interpreter takes half a minute for it")
    most = 6 if device.type == "cuda" else 4
    params = [SamplingParams(max_tokens=most, ignore_eos=True, **given) for given in OPTIONS.values()]
    prompts = [prompt(number, 3 + number) for number in range(len(params))]
    plain = run(tiny.core(CPU, gpu=False), prompts, params)
    # What it would have said becomes bad: its first token anywhere, and its third behind its second.
    said = tokens_of(plain[list(OPTIONS).index("bad words")])
    words = [[[said[0]], said[1:3], [1, 2]] if name == "bad words" else [] for name in OPTIONS]
    here = run(tiny.core(device, gpu=True), prompts, params, words)
    there = run(tiny.core(CPU, gpu=False), prompts, params, words)
    assert said[0] not in tokens_of(there[list(OPTIONS).index("bad words")])
    assert set(tokens_of(there[list(OPTIONS).index("allowed")])) <= set(range(3, 60, 2))
    for name, found, expected in zip(OPTIONS, here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected), name
        for one, other in zip(found, expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine.token_ids == theirs.token_ids
                assert mine.rank == theirs.rank
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("expand", [False, pytest.param(True, marks=pytest.mark.long)], ids=["quantized", "expanded"])
def test_a_quantized_file_says_what_it_says_on_a_cpu(expand: bool, tmp_path: Path, device: torch.device) -> None:
    """Blocks of every kind the engine keeps, some of them side by side; few rows and many."""
    model = TinyGguf(tmp_path / "tiny.gguf", expand=expand)
    prompts = [prompt(number, length) for number, length in enumerate((24, 2))]
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)] * 2
    here = run(model.core(device, gpu=True, step=26), prompts, params)
    there = run(model.core(CPU, gpu=False, step=26), prompts, params)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=1e-3)


@pytest.mark.usefixtures("few_programs")
def test_prompts_are_told_of_as_transformers_would(tiny: Tiny, device: torch.device) -> None:
    """In chunks, beside rows that only sample, in more turns than one."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        return
    asked: list[int | None] = [3, None, 0, 20]
    prompts = [prompt(number, length) for number, length in enumerate((21, 5, 9, 2))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=count, logprobs=1)
        for count in asked
    ]
    found = run(tiny.core(device, gpu=True), prompts, params)
    for ids, count, outputs in zip(prompts, asked, found, strict=True):
        tiny.assert_greedy(ids, tokens_of(outputs))
        told = told_of(outputs)
        if count is None:
            assert told == []
        else:
            with torch.inference_mode():
                assert_scores(tiny.model(torch.tensor([ids])).logits[0], ids, told, count)


@pytest.mark.usefixtures("few_programs")
def test_the_profile_run_scores_every_token_of_its_prompts(
    tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heaviest step is done for real: rows of logits in as many turns as it takes, never more at a time."""
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        return
    core = tiny.core(device, gpu=True, slots=3, step=16)
    runner: Any = core.runner
    seen: list[int] = []
    head = runner.decoder.logits

    def watch(stream: torch.Tensor, sampling: torch.Tensor | None, out: torch.Tensor) -> None:
        seen.append(len(out) if sampling is None else len(sampling))
        assert out.data_ptr() == runner._logits.data_ptr()
        head(stream, sampling, out)

    monkeypatch.setattr(runner.decoder, "logits", watch)
    runner.profile_run()
    # Of 16 tokens 3 sample, and all but those are scored, in turns of 3. Then steps of single tokens, of every kind.
    single = [size for size in padded_sizes(3) for _ in Work] if device.type == "cuda" else []
    assert seen == [3, 3, 3, 3, 3, 1, *single]
    asked = prompt(0, 5)
    (outputs,) = run(core, [asked], [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)])
    tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_runner_waits_for_its_device_before_anything_goes(
    graphs: bool, tiny: Tiny, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be closed while the step after the last one that was read is still computed; without graphs, too: pages go
    first then."""
    runner, order = tiny.core(device, gpu=True, slots=2).runner, list[str]()

    class Graphs:
        def close(self) -> None:
            order.append("graphs are closed")

    pages, close = runner.kv, runner.kv.close

    def finish(device: torch.device) -> None:
        order.append("waited")
        oom.finish(device)

    monkeypatch.setattr(gpu_runner, "finish", finish)
    monkeypatch.setattr(pages, "close", lambda: (order.append("pages go"), close()))
    if graphs:
        monkeypatch.setattr(runner, "_graphs", Graphs())
    runner.close()
    assert order == ["waited", *(["graphs are closed"] if graphs else []), "pages go"]
