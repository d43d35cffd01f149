# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of up to MOST_QUANTIZED_ROWS rows with GGUF's quantized blocks, read once and decoded in registers.

The two ways of scaled_products.py: `few` multiplies codes piece by piece of 32 columns and applies
scales to the sums; what is added to elements (minimums) is added as often as inputs are summed, by a product with ones.
`more` applies scales to the elements, which are then rounded to x's type. Planes lie as `execution.weights.gguf_blocks`
keeps them. Safe in a CUDA graph. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.layer import activation_code
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.triton_kernels.quantized.kquant_codes import (
    BLOCK_FORMS,
    as_float,
    iq4_value,
    load_block_scales,
    load_scales,
)
from holdfast.execution.triton_kernels.quantized.product_tiles import (
    FEW_QUANTIZED_ROWS,
    MOST_QUANTIZED_ROWS,
    QuantizedTile,
    block_tile,
)
from holdfast.execution.triton_kernels.quantized.products import NOT_GATED
from holdfast.execution.triton_kernels.quantized.scaled_codes import spread_halves
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


@triton.jit
def _ones(packed, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """As if they came from the codes: the inputs of both products then lie alike in shared memory."""
    if ASSEMBLY:
        if kind == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;", "=r,=r,r", [packed], dtype=tl.bfloat16,
                is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00;", "=r,=r,r", [packed], dtype=tl.float16,
                is_pure=True, pack=4,
            )  # fmt: skip
    else:
        return tl.full(packed.shape, 1.0, kind)


