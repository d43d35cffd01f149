# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of experts that stay in GGUF's quantized blocks with the tokens that chose them: one kernel for all kinds.

Planes lie as `execution.weights.gguf_blocks` keeps them, the rows of all experts one below the other; lines are those
of launch.py. Only the bytes of chosen experts are read; elements are rounded to the inputs' type, as an expanded matrix
would be. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.launch import (
    GATES_IN_MATRIX,
    GATES_IN_OUT,
    Activation,
    ExpertAssignments,
    Gates,
    expert_place,
    gated,
    gated_by_out,
    gates_of,
    line_pairs,
    line_part,
)
from holdfast.execution.triton_kernels.experts.tiles import ExpertTile, expert_block_tile, most_tiles
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.triton_kernels.quantized.kquant_codes import FORMS, KquantForm, load_codes, load_scales

EXPERT_FORMS = FORMS | {
    "Q4_0": KquantForm(4, offset=8, pieces=1),
    "Q4_1": KquantForm(4, pieces=1, minimum=True),
    "Q8_0": KquantForm(8, pieces=1),
}


@triton.jit
def _codes(
    quants, high, place, lane, inside, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Of the two elements of each lane."""
    if BITS == 8:
        byte = quants + (place * 32 + lane)
        return (
            tl.load(byte, mask=inside, other=0).to(tl.float32),
            tl.load(byte + 16, mask=inside, other=0).to(tl.float32),
        )
    else:
        return load_codes(quants, high, place, lane, inside, BITS, OFFSET, TABLE)


@triton.jit
def _multiply(
    x, quants, high, scales, minimums, small, out, counts, pairs, x_stride, out_stride, pairs_stride, outputs,
    places, waiting_quants, waiting_high, waiting_scales, waiting_minimums, waiting_small, PLACED: tl.constexpr,
    BLOCKS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, PIECES: tl.constexpr, SMALL: tl.constexpr,
    MINIMUM: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Where the matrix has gates, half of a tile's LINES are gates, and the others their ups."""
    GATED: tl.constexpr = GATES == GATES_IN_MATRIX
    OUTPUTS: tl.constexpr = LINES // 2 if GATED else LINES
    across = tl.cdiv(outputs, OUTPUTS)
    expert, first, length = line_part(tl.program_id(0) // across, counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    place, stays = expert_place(places, expert, PLACED)
    if PLACED:
        quants, high = tl.where(stays, quants, waiting_quants), tl.where(stays, high, waiting_high)
        scales, minimums = tl.where(stays, scales, waiting_scales), tl.where(stays, minimums, waiting_minimums)
        small = tl.where(stays, small, waiting_small)
    first_output, line = tl.program_id(0) % across * OUTPUTS, tl.arange(0, LINES)
    present = (first_output + line % OUTPUTS < outputs)[:, None, None]
    row = (2 if GATED else 1) * tl.cast(outputs, tl.int64) * place + first_output + line % OUTPUTS
    row = (row + line // OUTPUTS * outputs)[:, None, None]
    block, lane = tl.arange(0, TILE)[None, :, None], tl.arange(0, 16)[None, None, :]
    column = tl.arange(0, TILE * 16)[None, :]
    inputs = x + (pair // SHARED_BY)[:, None] * x_stride + column // 16 * 32 + column % 16
    kind = x.dtype.element_ty
    sums = tl.zeros((ROWS, LINES), tl.float32)
    for start in tl.range(0, BLOCKS, TILE):
        at = start + block
        inside = present & (at < BLOCKS)
        block_at = row * BLOCKS + at
        low, upper = _codes(quants, high, block_at, lane, inside, BITS, OFFSET, TABLE)
        scale, other_scale, added, other_added = load_scales(
            scales, minimums, small, block_at, inside, KIND, PIECES, SMALL, MINIMUM
        )  # fmt: skip
        low, upper = low * scale, upper * other_scale
        if MINIMUM:
            low, upper = low + added, upper + other_added
        wanted = live[:, None] & (start + column // 16 < BLOCKS)
        part = tl.load(inputs + start * 32, mask=wanted, other=0.0)
        sums = tl.dot(part, low.to(kind).reshape(LINES, TILE * 16).T, sums, input_precision="ieee")
        part = tl.load(inputs + start * 32 + 16, mask=wanted, other=0.0)
        sums = tl.dot(part, upper.to(kind).reshape(LINES, TILE * 16).T, sums, input_precision="ieee")
    output = first_output + tl.arange(0, OUTPUTS)
    index = pair[:, None] * out_stride + output[None, :]
    wanted = live[:, None] & (output < outputs)[None, :]
    found: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(sums.to(found).reshape(ROWS, 2, OUTPUTS).permute(0, 2, 1))
        sums = gated(gate, up, found, ACTIVATION)
    elif GATES == GATES_IN_OUT:
        sums = gated_by_out(out, index, wanted, sums, ACTIVATION)
    tl.store(out + index, sums.to(found), mask=wanted)


def _planes(matrix: BlockPlanes) -> tuple[torch.Tensor, ...]:
    """As the kernel takes them: something that it does not read for those that a kind has not got."""
    quants, scales = matrix.quants, matrix.scales
    return (
        quants,
        quants if matrix.high is None else matrix.high,
        scales,
        scales if matrix.minimums is None else matrix.minimums,
        quants if matrix.small is None else matrix.small,
    )


def multiply_blocks(
    x: torch.Tensor,
    matrix: BlockPlanes,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    activation: Activation | None = None,
    gates: Gates = "matrix",
    tile: ExpertTile | None = None,
    places: torch.Tensor | None = None,
    waiting: BlockPlanes | None = None,
) -> None:
    """out [pairs, outputs] = x · the matrix of each pair's expert, transposed; with an activation activation(gate)·up.
    `by_token`: a row of x is a token's, and all its pairs take it; else it is a pair's. `tile` replaces the table's,
    its `inputs` counted in blocks of 32. `places`: which experts are in `matrix`, and which in `waiting`."""
    experts, per_token = len(lines.counts), lines.weights.shape[1]
    pairs, outputs, blocks = len(out), out.shape[1], matrix.quants.shape[1]
    if pairs == 0:
        return
    form, (code, where) = EXPERT_FORMS[matrix.layout], gates_of(activation, gates)
    tile = tile or expert_block_tile(pairs, lines.chosen_from, blocks, x.element_size())
    across = triton.cdiv(outputs, tile.outputs // (2 if where == GATES_IN_MATRIX.value else 1))
    grid = (most_tiles(pairs // per_token, per_token, experts, tile.rows) * across,)
    apart = (None,) * 5 if waiting is None else _planes(waiting)
    _multiply[grid](
        x, *_planes(matrix), out, lines.counts, lines.pairs, x.stride(0), out.stride(0),
        lines.pairs.stride(0), outputs, places, *apart, PLACED=places is not None,
        BLOCKS=blocks, EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
        SHARED_BY=per_token if by_token else 1, KIND=matrix.layout, BITS=form.bits, OFFSET=form.offset,
        TABLE=form.table, PIECES=form.pieces, SMALL=form.small, MINIMUM=form.minimum, ACTIVATION=code,
        GATES=where, ROWS=tile.rows, LINES=tile.outputs, TILE=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
