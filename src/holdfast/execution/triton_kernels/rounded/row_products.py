# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of one row, rounded to float8_e4m3fn on the way, with a matrix of float8_e4m3fn, at the speed of memory.

Every program rounds the whole row for itself, with the norm before it, and multiplies a few matrix rows, which are on
their way from memory meanwhile. A thread has the same columns of the row and of each matrix row, so that nothing
changes hands before the sums do. The gate of an MLP may ride along.

No tensor core: products of two codes are exact in float32, and so are sums but for float32's own rounding. How inputs
are rounded is told in rounding.py. Safe in a CUDA graph. Knows nothing of int8 and of more rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import activation_code
from holdfast.execution.triton_kernels.quantized.products import NOT_GATED, put, put_gated
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.rounded.rounding import codes_of, dynamic_scale, magnitude, normed
from holdfast.execution.triton_kernels.rounded.tiles import RowTile, row_tile
from holdfast.footprint.rounded import GROUP


@triton.jit
def _load_tile(codes, row, column, outputs, codes_stride, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    inside = row < outputs
    if COLUMNS != PADDED:
        inside = inside & (column < COLUMNS)
    return tl.load(
        codes + row.to(tl.int64) * codes_stride + column, mask=inside, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _rounded_row(
    x, norm, static, column, epsilon, COLUMNS: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    STATIC: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """What codes stand for [1, PADDED] in float32, and scales: of the row [1], or of each 128 columns."""
    inside = column < COLUMNS
    kept = tl.load(x + column, mask=inside, other=0.0)
    wide = kept.to(tl.float32)
    if NORM:
        weight = tl.load(norm + column, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / COLUMNS + epsilon)
        wide = normed(kept, weight, factor[:, None]).to(tl.float32)
    if GROUPED:
        wide = tl.reshape(wide, (PADDED // 128, 128))
    largest = tl.max(magnitude(wide), 1)
    if STATIC:
        # inf - inf: a row that is not finite stays so.
        scale = tl.load(static) + (largest - largest)
    else:
        scale = dynamic_scale(largest, True)
    return codes_of(wide, scale[:, None], True, tl.float8e4nv).to(tl.float32), scale


@triton.jit
def _scaled_by_block(value, scale, block, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """The row times the scales of its groups and of the matrix's blocks: sums need no more."""
    group = tl.arange(0, PADDED // 128)
    by_block = tl.load(block + group, mask=group < COLUMNS // 128, other=0.0)
    return tl.reshape(value * (scale * by_block)[:, None], (1, PADDED))


@triton.jit
def _multiply_row(
    x, norm, static, codes, scales, out, bias, outputs, codes_stride, scales_stride, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr,
    STATIC: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS matrix rows at a time, and of a gate as many beside them. The next are on their way while these are
    multiplied, the first before the row is there."""
    let_others_start(EARLY)
    column = tl.arange(0, PADDED)[None, :]
    first = tl.program_id(0) * (ROWS * STEPS)
    row = first + tl.arange(0, ROWS)[:, None]
    # Rows of a gate end where those of `up` begin.
    last = outputs + outputs if ACTIVATION >= 0 else outputs
    tile = _load_tile(codes, row, column, last, codes_stride, COLUMNS, PADDED)
    up_tile = tile
    if ACTIVATION >= 0:
        up_tile = _load_tile(codes, outputs + row, column, last, codes_stride, COLUMNS, PADDED)
    wait_for_others(EARLY)

    value, scale = _rounded_row(x, norm, static, column, epsilon, COLUMNS, PADDED, NORM, STATIC, GROUPED)
    up_value = value
    if GROUPED:
        if ACTIVATION >= 0:
            up_block = scales + (outputs + first) // 128 * scales_stride
            up_value = _scaled_by_block(value, scale, up_block, COLUMNS, PADDED)
        value = _scaled_by_block(value, scale, scales + first // 128 * scales_stride, COLUMNS, PADDED)

    # Unrolled: a tile that a loop carries is taken apart into bytes and put together again.
    for step in tl.static_range(0, STEPS):
        next_tile, next_up_tile = tile, up_tile
        if step + 1 < STEPS:
            following = row + (step + 1) * ROWS
            next_tile = _load_tile(codes, following, column, last, codes_stride, COLUMNS, PADDED)
            if ACTIVATION >= 0:
                next_up_tile = _load_tile(codes, outputs + following, column, last, codes_stride, COLUMNS, PADDED)
        output = first + step * ROWS + tl.arange(0, ROWS)
        inside = output < outputs
        sums = tl.sum(tile.to(tl.float32) * value, 1)
        if not GROUPED:
            sums = sums * tl.load(scales + output, mask=inside, other=0.0) * scale
        if ACTIVATION >= 0:
            up_sums = tl.sum(up_tile.to(tl.float32) * up_value, 1)
            if not GROUPED:
                up_sums = up_sums * tl.load(scales + outputs + output, mask=inside, other=0.0) * scale
            put_gated(out, output, sums, up_sums, bias, output, outputs, inside, BIAS, ACTIVATION)
        else:
            put(out, output, sums, bias, output, inside, BIAS, ADD)
        tile, up_tile = next_tile, next_up_tile


def row_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    static: torch.Tensor | None = None,
    grouped: bool = False,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    activation: Literal["silu", "gelu", "gelu_tanh"] | None = None,
    tile: RowTile | None = None,
) -> None:
    """out [1, outputs] = (or +=) x [1, inputs] rounded, or its rms_norm, · codesᵀ by their scales, + bias.

    scales: [outputs, 1], or grouped [outputs / 128, inputs / 128]; static [1]: the scale of inputs to take. With an
    activation codes are [2 · outputs, inputs], and out is activation(gate) · up. `tile` replaces the table's.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    if rows != 1:
        raise EngineError("too many rows for a product of one", needed="1", found=str(rows))
    if grouped and activation is not None and outputs % GROUP:
        raise EngineError("a block of scales is shared by a gate and what it gates", needed="outputs of whole blocks")
    gated, early = activation is not None, starts_early()
    tile = tile or row_tile(inputs, gated=gated)
    _multiply_row[(triton.cdiv(outputs, tile.outputs * tile.steps),)](
        x, x if norm is None else norm, scales if static is None else static, codes, scales, out,
        codes if bias is None else bias, outputs, codes.stride(0), scales.stride(0), epsilon, COLUMNS=inputs,
        PADDED=triton.next_power_of_2(inputs), ROWS=tile.outputs, STEPS=tile.steps, NORM=norm is not None,
        STATIC=static is not None, GROUPED=grouped, BIAS=bias is not None, ADD=accumulate,
        ACTIVATION=NOT_GATED if activation is None else activation_code(activation), EARLY=early,
        num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
