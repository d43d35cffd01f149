# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of one or two rows with matrices of four-bit codes, straight from memory to registers: GGUF's Q4_0, Q4_1 and
Q4_K, and int4 codes with scales.

    element = code · scale + added          both of a piece of 32 columns

A thread has neighbouring codes of one piece and the inputs that lie beside them, so that nothing changes hands before
the sums do. Sums are float32. A norm of the inputs may ride along: a row's scale is not known before its columns were
read, so it is applied to the sums. Safe in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.quantized.kquant_codes import as_float, load_scales
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_ROWS, VectorTile, vector_tile
from holdfast.execution.triton_kernels.quantized.products import put, put_gated
from holdfast.execution.triton_kernels.quantized.scaled_codes import scale_values

RAISED = tl.constexpr(128.0)
"""A code in the bits of 128.0 that stand for ones, or for sixteenths, adds itself: cheaper than a conversion."""


@triton.jit
def _code(words, BYTE: tl.constexpr, HIGH: tl.constexpr, EXACT: tl.constexpr):
    """One half of a byte of each word, of the high one sixteenths; raised by RAISED unless EXACT."""
    if EXACT:
        value = as_float((words >> (8 * BYTE + 4 * HIGH)) & 15, 0)
        if HIGH:
            value *= 0.0625
        return value
    else:
        # The low half of byte 2 and the high one of byte 1 are in place.
        FROM: tl.constexpr = 8 * BYTE - (8 if HIGH == 1 else 16)
        if FROM > 0:
            words = words >> FROM
        elif FROM < 0:
            words = words << -FROM
        # One instruction each, which the compiler does not find by itself.
        if HIGH == 1:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x0000f000, 0x43000000, 0xea;", "=r,r", [words], tl.float32, is_pure=True, pack=1
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000f0000, 0x43000000, 0xea;", "=r,r", [words], tl.float32, is_pure=True, pack=1
            )  # fmt: skip


@triton.jit
def _scales(
    scales, minimums, small, row, piece, pieces, groups, inside, KIND: tl.constexpr, GROUP: tl.constexpr,
    IN_BLOCK: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """What codes of a piece are multiplied by, and what is added then. GROUP: pieces of a group, of codes with scales;
    0: a block of GGUF."""
    if GROUP:
        place = row * groups + piece // GROUP
        scale = scale_values(tl.load(scales + place, mask=inside, other=0.0))
        zero = tl.full(scale.shape, OFFSET, tl.float32)
        if MINIMUM:
            zero = tl.load(minimums + place, mask=inside, other=0).to(tl.float32)
        return scale, -zero * scale
    else:
        scale, _, added, _ = load_scales(
            scales, minimums, small, row * pieces + piece, inside, KIND, IN_BLOCK, SMALL, MINIMUM
        )  # fmt: skip
        if not MINIMUM:
            added = scale * -OFFSET
        return scale, added


@triton.jit
def _quarters(tile):
    """[pieces, 1, 16] to four [pieces, 1, 4]: bytes 0, 1, 2 and 3 of each word."""
    even, odd = tl.split(tile.reshape(tile.shape[0], 1, 4, 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _inputs(x, norm, column, inside, NORM: tl.constexpr):
    """Inputs of both halves of pieces in float32, the high ones times 16, and squares of both before the norm's
    weight."""
    low = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + column + 16, mask=inside, other=0.0).to(tl.float32)
    squares = low * low + high * high
    if NORM:
        low *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        high *= tl.load(norm + column + 16, mask=inside, other=0.0).to(tl.float32)
    return low, high * 16.0, squares


@triton.jit
def _terms(words, low, high, scale, added, EXACT: tl.constexpr):
    """Of the products of one step with each word: [pieces, rows, 4]."""
    low0, low1, low2, low3 = _quarters(low)
    high0, high1, high2, high3 = _quarters(high)
    found = _code(words, 0, 0, EXACT) * low0
    found += _code(words, 1, 0, EXACT) * low1
    found += _code(words, 2, 0, EXACT) * low2
    found += _code(words, 3, 0, EXACT) * low3
    found += _code(words, 0, 1, EXACT) * high0
    found += _code(words, 1, 1, EXACT) * high1
    found += _code(words, 2, 1, EXACT) * high2
    found += _code(words, 3, 1, EXACT) * high3
    lows, highs = (low0 + low1) + (low2 + low3), (high0 + high1) + (high2 + high3)
    if not EXACT:
        found -= RAISED * (lows + highs)
    return found * scale[:, :, None] + (lows + highs * 0.0625) * added[:, :, None]


@triton.jit
def _finish_row(
    out, sums, up, squares, bias, row, outputs, columns, epsilon,
    ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    total, up_total = tl.sum(tl.sum(sums, 2), 0), tl.sum(tl.sum(up, 2), 0)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / columns + epsilon)
        total, up_total = total * scale, up_total * scale
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = output < outputs
    if ACTIVATION >= 0:
        put_gated(out, row + output, total, up_total, bias, output, outputs, inside, BIAS, ACTIVATION)
    else:
        put(out, row + output, total, bias, output, inside, BIAS, ADD)


@triton.jit
def _multiply(
    x, words, scales, minimums, small, out, norm, bias, outputs, columns, groups, x_stride, out_stride, epsilon,
    KIND: tl.constexpr, GROUP: tl.constexpr, IN_BLOCK: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr,
    OFFSET: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """PIECES of ROWS matrix rows at a time."""
    GATED: tl.constexpr = ACTIVATION >= 0
    # As many words as there are inputs beside their bytes in a load of 16 bytes: both then lie alike over the threads.
    TOGETHER: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    pieces = columns // 32
    # Pieces come before rows: of two dimensions alike to it, the compiler lays threads along the first.
    piece, row = tl.arange(0, PIECES)[:, None], tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    row = tl.minimum(row, outputs - 1).to(tl.int64)
    up_row = row + outputs
    lane = tl.arange(0, 16)[None, None, :]
    place = row[:, :, None] * (columns // 8) + piece[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    line = words + tl.max_contiguous(place, (1, 1, TOGETHER))
    up_line = line + tl.cast(outputs, tl.int64) * (columns // 8)
    sums = tl.zeros((PIECES, ROWS, 4), tl.float32)
    up, second_sums, second_up = sums, sums, sums
    squares = tl.zeros((PIECES, 1, 16), tl.float32)
    second_squares = squares
    for start in tl.range(0, pieces, PIECES):
        here = start + piece
        inside = (here < pieces)[:, :, None]
        found = tl.load(line + start * 4, mask=inside, other=0, eviction_policy="evict_first")
        known = here < pieces
        scale, added = _scales(
            scales, minimums, small, row, here, pieces, groups, known, KIND, GROUP, IN_BLOCK, SMALL, MINIMUM, OFFSET
        )  # fmt: skip
        up_scale, up_added = scale, added
        if GATED:
            up_scale, up_added = _scales(
                scales, minimums, small, up_row, here, pieces, groups, known, KIND, GROUP, IN_BLOCK, SMALL, MINIMUM,
                OFFSET,
            )  # fmt: skip
        column = here[:, :, None] * 32 + lane
        low, high, part_squares = _inputs(x, norm, column, inside, NORM)
        sums += _terms(found, low, high, scale, added, EXACT)
        if NORM:
            squares += part_squares
        up_found = found
        if GATED:
            up_found = tl.load(up_line + start * 4, mask=inside, other=0, eviction_policy="evict_first")
            up += _terms(up_found, low, high, up_scale, up_added, EXACT)
        if TWO:
            low, high, part_squares = _inputs(x + x_stride, norm, column, inside, NORM)
            second_sums += _terms(found, low, high, scale, added, EXACT)
            if NORM:
                second_squares += part_squares
            if GATED:
                second_up += _terms(up_found, low, high, up_scale, up_added, EXACT)
    _finish_row(
        out, sums, up, squares, bias, 0, outputs, columns, epsilon, ROWS, NORM, BIAS, ADD, ACTIVATION
    )  # fmt: skip
    if TWO:
        _finish_row(
            out, second_sums, second_up, second_squares, bias, out_stride, outputs, columns, epsilon,
            ROWS, NORM, BIAS, ADD, ACTIVATION,
        )  # fmt: skip


class VectorPlanes(NamedTuple):
    """Codes with scales, or blocks: what `_multiply` has to know of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    """Zero points, where there are groups."""
    small: torch.Tensor | None
    kind: str
    group: int
    """Pieces of 32 columns that share a scale; 0: a block of GGUF."""
    in_block: int
    small_bytes: int
    offset: int


def multiply_vectors(
    x: torch.Tensor,
    planes: VectorPlanes,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    bias: torch.Tensor | None,
    activation: int,
    accumulate: bool,
    tile: VectorTile | None = None,
) -> None:
    """One row of x or two; `activation`: as layer.py counts them, below 0: none, and outputs are not gated."""
    (rows, columns), outputs = x.shape, out.shape[1]
    tile = tile or vector_tile(outputs, columns, x.element_size(), gated=activation >= 0, rows=rows)
    known: dict[str, Any] = {
        "KIND": planes.kind, "GROUP": planes.group, "IN_BLOCK": planes.in_block, "SMALL": planes.small_bytes,
        "MINIMUM": planes.minimums is not None, "OFFSET": planes.offset, "TWO": rows == FEW_ROWS,
        "NORM": norm_weight is not None, "BIAS": bias is not None, "ADD": accumulate, "ACTIVATION": activation,
        "EXACT": x.element_size() == 4 or x.device.type == "cpu", "ROWS": tile.outputs, "PIECES": tile.pieces,
        "num_warps": tile.warps,
    }  # fmt: skip
    scales = planes.scales
    _multiply[(triton.cdiv(outputs, tile.outputs),)](
        x, planes.codes.view(torch.int32), scales, scales if planes.minimums is None else planes.minimums,
        scales if planes.small is None else planes.small, out, x if norm_weight is None else norm_weight,
        x if bias is None else bias, outputs, columns, scales.shape[1], x.stride(0), out.stride(0), epsilon, **known,
    )  # fmt: skip
