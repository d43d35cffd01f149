# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of one or two rows with a dense matrix [outputs, inputs], read once, at the speed of memory: programs of a
few matrix rows multiply, add up in registers and reduce once at the end.

A norm of the inputs may ride along: a row's scale is not known before its columns were read, so it is applied to the
sums. Sums are float32 and rounded once. Safe in a CUDA graph. Knows nothing of quantized blocks.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import activate, activation_code
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_ROWS, ProductTile, few_rows_tile

NOT_GATED = -1


@triton.jit
def input_part(x, norm, column, inside, NORM: tl.constexpr):
    """Inputs in float32 times the norm's weight, and their squares before it."""
    wide = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    squares = wide * wide
    if NORM:
        wide *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    return wide, squares


@triton.jit
def put(out, index, sums, bias, bias_index, inside, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Sums to out, or onto what is there: in float32, rounded once."""
    if BIAS:
        sums += tl.load(bias + bias_index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        sums += tl.load(out + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def put_gated(
    out, index, gated, up, bias, bias_index, outputs, inside, BIAS: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """activation(gate) · up, rounded where the separate product and gate would round."""
    kind = out.dtype.element_ty
    if BIAS:
        gated += tl.load(bias + bias_index, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + outputs + bias_index, mask=inside, other=0.0).to(tl.float32)
    activated = activate(gated.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    tl.store(out + index, (activated * up.to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _finish_row(
    out, sums, second_sums, squares, bias, row, outputs, epsilon,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    totals, second_totals = tl.sum(sums, 1), tl.sum(second_sums, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / INPUTS + epsilon)
        totals, second_totals = totals * scale, second_totals * scale
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = output < outputs
    if ACTIVATION >= 0:
        put_gated(out, row + output, totals, second_totals, bias, output, outputs, inside, BIAS, ACTIVATION)
    else:
        put(out, row + output, totals, bias, output, inside, BIAS, ADD)


@triton.jit
def _multiply_few(
    x, weight, out, norm, bias, outputs, x_stride, weight_stride, out_stride, epsilon,
    INPUTS: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One or two rows of x. The next tile of the matrix is on its way while this one is multiplied."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    present = output < outputs
    line = weight + output.to(tl.int64) * weight_stride + column
    up_line = line + tl.cast(outputs, tl.int64) * weight_stride
    tile = tl.load(line, mask=present & (column < INPUTS), other=0.0, eviction_policy="evict_first")
    up_tile = tile
    if ACTIVATION >= 0:
        up_tile = tl.load(up_line, mask=present & (column < INPUTS), other=0.0, eviction_policy="evict_first")

    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_sums, second_sums, second_up_sums = sums, sums, sums
    squares = tl.zeros((1, COLUMNS), tl.float32)
    second_squares = squares
    for start in tl.range(0, INPUTS, COLUMNS):
        next_tile, next_up_tile = tile, up_tile
        if INPUTS > COLUMNS:
            following = present & (start + COLUMNS + column < INPUTS)
            next_tile = tl.load(line + start + COLUMNS, mask=following, other=0.0, eviction_policy="evict_first")
            if ACTIVATION >= 0:
                next_up_tile = tl.load(
                    up_line + start + COLUMNS, mask=following, other=0.0, eviction_policy="evict_first"
                )
        inside = start + column < INPUTS
        part, part_squares = input_part(x, norm, start + column, inside, NORM)
        squares += part_squares
        sums += tile.to(tl.float32) * part
        if ACTIVATION >= 0:
            up_sums += up_tile.to(tl.float32) * part
        if TWO:
            second, second_part_squares = input_part(x + x_stride, norm, start + column, inside, NORM)
            second_squares += second_part_squares
            second_sums += tile.to(tl.float32) * second
            if ACTIVATION >= 0:
                second_up_sums += up_tile.to(tl.float32) * second
        tile, up_tile = next_tile, next_up_tile
    _finish_row(
        out, sums, up_sums, squares, bias, 0, outputs, epsilon, INPUTS, ROWS, NORM, BIAS, ADD, ACTIVATION
    )  # fmt: skip
    if TWO:
        _finish_row(
            out, second_sums, second_up_sums, second_squares, bias, out_stride, outputs, epsilon,
            INPUTS, ROWS, NORM, BIAS, ADD, ACTIVATION,
        )  # fmt: skip


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    tile: ProductTile | None = None,
) -> None:
    """out [rows, outputs] = (or +=) norm(x) [rows, inputs] · weightᵀ + bias, for one row or two.

    Columns of every tensor lie side by side; rows may be apart. Without norm_weight x is taken as it is. `tile`
    replaces the table's.
    """
    _launch(x, weight, out, norm_weight, epsilon, bias, NOT_GATED, accumulate, tile)


def skinny_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu",
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    bias: torch.Tensor | None = None,
    tile: ProductTile | None = None,
) -> None:
    """out [rows, inner] = activation(gate) · up, where gate beside up = norm(x) · weightᵀ + bias, weight [2·inner,
    inputs]; for one row or two."""
    _launch(x, weight, out, norm_weight, epsilon, bias, activation_code(activation), False, tile)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    bias: torch.Tensor | None,
    activation: int,
    accumulate: bool,
    tile: ProductTile | None,
) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    if rows > FEW_ROWS:
        raise EngineError("too many rows for a skinny product", needed=f"at most {FEW_ROWS}", found=str(rows))
    if rows == 0:
        return
    gated, normed, biased = activation != NOT_GATED, norm_weight is not None, bias is not None
    tile = tile or few_rows_tile(outputs, inputs, weight.element_size(), gated=gated, normed=normed)
    _multiply_few[(triton.cdiv(outputs, tile.outputs),)](
        x, weight, out, norm_weight if normed else weight, bias if biased else weight, outputs, x.stride(0),
        weight.stride(0), out.stride(0), epsilon, INPUTS=inputs, TWO=rows == FEW_ROWS, NORM=normed, BIAS=biased,
        ADD=accumulate, ACTIVATION=activation, ROWS=tile.outputs, COLUMNS=tile.inputs, num_warps=tile.warps,
    )  # fmt: skip
