"""Compiled small operations against float64."""

from __future__ import annotations

import numpy
import pytest
import torch

from holdfast.execution import native


@pytest.mark.parametrize("columns", [1, 7, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_rms_norm(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns + 5, generator=generator)[:, 2:-3] * 3
    residual, weight = torch.randn(rows, columns, generator=generator), torch.randn(columns, generator=generator)
    for added in (None, residual):
        before = x.double() if added is None else x.double() + added.double()
        wanted = before / (before.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        out = torch.full((rows, columns), float("nan"))
        native.rms_norm(x, weight, 1e-5, out, added)
        assert torch.allclose(out.double(), wanted, rtol=2e-6, atol=1e-6)
        assert torch.allclose(x.double(), before, rtol=1e-6, atol=1e-6)
    native.rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "inner"), [(1, 3), (4, 96), (90, 1537)])
def test_gate(activation: str, rows: int, inner: int) -> None:
    gate_up = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner)) * 8
    out = torch.full((rows, inner), float("nan"))
    native.activate_and_multiply(gate_up, out, activation)
    x, up = gate_up.double().chunk(2, -1)
    acted = torch.nn.functional.silu(x) if activation == "silu" else torch.nn.functional.gelu(x, approximate="tanh")
    assert torch.allclose(out.double(), acted * up, rtol=2e-6, atol=2e-6)


def test_the_exponential_is_good_to_the_last_bits() -> None:
    """Seen through silu: x / (1 + e^-x), over the whole range where it is neither 0 nor x."""
    x = torch.linspace(-80, 20, 400_001)
    out = torch.empty(1, len(x))
    native.activate_and_multiply(torch.cat((x, torch.ones_like(x)))[None], out)
    wanted = x.double() / (1 + (-x.double()).exp())
    # One rounding of the exponential, one of the sum, one of the quotient, and 2e-7 for the exponential itself.
    assert float(((out[0].double() - wanted) / wanted.where(wanted != 0, 1.0)).abs().max()) < 4e-7
    extreme = torch.tensor([[-1e30, 1e30, float("nan"), float("inf"), 1, 1, 1, 1]])
    ends = torch.empty(1, 4)
    native.activate_and_multiply(extreme, ends)
    assert abs(float(ends[0, 0])) < 1e-6
    assert float(ends[0, 1]) == pytest.approx(1e30)
    assert bool(ends[0, 2].isnan())
    assert float(ends[0, 3]) == float("inf")


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_every_rounding_of_float8_is_that_of_torch(dtype: torch.dtype) -> None:
    """All codes, the middle between any two, and the floats beside them; what is too large becomes the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    finite = codes[codes.isfinite()].sort().values
    exact = torch.cat((finite, (finite[1:] + finite[:-1]) / 2)).float()
    infinity = torch.tensor(torch.inf)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 464.0, 465.0, -480.0, 61440.0, -1e30, torch.inf, -torch.inf])
    numbers = torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity), odd, torch.tensor([torch.nan])))
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 4))
    heads, still = numbers[None, None], torch.zeros(1, 0)
    pool = torch.full((2, 1, len(numbers)), 0x55, dtype=torch.uint8).view(dtype)
    place = torch.zeros(1, dtype=torch.int64)
    native.rotate_and_store(heads.clone(), heads.clone(), heads, still, still, place, pool[0], pool[1])
    wanted = numbers.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    numbered = ~numbers.isnan()
    for found in (pool[0, 0], pool[1, 0]):
        assert torch.equal(found.view(torch.uint8)[numbered], wanted.view(torch.uint8)[numbered])
        assert bool(found[~numbered].isnan().all())


def test_a_center_is_taken_off_turned_keys() -> None:
    source = torch.Generator().manual_seed(3)
    fused = torch.randn(5, 6, 16, generator=source)
    query, key, value = fused[:, :2], fused[:, 2:4], fused[:, 4:]
    angles, center = torch.rand(5, 8, generator=source), torch.randn(32, generator=source)
    pools, places = torch.full((2, 2, 9, 32), torch.nan), torch.randperm(9, generator=source)[:5]
    for pool, taken in zip(pools, (None, center), strict=True):
        parts = query.clone(), key.clone(), value.clone()
        native.rotate_and_store(*parts, angles.cos(), angles.sin(), places, pool[0], pool[1], center=taken)
    assert torch.equal(pools[1, 0][places], pools[0, 0][places] - center)
    assert torch.equal(pools[1, 1][places], pools[0, 1][places])
    with pytest.raises(ValueError, match="center"):
        native.rotate_and_store(
            query, key, value, angles, angles, places, pools[0, 0], pools[0, 1], center=center.double()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (20, 10), (64, 16)])
@pytest.mark.parametrize("by_position", [False, True])
def test_rotate_and_store(dtype: torch.dtype, dim: int, half: int, by_position: bool) -> None:
    tokens, heads, kv_heads = 40, 6, 2
    generator = torch.Generator().manual_seed(dim)
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator)
    before = fused.double().numpy().copy()
    positions = torch.randint(0, 90, (tokens,), generator=generator)
    angles = torch.rand(90, half, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    pool = torch.full((2, 100, kv_heads * dim), float("nan"), dtype=dtype)
    places = torch.randperm(100, generator=generator)[:tokens]
    lines = (cos, sin) if by_position else (cos[positions][:, None].contiguous(), sin[positions][:, None].contiguous())
    query, key, value = fused[:, :heads], fused[:, heads:-kv_heads], fused[:, -kv_heads:]
    native.rotate_and_store(query, key, value, *lines, places, pool[0], pool[1], positions if by_position else None)
    c, s = (numpy.take(table.double().numpy(), positions.numpy(), axis=0)[:, None] for table in (cos, sin))
    turned = before.copy()
    first, second = before[:, :-kv_heads, :half], before[:, :-kv_heads, half : 2 * half]
    turned[:, :-kv_heads, :half] = first * c - second * s
    turned[:, :-kv_heads, half : 2 * half] = second * c + first * s
    assert numpy.abs(fused.numpy() - turned).max() < 1e-6
    assert torch.equal(pool[0][places], key.reshape(tokens, -1).to(dtype))
    assert torch.equal(pool[1][places], value.reshape(tokens, -1).to(dtype))
    untouched = torch.ones(100, dtype=torch.bool)
    untouched[places] = False
    assert bool(pool[:, untouched].isnan().all())


def test_misuse_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="x must be float32"):
        native.rms_norm(x.double(), torch.ones(8), 1e-5, x)
    with pytest.raises(ValueError, match="out must be like x"):
        native.rms_norm(x, torch.ones(7), 1e-5, torch.empty(2, 8))
    with pytest.raises(ValueError, match="gate_up must be"):
        native.activate_and_multiply(x, torch.empty(2, 8))
    with pytest.raises(ValueError, match="no compiled gelu"):
        native.activate_and_multiply(x, torch.empty(2, 4), "gelu")
    heads, angles, places = torch.zeros(2, 2, 4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="places"):
        native.rotate_and_store(heads, heads, heads, angles, angles, places[:1], x, x)
    with pytest.raises(ValueError, match="key_rows"):
        native.rotate_and_store(heads, heads, heads, angles, angles, places, x[:, :4].contiguous(), x)
