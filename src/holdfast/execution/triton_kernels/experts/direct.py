# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of experts with the tokens that chose them, where tensor cores take both as they lie in memory: plain
numbers, and codes of one byte with inputs that are rounded to the same codes.

Lines are those of launch.py. Programs go through the outputs of one tile of a line, then to the next tile: the rows of
a tile and the matrix of an expert are read from memory once, and then from cache. Where copies by descriptor (TMA)
exist, matrices come by them; which rows of x a tile has is known on the device only, so that these come by address.

    out[p, o] = sum of x[p, i] · w[o, i] · scale of (p, group of i) · scale of (o, group of i)

Hopper's tensor cores add products of fp8 with about 14 bits: every 128 columns the sum is taken over into float32.
Below compute capability 8.9 both factors become float16, which holds every e4m3 number. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from holdfast.execution.triton_kernels.experts.codes import fp8_values
from holdfast.execution.triton_kernels.experts.device import copies_by_descriptor, interpreted, multiplies_fp8
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
from holdfast.execution.triton_kernels.experts.planes import RoundedRows, ScaledPlanes
from holdfast.execution.triton_kernels.experts.tiles import SOME, ExpertTile, expert_tile, most_tiles
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.shared_memory import shared_memory_bytes

ROUNDED_GROUP = 128
"""Columns that are multiplied at a time where inputs are rounded: groups are multiples of it."""
DESCRIBED_ROWS = 64
"""Tiles of so many pairs and more take matrices by descriptor: below, programs are short and making one takes longer
than it saves."""


