# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What LoRA adapters add to a product on a GPU: the rows of all adapters in two kernels, tile by tile.

    rows sorted by place ─► tiles of TILE_ROWS, all of one place ─► inner = x·Aᵀ ─► out += inner·Bᵀ

Rows that are in no tile are not touched. Tiles with place -1 end at once, so that a CUDA graph has room for as many as
there may be; so do those whose adapter leaves the product as it is, and read none of its factors. For few rows the
inputs are cut into parts whose sums are added up in order, the same way every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.footprint.lora import RANK_STEP, SPLIT_ROWS, SPLITS, TILE_ROWS

# Rows of a step are not compiled in, not even whether 16 divides them: what was tried at the start serves every step.
COLUMNS, OUTPUTS, WARPS = 128, 64, 4
MOST_PARTS = 3


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """int32 on the device, in one memory for all steps of a form."""

    order: torch.Tensor
    """Rows of the product, those of a place together."""
    places: torch.Tensor
    """Of each tile; -1: it is none."""
    starts: torch.Tensor
    ends: torch.Tensor
    """Into `order`."""
    rows: int
    """Of the step, as many as are padded to."""


@triton.jit(do_not_specialize=["inner_rows", "span"])
def _shrink(
    x, a, inner, order, places, starts, ends, changes, changes_stride, x_stride, place_stride, columns, inner_rows,
    span, WIDTH: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of a part of the inputs: inner[part, place in order] = x·Aᵀ."""
    tile, split = tl.program_id(0), tl.program_id(2)
    place = tl.load(places + tile)
    if tl.load(changes + place * changes_stride, mask=place >= 0, other=0) == 0:
        return
    member, rank = tl.load(starts + tile) + tl.arange(0, ROWS), tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    real, known = member < tl.load(ends + tile), rank < WIDTH
    row = tl.load(order + member, mask=real, other=0).to(tl.int64)
    matrix = a + place.to(tl.int64) * place_stride
    first = split * span
    last = tl.minimum(first + span, columns)
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < last)[None, :]
        part = tl.load(x + row[:, None] * x_stride + column[None, :], mask=real[:, None] & inside, other=0.0)
        lines = tl.load(matrix + rank[:, None] * columns + column[None, :], mask=known[:, None] & inside, other=0.0)
        sums = tl.dot(part, lines.T, sums, input_precision="ieee")
    at = (split * inner_rows + member).to(tl.int64)[:, None] * WIDTH + rank[None, :]
    tl.store(inner + at, sums, mask=real[:, None] & known[None, :])


@triton.jit(do_not_specialize=["inner_rows"])
def _expand(
    inner, b, out, order, places, starts, ends, changes, changes_stride, out_stride, place_stride, inner_rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out += inner·Bᵀ for outputs of one part, FIRST, SECOND or THIRD of them."""
    FIRST_BLOCKS: tl.constexpr = (FIRST + OUTPUTS - 1) // OUTPUTS
    SECOND_BLOCKS: tl.constexpr = (SECOND + OUTPUTS - 1) // OUTPUTS
    tile, block = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + tile)
    if tl.load(changes + place * changes_stride, mask=place >= 0, other=0) == 0:
        return
    member = tl.load(starts + tile) + tl.arange(0, ROWS)
    real = member < tl.load(ends + tile)
    row = tl.load(order + member, mask=real, other=0).to(tl.int64)
    second = (block >= FIRST_BLOCKS).to(tl.int32)
    third = (block >= FIRST_BLOCKS + SECOND_BLOCKS).to(tl.int32)
    part, before = second + third, second * FIRST + third * SECOND
    count = FIRST + second * (SECOND - FIRST) + third * (THIRD - SECOND)
    output = (block - second * FIRST_BLOCKS - third * SECOND_BLOCKS) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < count
    matrix = b + place.to(tl.int64) * place_stride
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, RANK, RANKS):
        rank = start + tl.arange(0, RANKS)
        read = tl.zeros((ROWS, RANKS), tl.float32)
        for split in range(SPLITS):
            at = (split * inner_rows + member).to(tl.int64)[:, None] * WIDTH + part * RANK + rank[None, :]
            read += tl.load(inner + at, mask=real[:, None], other=0.0)
        lines = tl.load(matrix + (before + output)[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0)
        sums = tl.dot(read.to(lines.dtype), lines.T, sums, input_precision="ieee")
    at = row[:, None] * out_stride + (before + output)[None, :]
    chosen = real[:, None] & inside[None, :]
    sums += tl.load(out + at, mask=chosen, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=chosen)


def add_adapters(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    parts: tuple[int, ...],
    changes: torch.Tensor,
    tiles: LoraTiles,
    inner: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out [rows, outputs] += what the adapters of `tiles` make of x [rows, columns], both with contiguous rows.

    a [places, parts · rank, columns] and b [places, outputs, rank]: contiguous but for the places. `parts`: outputs of
    each. `changes` [places]: 0 for a place whose factors are to be left alone. `inner`: float32, of
    `lora_sizes.inner_elements`.
    """
    width, columns = a.shape[1:]
    rank = b.shape[2]
    splits = SPLITS if tiles.rows <= SPLIT_ROWS else 1
    span = -(-columns // (splits * COLUMNS)) * COLUMNS
    ranks = 32 if rank % 32 == 0 else RANK_STEP
    counts = (*parts, *(0,) * (MOST_PARTS - len(parts)))
    common = tiles.order, tiles.places, tiles.starts, tiles.ends, changes, changes.stride(0)
    _shrink[(len(tiles.places), -(-width // ranks), splits)](
        x, a, inner, *common, x.stride(0), a.stride(0), columns, tiles.rows, span,
        WIDTH=width, RANKS=ranks, COLUMNS=COLUMNS, ROWS=TILE_ROWS, num_warps=WARPS,
    )  # fmt: skip
    blocks = sum(-(-count // OUTPUTS) for count in counts)
    _expand[(len(tiles.places), blocks)](
        inner, b, out, *common, out.stride(0), b.stride(0), tiles.rows,
        FIRST=counts[0], SECOND=counts[1], THIRD=counts[2], WIDTH=width, RANK=rank, RANKS=ranks, OUTPUTS=OUTPUTS,
        ROWS=TILE_ROWS, SPLITS=splits, num_warps=WARPS,
    )  # fmt: skip
