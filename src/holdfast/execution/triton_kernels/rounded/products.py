# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of rounded inputs with a matrix of one-byte codes, on tensor cores: float8_e4m3fn with float8_e4m3fn, int8
with int8, scaled by row or by block of 128 x 128, with bias, written or added.

The matrix is the first operand, so that few rows of inputs are a narrow second one and no lane of the tensor core is
wasted on padding. Where its tiles are too few to keep memory busy, the inputs are cut into parts: each leaves its sums
in a workspace, and the program that comes last adds them up in order, so that the result does not depend on who that
was. Safe in a CUDA graph.

Hopper's tensor cores add products of float8 with about 14 bits; every 128 inputs the sum is taken over into float32.
int8 is summed exactly in int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.rounded.early import (
    fetch_to_cache,
    let_others_start,
    starts_early,
    wait_for_others,
)
from holdfast.execution.triton_kernels.rounded.tiles import PREFETCH_BYTES, SKINNY_ROWS, RoundedTile, rounded_tile

ACROSS = 8
"""Neighbouring tiles of outputs that are done for all rows before the next."""
SUMS_COLUMNS = 1024
"""Of a program that scales them."""


@triton.jit
def _finish(
    out, sums, x_scales, scales, bias, row, output, rows, outputs, x_scale_row, out_stride,
    GROUPED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sums [outputs, rows] with what is left to do, rounded once."""
    sums = sums.to(tl.float32)
    if not GROUPED:
        by_output = tl.load(scales + output, mask=output < outputs, other=0.0)
        by_row = tl.load(x_scales + row * x_scale_row, mask=row < rows, other=0.0)
        sums = sums * by_output[:, None] * by_row[None, :]
    if BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    inside = (output < outputs)[:, None] & (row < rows)[None, :]
    place = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    if ADD:
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_rounded(
    x, x_scales, codes, scales, out, bias, parts, arrivals, rows, outputs, x_stride, x_scale_row, x_scale_group,
    codes_stride, scales_stride, out_stride,
    INPUTS: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr,
    PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of ACROSS neighbouring outputs are done for all rows before the next: those rows stay in cache."""
    row_tiles = tl.cdiv(rows, ROWS)
    tile, part = tl.program_id(0), tl.program_id(1)
    band = tile // (ACROSS * row_tiles)
    high = tl.minimum(tl.cdiv(outputs, OUTPUTS) - band * ACROSS, ACROSS)
    within = tile % (ACROSS * row_tiles)
    first_output, first_row = (band * ACROSS + within % high) * OUTPUTS, within // high * ROWS
    output, row = first_output + tl.arange(0, OUTPUTS), first_row + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    integer: tl.constexpr = x.dtype.element_ty == tl.int8
    kind: tl.constexpr = tl.int32 if integer else tl.float32
    steps: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    first, last = part * steps // PARTS, (part + 1) * steps // PARTS

    matrix = codes + output.to(tl.int64)[:, None] * codes_stride + column[None, :]
    inputs = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    block = scales + first_output // 128 * scales_stride
    input_scale = x_scales + row * x_scale_row
    sums = tl.zeros((OUTPUTS, ROWS), kind)
    if PREFETCH:
        lane = tl.arange(0, 2 * OUTPUTS)  # Two halves of each row: as many as there are threads.
        line = tl.minimum(first_output + lane % OUTPUTS, outputs - 1).to(tl.int64) * codes_stride
        fetch_to_cache(codes + line + first * COLUMNS + lane // OUTPUTS * (PREFETCH // 2), PREFETCH // 2, EARLY)
    wait_for_others(EARLY)
    for step in tl.range(first, last):
        at = step * COLUMNS
        if INPUTS % COLUMNS:
            weight = tl.load(matrix + at, mask=(output < outputs)[:, None] & (at + column < INPUTS)[None, :], other=0.0)
            value = tl.load(inputs + at, mask=(row < rows)[None, :] & (at + column < INPUTS)[:, None], other=0.0)
        else:
            weight = tl.load(matrix + at, mask=(output < outputs)[:, None], other=0.0)
            value = tl.load(inputs + at, mask=(row < rows)[None, :], other=0.0)
        if integer:
            sums = tl.dot(weight, value, sums, out_dtype=kind)
        elif GROUPED:
            scale = tl.load(block + step) * tl.load(input_scale + step * x_scale_group, mask=row < rows, other=0.0)
            sums += tl.dot(weight, value) * scale[None, :]
        else:
            sums = tl.dot(weight, value, sums, max_num_imprecise_acc=128 if COLUMNS >= 128 else 0)
    let_others_start(EARLY)

    if PARTS == 1:
        _finish(
            out, sums, x_scales, scales, bias, row, output, rows, outputs, x_scale_row, out_stride, GROUPED, BIAS, ADD
        )  # fmt: skip
    else:
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        kept = parts + tile.to(tl.int64) * (PARTS * OUTPUTS * ROWS) + place
        tl.store(kept + part * (OUTPUTS * ROWS), sums)
        tl.debug_barrier()  # All threads have stored before one of them says so.
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrivals + tile, 0)
            sums = tl.zeros((OUTPUTS, ROWS), kind)
            for other in tl.range(0, PARTS):
                sums += tl.load(kept + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            _finish(
                out, sums, x_scales, scales, bias, row, output, rows, outputs, x_scale_row, out_stride,
                GROUPED, BIAS, ADD,
            )  # fmt: skip


def rounded_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    grouped: bool = False,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    tile: RoundedTile | None = None,
) -> None:
    """out [rows, outputs] = (or +=) x [rows, inputs] · codesᵀ by their scales, + bias; any number of rows.

    x_scales and scales: [rows, 1] and [outputs, 1]; grouped: [rows, inputs / 128] and [outputs / 128, inputs / 128].
    parts: float32, and arrivals: int32 and zero, as it is left; as much of each as the tiles' table says. `tile`
    replaces the table's.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    if rows == 0:
        return
    tile = tile or rounded_tile(rows, outputs, inputs)
    tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, tile.rows)
    integer, early = codes.dtype == torch.int8, starts_early()
    # A part is no shorter than its steps, all but the last of which are whole.
    whole = inputs // tile.parts // tile.columns * tile.columns
    prefetch = min(PREFETCH_BYTES, whole) if codes.stride(0) % 16 == 0 and rows <= SKINNY_ROWS else 0
    _multiply_rounded[(tiles, tile.parts)](
        x, x_scales, codes, scales, out, codes if bias is None else bias,
        parts.view(torch.int32) if integer else parts, arrivals, rows, outputs, x.stride(0), x_scales.stride(0),
        x_scales.stride(1), codes.stride(0), scales.stride(0), out.stride(0), INPUTS=inputs, GROUPED=grouped,
        BIAS=bias is not None, ADD=accumulate, PARTS=tile.parts, OUTPUTS=tile.outputs, ROWS=tile.rows,
        COLUMNS=tile.columns, ACROSS=ACROSS,
        PREFETCH=prefetch, EARLY=early, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _scale_sums(
    sums, x_scales, scales, bias, out, outputs, x_scale_row, sums_stride, out_stride, BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    by_output = tl.load(scales + output, mask=inside, other=0.0)
    wait_for_others(EARLY)
    wide = tl.load(sums + row * sums_stride + output, mask=inside, other=0.0).to(tl.float32)
    wide *= by_output * tl.load(x_scales + row * x_scale_row)
    if BIAS:
        wide += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    place = out + row * out_stride + output
    if ADD:
        wide += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, wide.to(out.dtype.element_ty), mask=inside)


def scale_sums(
    sums: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """out = (or +=) sums [rows, outputs] of products without scales, by those of their rows and columns, + bias. `out`
    may be `sums`."""
    (rows, outputs), early = sums.shape, starts_early()
    if rows:
        _scale_sums[(rows, triton.cdiv(outputs, SUMS_COLUMNS))](
            sums, x_scales, scales, scales if bias is None else bias, out, outputs, x_scales.stride(0), sums.stride(0),
            out.stride(0), BIAS=bias is not None, ADD=accumulate, BLOCK=SUMS_COLUMNS,
            EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