@triton.jit
def _matrix_tile(
    weight, line, row, start, inside, DESCRIBED: tl.constexpr, WHOLE: tl.constexpr, DECODED: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, OUTPUTS]"""
    if DESCRIBED:
        tile = weight.load([row, start])
    elif WHOLE:
        tile = tl.load(line + start)
    else:
        tile = tl.load(line + start, mask=inside, other=0.0)
    if DECODED:
        tile = fp8_values(tile, tl.float16, ASSEMBLED)
    return tile.T


@triton.jit
def _added(sums, part, tile, x_scale, scale, ROUNDED: tl.constexpr, GROUPED: tl.constexpr):
    """sums + part · tile, by the scales of the group where there are groups."""
    if GROUPED:
        sums += tl.dot(part, tile, input_precision="ieee") * (x_scale[:, None] * scale)
    elif ROUNDED and part.dtype != tl.int8:
        sums += tl.dot(part, tile, input_precision="ieee")
    else:
        sums = tl.dot(part, tile, sums, input_precision="ieee", out_dtype=sums.dtype)
    return sums


@triton.jit
def _group_scale(scales, row, first_row, group, scales_stride, GROUP_ROWS: tl.constexpr, ALIKE: tl.constexpr):
    """[1, 1 or OUTPUTS]: of these rows. ALIKE: all are in the first one's block."""
    if ALIKE:
        return tl.load(scales + first_row // GROUP_ROWS * scales_stride + group + tl.arange(0, 1))[None, :]
    else:
        return tl.load(scales + row // GROUP_ROWS * scales_stride + group)[None, :]


@triton.jit
def _product(
    x, weight, out, x_scales, scales, counts, pairs, x_stride, weight_stride, out_stride, x_scales_stride,
    scales_stride, pairs_stride, outputs, places, waiting, waiting_scales, PLACED: tl.constexpr, INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr,
    ROUNDED: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ALIKE: tl.constexpr, DECODED: tl.constexpr,
    ASSEMBLED: tl.constexpr, DESCRIBED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUP 0: scales are of rows. DECODED: both factors are e4m3's bits, which tensor cores do not take."""
    GATED: tl.constexpr = GATES == GATES_IN_MATRIX
    GROUPED: tl.constexpr = ROUNDED and GROUP > 0
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    across = tl.cdiv(outputs, OUTPUTS)
    wait_for_others(EARLY)
    expert, first, length = line_part(tl.program_id(0) // across, counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    kept, stays = expert_place(places, expert, PLACED)
    if PLACED:
        weight, scales = tl.where(stays, weight, waiting), tl.where(stays, scales, waiting_scales)
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    first_output = tl.program_id(0) % across * OUTPUTS
    output, column = first_output + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    source = pair // SHARED_BY
    inputs = x + source[:, None] * x_stride + column[None, :]
    first_row = kept * (2 * outputs if GATED else outputs) + first_output
    # Outputs beyond the last read the last one's row again: they are not written.
    row = first_row.to(tl.int64) + tl.minimum(tl.arange(0, OUTPUTS), outputs - 1 - first_output)
    line, up_line = weight, weight
    if not DESCRIBED:
        line = weight + row[:, None] * weight_stride + column[None, :]
        up_line = line + tl.cast(outputs, tl.int64) * weight_stride
    x_scale_at = x_scales + source * x_scales_stride
    x_scale = tl.full((ROWS,), 1.0, tl.float32)
    scale = tl.full((1, OUTPUTS if GROUPED and not ALIKE else 1), 1.0, tl.float32)
    up_scale = scale
    sums = tl.zeros((ROWS, OUTPUTS), KIND)
    up_sums = tl.zeros((ROWS, OUTPUTS), KIND)
    for start in tl.range(0, INPUTS, COLUMNS):
        inside = (start + column < INPUTS)[None, :]
        if WHOLE and ROWS > 32:
            # Rows of no pair read some token's: they are not written.
            part = tl.load(inputs + start)
        elif WHOLE:
            # Programs with few rows would wait for them longer than for the matrix.
            part = tl.load(inputs + start, mask=live[:, None], other=0.0)
        else:
            part = tl.load(inputs + start, mask=live[:, None] & inside, other=0.0)
        if DECODED:
            part = fp8_values(part, tl.float16, ASSEMBLED)
        if GROUPED:
            x_scale = tl.load(x_scale_at + start // GROUP)
            group = start // GROUP
            scale = _group_scale(scales, row, first_row, group, scales_stride, GROUP_ROWS, ALIKE)
            if GATED:
                up_scale = _group_scale(
                    scales, row + outputs, first_row + outputs, group, scales_stride, GROUP_ROWS, ALIKE
                )  # fmt: skip
        tile = _matrix_tile(weight, line, first_row, start, inside, DESCRIBED, WHOLE, DECODED, ASSEMBLED)
        sums = _added(sums, part, tile, x_scale, scale, ROUNDED, GROUPED)
        if GATED:
            tile = _matrix_tile(
                weight, up_line, first_row + outputs, start, inside, DESCRIBED, WHOLE, DECODED, ASSEMBLED
            )
            up_sums = _added(up_sums, part, tile, x_scale, up_scale, ROUNDED, GROUPED)
    let_others_start(EARLY)
    sums, up_sums = sums.to(tl.float32), up_sums.to(tl.float32)
    if ROUNDED and not GROUPED:
        x_scale = tl.load(x_scale_at)[:, None]
        sums *= x_scale * tl.load(scales + row)[None, :]
        if GATED:
            up_sums *= x_scale * tl.load(scales + row + outputs)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    index = pair[:, None] * out_stride + output[None, :]
    inside = live[:, None] & (output < outputs)[None, :]
    if GATED:
        sums = gated(sums, up_sums, kind, ACTIVATION)
    elif GATES == GATES_IN_OUT:
        sums = gated_by_out(out, index, inside, sums, ACTIVATION)
    tl.store(out + index, sums.to(kind), mask=inside)


def multiply_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    activation: Activation | None = None,
    gates: Gates = "matrix",
    tile: ExpertTile | None = None,
    described: bool | None = None,
    places: torch.Tensor | None = None,
    waiting: torch.Tensor | None = None,
) -> None:
    """out [pairs, outputs] = x · weight [experts, outputs, inputs]ᵀ of each pair's expert; with an activation
    activation(gate) · up. `by_token`: a row of x is a token's, and all its pairs take it; else it is a pair's. Rows of
    tokens that are in no line stay as they are. `tile` and `described` replace the table's. `places`: which experts are
    in `weight`, and which in `waiting`."""
    apart = None if waiting is None else waiting.view(-1, waiting.shape[2])
    _launch(
        x, None, weight.view(-1, weight.shape[2]), None, lines, out, by_token, activation, gates, tile, described,
        places, apart, None,
    )  # fmt: skip


def multiply_rounded(
    x: RoundedRows,
    matrix: ScaledPlanes,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    activation: Activation | None = None,
    gates: Gates = "matrix",
    tile: ExpertTile | None = None,
    described: bool | None = None,
    places: torch.Tensor | None = None,
    waiting: ScaledPlanes | None = None,
) -> None:
    """The same for codes of one byte: x is rounded as the layout says, by the matrix's own groups of columns."""
    _launch(
        x.codes, x.scales, matrix.codes, matrix, lines, out, by_token, activation, gates, tile, described, places,
        None if waiting is None else waiting.codes, None if waiting is None else waiting.scales,
    )  # fmt: skip


def _launch(
    x: torch.Tensor, x_scales: torch.Tensor | None, weight: torch.Tensor, matrix: ScaledPlanes | None,
    lines: ExpertAssignments, out: torch.Tensor, by_token: bool, activation: Activation | None, gates: Gates,
    tile: ExpertTile | None, described: bool | None, places: torch.Tensor | None, waiting: torch.Tensor | None,
    waiting_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    pairs, experts, inputs, per_token = len(out), len(lines.counts), weight.shape[1], lines.weights.shape[1]
    if pairs == 0:
        return
    code, where = gates_of(activation, gates)
    outputs, doubled = out.shape[1], where == GATES_IN_MATRIX.value
    group, group_rows, decoded = 0, 1, False
    if matrix is not None:
        group, group_rows = matrix.layout.group, matrix.layout.group_rows
        if weight.dtype == torch.float8_e4m3fn:
            decoded = not multiplies_fp8()
            kind = torch.uint8 if decoded else torch.float8_e4m3fn
            weight, x = weight.view(kind), x.view(kind)
            waiting = None if waiting is None else waiting.view(kind)
    # What is decoded takes registers: such tiles have no more than 64 rows.
    spread = lines.chosen_from
    most_pairs = min(pairs, SOME * spread) if decoded else pairs
    tile = tile or expert_tile(most_pairs, spread, weight.element_size(), shared_memory_bytes(), gated=doubled)
    if described is None:
        aligned = weight.stride(0) * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
        described = places is None and tile.rows >= DESCRIBED_ROWS and aligned and copies_by_descriptor()
    scales, early = weight if matrix is None else matrix.scales, starts_early()
    x_scales = weight if x_scales is None else x_scales
    waiting_scales = waiting if waiting_scales is None else waiting_scales
    grid = (most_tiles(pairs // per_token, per_token, experts, tile.rows) * triton.cdiv(outputs, tile.outputs),)
    _product[grid](
        x, TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs]) if described else weight, out, x_scales,
        scales, lines.counts, lines.pairs, x.stride(0), weight.stride(0), out.stride(0), x_scales.stride(0),
        scales.stride(0), lines.pairs.stride(0), outputs, places, waiting, waiting_scales,
        PLACED=places is not None, INPUTS=inputs, EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts), SHARED_BY=per_token if by_token else 1, ACTIVATION=code, GATES=where,
        ROUNDED=matrix is not None, GROUP=group, GROUP_ROWS=group_rows,
        ALIKE=group_rows % tile.outputs == 0 and outputs % group_rows == 0, DECODED=decoded,
        ASSEMBLED=not interpreted(), DESCRIBED=described,
        WHOLE=inputs % tile.inputs == 0, ROWS=tile.rows, OUTPUTS=tile.outputs, COLUMNS=tile.inputs, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip
