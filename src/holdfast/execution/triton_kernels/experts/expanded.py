# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of experts kept as codes with scales, with many plain rows each: codes are expanded to scaled numbers of x's
type tile by tile, on their way through shared memory to tensor cores, and never in memory.

Planes lie as `footprint.scaled_layouts` draws them, the rows of all experts one below the other; lines are those of
launch.py. x is the left factor, so that all warps share what any of them expands. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.codes import scaled_factors, step_scales, tile_scales
from holdfast.execution.triton_kernels.experts.device import interpreted
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
from holdfast.execution.triton_kernels.experts.tiles import ScaledTile, most_tiles


@triton.jit
def _product(
    x, codes, scales, zeros, out, counts, pairs, x_stride, codes_stride, scales_stride, out_stride, pairs_stride,
    outputs, places, waiting_codes, waiting_scales, waiting_zeros, PLACED: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, FORM: tl.constexpr,
    FOUR_BITS: tl.constexpr, POWERS: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLED: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, ACTIVATION: tl.constexpr,
    GATES: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """GROUP 0: a scale for a row. FINE: one for each 32 columns, of four bits. Where the matrix has gates, half of a
    tile's LINES are gates, and the others their ups."""
    kind: tl.constexpr = x.dtype.element_ty
    GATED: tl.constexpr = GATES == GATES_IN_MATRIX
    OUTPUTS: tl.constexpr = LINES // 2 if GATED else LINES
    across = tl.cdiv(outputs, OUTPUTS)
    expert, first, length = line_part(tl.program_id(0) // across, counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    kept, stays = expert_place(places, expert, PLACED)
    if PLACED:
        codes, scales = tl.where(stays, codes, waiting_codes), tl.where(stays, scales, waiting_scales)
        zeros = tl.where(stays, zeros, waiting_zeros)
    first_output, line = tl.program_id(0) % across * OUTPUTS, tl.arange(0, LINES)
    # Outputs beyond the last read its line again, and rows of no pair some token's: neither are written.
    row = (2 if GATED else 1) * kept.to(tl.int64) * outputs + tl.minimum(first_output + line % OUTPUTS, outputs - 1)
    row += line // OUTPUTS * outputs
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    STEP: tl.constexpr = SPAN // 2 if FOUR_BITS else SPAN
    byte = tl.arange(0, STEP)
    column = byte // 16 * 32 + byte % 16 if FOUR_BITS else byte
    code_at = codes + row[:, None] * codes_stride + byte[None, :]
    scale_at = row // GROUP_ROWS * scales_stride
    x_at = x + (pair // SHARED_BY)[:, None] * x_stride + column[None, :]
    sums = tl.zeros((ROWS, LINES), tl.float32)
    # Scales are too small for copies that run ahead: those of the next step are loaded before this one is multiplied.
    next_scale, next_zero = step_scales(scales, zeros, scale_at, 0, byte, COLUMNS, GROUP, ZEROS, FINE)
    for start in tl.range(0, COLUMNS, SPAN):
        inside = (start + column < COLUMNS)[None, :]
        scale, zero = tile_scales(next_scale, kind, POWERS, FINE), next_zero
        if GROUP > 0:
            next_scale, next_zero = step_scales(
                scales, zeros, scale_at, start + SPAN, byte, COLUMNS, GROUP, ZEROS, FINE
            )
        at = start // 2 if FOUR_BITS else start
        if WHOLE:
            tile = tl.load(code_at + at)
            part = tl.load(x_at + start)
        else:
            tile = tl.load(code_at + at, mask=inside, other=0)
            part = tl.load(x_at + start, mask=inside, other=0.0)
        low, high = scaled_factors(tile, zero, FORM, kind, ZEROS, ASSEMBLED)
        sums = tl.dot(part, (low * scale).T, sums, input_precision="ieee")
        if FOUR_BITS:
            if WHOLE:
                part = tl.load(x_at + (start + 16))
            else:
                part = tl.load(x_at + (start + 16), mask=inside, other=0.0)
            sums = tl.dot(part, (high * scale).T, sums, input_precision="ieee")
    found: tl.constexpr = out.dtype.element_ty
    output = first_output + tl.arange(0, OUTPUTS)
    index = pair[:, None] * out_stride + output[None, :]
    inside = live[:, None] & (output < outputs)[None, :]
    if GATED:
        gate, up = tl.split(sums.to(found).reshape(ROWS, 2, OUTPUTS).permute(0, 2, 1))
        sums = gated(gate, up, found, ACTIVATION)
    elif GATES == GATES_IN_OUT:
        sums = gated_by_out(out, index, inside, sums, ACTIVATION)
    tl.store(out + index, sums.to(found), mask=inside)


def multiply_expanded(
    x: torch.Tensor,
    matrix: ScaledPlanes,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    activation: Activation | None = None,
    gates: Gates = "matrix",
    tile: ScaledTile,
    span: int,
    places: torch.Tensor | None = None,
    waiting: ScaledPlanes | None = None,
) -> None:
    """As `scaled.multiply_scaled`, but scales are rounded to x's type. `span`: columns that are taken at a time, which
    have one scale, or of MXFP4 one for each 32."""
    layout, experts, per_token = matrix.layout, len(lines.counts), lines.weights.shape[1]
    pairs, outputs, columns = len(out), out.shape[1], x.shape[1]
    code, where = gates_of(activation, gates)
    across = triton.cdiv(outputs, tile.lines // (2 if where == GATES_IN_MATRIX.value else 1))
    grid = (most_tiles(pairs // per_token, per_token, experts, tile.rows) * across,)
    codes, scales, zeros = code_planes(matrix)
    apart = (None,) * 3 if waiting is None else code_planes(waiting)
    _product[grid](
        x, codes, scales, zeros, out, lines.counts,
        lines.pairs, x.stride(0), codes.stride(0), scales.stride(0), out.stride(0), lines.pairs.stride(0),
        outputs, places, *apart, PLACED=places is not None,
        COLUMNS=columns, GROUP=layout.group, GROUP_ROWS=layout.group_rows, FORM=layout.codes,
        FOUR_BITS=layout.four_bits, POWERS=layout.scales == "uint8", ZEROS=matrix.zeros is not None,
        ASSEMBLED=not interpreted(), EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
        SHARED_BY=per_token if by_token else 1, ACTIVATION=code, GATES=where, WHOLE=columns % span == 0,
        ROWS=tile.rows, LINES=tile.lines, SPAN=span, FINE=0 < layout.group < span,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
