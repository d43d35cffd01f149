# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of experts kept as codes with scales, with plain inputs of the tokens that chose them: one kernel for all
kinds of codes.

Planes lie as `footprint.scaled_layouts` draws them, the rows of all experts one below the other; lines are those of
launch.py. Codes become numbers of x's type in registers, and sums of a group are scaled, in float32. A matrix is the
left factor: its codes go from memory through registers to tensor cores, x from shared memory. Safe in a CUDA graph;
only chosen experts are read.

Tensor cores take no fewer than 16 lines and 8 columns. Where there are fewer rows of x than that, columns are cut into
segments, whose lines stand one below the other and whose rows of x stand side by side:

                        x segment 0   x segment 1
    lines, segment 0        sums           -           the sums that count are added; more warps have work, and x is
    lines, segment 1         -            sums         read from shared memory once for all segments
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.codes import scaled_factors, step_scales, tile_scales, wide_scales
from holdfast.execution.triton_kernels.experts.device import interpreted
from holdfast.execution.triton_kernels.experts.expanded import multiply_expanded
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
from holdfast.execution.triton_kernels.experts.planes import ScaledPlanes, code_planes
from holdfast.execution.triton_kernels.experts.tiles import ScaledTile, expanded_tile, most_tiles, scaled_tile
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.shared_memory import shared_memory_bytes
from holdfast.footprint.scaled_layouts import ScaledLayout

SPAN = 128
"""Columns whose products are added before they are scaled, at most."""


