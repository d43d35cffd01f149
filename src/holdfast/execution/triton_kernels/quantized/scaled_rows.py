# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Matrices of codes and scales expanded to rows of numbers: for products with many rows, and for embeddings; and inputs
put into the order of a matrix's columns. Elements are computed in float32 and rounded once. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import token_of
from holdfast.execution.triton_kernels.quantized.scaled_codes import eight_bit_values, four_bit_values, scale_values
from holdfast.execution.weights.scaled_matrix import INT4_ZERO, ScaledMatrix

EXPANDED_CODES = 1024
"""Bytes of codes that a program expands."""
GATHERED_COLUMNS = 1024


@triton.jit
def _put_elements(
    place, order, column, values, scale, inside, ORDERED: tl.constexpr
):  # fmt: skip
    if ORDERED:
        column = tl.load(order + column, mask=inside, other=0)
    tl.store(place + column, (values * scale).to(place.dtype.element_ty), mask=inside)


@triton.jit
def _expand_rows(
    ids, slots, positions, codes, scales, zeros, order, out, first, ids_stride, out_stride, columns, groups, known_rows,
    CODES: tl.constexpr, FOUR: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ORDERED: tl.constexpr, CHOSEN: tl.constexpr, BYTES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One row of out is row first + i of the matrix, or the one of a slot's token; zeros where there is no such row."""
    target = tl.program_id(0).to(tl.int64)
    row = first + target
    if CHOSEN:
        row = token_of(ids, slots, positions, ids_stride, target)
    known = (row >= 0) & (row < known_rows)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    place, column = out + target * out_stride, byte
    if FOUR:
        column = byte // 16 * 32 + byte % 16
        inside = byte < columns // 2
        found = tl.load(codes + row * (columns // 2) + byte, mask=inside & known, other=0)
    else:
        inside = byte < columns
        found = tl.load(codes + row * columns + byte, mask=inside & known, other=0)
    # A scale of 0 where nothing is known, so that no code counts. Halves of a byte are in one group.
    at = row // GROUP_ROWS * groups + column // GROUP
    scale = tl.where(known, scale_values(tl.load(scales + at, mask=inside & known, other=0)), 0.0)
    zero = tl.full((BYTES,), OFFSET if FOUR else 0.0, tl.float32)
    if ZEROS:
        zero = tl.load(zeros + at, mask=inside & known, other=0).to(tl.float32)
    if FOUR:
        low, high = four_bit_values(found, zero, tl.float32, CODES, False)
        _put_elements(place, order, column, low, scale, inside, ORDERED)
        _put_elements(place, order, column + 16, high, scale, inside, ORDERED)
    else:
        _put_elements(place, order, column, eight_bit_values(found, tl.float32, CODES) - zero, scale, inside, ORDERED)


@triton.jit
def _gather_columns(x, order, out, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    taken = tl.load(order + column, mask=inside, other=0)
    tl.store(out + row * out_stride + column, tl.load(x + row * x_stride + taken, mask=inside, other=0.0), mask=inside)


def expand_scaled(matrix: ScaledMatrix, first: int, last: int, out: torch.Tensor) -> None:
    """Rows first..last-1 into out [last - first, inputs], as out's type: what a cuBLAS product is then made with.
    Columns are in the order of the inputs."""
    if last > first:
        _launch_expand(matrix, first, out, (matrix.scales, matrix.scales, matrix.scales), chosen=False)


def embed_scaled(
    tokens_of_slots: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, matrix: ScaledMatrix, out: torch.Tensor
) -> None:
    """`layer.embed` for an embedding of codes and scales."""
    if len(out):
        _launch_expand(matrix, 0, out, (tokens_of_slots, slots, positions), chosen=True)


def gather_columns(x: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
    """out[:, i] = x[:, order[i]]"""
    rows, columns = x.shape
    if rows:
        _gather_columns[(rows, triton.cdiv(columns, GATHERED_COLUMNS))](
            x, order, out, columns, x.stride(0), out.stride(0), BLOCK=GATHERED_COLUMNS, num_warps=4
        )


def _launch_expand(
    matrix: ScaledMatrix, first: int, out: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *,
    chosen: bool,
) -> None:  # fmt: skip
    layout, columns = matrix.layout, matrix.columns
    group = layout.group or columns
    width = columns // 2 if layout.four_bits else columns
    block = min(EXPANDED_CODES, triton.next_power_of_2(width))
    _expand_rows[(len(out), triton.cdiv(width, block))](
        *choice, matrix.codes.view(torch.uint8), matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros,
        matrix.scales if matrix.order is None else matrix.order, out, first, choice[0].stride(0), out.stride(0),
        columns, columns // group, matrix.rows, CODES=layout.codes, FOUR=layout.four_bits, GROUP=group,
        GROUP_ROWS=layout.group_rows, ZEROS=layout.zeros, ORDERED=layout.ordered, CHOSEN=chosen, BYTES=block,
        OFFSET=INT4_ZERO, num_warps=4,
    )  # fmt: skip
