# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of at most 16 rows with GGUF's quantized blocks, and blocks expanded to rows for larger products.

The kernels here are for blocks of 32 elements in 4 or 8 bits; those of the denser kinds are in kquant_blocks.py.

Planes lie as `execution.weights.gguf_blocks` keeps them: quants [rows, blocks, bytes], scales and minimums [rows,
blocks, 1].
A packed byte holds two quants: element i of a block in the low half, element i + 16 in the high one, so that each half
is taken with 16 neighbouring inputs. Only quantized bytes are read. An element is (quant - offset) · scale + minimum in
float32, which is exact but for the last sum. Safe in a CUDA graph. Knows nothing of files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import token_of
from holdfast.execution.triton_kernels.quantized.kquant_blocks import (
    KQUANTS,
    Planes,
    expand,
    multiply_few,
    multiply_more,
)
from holdfast.execution.triton_kernels.quantized.product_tiles import (
    FEW_ROWS,
    MOST_BLOCK_ROWS,
    ProductTile,
    few_rows_block_tile,
    more_rows_block_tile,
)
from holdfast.execution.triton_kernels.quantized.products import put

OFFSETS = {"Q8_0": 0, "Q4_0": 8, "Q4_1": 0}
EXPANDED_BLOCKS = 32
"""Blocks of a row that a program expands at a time."""


class BlockPlanes(NamedTuple):
    """A matrix of rows of blocks, or some neighbouring rows of one: `rows` cuts without a copy."""

    layout: str
    quants: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    high: torch.Tensor | None = None
    small: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> BlockPlanes:
        minimums, high, small = (
            None if plane is None else plane[first:last] for plane in (self.minimums, self.high, self.small)
        )
        return BlockPlanes(self.layout, self.quants[first:last], self.scales[first:last], minimums, high, small)

    @property
    def denser(self) -> Planes:
        """As kquant_blocks.py takes them."""
        return self.quants, self.high, self.scales, self.minimums, self.small


@triton.jit
def _load_blocks(
    quants, scales, minimums, row, block, lane, blocks, inside,
    LANES: tl.constexpr, MINIMUM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """(quant bytes of row, block and lane, scales and minimums of row and block as float16).

    A thread takes TOGETHER neighbouring quants at once."""
    place = row * blocks + block
    byte = tl.max_contiguous(place * LANES + lane, (1, 1, TOGETHER))
    found = tl.load(quants + byte, mask=inside, other=0, eviction_policy="evict_first")
    scale = tl.load(scales + place, mask=inside, other=0.0)
    minimum = scale
    if MINIMUM:
        minimum = tl.load(minimums + place, mask=inside, other=0.0)
    return found, scale, minimum


@triton.jit
def _block_inputs(x, block, lane, inside, PACKED: tl.constexpr):
    """Inputs of each lane in float32: of the low halves, and where quants are packed, of the high ones."""
    low = tl.load(x + block * 32 + lane, mask=inside, other=0.0).to(tl.float32)
    high = low
    if PACKED:
        high = tl.load(x + block * 32 + 16 + lane, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _block_terms(
    found, scale, minimum, low, high, PACKED: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """The terms of the products with one tile, lane by lane; scales are applied once for both halves."""
    if PACKED:
        terms = (found & 15).to(tl.float32) * low + (found >> 4).to(tl.float32) * high
        if OFFSET:
            terms -= OFFSET * (low + high)
    else:
        terms = found.to(tl.float32) * low
    terms *= scale.to(tl.float32)
    if MINIMUM:
        terms += minimum.to(tl.float32) * (low + high)
    return terms


@triton.jit
def _multiply_few(
    x, quants, scales, minimums, out, bias, outputs, x_stride, out_stride,
    BLOCKS: tl.constexpr, TWO: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr,
    OFFSET: tl.constexpr, MINIMUM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One or two rows of x. The next tile of the matrix is on its way while this one is multiplied."""
    LANES: tl.constexpr = 16 if PACKED else 32
    # As many as of the inputs: quants and inputs then lie alike over the threads and meet without a detour.
    TOGETHER: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    # Blocks come before rows: of two dimensions alike to it, the compiler lays threads along the first.
    block, lane = tl.arange(0, TILE)[:, None, None], tl.arange(0, LANES)[None, None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :, None]
    present = row < outputs
    found, scale, minimum = _load_blocks(
        quants, scales, minimums, row, block, lane, BLOCKS, present & (block < BLOCKS), LANES, MINIMUM, TOGETHER
    )  # fmt: skip
    sums = tl.zeros((TILE, ROWS, LANES), tl.float32)
    second_sums = sums
    for start in tl.range(0, BLOCKS, TILE):
        next_found, next_scale, next_minimum = found, scale, minimum
        if BLOCKS > TILE:
            following = start + TILE + block
            next_found, next_scale, next_minimum = _load_blocks(
                quants, scales, minimums, row, following, lane, BLOCKS, present & (following < BLOCKS),
                LANES, MINIMUM, TOGETHER,
            )  # fmt: skip
        at = start + block
        low, high = _block_inputs(x, at, lane, at < BLOCKS, PACKED)
        sums += _block_terms(found, scale, minimum, low, high, PACKED, OFFSET, MINIMUM)
        if TWO:
            low, high = _block_inputs(x + x_stride, at, lane, at < BLOCKS, PACKED)
            second_sums += _block_terms(found, scale, minimum, low, high, PACKED, OFFSET, MINIMUM)
        found, scale, minimum = next_found, next_scale, next_minimum
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = output < outputs
    put(out, output, tl.sum(tl.sum(sums, 2), 0), bias, output, inside, BIAS, ADD)
    if TWO:
        put(out, out_stride + output, tl.sum(tl.sum(second_sums, 2), 0), bias, output, inside, BIAS, ADD)


@triton.jit
def _expand(half, scale, minimum, OFFSET: tl.constexpr, MINIMUM: tl.constexpr):
    """Quants of one half as elements in float32."""
    wide = half.to(tl.float32)
    if OFFSET:
        wide -= OFFSET
    wide *= scale.to(tl.float32)
    if MINIMUM:
        wide += minimum.to(tl.float32)
    return wide


@triton.jit(do_not_specialize=["rows"])
def _multiply_more(
    x, quants, scales, minimums, out, bias, rows, outputs, x_stride, out_stride,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows of x; elements are rounded to its type, as an expanded matrix would be."""
    LANES: tl.constexpr = 16 if PACKED else 32
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    block, lane = tl.arange(0, TILE)[None, :, None], tl.arange(0, LANES)[None, None, :]
    x_row, column = tl.arange(0, 16)[:, None], tl.arange(0, TILE * LANES)[None, :]
    live = x_row < rows
    inputs = x + x_row * x_stride + column // LANES * 32 + column % LANES
    sums = tl.zeros((16, ROWS), tl.float32)
    for start in tl.range(0, BLOCKS, TILE):
        at = start + block
        found, scale, minimum = _load_blocks(
            quants, scales, minimums, row, at, lane, BLOCKS, (row < outputs) & (at < BLOCKS), LANES, MINIMUM, 16
        )  # fmt: skip
        inside = live & (start + column // LANES < BLOCKS)
        low = found
        if PACKED:
            low = found & 15
        part = tl.load(inputs + start * 32, mask=inside, other=0.0)
        tile = _expand(low, scale, minimum, OFFSET, MINIMUM).to(kind).reshape(ROWS, TILE * LANES)
        sums = tl.dot(part, tile.T, sums, input_precision="ieee")
        if PACKED:
            part = tl.load(inputs + start * 32 + 16, mask=inside, other=0.0)
            tile = _expand(found >> 4, scale, minimum, OFFSET, MINIMUM).to(kind).reshape(ROWS, TILE * LANES)
            sums = tl.dot(part, tile.T, sums, input_precision="ieee")
    written = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    inside = live & (written < outputs)
    put(out, x_row.to(tl.int64) * out_stride + written, sums, bias, written, inside, BIAS, ADD)


def block_product(
    x: torch.Tensor,
    matrix: BlockPlanes,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    tile: ProductTile | None = None,
) -> None:
    """out [rows, outputs] = (or +=) x [rows, inputs] · matrixᵀ + bias, for at most 16 rows.

    Columns of x and out lie side by side; rows may be apart. `tile` replaces the table's, its `inputs` counted in
    blocks.
    """
    rows, (outputs, blocks, _) = len(x), matrix.quants.shape
    if rows > MOST_BLOCK_ROWS:
        raise EngineError(
            "too many rows for a product with blocks", needed=f"at most {MOST_BLOCK_ROWS}", found=str(rows)
        )
    if rows == 0:
        return
    if matrix.layout in KQUANTS:
        _denser_product(x, matrix, out, accumulate, bias, tile)
        return
    packed, offset, minimum = _kind(matrix)
    planes = (x, matrix.quants, matrix.scales, matrix.minimums if minimum else matrix.scales, out)
    added = matrix.scales if bias is None else bias
    if rows <= FEW_ROWS:
        tile = tile or few_rows_block_tile(rows, outputs, blocks, 16 if packed else 32, x.element_size())
        _multiply_few[(triton.cdiv(outputs, tile.outputs),)](
            *planes, added, outputs, x.stride(0), out.stride(0), BLOCKS=blocks, TWO=rows == FEW_ROWS,
            BIAS=bias is not None, ADD=accumulate, PACKED=packed, OFFSET=offset, MINIMUM=minimum, ROWS=tile.outputs,
            TILE=tile.inputs, num_warps=tile.warps,
        )  # fmt: skip
        return
    tile = tile or more_rows_block_tile(blocks, x.element_size())
    _multiply_more[(triton.cdiv(outputs, tile.outputs),)](
        *planes, added, rows, outputs, x.stride(0), out.stride(0), BLOCKS=blocks, BIAS=bias is not None,
        ADD=accumulate, PACKED=packed, OFFSET=offset, MINIMUM=minimum, ROWS=tile.outputs, TILE=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _denser_product(
    x: torch.Tensor, matrix: BlockPlanes, out: torch.Tensor, add: bool, bias: torch.Tensor | None,
    tile: ProductTile | None,
) -> None:  # fmt: skip
    rows, (outputs, blocks, _) = len(x), matrix.quants.shape
    if rows <= FEW_ROWS:
        tile = tile or few_rows_block_tile(rows, outputs, blocks, 16, x.element_size())
        multiply_few(x, matrix.layout, matrix.denser, out, bias, add, tile)
        return
    tile = tile or more_rows_block_tile(blocks, x.element_size())
    multiply_more(x, matrix.layout, matrix.denser, out, bias, add, tile)


def _kind(matrix: BlockPlanes) -> tuple[bool, int, bool]:
    """(two quants a byte, what is subtracted from one, whether there are minimums)."""
    return matrix.layout != "Q8_0", OFFSETS[matrix.layout], matrix.minimums is not None


@triton.jit
def _expand_rows(
    ids, slots, positions, quants, scales, minimums, out, ids_stride, out_stride, known_rows,
    BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row of out is row i of the matrix, or the one of a slot's token."""
    LANES: tl.constexpr = 16 if PACKED else 32
    target = tl.program_id(0).to(tl.int64)
    row = target
    if CHOSEN:
        row = token_of(ids, slots, positions, ids_stride, target)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    inside = block < BLOCKS
    known = inside & (row >= 0) & (row < known_rows)
    # Rows beyond the mask read nothing: quants, scales and minimums of 0. Q4_0's offset times 0 is 0 as well.
    found, scale, minimum = _load_blocks(
        quants, scales, minimums, row, block, lane, BLOCKS, known, LANES, MINIMUM, 8
    )  # fmt: skip
    place = out + target * out_stride + block * 32 + lane
    low = found
    if PACKED:
        low = found & 15
        high = _expand(found >> 4, scale, minimum, OFFSET, MINIMUM)
        tl.store(place + 16, high.to(out.dtype.element_ty), mask=inside)
    tl.store(place, _expand(low, scale, minimum, OFFSET, MINIMUM).to(out.dtype.element_ty), mask=inside)


def dequantize_tile(matrix: BlockPlanes, first: int, last: int, out: torch.Tensor) -> None:
    """Rows first..last-1 into out [last - first, inputs], as out's type: what a cuBLAS product is then made with."""
    if last > first:
        part = matrix.rows(first, last)
        _launch_expand(part, out, (part.scales, part.scales, part.scales), chosen=False)


def embed_blocks(
    tokens_of_slots: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, matrix: BlockPlanes, out: torch.Tensor
) -> None:
    """`layer.embed` for a quantized embedding."""
    _launch_expand(matrix, out, (tokens_of_slots, slots, positions), chosen=True)


def _launch_expand(
    matrix: BlockPlanes,
    out: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    chosen: bool,
) -> None:
    if len(out) == 0:
        return
    if matrix.layout in KQUANTS:
        expand(matrix.layout, matrix.denser, out, choice, chosen=chosen)
        return
    blocks = matrix.quants.shape[1]
    packed, offset, minimum = _kind(matrix)
    _expand_rows[(len(out), triton.cdiv(blocks, EXPANDED_BLOCKS))](
        *choice, matrix.quants, matrix.scales, matrix.minimums if minimum else matrix.scales, out,
        choice[0].stride(0), out.stride(0), len(matrix.quants), BLOCKS=blocks, CHOSEN=chosen, PACKED=packed,
        OFFSET=offset, MINIMUM=minimum, TILE=EXPANDED_BLOCKS, num_warps=4,
    )  # fmt: skip
