"""Norms, rotary with the write of keys and values, gates and embedding rows against float64 and the plain forms."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from holdfast.execution.layers.rope import inverse_frequencies
from holdfast.execution.ops import reference
from holdfast.execution.triton_kernels import layer
from holdfast.models import RopeSpec

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance between neighbours at 1."""
COUNTS = [1, 5, 517] if ON_GPU else [1, 5]


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, roundings: float) -> None:
    """wanted is float64; so many roundings of the type, relative to the largest number beside each."""
    tolerance = roundings * UNIT[dtype] * wanted.abs().clamp(min=1e-3)
    error = (found.double() - wanted).abs()
    assert torch.isfinite(error).all()
    assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 576, 4096] if ON_GPU else [64, 576])
def test_the_stream_is_normed(dtype: torch.dtype, columns: int) -> None:
    for rows in COUNTS:
        source = seeded(dtype, columns, rows)
        wide = normal(source, rows, columns + 8, dtype=dtype)
        stream, weight = wide[:, :columns], normal(source, columns, dtype=dtype)
        before = wide.clone()
        out = poisoned(rows, columns, dtype=dtype)
        layer.rms_norm(stream, weight, 1e-5, out)
        assert torch.equal(wide, before)
        exact = stream.double()
        exact *= torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        close(out, exact * weight.double(), dtype, 8 if dtype == torch.float32 else 2.2)
        if dtype != torch.float32:
            plain = torch.empty_like(out)
            reference.rms_norm(stream, weight, 1e-5, plain)
            # A last bit of the scale may turn a rounding to the other side, and seldom does.
            assert (out != plain).float().mean() < 0.01


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_weight_of_float32_has_its_product_rounded_once(dtype: torch.dtype) -> None:
    """As Gemma's norms are: on the stream, on what is added to it, and of heads."""
    source = seeded(dtype)
    x, weight, columns = normal(source, 40, 64, dtype=dtype), 1 + 0.3 * normal(source, 64), 64
    exact = x.double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    normed, stream = poisoned(40, columns, dtype=dtype), torch.zeros(40, columns, dtype=dtype, device=DEVICE)
    layer.rms_norm(x, weight, 1e-6, normed)
    layer.add_branch(x, weight, 1e-6, 1.0, stream)
    pool = Pool(source, 40, 1, columns, dtype)
    qkv = x.repeat(1, 3)
    positions, slots, tables = (part.to(DEVICE) for part in (pool.positions, pool.slots, pool.tables))
    layer.rotate_and_store(
        qkv, poisoned(40, 0), positions, slots, pool.pages, tables, place=pool.place, query_norm=weight,
        key_norm=weight, epsilon=1e-6,
    )  # fmt: skip
    for found in (normed, stream, qkv[:, :columns], qkv[:, columns : 2 * columns]):
        close(found, exact, dtype, 1.01)


def angles_of(positions: torch.Tensor, dim: int, theta: float = 10000.0) -> torch.Tensor:
    frequencies = inverse_frequencies(RopeSpec(theta=theta, dim=dim)).to(DEVICE)
    out = poisoned(len(positions), dim)
    layer.fill_cos_sin(positions, frequencies, 1.0, out)
    return out


def test_angles_are_those_of_the_plain_form_up_to_long_contexts() -> None:
    positions = torch.tensor([0, 1, 2, 100, 4095, 8191, 65535, 99999, 131071, 131072], dtype=torch.int32, device=DEVICE)
    frequencies = inverse_frequencies(RopeSpec(theta=500000.0, dim=128))
    found = poisoned(len(positions), 128)
    layer.fill_cos_sin(positions, frequencies.to(DEVICE), 1.25, found)
    angles = (positions.cpu().float()[:, None] * frequencies).double()  # the product is float32, as in the plain form
    wanted = torch.cat((angles.cos(), angles.sin()), -1) * 1.25
    assert (found.cpu().double() - wanted).abs().max() < 1e-6


