"""Answers held to a form on the GPU runner: the tokens of the CPU's, beside free ones, one step ahead."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.engine.core import masks
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.records import EngineOutput, FinishReason, SamplingParams, StructuredOutputsParams
from holdfast.records.structured import Vocabulary
from holdfast.text.structured.client import GrammarService

CPU = torch.device("cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOKENS = [b"", b"", b"</s>", *(LETTERS[at % 36].encode() * (1 + at // 36) for at in range(200))]
VOCABULARY = Vocabulary(TOKENS, {"</s>": 2})
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-c]{3,5}")),
    SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    SamplingParams(
        max_tokens=4, seed=3, frequency_penalty=1.0, logprobs=2, allowed_token_ids=list(range(2, 30)),
        structured_outputs=StructuredOutputsParams(regex="([a-m][0-9]?)+"),
    ),
    SamplingParams(max_tokens=4, seed=4, allowed_token_ids=list(range(3, 60, 2)), ignore_eos=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def services() -> Iterator[list[GrammarService]]:
    started: list[GrammarService] = []
    yield started
    for service in started:
        service.close()


def with_forms(core: EngineCore, tiny: Tiny, services: list[GrammarService]) -> EngineCore:
    service = GrammarService(lambda: VOCABULARY, [2], tiny.spec.vocab_size)
    services.append(service)
    service.start()
    rows = core.scheduler.limits.max_num_seqs
    core.structured_output = StructuredOutputManager(
        lambda: service.address, rows=rows, vocab_size=tiny.spec.vocab_size, eos_ids=(2,)
    )
    return core


def text_of(outputs: list[EngineOutput]) -> str:
    return b"".join(TOKENS[token] for token in tokens_of(outputs) if token != 2).decode()


@pytest.mark.usefixtures("few_programs")
def test_held_and_free_answers_are_those_of_the_cpu(
    tiny: Tiny, device: torch.device, services: list[GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        pytest.skip("masks know nothing of windows, and the interpreter is slow")
    prompts = [prompt(number, 3 + number) for number in range(len(PARAMS))]
    there = run(with_forms(tiny.core(CPU, gpu=False), tiny, services), prompts, PARAMS)
    # Some masks are late: their rows are computed once more, and the answers stay what they are.
    calls, real = itertools.count(), masks.StepMasks.rows
    monkeypatch.setattr(masks.StepMasks, "rows", lambda step, busy: {} if next(calls) == 1 else real(step, busy))
    here = run(with_forms(tiny.core(device, gpu=True), tiny, services), prompts, PARAMS)
    assert next(calls) > 2
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        assert found[-1].finish_reason == expected[-1].finish_reason
    assert re.fullmatch("[a-c]{3,5}", text_of(here[0]))
    assert here[0][-1].finish_reason is FinishReason.STOP
    assert re.fullmatch("([a-m][0-9]?)*", text_of(here[2]))
    # Raw log-probabilities, whatever the form forbids.
    assert [entry.token_ids for output in here[2] for entry in output.logprobs or []] == [
        entry.token_ids for output in there[2] for entry in output.logprobs or []
    ]
