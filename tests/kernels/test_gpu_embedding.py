"""Prompts as vectors on the GPU runner: those of the CPU runner, beside answers, in chunks and from cached prefixes."""

from __future__ import annotations

import pytest
import torch
from embedded_prompts import assert_same_vectors, embedded
from tiny_gpu import Tiny, prompt


@pytest.mark.usefixtures("few_programs")
def test_vectors_are_those_of_a_cpu(tiny: Tiny, device: torch.device) -> None:
    if tiny.spec.layers[0].window is not None and device.type == "cpu":
        pytest.skip("the last token's state knows nothing of windows, and the interpreter is slow")
    prompts = [prompt(0, 9), prompt(1, 1)]
    here = embedded(tiny.core(device, gpu=True), prompts)
    there = embedded(tiny.core(torch.device("cpu"), gpu=False), prompts)
    assert_same_vectors(here, there, tiny.spec.hidden_size)
