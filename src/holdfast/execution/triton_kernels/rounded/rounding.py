# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Inputs of a product rounded to one byte each (float8_e4m3fn or int8), with the norm or the gate before it.

    scale = max |x| / most       of the row, or of each 128 columns of it; most: 448 of float8_e4m3fn, 127 of int8; at
                                 least 1e-12, so that zeros stay zeros. Or the checkpoint's own scale
                                 max |x| of all parts, where each of several ranks has a part of the row
                                 max |x| no larger than BOUND, where the format has one; POWERS: the scale is the next
                                 power of two above
    code  = x / scale            clamped to what codes can say (-128 of int8 too), rounded to nearest, ties to even

All of it in float32, from x as its own type has it: after a norm or a gate x is rounded to that type first, as the
plain forms do. A row with a number that is not finite gets a scale that is none either, and so do its products.
Safe in a CUDA graph. Knows no products.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import activate, activation_code
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.rounded.tiles import SKINNY_ROWS
from holdfast.footprint.rounded import GROUP

LEAST_SCALE = tl.constexpr(1e-12)
FP8_MOST = tl.constexpr(448.0)
INT8_MOST = tl.constexpr(127.0)
INT8_LEAST = tl.constexpr(-128.0)
NO_GATE = -1
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def magnitude(x):
    """|x|, and inf where x is no number, which the hardware's maximum would drop."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def power_above(scale):
    """The least power of two that is not below it, of positive numbers; infinity stays."""
    return ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def dynamic_scale(largest, FP8: tl.constexpr, BOUND: tl.constexpr = 0.0, POWERS: tl.constexpr = False):
    """BOUND: what the largest counts for at most; 0: there is none. What is not finite stays so."""
    most = FP8_MOST if FP8 else INT8_MOST
    if BOUND > 0.0:
        largest = tl.where(largest < float("inf"), tl.minimum(largest, BOUND), largest)
    scale = tl.maximum(tl.div_rn(largest, most + tl.zeros_like(largest)), LEAST_SCALE)
    if POWERS:
        scale = power_above(scale)
    return scale


@triton.jit
def _quotient(x, scale):
    """x / scale as float32 rounds it. What lies between two codes is often just between them, bfloat16 having few
    bits: a quotient that is off by one unit would go the other way."""
    if INTERPRETED:
        found = x / scale
    else:
        # Two steps from the rounded inverse, which is one division for all of a row.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        near = x * inverse
        found = tl.fma(tl.fma(-near, scale, x), inverse, near)
    return found


@triton.jit
def on_grid(x, FP8: tl.constexpr):
    """The nearest number that a code stands for, still in float32: converting it is exact, so that no conversion's own
    way of rounding matters."""
    most = FP8_MOST if FP8 else INT8_MOST
    least = -FP8_MOST if FP8 else INT8_LEAST
    x = tl.where(x > most, most, x)
    x = tl.where(x < least, least, x)
    if FP8:
        # Adding 1.5 · 2^20 times x's power of two leaves three bits of its fraction, and below 2^-6 steps of 2^-9.
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, 0.015625) * 1572864.0
    else:
        shift = tl.full(x.shape, 12582912.0, tl.float32)
    return (x + shift) - shift


@triton.jit
def normed(x, weight, factor):
    """x over its root mean square, times the norm's weight, rounded as `layer.rms_norm` does: in x's type."""
    return ((x.to(tl.float32) * factor).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _round_rows(
    x, norm, static, parts, codes, scales, x_stride, codes_stride, scale_row, scale_group, epsilon,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    STATIC: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr, BOUND: tl.constexpr,
    POWERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row as [GROUPS, WIDTH], each group with a scale of its own. PARTS: how many ranks have a part of it; 0: x has
    all of it."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    line = x + row * x_stride
    let_others_start(EARLY)
    wait_for_others(EARLY)
    kept = tl.load(line + column, mask=inside, other=0.0)
    wide = kept.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / COLUMNS + epsilon)
        wide = normed(kept, tl.load(norm + column, mask=inside, other=0.0), factor).to(tl.float32)
    if ACTIVATION >= 0:
        up = tl.load(line + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        activated = activate(wide, ACTIVATION).to(kept.dtype).to(tl.float32)
        wide = (activated * up).to(kept.dtype).to(tl.float32)
    if PARTS > 0:
        part = tl.arange(0, PADDED)
        shown = tl.load(parts + row * PARTS + part, mask=part < PARTS, other=0.0)
        largest = tl.max(shown[None, :], 1)
    else:
        largest = tl.max(magnitude(wide), 1)
    if STATIC:
        # inf - inf: a row that is not finite stays so.
        scale = tl.load(static) + (largest - largest)
    else:
        scale = dynamic_scale(largest, FP8, BOUND, POWERS)
    found = _quotient(wide, scale[:, None])
    # A GPU's own conversion to float8 clamps and rounds so in half an instruction; Triton's interpreter cuts off.
    if INTERPRETED or not FP8:
        found = on_grid(found, FP8)
    if not FP8:
        found = tl.where(found == found, found, 0.0)
    tl.store(codes + row * codes_stride + column, found.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row * scale_row + group * scale_group, scale, mask=group * WIDTH < COLUMNS)


def round_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    activation: Literal["silu", "gelu", "gelu_tanh"] | None = None,
    static: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    grouped: bool = False,
    bound: float = 0.0,
    powers: bool = False,
) -> None:
    """codes [rows, columns] of x, of its rms_norm, or of activation(gate)·up where x is gate beside up.

    scales: float32 [rows, 1], or grouped [rows, columns / 128], in any strides; static [1]: the scale to take, which is
    written too. `parts`: as `largest_of_parts` finds them, where x is one rank's part of rows that have one scale.
    `bound`, `powers`: as a layout's `input_bound` and `input_powers`.
    """
    rows, columns = codes.shape
    if rows == 0:
        return
    groups = triton.next_power_of_2(columns // GROUP) if grouped else 1
    width, early = GROUP if grouped else triton.next_power_of_2(columns), starts_early()
    count = 0 if parts is None else parts.shape[1]
    _round_rows[(rows,)](
        x, x if norm is None else norm, scales if static is None else static, scales if parts is None else parts,
        codes, scales, x.stride(0), codes.stride(0), scales.stride(0), scales.stride(1), epsilon, COLUMNS=columns,
        GROUPS=groups, WIDTH=width, NORM=norm is not None,
        ACTIVATION=NO_GATE if activation is None else activation_code(activation), STATIC=static is not None,
        PARTS=count, PADDED=triton.next_power_of_2(max(1, count)), FP8=codes.dtype == torch.float8_e4m3fn,
        BOUND=bound, POWERS=powers, EARLY=early, num_warps=_warps(rows, columns, activation is not None),
        launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _largest_of_parts(
    x, found, x_stride, rank, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column, part = tl.arange(0, WIDTH), tl.arange(0, PADDED)
    kept = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    largest = tl.max(magnitude(kept), 0)
    tl.store(found + row * PARTS + part, tl.where(part == rank, largest, 0.0), mask=part < PARTS)


def largest_of_parts(x: torch.Tensor, found: torch.Tensor, rank: int) -> None:
    """found [rows, ranks], contiguous: of each row the largest size of a number, where this rank has its own, and zeros
    elsewhere. The sum over ranks has that of each, and not a bit of it is changed."""
    rows, columns = x.shape
    if rows == 0:
        return
    _largest_of_parts[(rows,)](
        x, found, x.stride(0), rank, COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), PARTS=found.shape[1],
        PADDED=triton.next_power_of_2(found.shape[1]), num_warps=_warps(rows, columns, False),
    )  # fmt: skip


def _warps(rows: int, columns: int, gated: bool) -> int:
    """A row is one program: 32 elements a thread, 16 of a gate or where rows are so few that they wait for themselves.
    H200: 8,192 rows of 4,096 normed in 28 us (84% of what memory gives), of 14,336 gated in 162 (84%)."""
    half = gated or rows <= SKINNY_ROWS
    return min(32, max(1, (1 << (columns - 1).bit_length()) * (2 if half else 1) // 1024))
