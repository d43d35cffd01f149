# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Inputs of products with experts rounded to one byte each, in any GPU's integers: e4m3 or int8.

    largest = max |x| of the row, or of each group of its columns; at least 1e-10, so that zeros stay zeros, and at most
              BOUND, where the format has one
    scale   = largest / 448 (e4m3) or / 127 (int8), POWERS: the next power of two above; or the checkpoint's own
    code    = x · (1 / scale), no larger than 448 or 127, rounded to nearest, halves to even

Rows of tokens that are not computed may hold anything; a row with a number that is not finite gets a scale that is none
either. Knows no products. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.codes import fp8_code
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.rounded.rounding import power_above

ROUNDED_TOGETHER = 4096
"""Numbers that one program takes, where there are many rows."""
MANY_ROWS = 1024


@triton.jit
def _round_rows(
    x, codes, scales, static, rows, x_stride, codes_stride, scales_stride, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    TOGETHER: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, STATIC: tl.constexpr,
    BOUND: tl.constexpr, POWERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TOGETHER rows as [UNITS, WIDTH], a unit a group of LENGTH columns."""
    unit, lane = tl.arange(0, UNITS), tl.arange(0, WIDTH)
    row, group = (tl.program_id(0) * TOGETHER + unit // GROUPS).to(tl.int64), unit % GROUPS
    there = (unit < TOGETHER * GROUPS) & (row < rows)
    inside = there[:, None] & (lane < LENGTH)[None, :]
    column = (group * LENGTH)[:, None] + lane[None, :]
    wait_for_others(EARLY)
    wide = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    # A maximum may drop what is no number.
    largest = tl.max(tl.where(wide == wide, tl.abs(wide), float("inf")), 1)
    if STATIC:
        scale = tl.load(static) + (largest - largest)
    else:
        if BOUND > 0.0:
            largest = tl.where(largest < float("inf"), tl.minimum(largest, BOUND), largest)
        scale = tl.div_rn(tl.maximum(largest, 1e-10), tl.full(largest.shape, MOST, tl.float32))
        if POWERS:
            scale = power_above(scale)
    value = wide * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    value = tl.where(value == value, tl.minimum(tl.maximum(value, -MOST), MOST), 0.0)
    if MOST == 448.0:
        found = fp8_code(value)
    else:
        # Adding 1.5 * 2**23 rounds to whole numbers.
        found = ((value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    let_others_start(EARLY)
    # Codes may replace the rows themselves: all of them are read before any is written.
    tl.debug_barrier()
    tl.store(codes + row[:, None] * codes_stride + column, found, mask=inside)
    tl.store(scales + row * scales_stride + group, scale, mask=there)


def round_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    static: torch.Tensor | None = None,
    *,
    bound: float = 0.0,
    powers: bool = False,
) -> None:
    """codes [rows, columns] (uint8: e4m3's bits; int8) and float32 scales [rows, groups] of x [rows, columns]; `static`
    [1]: the scale to take, which is written too. Both may lie in the memory of x's own rows. `bound`, `powers`: as a
    layout's `input_bound` and `input_powers`."""
    rows, columns = x.shape
    if rows == 0:
        return
    groups, early = scales.shape[1], starts_early()
    length = columns // groups
    width = triton.next_power_of_2(length)
    together = max(1, ROUNDED_TOGETHER // (width * groups)) if rows >= MANY_ROWS else 1
    _round_rows[(triton.cdiv(rows, together),)](
        x, codes, scales, scales if static is None else static, rows, x.stride(0), codes.stride(0), scales.stride(0),
        GROUPS=groups, LENGTH=length, TOGETHER=together, UNITS=triton.next_power_of_2(together * groups), WIDTH=width,
        MOST=448.0 if codes.dtype == torch.uint8 else 127.0, STATIC=static is not None,
        BOUND=bound, POWERS=powers, EARLY=early, num_warps=4 if columns <= 4096 else 8, launch_pdl=early,
    )  # fmt: skip
