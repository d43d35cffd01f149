"""Quantized matrices: expanded bit for bit as the gguf package does, products held against float64."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch

from holdfast.execution.linear import DenseLinear, PackedLinear, QuantizedLinear, StackedLinear
from holdfast.execution.quantization import QUANTIZED_LAYOUTS, QuantizedMatrix, dequantize_stored
from holdfast.execution.weights import expand_into

CPU = torch.device("cpu")
ROWS, COLUMNS = 70, 96


def stored(layout: str, seed: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, numpy.ndarray]:
    """Bytes as a file has them, and what the gguf package reads from them."""
    kind = gguf.GGMLQuantizationType[layout]
    values = numpy.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(numpy.float32)
    raw = gguf.quants.quantize(values, kind)
    return torch.from_numpy(raw.copy()), gguf.quants.dequantize(raw, kind)


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
def test_every_byte_of_a_block_means_what_gguf_says(layout: str) -> None:
    """Random bytes instead of quantized numbers: scales of any size, every quant."""
    kind = gguf.GGMLQuantizationType[layout]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = numpy.random.default_rng(1).integers(0, 256, (200, block_bytes), dtype=numpy.uint8)
    raw[:, 1] &= 0x3F  # finite scales
    raw[:, 3] &= 0x3F
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    found = torch.empty(200, 32)
    dequantize_stored(layout, torch.from_numpy(raw), found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", sorted(QUANTIZED_LAYOUTS))
def test_rows_can_be_reordered_while_quantized(layout: str) -> None:
    raw, expected = stored(layout)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    quantized = QuantizedMatrix(layout, ROWS, COLUMNS, CPU)
    quantized.fill_rows(0, raw, order)
    whole = torch.empty(ROWS, COLUMNS)
    quantized.dequantize(0, ROWS, whole)
    assert torch.equal(whole, torch.from_numpy(expected)[order])


@pytest.mark.parametrize("layout", [*sorted(QUANTIZED_LAYOUTS), "F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_bytes_expand_to_any_type(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several tiles, with and without a new order of rows."""
    monkeypatch.setattr("holdfast.execution.weights.EXPAND_BYTES", 4 * COLUMNS * 9)
    raw, expected = stored(layout)
    flat = raw.contiguous().view(torch.uint8).reshape(-1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    for picked in (None, order):
        found = torch.empty(ROWS, COLUMNS, dtype=dtype)
        expand_into(found, flat, layout, picked)
        wanted = torch.from_numpy(expected) if picked is None else torch.from_numpy(expected)[picked]
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [*sorted(QUANTIZED_LAYOUTS), "dense", "packed", "stacked"])
def test_products_are_near_float64(tokens: int, biased: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.execution.linear.TILE_BYTES", 4 * COLUMNS * 32)
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
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)
    residual = torch.randn_like(out)
    summed = residual.double() + expected
    linear.add(x, residual)
    torch.testing.assert_close(residual.double(), summed, atol=1e-4, rtol=1e-5)
