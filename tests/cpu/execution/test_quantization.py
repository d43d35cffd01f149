"""Quantized matrices: expanded bit for bit as the gguf package does, products held against float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest
import torch
from quantized_blocks import WRITTEN, drawn, written

from holdfast.checkpoints import ENGINE_LAYOUTS, LAYOUTS, StoredTensor
from holdfast.errors import CheckpointError
from holdfast.execution.layers.linear import DenseLinear, PackedLinear, QuantizedLinear, StackedLinear
from holdfast.execution.native.products import LAYOUT_BYTES, LAYOUT_NUMBERS, block_elements
from holdfast.execution.weights.gguf_block_types import KINDS
from holdfast.execution.weights.gguf_blocks import (
    QUANTIZED_LAYOUTS,
    STORED_LAYOUTS,
    QuantizedMatrix,
    dequantize_stored,
    expand_into,
)

CPU = torch.device("cpu")
ROWS, COLUMNS = 70, 512


def stored(layout: str, seed: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, numpy.ndarray]:
    """Bytes as a file has them, and what the gguf package reads from them."""
    source = written if layout in (*WRITTEN, "F32", "F16", "BF16") else drawn
    raw, expected = source(layout, rows, COLUMNS, seed)
    return torch.from_numpy(raw.copy()), expected


def matrix(layout: str, seed: int = 0) -> tuple[QuantizedMatrix, torch.Tensor]:
    raw, expected = stored(layout, seed)
    result = QuantizedMatrix(layout, ROWS, COLUMNS, CPU)
    result.fill_rows(0, raw[:30])
    result.fill_rows(30, raw[30:])
    return result, torch.from_numpy(expected)


@pytest.mark.parametrize("layout", sorted(QUANTIZED_LAYOUTS))
def test_expansion_is_bit_exact(layout: str) -> None:
    quantized, expected = matrix(layout)
    whole = torch.empty(ROWS, COLUMNS)
    quantized.dequantize(0, ROWS, whole)
    assert torch.equal(whole, expected)
    part = torch.empty(7, COLUMNS)
    quantized.dequantize(11, 18, part)
    assert torch.equal(part, expected[11:18])
    rows = torch.tensor([3, 69, 3, 0])
    some = torch.empty(4, COLUMNS)
    quantized.dequantize_some(rows, some)
    assert torch.equal(some, expected[rows])
    direct = torch.empty(ROWS, COLUMNS)
    dequantize_stored(layout, stored(layout)[0], direct)
    assert torch.equal(direct, expected)


@pytest.mark.parametrize("layout", sorted(QUANTIZED_LAYOUTS))
def test_every_byte_of_a_block_means_what_gguf_says(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes instead of quantized numbers: every code and small scale; split in several pieces."""
    monkeypatch.setattr("holdfast.execution.weights.gguf_blocks.PIECE_ELEMENTS", 5 * COLUMNS)
    raw, expected = drawn(layout, 50, COLUMNS, 1, scale=20.0)
    found = torch.empty(50, COLUMNS)
    dequantize_stored(layout, torch.from_numpy(raw), found)
    assert torch.equal(found, torch.from_numpy(expected))
    quantized = QuantizedMatrix(layout, 50, COLUMNS, CPU)
    assert quantized.nbytes == raw.nbytes, "the same bytes in another order"
    quantized.fill_rows(0, torch.from_numpy(raw))
    quantized.dequantize(0, 50, found.fill_(float("nan")))
    assert torch.equal(found, torch.from_numpy(expected))


def test_rows_of_broken_blocks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="224"):
        QuantizedMatrix("Q4_K", 4, 224, CPU)


@pytest.mark.parametrize("layout", sorted(QUANTIZED_LAYOUTS))
def test_rows_can_be_reordered_while_quantized(layout: str) -> None:
    raw, expected = stored(layout)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    quantized = QuantizedMatrix(layout, ROWS, COLUMNS, CPU)
    quantized.fill_rows(0, raw, order)
    whole = torch.empty(ROWS, COLUMNS)
    quantized.dequantize(0, ROWS, whole)
    assert torch.equal(whole, torch.from_numpy(expected)[order])


def test_every_code_and_scale_of_mxfp4_means_what_gguf_says() -> None:
    """But for 255, which is no number."""
    codes = torch.randint(0, 256, (255, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes[:, 0], codes[:, 1] = torch.arange(255), 255
    raw = torch.cat([torch.arange(255, dtype=torch.uint8)[:, None], codes], 1)
    found = torch.empty(255, 32)
    dequantize_stored("MXFP4", raw, found)
    with numpy.errstate(over="ignore"):
        expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize("layout", [*sorted(QUANTIZED_LAYOUTS), "F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_bytes_expand_to_any_type(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several tiles, with and without a new order of rows."""
    monkeypatch.setattr("holdfast.execution.weights.gguf_blocks.EXPAND_BYTES", 4 * COLUMNS * 9)
    raw, expected = stored(layout)
    flat = raw.contiguous().view(torch.uint8).reshape(-1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    tensor = StoredTensor("any", (ROWS, COLUMNS), layout, Path(), 0, flat.nbytes)
    for picked in (None, order):
        found = torch.empty(ROWS, COLUMNS, dtype=dtype)
        expand_into(found, flat, tensor, picked)
        wanted = torch.from_numpy(expected) if picked is None else torch.from_numpy(expected)[picked]
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [*sorted(QUANTIZED_LAYOUTS), "dense", "packed", "stacked"])
def test_products_are_near_float64(tokens: int, biased: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.execution.layers.linear.TILE_BYTES", 4 * COLUMNS * 32)
    torch.manual_seed(tokens)
    bias = torch.randn(ROWS) if biased else None
    quantized, weight = matrix(kind if kind in QUANTIZED_LAYOUTS else "Q8_0")
    linear = {
        "dense": lambda: DenseLinear(weight, bias),
        "packed": lambda: PackedLinear(weight, bias),
        "stacked": lambda: StackedLinear([DenseLinear(weight, bias), QuantizedLinear(quantized, torch.float32, bias)]),
    }.get(kind, lambda: QuantizedLinear(quantized, torch.float32, bias))()
    x = torch.randn(tokens, COLUMNS)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if kind == "stacked":
        expected = torch.cat((expected, expected), dim=1)
    out = torch.full((tokens, linear.rows), float("nan"))
    linear.write(x, out)
    terms = 1e-6 * float((x.double().abs() @ weight.double().abs().t()).max()) + 1e-6
    torch.testing.assert_close(out.double(), expected, atol=terms, rtol=1e-6)
    residual = torch.randn_like(out)
    summed = residual.double() + expected
    linear.add(x, residual)
    torch.testing.assert_close(residual.double(), summed, atol=terms, rtol=1e-6)


def test_what_the_engine_reads_is_known_everywhere() -> None:
    """A layout is expanded by torch and multiplied by compiled kernels and on GPUs, in blocks of the same size."""
    quantized = {name for name in ENGINE_LAYOUTS if LAYOUTS[name].quantized}
    assert quantized == STORED_LAYOUTS
    assert set(LAYOUT_NUMBERS) == ENGINE_LAYOUTS - {"MXFP4"}, "which becomes codes and scales of a ScaledMatrix"
    for name in QUANTIZED_LAYOUTS:
        known = LAYOUTS[name]
        assert (known.block_elements, known.block_bytes) == (KINDS[name].elements, KINDS[name].nbytes)
        assert (known.block_elements, known.block_bytes) == (block_elements(name), LAYOUT_BYTES[name])
