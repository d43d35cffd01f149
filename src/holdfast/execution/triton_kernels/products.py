# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of at most 16 rows with a dense matrix [outputs, inputs], read once, at the speed of memory.

    1-2 rows   programs of a few matrix rows: multiply, add up in registers, reduce once at the end
    3-16 rows  tensor cores over 16 padded rows; where output tiles are few, programs share one:
               each leaves its partial sums in the workspace, and the last to arrive adds them in order

A norm of the inputs may ride along: where a row's scale is not known before the columns were read, it is applied to
the sums. Sums are float32 and rounded once. Safe in a CUDA graph; products of two streams must not share a workspace.
Knows nothing of quantized blocks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import activate, activation_code, after_the_one_before
from holdfast.execution.triton_kernels.product_tiles import (
    FEW_ROWS,
    MOST_ROWS,
    PROGRAMS,
    ProductTile,
    few_rows_tile,
    fits_workspace,
    more_rows_tile,
    split_partials,
)

NOT_GATED = -1


class SplitWorkspace(NamedTuple):
    partials: torch.Tensor
    counters: torch.Tensor
    """Zero between products: the last program of a tile puts its own back."""


def make_workspace(device: torch.device) -> SplitWorkspace:
    return SplitWorkspace(
        torch.empty(split_partials(), dtype=torch.float32, device=device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
    )


def splits_of(tile: ProductTile, outputs: int, workspace: SplitWorkspace | None) -> int:
    """How many programs share an output tile: one without a workspace."""
    if workspace is None:
        return 1
    if not fits_workspace(tile, outputs):
        raise EngineError(
            "a split product would leave its workspace", needed=f"at most {PROGRAMS} programs", found=f"{tile}"
        )
    return tile.splits


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
def _put_gated(
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
        _put_gated(out, row + output, totals, second_totals, bias, output, outputs, inside, BIAS, ACTIVATION)
    else:
        put(out, row + output, totals, bias, output, inside, BIAS, ADD)


@triton.jit
def _multiply_few(
    x, weight, out, norm, bias, outputs, x_stride, weight_stride, out_stride, epsilon,
    INPUTS: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
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
    after_the_one_before(OVERLAP)

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


@triton.jit
def _scales(x, live, epsilon, INPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """One over the root mean square of each row; x points at the rows, [16, 1]."""
    squares = tl.zeros((16, COLUMNS), tl.float32)
    for start in tl.range(0, INPUTS, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        wide = tl.load(x + column, mask=live & (column < INPUTS), other=0.0).to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, 1) / INPUTS + epsilon)[:, None]


@triton.jit
def add_parts(partials, counters, sums, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """(the sum over all programs of an output tile, whether this one was the last); in the same order always."""
    tile, split = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, 16)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    mine = partials + tile * (SPLITS * 16 * ROWS)
    tl.store(mine + split * (16 * ROWS) + place, sums)
    tl.debug_barrier()  # all threads have stored before one says so
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    last = arrived == SPLITS - 1
    if last:
        sums = tl.zeros((16, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            sums += tl.load(mine + part * (16 * ROWS) + place, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return sums, last


@triton.jit(do_not_specialize=["rows"])
def _multiply_more(
    x, weight, out, norm, bias, partials, counters, rows, outputs, x_stride, weight_stride, out_stride, epsilon,
    INPUTS: tl.constexpr, NORM: tl.constexpr, SCALE_FIRST: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows of x; WIDE: in float32, where x or the matrix is."""
    after_the_one_before(OVERLAP)
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, COLUMNS)[None, :]
    live = row < rows
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    present = output < outputs
    inputs = x + row * x_stride
    line = weight + output.to(tl.int64) * weight_stride
    scale = tl.full((16, 1), 1.0, tl.float32)
    if NORM and SCALE_FIRST:
        scale = _scales(inputs, live, epsilon, INPUTS, COLUMNS)

    kind = tl.float32 if WIDE else weight.dtype.element_ty
    sums = tl.zeros((16, ROWS), tl.float32)
    up_sums = sums
    squares = tl.zeros((16, COLUMNS), tl.float32)
    share: tl.constexpr = (INPUTS + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS) * COLUMNS
    first = tl.program_id(1) * share
    for start in tl.range(first, tl.minimum(first + share, INPUTS), COLUMNS):
        at = start + column
        inside = at < INPUTS
        part = tl.load(inputs + at, mask=live & inside, other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            if SCALE_FIRST:
                wide *= scale
            else:
                squares += wide * wide
            part = wide * tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        part = part.to(kind)
        tile = tl.load(line + at, mask=present & inside, other=0.0, eviction_policy="evict_first").to(kind)
        sums = tl.dot(part, tile.T, sums, input_precision="ieee")
        if ACTIVATION >= 0:
            up = tl.load(
                line + tl.cast(outputs, tl.int64) * weight_stride + at, mask=present & inside, other=0.0,
                eviction_policy="evict_first",
            ).to(kind)  # fmt: skip
            up_sums = tl.dot(part, up.T, up_sums, input_precision="ieee")
    if NORM and not SCALE_FIRST:
        scale = tl.rsqrt(tl.sum(squares, 1) / INPUTS + epsilon)[:, None]
        sums, up_sums = sums * scale, up_sums * scale

    written = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    target = row.to(tl.int64) * out_stride + written
    inside = live & (written < outputs)
    if SPLITS > 1:
        sums, last = add_parts(partials, counters, sums, SPLITS, ROWS)
        inside = inside & last
    if ACTIVATION >= 0:
        _put_gated(out, target, sums, up_sums, bias, written, outputs, inside, BIAS, ACTIVATION)
    else:
        put(out, target, sums, bias, written, inside, BIAS, ADD)


def skinny_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    tile: ProductTile | None = None,
    overlap: bool = False,
) -> None:
    """out [rows, outputs] = (or +=) norm(x) [rows, inputs] · weightᵀ + bias, for at most 16 rows.

    Columns of every tensor lie side by side; rows may be apart. Without norm_weight x is taken as it is. Without a
    workspace nothing is split, which is slower for 3-16 rows and few outputs. `tile` replaces the table's.
    """
    _launch(x, weight, out, norm_weight, epsilon, bias, NOT_GATED, accumulate, workspace, tile, overlap)


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
    overlap: bool = False,
) -> None:
    """out [rows, inner] = activation(gate) · up, where gate beside up = norm(x) · weightᵀ + bias, weight [2·inner,
    inputs]; for at most 16 rows."""
    _launch(x, weight, out, norm_weight, epsilon, bias, activation_code(activation), False, None, tile, overlap)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    epsilon: float,
    bias: torch.Tensor | None,
    activation: int,
    accumulate: bool,
    workspace: SplitWorkspace | None,
    tile: ProductTile | None,
    overlap: bool,
) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    if rows > MOST_ROWS:
        raise EngineError("too many rows for a skinny product", needed=f"at most {MOST_ROWS}", found=str(rows))
    if rows == 0:
        return
    gated, normed, biased = activation != NOT_GATED, norm_weight is not None, bias is not None
    norm, added = (norm_weight if normed else weight), (bias if biased else weight)
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    if rows <= FEW_ROWS:
        tile = tile or few_rows_tile(outputs, inputs, weight.element_size(), gated=gated, normed=normed)
        _multiply_few[(triton.cdiv(outputs, tile.outputs),)](
            x, weight, out, norm, added, outputs, *strides, epsilon, INPUTS=inputs, TWO=rows == FEW_ROWS, NORM=normed,
            BIAS=biased, ADD=accumulate, ACTIVATION=activation, ROWS=tile.outputs, COLUMNS=tile.inputs,
            OVERLAP=overlap, num_warps=tile.warps, launch_pdl=overlap,
        )  # fmt: skip
        return
    wide = torch.float32 in (x.dtype, weight.dtype)
    tile = tile or more_rows_tile(outputs, inputs, 4 if wide else 2, gated=gated)
    splits = splits_of(tile, outputs, None if gated else workspace)
    partials, counters = workspace if workspace is not None else (weight, weight)
    # float16 could overflow before the norm's scale is applied, and a part of the columns does not know it.
    scale_first = splits > 1 or weight.dtype == torch.float16
    _multiply_more[(triton.cdiv(outputs, tile.outputs), splits)](
        x, weight, out, norm, added, partials, counters, rows, outputs, *strides, epsilon, INPUTS=inputs, NORM=normed,
        SCALE_FIRST=scale_first, WIDE=wide, BIAS=biased, ADD=accumulate, ACTIVATION=activation, ROWS=tile.outputs,
        COLUMNS=tile.inputs, SPLITS=splits, OVERLAP=overlap, num_warps=tile.warps, num_stages=tile.stages,
        launch_pdl=overlap,
    )  # fmt: skip