class Pool:
    """Pages full of NaN, tables with pages shuffled, and rows that name them."""

    def __init__(self, source: torch.Generator, tokens: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.block, self.places, self.place = 4, 3, 1
        slots, blocks = 5, 8
        self.pages = poisoned(slots * blocks + 1, self.places, 2, self.block, kv_heads, dim, dtype=dtype)
        order = torch.randperm(slots * blocks, generator=source) + 1
        # Rows of the table lie apart.
        self.tables = torch.full((slots, blocks + 3), -7, dtype=torch.int32)[:, :blocks]
        self.tables.copy_(order.view(slots, blocks))
        chosen = torch.randperm(slots * blocks * self.block, generator=source)[:tokens]
        self.slots = (chosen // (blocks * self.block)).int()
        self.positions = (chosen % (blocks * self.block)).int()
        if tokens > 3:
            self.slots[1], self.positions[2] = -1, -1

    def rows(self) -> list[tuple[int, int, int]]:
        """(token of the batch, page, place in the page) of those that are kept."""
        found = []
        for token, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            if slot >= 0 and position >= 0:
                found.append((token, int(self.tables[slot, position // self.block]), position % self.block))
        return found


def turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = angles.shape[-1] // 2
    cos, sin = angles[:, None, :half].double(), angles[:, None, half:].double()
    first, second = heads[..., :half], heads[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]), -1)


SHAPES = [(3, 1, 16, 16), (6, 2, 80, 80), (5, 5, 64, 32)]
if ON_GPU:
    SHAPES += [(32, 8, 128, 128), (16, 8, 128, 128), (16, 1, 256, 64), (9, 3, 64, 64), (40, 8, 96, 96)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), SHAPES)
def test_heads_are_turned_and_kept(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    tokens = 40 if ON_GPU else 6
    source = seeded(dtype, heads, kv_heads, dim, rotary)
    pool = Pool(source, tokens, kv_heads, dim, dtype)
    width = (heads + 2 * kv_heads) * dim
    qkv = normal(source, tokens, width + 16, dtype=dtype)[:, :width]
    before = qkv.clone()
    positions, slots, tables = (part.to(DEVICE) for part in (pool.positions, pool.slots, pool.tables))
    angles = angles_of(positions, rotary)
    layer.rotate_and_store(qkv, angles, positions, slots, pool.pages, tables, place=pool.place)
    split = before.view(tokens, -1, dim).double()
    query, key, value = split.split((heads, kv_heads, kv_heads), 1)
    live = positions >= 0
    wanted = turned(torch.cat((query, key), 1), angles)
    found = qkv.view(tokens, -1, dim)
    # Relative to the pair that was turned, not to what was left of it.
    tolerance = 3 * UNIT[dtype] * (1 + torch.cat((query, key), 1).abs().amax(-1, keepdim=True))
    error = (found[:, : heads + kv_heads].double() - wanted).abs()
    assert (error <= tolerance)[live].all(), error.max().item()
    assert torch.equal(found[:, heads + kv_heads :].double(), value)
    check_pages(pool, found[:, heads : heads + kv_heads], found[:, heads + kv_heads :])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("centered", [False, True])
def test_float8_pages_hold_scaled_keys_and_values(stored: torch.dtype, centered: bool) -> None:
    """As torch rounds what the buffer holds: divided, without a center of keys, and cut off at the largest number."""
    source = seeded(stored, centered)
    tokens, heads, kv_heads, dim = 19, 3, 2, 24
    pool = Pool(source, tokens, kv_heads, dim, torch.float32)
    pages = pool.pages.to(stored)
    qkv = normal(source, tokens, (heads + 2 * kv_heads) * dim)
    qkv[4, heads * dim : heads * dim + 3] = torch.tensor([1e7, -1e7, 30.0])
    center = normal(source, kv_heads * dim) if centered else None
    key_scale, value_scale = 0.25, 0.037
    positions, slots, tables = (part.to(DEVICE) for part in (pool.positions, pool.slots, pool.tables))
    layer.rotate_and_store(
        qkv, angles_of(positions, 16), positions, slots, pages, tables, place=pool.place, key_scale=key_scale,
        value_scale=value_scale, center=center,
    )  # fmt: skip
    kept = qkv.view(tokens, -1, dim)[:, heads:].split((kv_heads, kv_heads), 1)
    keys = kept[0] * (1 / key_scale) - (0 if center is None else center.view(kv_heads, dim))
    values = kept[1] * torch.tensor(1 / value_scale, dtype=torch.float32)
    largest = torch.finfo(stored).max
    wanted = torch.full_like(pages, NAN)
    for token, page, place in pool.rows():
        wanted[page, pool.place, 0, place] = keys[token].clamp(-largest, largest).to(stored)
        wanted[page, pool.place, 1, place] = values[token].clamp(-largest, largest).to(stored)
    torch.testing.assert_close(pages.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def check_pages(pool: Pool, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Pages hold the keys and values of every kept token, and NaN everywhere else."""
    wanted = torch.full_like(pool.pages, NAN)
    for token, page, place in pool.rows():
        wanted[page, pool.place, 0, place], wanted[page, pool.place, 1, place] = keys[token], values[token]
    torch.testing.assert_close(pool.pages, wanted, rtol=0, atol=0, equal_nan=True)


def test_far_pages_are_reached() -> None:
    """Offsets beyond 2^31 elements."""
    if not ON_GPU:
        pytest.skip("needs 5 GB of GPU memory")
    pages = torch.empty(80_000, 1, 2, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    pages[79_999] = NAN
    qkv = torch.randn(1, 24 * 128, device=DEVICE).bfloat16()
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[79_999]], dtype=torch.int32, device=DEVICE)
    layer.rotate_and_store(qkv, angles_of(one, 128), one, one, pages, tables, place=0)
    assert torch.equal(pages[79_999, 0, :, 0].flatten(), qkv[0, 8 * 128 :])
    assert torch.isnan(pages[79_999, 0, :, 1:]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, activation: str) -> None:
    for rows, columns in ((1, 24), (3, 1100), *(((300, 14336),) if ON_GPU else ())):
        source = seeded(dtype, activation, rows, columns)
        gate_up = (3 * normal(source, rows, 2 * columns + 8)).to(dtype)[:, : 2 * columns]
        gate_up[0, 0], gate_up[0, 1] = 90.0, -90.0
        out = poisoned(rows, columns + 3, dtype=dtype)
        layer.gate(gate_up, activation, out[:, :columns])
        gated, up = gate_up.double().chunk(2, -1)
        exact = reference.activate(gated, activation) * up
        # Against float64 relative to the inputs: far in the negative tail the exact result all but vanishes.
        error = (out[:, :columns].double() - exact).abs()
        assert (
            error <= (8 if dtype == torch.float32 else 2.2) * UNIT[dtype] * (up * gated).abs().clamp(min=0.01)
        ).all()
        assert torch.isnan(out[:, columns:]).all()


@pytest.mark.parametrize(("stored", "wanted"), [(torch.float32, torch.float32), (torch.float32, torch.float16)])
def test_embedding_rows(stored: torch.dtype, wanted: torch.dtype) -> None:
    source = seeded(stored, wanted)
    columns = 1100
    embedding = normal(source, 50, columns, dtype=stored)
    tokens_of_slots = torch.randint(0, 50, (4, 9), generator=source, dtype=torch.int32).to(DEVICE)[:, :7]
    tokens_of_slots[3, 6] = 50
    slots = torch.tensor([2, 0, -1, 1, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([6, 0, 3, -1, 6], dtype=torch.int32, device=DEVICE)
    out = poisoned(5, columns, dtype=wanted)
    layer.embed(tokens_of_slots, slots, positions, embedding, out)
    ids = torch.stack((tokens_of_slots[2, 6], tokens_of_slots[0, 0]))
    assert torch.equal(out[:2], embedding[ids.long()].to(wanted))
    assert not out[2:].any(), "no token, no row"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_mean_is_taken_out(dtype: torch.dtype, biased: bool) -> None:
    for rows in COUNTS:
        source = seeded(dtype, biased, rows)
        stream = (normal(source, rows, 200, dtype=dtype) + 3)[:, :176]
        weight, bias = 1 + normal(source, 176, dtype=dtype), normal(source, 176, dtype=dtype)
        out = poisoned(rows, 180, dtype=dtype)
        layer.layer_norm(stream, weight, bias if biased else None, 1e-5, out[:, :176])
        exact = torch.nn.functional.layer_norm(
            stream.double(), (176,), weight.double(), bias.double() if biased else None, 1e-5
        )
        error = (out[:, :176].double() - exact).abs()
        assert (error <= (64 if dtype == torch.float32 else 2.2) * UNIT[dtype] * (1 + exact.abs())).all()
        assert torch.isnan(out[:, 176:]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_added_to_the_stream_may_be_normed_and_scaled(dtype: torch.dtype, normed: bool) -> None:
    source = seeded(dtype, normed)
    branch, stream = (normal(source, 5, 200, dtype=dtype)[:, :176] for _ in range(2))
    weight, before = 1 + normal(source, 176), stream.double()
    layer.add_branch(branch, weight if normed else None, 1e-5, 0.25, stream)
    added = branch.double()
    if normed:
        added = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    error = (stream.double() - before - 0.25 * added).abs()
    assert (error <= 4 * UNIT[dtype] * (1 + before.abs() + added.abs())).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (24, 12), (16, 0)])
def test_heads_may_be_normed_before_they_are_turned(dtype: torch.dtype, dim: int, rotary: int) -> None:
    heads, kv_heads, tokens = 5, 2, 6
    source = seeded(dtype, dim, rotary)
    pool = Pool(source, tokens, kv_heads, dim, dtype)
    qkv = normal(source, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [1 + 0.3 * normal(source, dim) for _ in range(2)]
    split = qkv.view(tokens, -1, dim).double().split((heads, kv_heads, kv_heads), 1)
    positions, slots, tables = (part.to(DEVICE) for part in (pool.positions, pool.slots, pool.tables))
    angles = angles_of(positions, rotary) if rotary else poisoned(tokens, 0)
    layer.rotate_and_store(
        qkv, angles, positions, slots, pool.pages, tables, place=pool.place, query_norm=norms[0], key_norm=norms[1],
        epsilon=1e-5,
    )  # fmt: skip
    after = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    for part, norm, found in zip(split[:2], norms, after[:2], strict=True):
        scaled = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
        error = (found.double() - turned(scaled, angles)).abs()[positions >= 0]
        assert (error <= 8 * UNIT[dtype] * (1 + scaled.abs().amax())).all(), error.max().item()
    assert torch.equal(after[2].double(), split[2])
    check_pages(pool, *after[1:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_activations_and_caps_in_place(dtype: torch.dtype) -> None:
    source = seeded(dtype)
    wide = (3 * normal(source, 3, 1104)).to(dtype)
    x, before = wide[:, :1100], wide.double()
    layer.activate_rows(x, "gelu_tanh")
    exact = reference.activate(before[:, :1100], "gelu_tanh")
    assert ((x.double() - exact).abs() <= 8 * UNIT[dtype] * before[:, :1100].abs().clamp(min=0.01)).all()
    assert torch.equal(wide[:, 1100:].double(), before[:, 1100:])
    for scale, cap in ((0.5, 0.0), (2.0, 3.0)):
        x.copy_(before[:, :1100])
        layer.scale_and_cap(x, scale, cap)
        exact = scale * before[:, :1100]
        exact = cap * (exact / cap).tanh() if cap else exact
        assert ((x.double() - exact).abs() <= 8 * UNIT[dtype] * (1 + exact.abs())).all()