@triton.jit
def _value(code, kind: tl.constexpr, OFFSET: tl.constexpr):
    """Codes below 128 less OFFSET, exact: written into the last bits of a number that is taken off again."""
    if kind == tl.bfloat16:
        return (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    elif kind == tl.float16:
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    else:
        return as_float(code, OFFSET)


@triton.jit
def _spread(part, LANES: tl.constexpr):
    """[outputs, pieces] to every lane of each piece."""
    OUTPUTS: tl.constexpr = part.shape[0]
    PIECES: tl.constexpr = part.shape[1]
    return tl.broadcast_to(part[:, :, None], (OUTPUTS, PIECES, LANES)).reshape(OUTPUTS, PIECES * LANES)


@triton.jit
def _word(words, place, index, COUNT: tl.constexpr, FLAT: tl.constexpr):
    """Of each piece, for all its lanes: [.., lanes], or with FLAT lanes of all pieces in a row."""
    word = tl.load(words + (place * COUNT + index))
    if FLAT:
        return _spread(word, 16)
    else:
        return word[:, :, None]


@triton.jit
def _with_high_bits(first, second, words, place, lane, WORDS: tl.constexpr, SHIFT: tl.constexpr, FLAT: tl.constexpr):
    """Bit i of each word on element i; `lane` counts elements of a half."""
    for bit in tl.static_range(WORDS):
        word = _word(words, place, bit, WORDS, FLAT)
        first = first | (((word >> lane) & 1) << (SHIFT + bit))
        second = second | (((word >> (lane + 16)) & 1) << (SHIFT + bit))
    return first, second


def _spread_with_bits(bits: int, raised: int) -> str:
    """PTX: four bytes of two codes each, the first byte's place in its piece, and one or two words with a further bit
    of each element of the piece, to eight codes in the last bits of `raised`."""
    lines = ["{", ".reg .b32 part, all;"]
    words = [f"${9 + 4 * index}" for index in range(bits)]
    lane, mask = "$5", 0x000F000F
    for half in (0, 1):
        for pair in (0, 1):
            result = f"${2 * half + pair}"
            lines.append(f"prmt.b32 all, $4, 0, {'0x4342' if pair else '0x4140'};")
            if half:
                lines.append("shr.u32 all, all, 4;")
            lines.append(f"lop3.b32 {result}, all, {mask:#x}, {raised:#x}, 0xea;")
        for bit, word in enumerate(words):
            lines.append(f"shr.u32 part, {word}, {lane};")
            lines.append(f"bfe.u32 part, part, {16 * half}, 4;" if half else "and.b32 part, part, 15;")
            for pair in (0, 1):
                # Two neighbouring bits to where the codes of both halves of a register have their next bit.
                low, high = 4 + bit - 2 * pair, 19 + bit - 2 * pair
                lines.append(f"mul.lo.u32 all, part, {(1 << low) | (1 << high):#x};")
                place = 0x00010001 << (4 + bit)
                lines.append(f"lop3.b32 ${2 * half + pair}, all, {place:#x}, ${2 * half + pair}, 0xea;")
    return "\n".join([*lines, "}"])


SPREAD_5_BFLOAT16 = tl.constexpr(_spread_with_bits(1, 0x43004300))
SPREAD_6_BFLOAT16 = tl.constexpr(_spread_with_bits(2, 0x43004300))
SPREAD_5_FLOAT16 = tl.constexpr(_spread_with_bits(1, 0x64006400))
SPREAD_6_FLOAT16 = tl.constexpr(_spread_with_bits(2, 0x64006400))


@triton.jit
def _spread_bits(packed, words, place, lane, kind: tl.constexpr, BITS: tl.constexpr):
    """`spread_halves` of five or six bits. Bytes of a thread lie in fours of one piece."""
    lane = tl.broadcast_to(lane, packed.shape)
    first = tl.broadcast_to(_word(words, place, 0, BITS - 4, False), packed.shape)
    second = first
    if BITS == 6:
        second = tl.broadcast_to(_word(words, place, 1, BITS - 4, False), packed.shape)
    FORM: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r"
    if kind == tl.bfloat16:
        CODE: tl.constexpr = SPREAD_5_BFLOAT16 if BITS == 5 else SPREAD_6_BFLOAT16
        low, high = tl.inline_asm_elementwise(
            CODE, FORM, [packed, lane, first, second], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )  # fmt: skip
    else:
        HALF_CODE: tl.constexpr = SPREAD_5_FLOAT16 if BITS == 5 else SPREAD_6_FLOAT16
        low, high = tl.inline_asm_elementwise(
            HALF_CODE, FORM, [packed, lane, first, second], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )  # fmt: skip
    return low, high


@triton.jit
def _halves(
    packed, words, place, lane, kind: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    ASSEMBLY: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """What the elements of both halves of pieces stand for before they are scaled, exact in `kind`."""
    if ASSEMBLY and not TABLE and (BITS == 4 or (BITS > 4 and not FLAT)):
        RAISED: tl.constexpr = 128.0 if kind == tl.bfloat16 else 1024.0
        if BITS == 4:
            first, second = spread_halves(packed, kind)
        else:
            first, second = _spread_bits(packed, words, place, lane, kind, BITS)
        return first - (RAISED + OFFSET), second - (RAISED + OFFSET)
    else:
        if BITS < 4:
            none = tl.zeros_like(_word(words, place, 0, BITS, FLAT) + lane)
            first, second = _with_high_bits(none, none, words, place, lane, BITS, 0, FLAT)
        else:
            wide = packed.to(tl.int32)
            first, second = _with_high_bits(wide & 15, wide >> 4, words, place, lane, BITS - 4, 4, FLAT)
        if TABLE:
            return iq4_value(first).to(kind), iq4_value(second).to(kind)
        else:
            return _value(first, kind, OFFSET), _value(second, kind, OFFSET)


@triton.jit
def _ask_for_scales(
    scales, minimums, small, row, first, last, pieces, IN_BLOCK: tl.constexpr, SMALL: tl.constexpr,
    MINIMUM: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Of steps first..last-1."""
    LINES: tl.constexpr = 8 if IN_BLOCK == 1 else 2
    blocks = pieces // IN_BLOCK
    start, end = first * PIECES // IN_BLOCK, tl.minimum(last * PIECES // IN_BLOCK + 1, blocks)
    ask_ahead(scales, row, blocks, start, end, LINES)
    if MINIMUM:
        ask_ahead(minimums, row, blocks, start, end, LINES)
    if SMALL:
        ask_ahead(small, row, blocks * SMALL, start * SMALL, end * SMALL, 8)


@triton.jit
def _signed_bytes(codes, kind: tl.constexpr):
    return as_float((codes.to(tl.int32) & 255) ^ 128, 128).to(kind)


@triton.jit
def _few_part(
    quants, high, scales, minimums, small, row, step, here, byte, low, upper, kind: tl.constexpr, width, pieces,
    KIND: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, IN_BLOCK: tl.constexpr,
    SMALL: tl.constexpr, MINIMUM: tl.constexpr, ASSEMBLY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sums [pieces, outputs, rows] of one step with matrix rows [outputs] and pieces [pieces, 1]. WHOLE: the pieces are
    those of one block."""
    SHORT: tl.constexpr = BITS == 6 or BITS < 4  # groups of 16
    words = high if BITS > 4 else quants
    place = row[None, :] * pieces + here
    if WHOLE:
        scale, other_scale, added, other_added = load_block_scales(
            scales, minimums, small, row[None, :] * (pieces // 8) + step, tl.arange(0, 8)[:, None], KIND
        )  # fmt: skip
    else:
        scale, other_scale, added, other_added = load_scales(
            scales, minimums, small, place, place >= 0, KIND, IN_BLOCK, SMALL, MINIMUM
        )  # fmt: skip
    if BITS == 8:
        codes = tl.load(quants + (row[None, :, None] * width + here[:, :, None] * 32 + byte))
        part = tl.dot(_signed_bytes(codes, kind), low, input_precision="ieee") * scale[:, :, None]
    else:
        packed = place[:, :, None]
        if BITS > 3:
            packed = tl.load(quants + (row[None, :, None] * width + here[:, :, None] * 16 + byte))
        first, second = _halves(packed, words, place, byte, kind, BITS, OFFSET, TABLE, ASSEMBLY, False)
        part = tl.dot(first, low, input_precision="ieee")
        if SHORT:
            part *= scale[:, :, None]
            part += tl.dot(second, upper, input_precision="ieee") * other_scale[:, :, None]
        else:
            part = tl.dot(second, upper, part, input_precision="ieee") * scale[:, :, None]
        if MINIMUM:
            if BITS > 3:
                ones = _ones(packed, kind, ASSEMBLY)
            else:
                ones = tl.full(first.shape, 1.0, kind)
            summed = tl.dot(ones, low, input_precision="ieee")
            if SHORT:
                part += summed * added[:, :, None]
                part += tl.dot(ones, upper, input_precision="ieee") * other_added[:, :, None]
            else:
                part += tl.dot(ones, upper, summed, input_precision="ieee") * added[:, :, None]
    return part


@triton.jit(do_not_specialize=["rows", "steps", "pieces"])
def _multiply_few(
    x, quants, high, scales, minimums, small, out, bias, workspace, counters, rows, outputs, columns, pieces,
    steps, x_stride, out_stride,
    KIND: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, IN_BLOCK: tl.constexpr,
    SMALL: tl.constexpr, MINIMUM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A step is PIECES pieces of 32 columns; `steps` of each split, `pieces` of a matrix row."""
    GATED: tl.constexpr = ACTIVATION >= 0
    WHOLE: tl.constexpr = PIECES == 8 and (KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K")
    BYTES: tl.constexpr = 32 if BITS == 8 else 16
    kind = x.dtype.element_ty
    tile = tl.program_id(0)
    # Outputs beyond the last are read as the last, and not written.
    output = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1).to(tl.int64)
    up_output = output + outputs
    piece, byte = tl.arange(0, PIECES)[:, None], tl.arange(0, BYTES)[None, None, :]
    lane = tl.arange(0, BYTES)[None, :, None]
    x_row = tl.arange(0, ROWS)[None, None, :]
    live, x_row = x_row < rows, x_row * x_stride
    # Loads of 16 bytes a thread would send decoded elements through shared memory: let the compiler see 8.
    width = columns if BITS == 8 else columns // 2
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(pieces, PIECES))
    if ASSEMBLY:
        _ask_for_scales(scales, minimums, small, output, first, last, pieces, IN_BLOCK, SMALL, MINIMUM, PIECES)
        if GATED:
            _ask_for_scales(scales, minimums, small, up_output, first, last, pieces, IN_BLOCK, SMALL, MINIMUM, PIECES)
    sums = tl.zeros((PIECES, OUTPUTS, ROWS), tl.float32)
    up = sums
    for index in tl.range(0, last - first):
        step = turned(index, tile, first, last)
        here = step * PIECES + piece
        inside = live & (here < pieces)[:, :, None]
        column = here[:, :, None] * 32 + lane
        low = inputs(x, x_row + column, inside, live, EVEN)
        upper = low
        if BITS < 8:
            upper = inputs(x, x_row + column + 16, inside, live, EVEN)
        if not EVEN:
            here = tl.minimum(here, pieces - 1)
        sums += _few_part(
            quants, high, scales, minimums, small, output, step, here, byte, low, upper, kind, width, pieces,
            KIND, BITS, OFFSET, TABLE, IN_BLOCK, SMALL, MINIMUM, ASSEMBLY, WHOLE,
        )  # fmt: skip
        if GATED:
            up += _few_part(
                quants, high, scales, minimums, small, up_output, step, here, byte, low, upper, kind, width, pieces,
                KIND, BITS, OFFSET, TABLE, IN_BLOCK, SMALL, MINIMUM, ASSEMBLY, WHOLE,
            )  # fmt: skip
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
def _elements(values, scale, added, kind: tl.constexpr, MINIMUM: tl.constexpr, LANES: tl.constexpr):
    wide = values.to(tl.float32) * _spread(scale, LANES)
    if MINIMUM:
        wide += _spread(added, LANES)
    return wide.to(kind)


@triton.jit(do_not_specialize=["rows", "steps", "pieces"])
def _multiply_more(
    x, quants, high, scales, minimums, small, out, bias, workspace, counters, rows, outputs, columns, pieces, steps,
    x_stride, out_stride,
    KIND: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, IN_BLOCK: tl.constexpr,
    SMALL: tl.constexpr, MINIMUM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """As `_multiply_few`, the pieces of a step in one product."""
    WHOLE: tl.constexpr = PIECES == 8 and (KIND == "Q4_K" or KIND == "Q5_K" or KIND == "Q6_K")
    LANES: tl.constexpr = 32 if BITS == 8 else 16
    BYTES: tl.constexpr = LANES * PIECES
    COLUMNS: tl.constexpr = 32 * PIECES
    kind = x.dtype.element_ty
    tile = tl.program_id(0)
    row = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1).to(tl.int64)[:, None]
    byte, lane = tl.arange(0, BYTES)[None, :], tl.arange(0, COLUMNS)[:, None]
    width = columns
    if BITS < 8:
        # Low halves of all bytes, then high ones. The compiler does not see by itself that sixteen are neighbours.
        lane, width = lane % BYTES // 16 * 32 + lane % 16 + lane // BYTES * 16, columns // 2
        lane = tl.max_contiguous(tl.multiple_of(lane, (16, 1)), (16, 1))
    x_row = tl.arange(0, ROWS)[None, :]
    live, x_row = x_row < rows, x_row * x_stride
    words = high if BITS > 4 else quants
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(pieces, PIECES))
    if ASSEMBLY:
        _ask_for_scales(
            scales, minimums, small, tl.reshape(row, (OUTPUTS,)), first, last, pieces, IN_BLOCK, SMALL, MINIMUM, PIECES
        )  # fmt: skip
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for index in tl.range(0, last - first):
        step = turned(index, tile, first, last)
        here = tl.minimum(step * PIECES + tl.arange(0, PIECES)[None, :], pieces - 1)
        column = step * COLUMNS + lane
        part = inputs(x, x_row + column, live & (column < columns), live, EVEN)
        place = row * pieces + here
        if WHOLE:
            scale, other_scale, added, other_added = load_block_scales(
                scales, minimums, small, row * (pieces // 8) + step, tl.arange(0, 8)[None, :], KIND
            )  # fmt: skip
        else:
            scale, other_scale, added, other_added = load_scales(
                scales, minimums, small, place, place >= 0, KIND, IN_BLOCK, SMALL, MINIMUM
            )  # fmt: skip
        packed = byte
        if BITS > 3:
            packed = tl.load(quants + (row * width + step * BYTES + byte), mask=step * BYTES + byte < width, other=0)
        if BITS == 8:
            elements = _elements(_signed_bytes(packed, kind), scale, added, kind, MINIMUM, LANES)
        else:
            values, others = _halves(packed, words, place, byte % 16, kind, BITS, OFFSET, TABLE, ASSEMBLY, True)
            values = _elements(values, scale, added, kind, MINIMUM, LANES)
            others = _elements(others, other_scale, other_added, kind, MINIMUM, LANES)
            elements = tl.join(values, others).permute(0, 2, 1).reshape(OUTPUTS, COLUMNS)
        sums = tl.dot(elements, part, sums, input_precision="ieee")
    if SPLIT:
        leave_sums(workspace, tile, sums, sums, False)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") != tl.num_programs(1) - 1:
            return
        sums, _ = gather_sums(workspace, tile, sums, sums, False)
        tl.store(counters + tile, 0)
    finish(out, sums, sums, bias, tile, rows, outputs, out_stride, BIAS, ADD, -1)


def block_product(
    x: torch.Tensor,
    matrix: BlockPlanes,
    out: torch.Tensor,
    workspace: SplitSums,
    *,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    tile: QuantizedTile | None = None,
) -> None:
    """out [rows, outputs] = (or +=) x [rows, inputs] · matrixᵀ + bias, for at most MOST_QUANTIZED_ROWS rows.

    Columns of x and out lie side by side; rows may be apart. `tile` replaces the table's.
    """
    _launch(x, matrix, out, workspace, bias, NOT_GATED, accumulate, tile)


def block_gate_up(
    x: torch.Tensor,
    matrix: BlockPlanes,
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
    matrix: BlockPlanes,
    out: torch.Tensor,
    workspace: SplitSums,
    bias: torch.Tensor | None,
    activation: int,
    accumulate: bool,
    tile: QuantizedTile | None,
) -> None:
    (rows, columns), outputs, form = x.shape, out.shape[1], BLOCK_FORMS[matrix.layout]
    gated, biased = activation != NOT_GATED, bias is not None
    most = FEW_QUANTIZED_ROWS if gated else MOST_QUANTIZED_ROWS
    if rows > most:
        raise EngineError("too many rows for a product with blocks", needed=f"at most {most}", found=str(rows))
    if rows == 0:
        return
    tile = tile or block_tile(rows, outputs, columns, form.bits, x.element_size(), gated=gated)
    pieces = columns // 32
    tiles, splits, steps = cut_columns(workspace, pieces, outputs, tile, gated=gated)
    known: dict[str, Any] = {
        "KIND": matrix.layout, "BITS": form.bits, "OFFSET": form.offset, "TABLE": form.table, "IN_BLOCK": form.pieces,
        "SMALL": form.small, "MINIMUM": form.minimum, "BIAS": biased, "ADD": accumulate, "SPLIT": splits > 1,
        "EVEN": pieces % tile.pieces == 0, "ASSEMBLY": x.element_size() == 2 and x.device.type != "cpu",
        "ROWS": tile.rows, "OUTPUTS": tile.outputs, "PIECES": tile.pieces, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
    quants, scales, added = matrix.quants, matrix.scales, bias if biased else x
    planes = (
        quants, quants if matrix.high is None else matrix.high, scales,
        scales if matrix.minimums is None else matrix.minimums, quants if matrix.small is None else matrix.small,
    )  # fmt: skip
    if tile.rows <= FEW_QUANTIZED_ROWS:
        _multiply_few[(tiles, splits)](
            x, *planes, out, added, workspace.sums, workspace.counters, rows, outputs, columns, pieces, steps,
            x.stride(0), out.stride(0), ACTIVATION=activation, **known,
        )  # fmt: skip
        return
    _multiply_more[(tiles, splits)](
        x, *planes, out, added, workspace.sums, workspace.counters, rows, outputs, columns, pieces, steps, x.stride(0),
        out.stride(0), **known,
    )  # fmt: skip
