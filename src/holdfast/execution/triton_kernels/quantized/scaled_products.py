# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of up to MOST_QUANTIZED_ROWS rows with a matrix of codes and scales, read once and decoded in registers.

    few    products of each piece of columns that shares a scale apart, and the scale on their sums
    more   scales on the elements, which are rounded to x's type

Both hand matrix rows to tensor cores as the left side, so that decoded elements need not leave registers. Where outputs
alone would not fill the GPU, columns are split among programs (split_sums.py). Sums are float32. Safe in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import activation_code
from holdfast.execution.triton_kernels.quantized.product_tiles import (
    FEW_QUANTIZED_ROWS,
    MOST_QUANTIZED_ROWS,
    QuantizedTile,
    scaled_tile,
)
from holdfast.execution.triton_kernels.quantized.products import NOT_GATED
from holdfast.execution.triton_kernels.quantized.scaled_codes import (
    eight_bit_values,
    four_bit_values,
    scale_values,
)
from holdfast.execution.triton_kernels.quantized.split_sums import (
    SplitSums,
    ask_ahead,
    cut_columns,
    finish,
    gather_sums,
    inputs,
    leave_sums,
    turned,
)
from holdfast.execution.weights.scaled_matrix import INT4_ZERO, ScaledMatrix


@triton.jit
def _stored_scales(scales, zeros, row, group, groups, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr):
    place = row // GROUP_ROWS * groups + group
    scale = tl.load(scales + place)
    zero = scale
    if ZEROS:
        zero = tl.load(zeros + place)
    return scale, zero


@triton.jit
def _both_scales(
    scales, zeros, output, outputs, at, groups, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Of outputs, and where they are gates, of their ups."""
    scale, zero = _stored_scales(scales, zeros, output, at, groups, GROUP_ROWS, ZEROS)
    up_scale, up_zero = scale, zero
    if GATED:
        up_scale, up_zero = _stored_scales(scales, zeros, output + outputs, at, groups, GROUP_ROWS, ZEROS)
    return scale, zero, up_scale, up_zero


@triton.jit
def _ask_for_scales(
    scales, zeros, row, first, last, groups, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Of steps first..last-1."""
    LINES: tl.constexpr = 4 if PIECE == 128 else 8
    start, end = first * (PIECES * PIECE) // GROUP, tl.minimum(last * (PIECES * PIECE) // GROUP + 1, groups)
    ask_ahead(scales, row // GROUP_ROWS, groups, start, end, LINES)
    if ZEROS:
        ask_ahead(zeros, row // GROUP_ROWS, groups, start, end, LINES)


@triton.jit
def _zero_values(zero, ZEROS: tl.constexpr, OFFSET: tl.constexpr):
    if ZEROS:
        return zero.to(tl.float32)
    else:
        return tl.full(zero.shape, OFFSET, tl.float32)


@triton.jit
def _few_part(
    codes, low, high, scale, zero, kind: tl.constexpr, CODES: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Sums [pieces, outputs, rows] of one step, scaled."""
    if FOUR:
        zero = _zero_values(zero, ZEROS, OFFSET)[:, :, None]
        first, second = four_bit_values(codes, zero, kind, CODES, ASSEMBLY)
        part = tl.dot(first, low, input_precision="ieee")
        part = tl.dot(second, high, part, input_precision="ieee")
    else:
        values = eight_bit_values(codes, kind, CODES)
        if ZEROS:
            values -= zero.to(kind)[:, :, None]
        part = tl.dot(values, low, input_precision="ieee")
    return part * scale_values(scale)[:, :, None]


@triton.jit(do_not_specialize=["rows", "steps", "pieces"])
def _multiply_few(
    x, codes, scales, zeros, out, bias, workspace, counters, rows, outputs, columns, pieces, steps, groups,
    x_stride, out_stride,
    CODES: tl.constexpr, FOUR: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A step is PIECES pieces of PIECE columns that share a scale; `steps` of each split, `pieces` of a matrix row."""
    GATED: tl.constexpr = ACTIVATION >= 0
    BYTES: tl.constexpr = PIECE // 2 if FOUR else PIECE
    kind = x.dtype.element_ty
    tile = tl.program_id(0)
    # Outputs beyond the last are read as the last, and not written.
    output = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1)
    piece, lane, byte = tl.arange(0, PIECES)[:, None, None], tl.arange(0, BYTES)[None, :, None], tl.arange(0, BYTES)
    x_row = tl.arange(0, ROWS)[None, None, :]
    live, x_row = x_row < rows, x_row * x_stride
    if FOUR:
        lane = lane // 16 * 32 + lane % 16
    if FOUR and PIECE == 32:
        # Loads of 16 bytes a thread would send decoded elements through shared memory: let the compiler see 8.
        width = columns // 2
    else:
        width = pieces * BYTES
    line = codes + output.to(tl.int64)[None, :, None] * width + byte[None, None, :]
    up_line = line + tl.cast(outputs, tl.int64) * width
    wide_output, wide_piece = output[None, :], tl.arange(0, PIECES)[:, None]
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(pieces, PIECES))
    if ASSEMBLY:
        _ask_for_scales(
            scales, zeros, output, first, last, groups, GROUP, GROUP_ROWS, ZEROS, PIECE, PIECES
        )  # fmt: skip
        if GATED:
            _ask_for_scales(
                scales, zeros, output + outputs, first, last, groups, GROUP, GROUP_ROWS, ZEROS, PIECE, PIECES
            )  # fmt: skip

    at = tl.minimum(turned(0, tile, first, last) * PIECES + wide_piece, pieces - 1) * PIECE // GROUP
    scale, zero, up_scale, up_zero = _both_scales(
        scales, zeros, wide_output, outputs, at, groups, GROUP_ROWS, ZEROS, GATED
    )  # fmt: skip
    sums = tl.zeros((PIECES, OUTPUTS, ROWS), tl.float32)
    up = sums
    for index in tl.range(0, last - first):
        step = turned(index, tile, first, last)
        # Scales of the next step are on their way while this one is multiplied.
        at = tl.minimum(turned(index + 1, tile, first, last) * PIECES + wide_piece, pieces - 1) * PIECE // GROUP
        next_scale, next_zero, next_up_scale, next_up_zero = _both_scales(
            scales, zeros, wide_output, outputs, at, groups, GROUP_ROWS, ZEROS, GATED
        )  # fmt: skip
        here = step * PIECES + piece
        inside = live & (here < pieces)
        column = here * PIECE + lane
        low = inputs(x, x_row + column, inside, live, EVEN)
        high = low
        if FOUR:
            high = inputs(x, x_row + column + 16, inside, live, EVEN)
        read = here
        if not EVEN:
            read = tl.minimum(here, pieces - 1)
        part = tl.load(line + read * BYTES)
        sums += _few_part(part, low, high, scale, zero, kind, CODES, FOUR, ZEROS, OFFSET, ASSEMBLY)
        if GATED:
            part = tl.load(up_line + read * BYTES)
            up += _few_part(part, low, high, up_scale, up_zero, kind, CODES, FOUR, ZEROS, OFFSET, ASSEMBLY)
        scale, zero, up_scale, up_zero = next_scale, next_zero, next_up_scale, next_up_zero
    total, up_total = tl.sum(sums, 0), tl.sum(up, 0)
    if SPLIT:
        leave_sums(workspace, tile, total, up_total, GATED)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != tl.num_programs(1) - 1:
            return
        total, up_total = gather_sums(workspace, tile, total, up_total, GATED)
        tl.store(counters + tile, 0)
    finish(out, total, up_total, bias, tile, rows, outputs, out_stride, BIAS, ADD, ACTIVATION)


@triton.jit
def _spread(part, LANES: tl.constexpr):
    """[outputs, pieces] to every byte of each piece."""
    OUTPUTS: tl.constexpr = part.shape[0]
    PIECES: tl.constexpr = part.shape[1]
    return tl.broadcast_to(part[:, :, None], (OUTPUTS, PIECES, LANES)).reshape(OUTPUTS, PIECES * LANES)


@triton.jit
def _scaled(values, scale, EXACT: tl.constexpr, PIECE_BYTES: tl.constexpr):
    """Elements [outputs, bytes] of values and scales [outputs, pieces], rounded to the values' type.

    bfloat16 is multiplied two at a time, by the scale's upper and lower half: what is lost is far below what rounding
    the element costs. EXACT: the scale has no lower half."""
    kind = values.dtype
    if kind == tl.bfloat16 or EXACT:
        upper = scale.to(kind)
        found = values * _spread(upper, PIECE_BYTES)
        if not EXACT:
            lower = (scale - upper.to(tl.float32)).to(kind)
            found = tl.fma(values, _spread(upper, PIECE_BYTES), values * _spread(lower, PIECE_BYTES))
        return found
    else:
        return values.to(tl.float32) * _spread(scale, PIECE_BYTES)


@triton.jit
def _elements(
    codes, scale, zero, kind: tl.constexpr, CODES: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr, PIECE_BYTES: tl.constexpr,
):  # fmt: skip
    """[outputs, columns]; of four-bit codes the low halves of all bytes, then the high ones. Scale and zero [outputs,
    pieces]."""
    OUTPUTS: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    # NF4's values are rounded with their scale, once.
    VALUES: tl.constexpr = tl.float32 if CODES == "nf4" else kind
    scale = scale_values(scale)
    if FOUR:
        zero = _spread(_zero_values(zero, ZEROS, OFFSET), PIECE_BYTES)
        low, high = four_bit_values(codes, zero, VALUES, CODES, ASSEMBLY)
        low = _scaled(low, scale, EXACT and CODES != "nf4", PIECE_BYTES).to(kind)
        high = _scaled(high, scale, EXACT and CODES != "nf4", PIECE_BYTES).to(kind)
        return tl.join(low, high).permute(0, 2, 1).reshape(OUTPUTS, 2 * BYTES)
    else:
        values = eight_bit_values(codes, VALUES, CODES)
        if ZEROS:
            values -= _spread(zero.to(kind), PIECE_BYTES)
        return _scaled(values, scale, EXACT, PIECE_BYTES).to(kind)


@triton.jit(do_not_specialize=["rows", "steps", "pieces"])
def _multiply_more(
    x, codes, scales, zeros, out, bias, workspace, counters, rows, outputs, pieces, steps, groups,
    x_stride, out_stride,
    CODES: tl.constexpr, FOUR: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, ASSEMBLY: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """As `_multiply_few`, all of a step in one product: with its left side in registers the next step is decoded while
    it runs."""
    PIECE_BYTES: tl.constexpr = PIECE // 2 if FOUR else PIECE
    BYTES: tl.constexpr = PIECE_BYTES * PIECES
    COLUMNS: tl.constexpr = PIECE * PIECES
    kind = x.dtype.element_ty
    tile = tl.program_id(0)
    output = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1)
    byte, lane = tl.arange(0, BYTES)[None, :], tl.arange(0, COLUMNS)[:, None]
    if FOUR:
        # Low halves of all bytes, then high ones. The compiler does not see by itself that sixteen are neighbours.
        lane = lane % BYTES // 16 * 32 + lane % 16 + lane // BYTES * 16
        lane = tl.max_contiguous(tl.multiple_of(lane, (16, 1)), (16, 1))
    x_row = tl.arange(0, ROWS)[None, :]
    live, x_row = x_row < rows, x_row * x_stride
    width = pieces * PIECE_BYTES
    line = codes + output.to(tl.int64)[:, None] * width + byte
    wide_piece = tl.arange(0, PIECES)[None, :]
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(pieces, PIECES))
    if ASSEMBLY:
        _ask_for_scales(
            scales, zeros, output, first, last, groups, GROUP, GROUP_ROWS, ZEROS, PIECE, PIECES
        )  # fmt: skip
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for index in tl.range(0, last - first):
        step = turned(index, tile, first, last)
        at = tl.minimum(step * PIECES + wide_piece, pieces - 1)
        scale, zero = _stored_scales(scales, zeros, output[:, None], at * PIECE // GROUP, groups, GROUP_ROWS, ZEROS)
        column = step * COLUMNS + lane
        inside = live & (column < pieces * PIECE)
        part = inputs(x, x_row + column, inside, live, EVEN)
        if EVEN:
            found = tl.load(line + step * BYTES)
        else:
            found = tl.load(line + step * BYTES, mask=step * BYTES + byte < width, other=0)
        elements = _elements(
            found, scale, zero, kind, CODES, FOUR, ZEROS, OFFSET, EXACT, ASSEMBLY, PIECE_BYTES
        )  # fmt: skip
        sums = tl.dot(elements, part, sums, input_precision="ieee")
    if SPLIT:
        leave_sums(workspace, tile, sums, sums, False)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != tl.num_programs(1) - 1:
            return
        sums, _ = gather_sums(workspace, tile, sums, sums, False)
        tl.store(counters + tile, 0)
    finish(out, sums, sums, bias, tile, rows, outputs, out_stride, BIAS, ADD, -1)


def scaled_product(
    x: torch.Tensor,
    matrix: ScaledMatrix,
    out: torch.Tensor,
    workspace: SplitSums,
    *,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    tile: QuantizedTile | None = None,
) -> None:
    """out [rows, outputs] = (or +=) x [rows, inputs] · matrixᵀ + bias, for at most MOST_QUANTIZED_ROWS rows.

    Columns of x and out lie side by side; rows may be apart. A matrix with an `order` takes x in that order already.
    `tile` replaces the table's.
    """
    _launch(x, matrix, out, workspace, bias, NOT_GATED, accumulate, tile)


def scaled_gate_up(
    x: torch.Tensor,
    matrix: ScaledMatrix,
    out: torch.Tensor,
    workspace: SplitSums,
    *,
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu",
    bias: torch.Tensor | None = None,
    tile: QuantizedTile | None = None,
) -> None:
    """out [rows, inner] = activation(gate) · up, where gate beside up = x · matrixᵀ + bias; for at most
    FEW_QUANTIZED_ROWS rows."""
    _launch(x, matrix, out, workspace, bias, activation_code(activation), False, tile)


def _launch(
    x: torch.Tensor,
    matrix: ScaledMatrix,
    out: torch.Tensor,
    workspace: SplitSums,
    bias: torch.Tensor | None,
    activation: int,
    accumulate: bool,
    tile: QuantizedTile | None,
) -> None:
    (rows, columns), outputs, layout = x.shape, out.shape[1], matrix.layout
    gated, biased = activation != NOT_GATED, bias is not None
    most = FEW_QUANTIZED_ROWS if gated else MOST_QUANTIZED_ROWS
    if rows > most:
        raise EngineError("too many rows for a product with codes", needed=f"at most {most}", found=str(rows))
    if rows == 0:
        return
    tile = tile or scaled_tile(rows, outputs, columns, layout, x.element_size(), gated=gated)
    pieces, group = columns // tile.piece, layout.group or columns
    tiles, splits, steps = cut_columns(workspace, pieces, outputs, tile, gated=gated)
    known: dict[str, Any] = {
        "CODES": layout.codes, "FOUR": layout.four_bits, "GROUP": group, "GROUP_ROWS": layout.group_rows,
        "ZEROS": layout.zeros, "OFFSET": INT4_ZERO, "BIAS": biased, "ADD": accumulate, "SPLIT": splits > 1,
        "EVEN": pieces % tile.pieces == 0, "ASSEMBLY": x.element_size() == 2 and x.device.type != "cpu",
        "ROWS": tile.rows, "OUTPUTS": tile.outputs, "PIECE": tile.piece, "PIECES": tile.pieces,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    codes, groups = matrix.codes.view(torch.uint8), columns // group
    zeros, added = matrix.scales if matrix.zeros is None else matrix.zeros, bias if biased else x
    if tile.rows <= FEW_QUANTIZED_ROWS:
        _multiply_few[(tiles, splits)](
            x, codes, matrix.scales, zeros, out, added, workspace.sums, workspace.counters, rows, outputs, columns,
            pieces, steps, groups, x.stride(0), out.stride(0), ACTIVATION=activation, **known,
        )  # fmt: skip
        return
    # Scales that elements' type holds need no second half; those of a byte are powers of two.
    known["EXACT"] = matrix.scales.dtype in (x.dtype, torch.uint8 if x.dtype == torch.bfloat16 else x.dtype)
    _multiply_more[(tiles, splits)](
        x, codes, matrix.scales, zeros, out, added, workspace.sums, workspace.counters, rows, outputs, pieces, steps,
        groups, x.stride(0), out.stride(0), **known,
    )  # fmt: skip
