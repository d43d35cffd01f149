"""Small operations against their plain forms, rotary frequencies, and pages shared by unlike layers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigurationError
from holdfast.execution.ops import ops_for
from holdfast.execution.rope import inverse_frequencies
from holdfast.models import LayerSpec, RopeSpec

CPU = torch.device("cpu")
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)]


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_fast_forms_equal_the_plain_ones(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    torch.manual_seed(tokens)
    fast, plain = ops_for(CPU), ops_for(CPU, reference=True)
    x, weight = torch.randn(tokens, 48).to(dtype), torch.randn(48).to(dtype)
    heads = torch.randn(tokens, 5, 16).to(dtype)
    cos, sin = torch.randn(tokens, 1, 8), torch.randn(tokens, 1, 8)
    results = []
    for ops in (fast, plain):
        normed, rotated = torch.empty_like(x), heads.clone()
        ops.rms_norm(x, weight, 1e-5, normed)
        ops.rotate(rotated[:, :3], cos, sin)
        gated = [torch.empty(tokens, 24, dtype=dtype) for _ in range(3)]
        for activation, out in zip(("silu", "gelu", "gelu_tanh"), gated, strict=True):
            ops.gate(x.clone(), activation, out)
        results.append((normed, rotated, *gated))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(results[0][1][:, 3:], heads[:, 3:])


def test_a_rotation_keeps_lengths_and_relative_angles() -> None:
    """What rotary positions are for: q·k depends on the distance alone."""
    ops = ops_for(CPU)
    frequencies = inverse_frequencies(RopeSpec(theta=10000.0, dim=16))
    query, key = torch.randn(16), torch.randn(16)

    def product(query_position: int, key_position: int) -> float:
        heads = torch.stack((query, key))[:, None].clone()
        angles = torch.tensor([query_position, key_position])[:, None, None] * frequencies
        ops.rotate(heads, angles.cos(), angles.sin())
        return float(heads[0, 0] @ heads[1, 0])

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-4)


def test_factors_of_a_checkpoint_divide_the_frequencies() -> None:
    """GGUF brings llama3's scaling as such a tensor: both ways give the same frequencies."""
    plain = RopeSpec(theta=500000.0, dim=64)
    scaled = dataclasses.replace(plain, scaling="llama3", factor=8.0, original_max_position=8192)
    wanted = inverse_frequencies(scaled)
    factors = inverse_frequencies(plain) / wanted
    torch.testing.assert_close(inverse_frequencies(plain, factors), wanted, atol=0, rtol=1e-6)
    assert float(factors[0]) == pytest.approx(1.0)
    assert float(factors[-1]) == pytest.approx(8.0)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no kernels"):
        ops_for(torch.device("meta"))


@pytest.mark.parametrize("windows", [(None, 9, 9), (9, None, None), (5, None, 11)], ids=str)
def test_layers_that_remember_differently_share_one_pool(
    windows: tuple[int | None, ...], oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """Several groups with tables of their own; held against the plain forms, which are held against transformers."""
    oracle = oracles("Llama")
    layers = tuple(LayerSpec(index=index, window=window) for index, window in enumerate(windows))
    mixed = SimpleNamespace(spec=dataclasses.replace(oracle.spec, layers=layers), checkpoint=oracle.checkpoint)
    source = random.Random(3)
    prompts = [[source.randrange(300) for _ in range(length)] for length in (3, 30, 41)]
    answers = []
    for reference in (False, True):
        driver = driver_for(mixed, reference=reference)
        assert len(driver.layout.groups) > 1
        for slot, prompt in enumerate(prompts):
            driver.start(slot, prompt)
        chunks = random.Random(4)
        while min(len(driver.tokens[slot]) - len(prompts[slot]) for slot in range(3)) < 10:
            counts = {
                slot: min(chunks.randint(1, 12), len(driver.tokens[slot]) - driver.computed[slot])
                for slot in range(3)
                if len(driver.tokens[slot]) - len(prompts[slot]) < 10
            }
            driver.step(counts)
        answers.append([driver.tokens[slot] for slot in range(3)])
    assert answers[0] == answers[1]
    assert any(
        token != int(likeliest)
        for tokens, prompt in zip(answers[0], prompts, strict=True)
        for token, likeliest in zip(
            tokens[len(prompt) :], oracle.logits(tokens)[len(prompt) - 1 : -1].argmax(-1), strict=True
        )
    ), "the windows changed nothing"
