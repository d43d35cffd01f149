"""Small operations against their plain forms, rotary frequencies, and pages shared by unlike layers."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigurationError
from holdfast.execution import native
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.layers.rope import inverse_frequencies
from holdfast.execution.ops import Heads, ops_for
from holdfast.execution.ops.cpu import rotate
from holdfast.kvcache.groups import KVLayout
from holdfast.models import LayerSpec, RopeSpec

CPU = torch.device("cpu")
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)]


def heads_of(product: torch.Tensor) -> Heads:
    """3 query heads and 2 of keys and values, 16 dimensions each."""
    heads = product.view(-1, 7, 16)
    return Heads(
        rotated=heads[:, :5],
        query=heads[:, :3],
        key=heads[:, 3:5],
        value=heads[:, 5:],
        query_rows=product[:, :48],
        key_rows=product[:, 48:80],
        value_rows=product[:, 80:],
    )


def store(dtype: torch.dtype) -> KVPool:
    layout = KVLayout(
        groups=(), block_tokens=4, layers_per_page=2, kv_heads=2, head_dim=16, element_bytes=dtype.itemsize
    )
    kv = KVPool(layout, 16, CPU, dtype)
    kv.pages.zero_()
    return kv


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_fast_forms_equal_the_plain_ones(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    torch.manual_seed(tokens)
    forms = [ops_for(CPU, reference=True), ops_for(CPU)]
    if dtype == torch.float32 and native.available():
        forms.append(ops_for(CPU, compiled=True))
    x, weight = torch.randn(tokens, 48).to(dtype), torch.randn(48).to(dtype)
    product = torch.randn(tokens, 7 * 16).to(dtype)
    cos, sin = torch.randn(tokens, 1, 8), torch.randn(tokens, 1, 8)
    slots = torch.randperm(60)[:tokens]
    places = (1 + slots // 4) * 16 + slots % 4  # any token of any page but the null page; 2 layers, keys and values
    results = []
    for ops in forms:
        normed, heads, kv = torch.empty_like(x), heads_of(product.clone()), store(dtype)
        ops.rms_norm(x, weight, 1e-5, normed)
        ops.rotate_and_store(heads, cos, sin, kv, 1, places)
        gated = [torch.empty(tokens, 24, dtype=dtype) for _ in range(3)]
        for activation, out in zip(("silu", "gelu", "gelu_tanh"), gated, strict=True):
            ops.gate(x.clone(), activation, out)
        results.append((normed, heads.query, heads.key, heads.value, kv.pages, *gated))
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(results[0][3], heads_of(product).value)
    assert int((results[0][4] != 0).any(-1).any(-1).sum()) == 2 * tokens  # keys and values of every token, no more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "olmo2", "llama"])
def test_norms_round_where_those_of_transformers_do(name: str, dtype: torch.dtype) -> None:
    """Gemma's weights, kept in float32 with the one that is added to them, and OLMo 2's are multiplied before any
    rounding."""
    torch.manual_seed(5)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    norm = getattr(module, f"{name.capitalize()}RMSNorm")(48, eps=1e-6)
    norm.weight.data = (0.3 * torch.randn(48)).to(dtype)
    weight = norm.weight.data if name == "llama" else norm.weight.data.float() + int(name != "olmo2")
    x = torch.randn(200, 48).to(dtype)
    for ops in (ops_for(CPU, reference=True), ops_for(CPU)):
        out, heads = torch.empty_like(x), x.view(50, 4, 48).clone()
        ops.rms_norm(x, weight, 1e-6, out)
        ops.norm_in_place(heads, weight, 1e-6)
        assert torch.equal(out, norm(x))
        assert torch.equal(heads.view(200, 48), out)


@pytest.mark.skipif(not native.available(), reason="no compiled kernels")
def test_heads_are_normed_alike_in_any_company() -> None:
    torch.manual_seed(6)
    ops, weight = ops_for(CPU, compiled=True), torch.randn(24)
    product = torch.randn(700, 7 * 24)

    def normed(first: int, last: int) -> torch.Tensor:
        heads = product[first:last].clone().view(-1, 7, 24)
        ops.norm_in_place(heads[:, 1:5], weight, 1e-6)
        return heads

    together = normed(0, 700)
    plain = product.view(-1, 7, 24)[:, 1:5].double()
    plain = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(together[:, 1:5].double(), plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(together[:, 0], product.view(-1, 7, 24)[:, 0])
    for first, last in ((0, 1), (3, 6), (10, 14), (20, 25), (0, 9), (500, 700)):
        assert torch.equal(normed(first, last), together[first:last])


def test_a_rotation_keeps_lengths_and_relative_angles() -> None:
    """What rotary positions are for: q·k depends on the distance alone."""
    frequencies = inverse_frequencies(RopeSpec(theta=10000.0, dim=16))
    query, key = torch.randn(16), torch.randn(16)

    def product(query_position: int, key_position: int) -> float:
        heads = torch.stack((query, key))[:, None].clone()
        angles = torch.tensor([query_position, key_position])[:, None, None] * frequencies
        rotate(heads, angles.cos(), angles.sin())
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
