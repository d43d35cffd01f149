# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Root-mean-square norms of rows of which several ranks have a part each: squares of the own part, and the norm by
those of all. Rounds where `layer.rms_norm` rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import norm_warps


@triton.jit
def _row_squares(x, found, x_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(found + row, tl.sum(wide * wide, 0))


def row_squares(x: torch.Tensor, found: torch.Tensor) -> None:
    """found [rows], float32: of each row of x [rows, columns] the sum of its squares; of no columns zero."""
    rows, columns = x.shape
    if rows:
        _row_squares[(rows,)](
            x, found, x.stride(0), COLUMNS=columns, BLOCK=triton.next_power_of_2(max(1, columns)),
            num_warps=norm_warps(columns),
        )  # fmt: skip


@triton.jit
def _norm_by_squares(x, squares, weight, x_stride, whole, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled_by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.load(squares + row) / whole + epsilon)
    normed = (wide * scale).to(weight.dtype.element_ty).to(tl.float32) * scaled_by
    tl.store(x + row * x_stride + column, normed.to(x.dtype.element_ty), mask=inside)


def norm_by_squares(x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, columns: int, epsilon: float) -> None:
    """x [rows, own columns] in place, of rows of so many `columns` whose squares these are; `weight`: of the own."""
    rows, own = x.shape
    if rows:
        _norm_by_squares[(rows,)](
            x, squares, weight, x.stride(0), columns, epsilon, COLUMNS=own, BLOCK=triton.next_power_of_2(own),
            num_warps=norm_warps(own),
        )  # fmt: skip
