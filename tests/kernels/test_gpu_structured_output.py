"""Answers held to a form on the GPU runner: the tokens of the CPU's, beside free ones, one step ahead."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from held_answers import PARAMS, raw_of, text_of, with_forms
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.engine.core import masks
from holdfast.records import FinishReason
from holdfast.text.structured.client import GrammarService

CPU = torch.device("cpu")


@pytest.mark.usefixtures("few_programs")
def test_held_and_free_answers_are_those_of_the_cpu(
    tiny: Tiny, device: torch.device, services: list[GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        pytest.skip("masks know nothing of windows, and the interpreter is slow")
    prompts = [prompt(number, 3 + number) for number in range(len(PARAMS))]
    there = run(with_forms(tiny.core(CPU, gpu=False), tiny.spec.vocab_size, services), prompts, PARAMS)
    # Some masks are late: their rows are computed once more, and the answers stay what they are.
    calls, real = itertools.count(), masks.StepMasks.rows
    monkeypatch.setattr(masks.StepMasks, "rows", lambda step, busy: {} if next(calls) == 1 else real(step, busy))
    here = run(with_forms(tiny.core(device, gpu=True), tiny.spec.vocab_size, services), prompts, PARAMS)
    assert next(calls) > 2
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        assert found[-1].finish_reason == expected[-1].finish_reason
    assert re.fullmatch("[a-c]{3,5}", text_of(tokens_of(here[0])))
    assert here[0][-1].finish_reason is FinishReason.STOP
    assert re.fullmatch("([a-m][0-9]?)*", text_of(tokens_of(here[2])))
    # Raw log-probabilities, whatever the form forbids.
    assert raw_of(here[2]) == raw_of(there[2])
