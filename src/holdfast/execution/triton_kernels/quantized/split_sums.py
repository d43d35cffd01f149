# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What products with quantized matrices share: the order of steps, sums of programs that split the columns of a tile,
and how sums are written.

    workspace ─► [tile of outputs][split][outputs, rows (twice where gated)]

Each program leaves its sums there; the last to arrive at a tile adds them up in order, so that results do not depend on
who is last, and sets the tile's counter back to zero. Knows no codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.quantized.product_tiles import QuantizedTile
from holdfast.execution.triton_kernels.quantized.products import put, put_gated


class SplitSums(NamedTuple):
    """What programs of split products leave for each other."""

    sums: torch.Tensor
    """float32"""
    counters: torch.Tensor
    """int32, zeros; one for each tile of outputs."""


@triton.jit
def turned(index, tile, first, last):
    """Steps first..last-1, and around: each tile begins at another one, so that not all programs ask the second level
    cache for the same inputs at once."""
    step = first + tile % tl.maximum(last - first, 1) + index
    return tl.where(step >= last, step - (last - first), step)


@triton.jit
def ask_ahead(plane, row, stride, first, last, LINES: tl.constexpr):
    """Elements first..last-1 of these rows are brought to the second level cache, and nobody waits for them: scales are
    read a few bytes at a time, each from a line of its own that would otherwise come from memory while a step waits."""
    APART: tl.constexpr = 1024 // plane.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(first + tl.arange(0, LINES)[None, :] * APART, last - 1)
    address = (plane + (row[:, None].to(tl.int64) * stride + at)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def inputs(x, place, inside, live, EVEN: tl.constexpr):
    """`live`: those of rows that there are; `inside`: those of columns too, where not all are (EVEN)."""
    if EVEN:
        return tl.load(x + place, mask=live, other=0.0)
    else:
        return tl.load(x + place, mask=inside, other=0.0)


@triton.jit
def leave_sums(workspace, tile, sums, up, GATED: tl.constexpr):
    OUTPUTS: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    AREA: tl.constexpr = OUTPUTS * ROWS
    SHARE: tl.constexpr = 2 * AREA if GATED else AREA
    share = workspace + (tile.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * SHARE
    cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(share + cell, sums)
    if GATED:
        tl.store(share + AREA + cell, up)


@triton.jit
def gather_sums(workspace, tile, sums, up, GATED: tl.constexpr):
    OUTPUTS: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    AREA: tl.constexpr = OUTPUTS * ROWS
    SHARE: tl.constexpr = 2 * AREA if GATED else AREA
    cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    sums, up = tl.zeros_like(sums), tl.zeros_like(up)
    for split in tl.range(0, tl.num_programs(1)):
        share = workspace + (tile.to(tl.int64) * tl.num_programs(1) + split) * SHARE
        # Past the first level cache, which may have lines of the last product here.
        sums += tl.load(share + cell, cache_modifier=".cg")
        if GATED:
            up += tl.load(share + AREA + cell, cache_modifier=".cg")
    return sums, up


@triton.jit
def finish(
    out, sums, up, bias, tile, rows, outputs, out_stride,
    BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    inside = (output < outputs) & (row < rows)
    index = row.to(tl.int64) * out_stride + output
    if ACTIVATION >= 0:
        put_gated(out, index, sums, up, bias, output, outputs, inside, BIAS, ACTIVATION)
    else:
        put(out, index, sums, bias, output, inside, BIAS, ADD)


def cut_columns(
    workspace: SplitSums, pieces: int, outputs: int, tile: QuantizedTile, *, gated: bool
) -> tuple[int, int, int]:
    """(tiles of outputs, splits, steps of each) of a matrix whose rows have so many pieces."""
    tiles, whole = triton.cdiv(outputs, tile.outputs), triton.cdiv(pieces, tile.pieces)
    steps = triton.cdiv(whole, tile.splits)
    splits = triton.cdiv(whole, steps)
    needed = tiles * splits * tile.rows * tile.outputs * (2 if gated else 1)
    if splits > 1 and (needed > len(workspace.sums) or tiles > len(workspace.counters)):
        raise EngineError(
            "the workspace of a split product is too small",
            needed=f"{needed} sums and {tiles} counters",
            found=f"{len(workspace.sums)} and {len(workspace.counters)}",
        )
    return tiles, splits, steps
