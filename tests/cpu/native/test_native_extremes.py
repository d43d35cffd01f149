"""Products with the largest and smallest quants, scales and activations there are, and one result for all variants."""

from __future__ import annotations

from functools import cache

import gguf
import numpy
import pytest
import torch
from examples import in_quick_run
from quantized_blocks import NEW_KINDS, OLD_KINDS, Bytes, Floats, block_shape, drawn, read, scales_at

from holdfast.execution import native
from holdfast.execution.native import loading
from holdfast.hardware import kernels

ALL_VARIANTS = True
"""Each overflows, where it does, in its own way."""
KINDS = (*OLD_KINDS, *NEW_KINDS)
ROWS = (1, 3, 8, 9, 17, 71) if in_quick_run() else (*range(1, 10), 17, 64, 71)
"""Up to eight, each count has a function of its own."""
IN_INTEGERS = [name for name in kernels.runnable_variants() if name != "portable"]


@cache
def filled(kind: str, rows: int, columns: int, byte: int, scale: float) -> tuple[Bytes, Floats]:
    """Every bit of codes and small scales alike, so that all quants are at one end or the other."""
    elements, size = block_shape(kind)
    blocks = numpy.full((rows, columns // elements, size), byte, numpy.uint8)
    for place in scales_at(kind):
        blocks[..., place : place + 2] = numpy.array([scale], numpy.float16).view(numpy.uint8)
    raw = blocks.reshape(rows, -1)
    return raw, read(kind, raw)


def activations(rows: int, columns: int, pattern: str) -> torch.Tensor:
    """Those that make sums as large as they get, and whole numbers whose digits are at their ends."""
    if pattern == "largest":
        return torch.full((rows, columns), 1.0)
    if pattern == "alternating":
        return torch.ones(rows, columns).mul(1 - 2 * (torch.arange(columns) % 2))
    # Whole numbers -32,600 to 32,600 with the largest first, so that 1 is the unit: -128 and 127 as lower digits.
    numbers = torch.tensor([32600, -32600, -128, 127, 128, -129, -32640 + 128, 32512, 255, -256] * 4)[:32]
    return numbers.float().repeat(rows, columns // 32)


@pytest.mark.parametrize("kind", KINDS)
def test_quants_and_activations_at_their_ends(kind: str) -> None:
    for byte in (0x00, 0x80, 0x7F, 0xFF):
        raw, weights = filled(kind, 21, 512, byte, 0.5)
        matrix = native.BlockMatrix(torch.from_numpy(raw.copy()), kind)
        for pattern in ("largest", "alternating", "digits"):
            x = activations(max(ROWS), 512, pattern)
            sizes = x.abs().numpy().astype(numpy.float64) @ numpy.abs(weights.astype(numpy.float64)).T
            exact = x.numpy().astype(numpy.float64) @ weights.astype(numpy.float64).T
            # They are whole numbers already: only float32's own rounding is left, of minimums among others.
            bound = 2.0**-19 * sizes + 1e-30
            for rows in ROWS:
                out = torch.full((rows, 21), float("nan"))
                matrix.write(x[:rows], out)
                assert (numpy.abs(out.numpy() - exact[:rows]) <= bound[:rows]).all(), (byte, pattern, rows)


SCALES_AND_SIZES = [(6e-8, 1.0), (6e-8, 1e-25), (60000.0, 1.0), (60000.0, 1e28), (1.0, 1e-35)]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_at_their_ends(kind: str) -> None:
    raw, _ = drawn(kind, 35, 512, seed=7)
    for scale, size in SCALES_AND_SIZES:
        _scales_at_an_end(kind, raw, scale, size)


def _scales_at_an_end(kind: str, raw: Bytes, scale: float, size: float) -> None:
    blocks = raw.reshape(35, -1, block_shape(kind)[1]).copy()
    for place in scales_at(kind):
        blocks[..., place : place + 2] = numpy.array([scale], numpy.float16).view(numpy.uint8)
    weights = read(kind, blocks.reshape(35, -1))
    matrix = native.BlockMatrix(torch.from_numpy(blocks.reshape(35, -1).copy()), kind)
    x = torch.randn(11, 512, generator=torch.Generator().manual_seed(1)) * size
    out = torch.full((11, 35), float("nan"))
    matrix.write(x, out)
    sizes = numpy.abs(x.numpy().astype(numpy.float64))
    peaks = sizes.reshape(11, -1, 32).max(2).repeat(32, axis=1)
    large = numpy.abs(weights.astype(numpy.float64))
    # Blocks of activations below 1e-30 count as zeros; results below float32's normal numbers lose digits.
    bound = peaks @ large.T / 60000 + 2.0**-19 * sizes @ large.T + 1e-30 * large.sum(1) + 1e-37
    exact = x.numpy().astype(numpy.float64) @ weights.astype(numpy.float64).T
    assert (numpy.abs(out.numpy() - exact) <= bound).all(), (scale, size)


@pytest.mark.parametrize("variant", IN_INTEGERS[:1], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_variants_agree_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, _ = drawn(kind, 48, 768, seed=4)
    x = torch.randn(70, 768, generator=torch.Generator().manual_seed(2))
    results = []
    for name in IN_INTEGERS:
        monkeypatch.setenv(kernels.FORCED_VARIANT, name)
        kernels.kernel_choice.cache_clear()
        loading._find.cache_clear()
        out = torch.full((70, 48), float("nan"))
        native.BlockMatrix(torch.from_numpy(raw.copy()), kind).write(x, out)
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_the_last_bundle(kind: str) -> None:
    """Weights lie woven in bundles of 4, 8 or 16 rows; the rest lies as in the file."""
    for rows in (1, 15, 16, 17, 31, 33):
        raw, weights = drawn(kind, rows, 256, seed=rows)
        matrix = native.BlockMatrix(torch.from_numpy(raw.copy()), kind)
        whole = torch.full((rows, 256), float("nan"))
        matrix.dequantize(whole)
        assert numpy.array_equal(whole.numpy(), weights), rows
        block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        assert matrix.nbytes == len(raw) * block_bytes * (256 // block_shape(kind)[0])
