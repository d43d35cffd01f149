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
from holdfast.execution.triton_kernels.rounded.rounding import INTERPRETED, codes_of, dynamic_scale, magnitude, normed
from holdfast.execution.triton_kernels.rounded.tiles import RowTile, row_tile
from holdfast.footprint.rounded import GROUP


@triton.jit
def _load_words(words, row, place, outputs, stride, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Four codes each."""
    inside = row < outputs
    if WORDS != PADDED:
        inside = inside & (place < WORDS)
    return tl.load(words + row.to(tl.int64) * stride + place, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _quarters(value, WORDS: tl.constexpr):
    """[1, 4 · WORDS] to what the first, second, third and fourth code of each word are multiplied with, in float32."""
    even, odd = tl.split(tl.reshape(value, (WORDS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (
        first[None, :].to(tl.float32),
        second[None, :].to(tl.float32),
        third[None, :].to(tl.float32),
        fourth[None, :].to(tl.float32),
    )


@triton.jit
def _code(words, SHIFT: tl.constexpr):
    return ((words >> SHIFT) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _terms(words, first, second, third, fourth):
    """What each word's codes add up to with their inputs. A GPU converts two codes at once to float16."""
    if INTERPRETED:
        found = _code(words, 0) * first + _code(words, 8) * second
        found += _code(words, 16) * third + _code(words, 24) * fourth
    else:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 codes;
            .reg .f32 left, right;
            mov.b32 {low, high}, $1;
            cvt.rn.f16x2.e4m3x2 codes, high;
            mov.b32 {low, high}, codes;
            cvt.f32.f16 left, low;
            cvt.f32.f16 right, high;
            mul.rn.f32 left, left, $4;
            fma.rn.f32 $0, right, $5, left;
            mov.b32 {low, high}, $1;
            cvt.rn.f16x2.e4m3x2 codes, low;
            mov.b32 {low, high}, codes;
            cvt.f32.f16 left, low;
            cvt.f32.f16 right, high;
            fma.rn.f32 $0, left, $2, $0;
            fma.rn.f32 $0, right, $3, $0;
            }""",
            "=&f,r,f,f,f,f", [words, first, second, third, fourth], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def _rounded_row(
    x, norm, static, column, epsilon, COLUMNS: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    STATIC: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """What codes stand for [1, PADDED] in float16, and scales: of the row [1], or of each 128 columns."""
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
    return codes_of(wide, scale[:, None], True, tl.float8e4nv).to(tl.float16), scale


@triton.jit
def _block_scales(block, scale, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Of the row's groups times the matrix's blocks, for each word [1, PADDED / 4]."""
    group = tl.arange(0, PADDED // 128)
    by_block = tl.load(block + group, mask=group < COLUMNS // 128, other=0.0) * scale
    return tl.reshape(tl.broadcast_to(by_block[:, None], (PADDED // 128, 32)), (1, PADDED // 4))


@triton.jit
def _multiply_row(
    x, norm, static, words, scales, out, bias, outputs, words_stride, scales_stride, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr,
    STATIC: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS matrix rows at a time, and of a gate as many beside them. The next are on their way while these are
    multiplied, the first before the row is there."""
    let_others_start(EARLY)
    WORDS: tl.constexpr = COLUMNS // 4
    ROOM: tl.constexpr = PADDED // 4
    place = tl.arange(0, ROOM)[None, :]
    first = tl.program_id(0) * (ROWS * STEPS)
    row = first + tl.arange(0, ROWS)[:, None]
    # Rows of a gate end where those of `up` begin.
    last = outputs + outputs if ACTIVATION >= 0 else outputs
    tile = _load_words(words, row, place, last, words_stride, WORDS, ROOM)
    up_tile = tile
    if ACTIVATION >= 0:
        up_tile = _load_words(words, outputs + row, place, last, words_stride, WORDS, ROOM)
    wait_for_others(EARLY)

    column = tl.arange(0, PADDED)[None, :]
    value, scale = _rounded_row(x, norm, static, column, epsilon, COLUMNS, PADDED, NORM, STATIC, GROUPED)
    one, two, three, four = _quarters(value, ROOM)
    by_word = tl.full((1, ROOM), 1.0, tl.float32)
    up_by_word = by_word
    if GROUPED:
        by_word = _block_scales(scales + first // 128 * scales_stride, scale, COLUMNS, PADDED)
        if ACTIVATION >= 0:
            up_block = scales + (outputs + first) // 128 * scales_stride
            up_by_word = _block_scales(up_block, scale, COLUMNS, PADDED)

    # Unrolled: the compiler then moves no registers from one tile to the next.
    for step in tl.static_range(0, STEPS):
        next_tile, next_up_tile = tile, up_tile
        if step + 1 < STEPS:
            following = row + (step + 1) * ROWS
            next_tile = _load_words(words, following, place, last, words_stride, WORDS, ROOM)
            if ACTIVATION >= 0:
                next_up_tile = _load_words(words, outputs + following, place, last, words_stride, WORDS, ROOM)
        output = first + step * ROWS + tl.arange(0, ROWS)
        inside = output < outputs
        terms = _terms(tile, one, two, three, four)
        if GROUPED:
            sums = tl.sum(terms * by_word, 1)
        else:
            sums = tl.sum(terms, 1) * tl.load(scales + output, mask=inside, other=0.0) * scale
        if ACTIVATION >= 0:
            terms = _terms(up_tile, one, two, three, four)
            if GROUPED:
                up_sums = tl.sum(terms * up_by_word, 1)
            else:
                up_sums = tl.sum(terms, 1) * tl.load(scales + outputs + output, mask=inside, other=0.0) * scale
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
        x, x if norm is None else norm, scales if static is None else static, codes.view(torch.int32), scales, out,
        out if bias is None else bias, outputs, codes.stride(0) // 4, scales.stride(0), epsilon, COLUMNS=inputs,
        PADDED=triton.next_power_of_2(inputs), ROWS=tile.outputs, STEPS=tile.steps, NORM=norm is not None,
        STATIC=static is not None, GROUPED=grouped, BIAS=bias is not None, ADD=accumulate,
        ACTIVATION=NOT_GATED if activation is None else activation_code(activation), EARLY=early,
        num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