@triton.jit
def _of_same_segments(
    sums, left, right, SEGMENTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """[LINES, ROWS]: lines of a segment with x of the same segment; what else was multiplied counts for nothing."""
    sums = tl.where(left[:, None] == right[None, :], sums, 0.0).reshape(SEGMENTS, LINES, SEGMENTS, ROWS)
    return tl.sum(tl.sum(sums, 2), 0)


@triton.jit
def _write(
    sums, out, pairs, pairs_stride, out_stride, outputs, expert, first, length, first_output,
    ACTIVATION: tl.constexpr, GATES: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile's sums [lines, ROWS], gated where they are gates and ups, to the rows of its pairs."""
    target: tl.constexpr = out.dtype.element_ty
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    index = pair[None, :] * out_stride + output[:, None]
    inside = live[None, :] & (output < outputs)[:, None]
    if GATES == GATES_IN_MATRIX:
        gate, up = tl.split(sums.to(target).reshape(2, OUTPUTS, ROWS).permute(1, 2, 0))
        sums = gated(gate, up, target, ACTIVATION)
    elif GATES == GATES_IN_OUT:
        sums = gated_by_out(out, index, inside, sums, ACTIVATION)
    tl.store(out + index, sums.to(target), mask=inside)


@triton.jit
def _product(
    x, codes, scales, zeros, out, counts, pairs, x_stride, codes_stride, scales_stride, out_stride, pairs_stride,
    outputs, places, waiting_codes, waiting_scales, waiting_zeros, PLACED: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, FORM: tl.constexpr,
    FOUR_BITS: tl.constexpr, POWERS: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLED: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, ACTIVATION: tl.constexpr,
    GATES: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, FINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUP 0: a scale for a row. FINE: numbers are multiplied by the powers of two of their 32 columns before they are
    added. Where the matrix has gates, half of a tile's LINES are gates, and the others their ups."""
    kind: tl.constexpr = x.dtype.element_ty
    GATED: tl.constexpr = GATES == GATES_IN_MATRIX
    OUTPUTS: tl.constexpr = LINES // 2 if GATED else LINES
    LENGTH: tl.constexpr = COLUMNS // SEGMENTS
    across = tl.cdiv(outputs, OUTPUTS)
    wait_for_others(EARLY)
    expert, first, length = line_part(tl.program_id(0) // across, counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    kept, stays = expert_place(places, expert, PLACED)
    if PLACED:
        codes, scales = tl.where(stays, codes, waiting_codes), tl.where(stays, scales, waiting_scales)
        zeros = tl.where(stays, zeros, waiting_zeros)
    first_output = tl.program_id(0) % across * OUTPUTS
    left, right = tl.arange(0, SEGMENTS * LINES), tl.arange(0, SEGMENTS * ROWS)
    line = left % LINES
    # Outputs beyond the last read its line again: they are not written.
    row = (2 if GATED else 1) * kept.to(tl.int64) * outputs + tl.minimum(first_output + line % OUTPUTS, outputs - 1)
    row += line // OUTPUTS * outputs
    place = first + right % ROWS
    live = place < length
    source = tl.load(pairs + expert.to(tl.int64) * pairs_stride + place, mask=live, other=0).to(tl.int64) // SHARED_BY
    STEP: tl.constexpr = SPAN // 2 if FOUR_BITS else SPAN
    byte = tl.arange(0, STEP)
    column = byte // 16 * 32 + byte % 16 if FOUR_BITS else byte
    code_at = (row * codes_stride + left // LINES * (LENGTH // 2 if FOUR_BITS else LENGTH))[:, None] + byte[None, :]
    scale_at = row // GROUP_ROWS * scales_stride
    if GROUP > 0:
        scale_at += left // LINES * (LENGTH // GROUP)
    x_at = (source * x_stride + right // ROWS * LENGTH)[:, None] + column[None, :]
    sums = tl.zeros((SEGMENTS * LINES, SEGMENTS * ROWS), tl.float32)
    # Scales are too small for copies that run ahead: those of the next part are loaded before this one is multiplied.
    next_scale, next_zero = step_scales(scales, zeros, scale_at, 0, byte, LENGTH, GROUP, ZEROS, FINE)
    for start in tl.range(0, LENGTH, SPAN * PARTS):
        for number in tl.static_range(PARTS):
            begin, behind = start + number * SPAN, start + (number + 1) * SPAN
            scale, zero = next_scale, next_zero
            if GROUP > 0:
                next_scale, next_zero = step_scales(scales, zeros, scale_at, behind, byte, LENGTH, GROUP, ZEROS, FINE)
            inside = (begin + column < LENGTH)[None, :]
            # Rows of no pair are not read: programs with few rows would wait for them longer than for the matrix.
            wanted = live[:, None] if WHOLE else live[:, None] & inside
            at = begin // 2 if FOUR_BITS else begin
            part = tl.load(x + x_at + begin, mask=wanted, other=0.0).T
            if WHOLE:
                tile = tl.load(codes + code_at + at)
            else:
                tile = tl.load(codes + code_at + at, mask=inside, other=0)
            low, high = scaled_factors(tile, zero, FORM, kind, ZEROS, ASSEMBLED)
            if FINE:
                low, high = low * tile_scales(scale, kind, POWERS, FINE), high * tile_scales(scale, kind, POWERS, FINE)
            found = tl.dot(low, part, input_precision="ieee")
            if FOUR_BITS:
                part = tl.load(x + x_at + (begin + 16), mask=wanted, other=0.0).T
                found = tl.dot(high, part, found, input_precision="ieee")
            if GROUP > 0 and not FINE:
                found *= wide_scales(scale, POWERS)[:, None]
            sums += found
    let_others_start(EARLY)
    if GROUP == 0:
        sums *= wide_scales(next_scale, POWERS)[:, None]
    if SEGMENTS > 1:
        sums = _of_same_segments(sums, left // LINES, right // ROWS, SEGMENTS, LINES, ROWS)
    _write(sums, out, pairs, pairs_stride, out_stride, outputs, expert, first, length, first_output, ACTIVATION, GATES,
           OUTPUTS, ROWS)  # fmt: skip


def span_of(layout: ScaledLayout, dtype: torch.dtype) -> int:
    """Columns that are multiplied at a time: a power of two, and in one group, but for MXFP4: its powers of two go into
    the numbers without a loss. Not into float16's, which has too few of them."""
    if layout.scales == "uint8" and dtype != torch.float16:
        return SPAN
    return min(SPAN, layout.group & -layout.group) if layout.group else SPAN


def multiply_scaled(
    x: torch.Tensor,
    matrix: ScaledPlanes,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    activation: Activation | None = None,
    gates: Gates = "matrix",
    tile: ScaledTile | None = None,
    places: torch.Tensor | None = None,
    waiting: ScaledPlanes | None = None,
) -> None:
    """out [pairs, outputs] = x · the matrix of each pair's expert, transposed; with an activation activation(gate)·up.
    `by_token`: a row of x is a token's, and all its pairs take it; else it is a pair's. Where experts have many rows
    it is left to `expanded.multiply_expanded`. `tile` replaces the table's. `places`: which experts are in `matrix`,
    and which in `waiting`."""
    layout, experts, per_token = matrix.layout, len(lines.counts), lines.weights.shape[1]
    pairs, outputs, columns = len(out), out.shape[1], x.shape[1]
    if pairs == 0:
        return
    span = span_of(layout, x.dtype)
    many = expanded_tile(pairs, lines.chosen_from, span, x.element_size(), shared_memory_bytes())
    if tile is None and many is not None:
        multiply_expanded(
            x, matrix, lines, out, by_token=by_token, activation=activation, gates=gates, tile=many, span=span,
            places=places, waiting=waiting,
        )  # fmt: skip
        return
    code, where = gates_of(activation, gates)
    if tile is None:
        most_bytes = shared_memory_bytes()
        tile = scaled_tile(pairs, lines.chosen_from, layout, span, columns, x.element_size(), most_bytes)
    across = triton.cdiv(outputs, tile.lines // (2 if where == GATES_IN_MATRIX.value else 1))
    grid = (most_tiles(pairs // per_token, per_token, experts, tile.rows) * across,)
    (codes, scales, zeros), early = code_planes(matrix), starts_early()
    apart = (None,) * 3 if waiting is None else code_planes(waiting)
    _product[grid](
        x, codes, scales, zeros, out, lines.counts,
        lines.pairs, x.stride(0), codes.stride(0), scales.stride(0), out.stride(0), lines.pairs.stride(0),
        outputs, places, *apart, PLACED=places is not None,
        COLUMNS=columns, GROUP=layout.group, GROUP_ROWS=layout.group_rows, FORM=layout.codes,
        FOUR_BITS=layout.four_bits, POWERS=layout.scales == "uint8", ZEROS=matrix.zeros is not None,
        ASSEMBLED=not interpreted(), EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
        SHARED_BY=per_token if by_token else 1, ACTIVATION=code, GATES=where,
        WHOLE=columns // tile.segments % (span * tile.parts) == 0, ROWS=tile.rows, LINES=tile.lines,
        SEGMENTS=tile.segments, SPAN=span, PARTS=tile.parts, FINE=0 < layout.group < span, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip
