# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of one row with matrices of four-bit codes, straight from memory to registers: GGUF's Q4_0, Q4_1 and Q4_K,
and int4 codes with scales.

    element = code · scale + added          both of a piece of 32 columns

A thread has neighbouring codes of one piece and the inputs that lie beside them, so that nothing changes hands before
the sums do. Sums are float32. A norm of the inputs may ride along: its scale is not known before all columns were read,
so it is applied to the sums. Safe in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.triton_kernels.quantized.kquant_codes import BLOCK_FORMS, as_float, load_scales
from holdfast.execution.triton_kernels.quantized.product_tiles import VECTOR_ELEMENTS, VectorTile, vector_tile
from holdfast.execution.triton_kernels.quantized.products import put
from holdfast.execution.triton_kernels.quantized.scaled_codes import scale_values
from holdfast.execution.weights.scaled_matrix import INT4_ZERO, ScaledMatrix

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
def _multiply(
    x, words, scales, minimums, small, out, norm, bias, outputs, columns, groups, epsilon,
    KIND: tl.constexpr, GROUP: tl.constexpr, IN_BLOCK: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr,
    OFFSET: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """PIECES of ROWS matrix rows at a time."""
    # As many words as there are inputs beside their bytes in a load of 16 bytes: both then lie alike over the threads.
    TOGETHER: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    pieces = columns // 32
    # Pieces come before rows: of two dimensions alike to it, the compiler lays threads along the first.
    piece, row = tl.arange(0, PIECES)[:, None], tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    row = tl.minimum(row, outputs - 1).to(tl.int64)
    lane = tl.arange(0, 16)[None, None, :]
    place = row[:, :, None] * (columns // 8) + piece[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    line = words + tl.max_contiguous(place, (1, 1, TOGETHER))
    sums = tl.zeros((PIECES, ROWS, 4), tl.float32)
    squares = tl.zeros((PIECES, 1, 16), tl.float32)
    for start in tl.range(0, pieces, PIECES):
        here = start + piece
        known, inside = here < pieces, (here < pieces)[:, :, None]
        found = tl.load(line + start * 4, mask=inside, other=0, eviction_policy="evict_first")
        scale, added = _scales(
            scales, minimums, small, row, here, pieces, groups, known, KIND, GROUP, IN_BLOCK, SMALL, MINIMUM, OFFSET
        )  # fmt: skip
        low, high, part_squares = _inputs(x, norm, here[:, :, None] * 32 + lane, inside, NORM)
        sums += _terms(found, low, high, scale, added, EXACT)
        if NORM:
            squares += part_squares
    total = tl.sum(tl.sum(sums, 2), 0)
    if NORM:
        total *= tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / columns + epsilon)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    put(out, output, total, bias, output, output < outputs, BIAS, ADD)


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


def vector_product(
    x: torch.Tensor,
    matrix: VectorPlanes,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    tile: VectorTile | None = None,
) -> None:
    """out [1, outputs] = (or +=) norm(x) [1, inputs] · matrixᵀ + bias. Without norm_weight x is taken as it is. `tile`
    replaces the table's."""
    (rows, columns), outputs = x.shape, out.shape[1]
    if rows != 1:
        raise EngineError("a product with a vector has one row", needed="1", found=str(rows))
    tile = tile or vector_tile(x.element_size())
    scales = matrix.scales
    _multiply[(triton.cdiv(outputs, tile.outputs),)](
        x, matrix.codes.view(torch.int32), scales, scales if matrix.minimums is None else matrix.minimums,
        scales if matrix.small is None else matrix.small, out, x if norm_weight is None else norm_weight,
        x if bias is None else bias, outputs, columns, scales.shape[1], epsilon, KIND=matrix.kind, GROUP=matrix.group,
        IN_BLOCK=matrix.in_block, SMALL=matrix.small_bytes, MINIMUM=matrix.minimums is not None, OFFSET=matrix.offset,
        NORM=norm_weight is not None, BIAS=bias is not None, ADD=accumulate,
        EXACT=x.element_size() == 4 or x.device.type == "cpu", ROWS=tile.outputs, PIECES=tile.pieces,
        num_warps=tile.warps,
    )  # fmt: skip


def vectors_of_codes(matrix: ScaledMatrix) -> VectorPlanes | None:
    """None where one row is multiplied faster, or only, by scaled_products.py."""
    layout = matrix.layout
    small = matrix.rows * matrix.columns <= VECTOR_ELEMENTS
    if layout.codes != "int4" or layout.group_rows != 1 or matrix.order is not None or not small:
        return None
    group = (layout.group or matrix.columns) // 32
    return VectorPlanes(matrix.codes, matrix.scales, matrix.zeros, None, "", group, 1, 0, INT4_ZERO)


def vectors_of_blocks(matrix: BlockPlanes) -> VectorPlanes | None:
    """None of other kinds than those with four-bit codes and no table."""
    form = BLOCK_FORMS[matrix.layout]
    if form.bits != 4 or form.table:
        return None
    return VectorPlanes(
        matrix.quants, matrix.scales, matrix.minimums, matrix.small, matrix.layout, 0, form.pieces, form.small,
        form.offset,
    )  # fmt: skip
