# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Products of at most 16 rows with GGUF's denser blocks, and such blocks expanded to rows for larger products.

The ways of blocks.py, which hands over what is of these kinds; codes and scales are read by kquant_codes.py. Only
quantized bytes are read. Safe in a CUDA graph. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import token_of
from holdfast.execution.triton_kernels.quantized.kquant_codes import FORMS, load_codes, load_scales
from holdfast.execution.triton_kernels.quantized.product_tiles import ProductTile
from holdfast.execution.triton_kernels.quantized.products import put

KQUANTS = frozenset(FORMS)
EXPANDED_PIECES = 32
"""Pieces of a row that a program expands at a time."""


@triton.jit
def _terms(
    inputs, inside, low, high, scale, other_scale, added, other_added, SHORT: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """Of the products with one tile, lane by lane; scales are applied once for both halves where those share them."""
    first = tl.load(inputs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(inputs + 16, mask=inside, other=0.0).to(tl.float32)
    if SHORT:
        terms = low * first * scale + high * second * other_scale
        if MINIMUM:
            terms += added * first + other_added * second
    else:
        terms = (low * first + high * second) * scale
        if MINIMUM:
            terms += added * (first + second)
    return terms


@triton.jit
def _multiply_few(
    x, quants, high, scales, minimums, small, out, bias, outputs, x_stride, out_stride,
    BLOCKS: tl.constexpr, TWO: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, PIECES: tl.constexpr, SMALL: tl.constexpr,
    MINIMUM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One or two rows of x."""
    SHORT: tl.constexpr = BITS == 6 or BITS < 4  # groups of 16
    # Blocks come before rows: of two dimensions alike to it, the compiler lays threads along the first.
    block, lane = tl.arange(0, TILE)[:, None, None], tl.arange(0, 16)[None, None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :, None]
    sums = tl.zeros((TILE, ROWS, 16), tl.float32)
    second_sums = sums
    for start in tl.range(0, BLOCKS, TILE):
        at = start + block
        inside = (row < outputs) & (at < BLOCKS)
        place = row * BLOCKS + at
        low, high_half = load_codes(quants, high, place, lane, inside, BITS, OFFSET, TABLE)
        scale, other_scale, added, other_added = load_scales(
            scales, minimums, small, place, inside, KIND, PIECES, SMALL, MINIMUM
        )  # fmt: skip
        inputs = x + at * 32 + lane
        sums += _terms(
            inputs, at < BLOCKS, low, high_half, scale, other_scale, added, other_added, SHORT, MINIMUM
        )  # fmt: skip
        if TWO:
            second_sums += _terms(
                inputs + x_stride, at < BLOCKS, low, high_half, scale, other_scale, added, other_added, SHORT, MINIMUM
            )  # fmt: skip
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = output < outputs
    put(out, output, tl.sum(tl.sum(sums, 2), 0), bias, output, inside, BIAS, ADD)
    if TWO:
        put(out, out_stride + output, tl.sum(tl.sum(second_sums, 2), 0), bias, output, inside, BIAS, ADD)


@triton.jit(do_not_specialize=["rows"])
def _multiply_more(
    x, quants, high, scales, minimums, small, out, bias, rows, outputs, x_stride, out_stride,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr, TABLE: tl.constexpr, PIECES: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows of x; elements are rounded to its type, as an expanded matrix would be."""
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    block, lane = tl.arange(0, TILE)[None, :, None], tl.arange(0, 16)[None, None, :]
    x_row, column = tl.arange(0, 16)[:, None], tl.arange(0, TILE * 16)[None, :]
    live = x_row < rows
    inputs = x + x_row * x_stride + column // 16 * 32 + column % 16
    sums = tl.zeros((16, ROWS), tl.float32)
    for start in tl.range(0, BLOCKS, TILE):
        at = start + block
        inside = (row < outputs) & (at < BLOCKS)
        place = row * BLOCKS + at
        low, high_half = load_codes(quants, high, place, lane, inside, BITS, OFFSET, TABLE)
        scale, other_scale, added, other_added = load_scales(
            scales, minimums, small, place, inside, KIND, PIECES, SMALL, MINIMUM
        )  # fmt: skip
        low, high_half = low * scale, high_half * other_scale
        if MINIMUM:
            low, high_half = low + added, high_half + other_added
        wanted = live & (start + column // 16 < BLOCKS)
        part = tl.load(inputs + start * 32, mask=wanted, other=0.0)
        sums = tl.dot(part, low.to(kind).reshape(ROWS, TILE * 16).T, sums, input_precision="ieee")
        part = tl.load(inputs + start * 32 + 16, mask=wanted, other=0.0)
        sums = tl.dot(part, high_half.to(kind).reshape(ROWS, TILE * 16).T, sums, input_precision="ieee")
    written = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    inside = live & (written < outputs)
    put(out, x_row.to(tl.int64) * out_stride + written, sums, bias, written, inside, BIAS, ADD)


@triton.jit
def _expand_rows(
    ids, slots, positions, quants, high, scales, minimums, small, out, ids_stride, out_stride, known_rows,
    BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    TABLE: tl.constexpr, PIECES: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row of out is row i of the matrix, or the one of a slot's token; zeros where there is no such row."""
    target = tl.program_id(0).to(tl.int64)
    row = target
    if CHOSEN:
        row = token_of(ids, slots, positions, ids_stride, target)
    block, lane = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, 16)[None, :]
    inside = block < BLOCKS
    known = inside & (row >= 0) & (row < known_rows)
    place = row * BLOCKS + block
    low, high_half = load_codes(quants, high, place, lane, known, BITS, OFFSET, TABLE)
    # A scale of 0 where nothing is known, so that no code counts.
    scale, other_scale, added, other_added = load_scales(
        scales, minimums, small, place, known, KIND, PIECES, SMALL, MINIMUM
    )  # fmt: skip
    low, high_half = low * scale, high_half * other_scale
    if MINIMUM:
        low, high_half = low + added, high_half + other_added
    to = out + target * out_stride + block * 32 + lane
    tl.store(to, low.to(out.dtype.element_ty), mask=inside)
    tl.store(to + 16, high_half.to(out.dtype.element_ty), mask=inside)


def _known(layout: str) -> dict[str, Any]:
    form = FORMS[layout]
    return {
        "KIND": layout, "BITS": form.bits, "OFFSET": form.offset, "TABLE": form.table, "PIECES": form.pieces,
        "SMALL": form.small, "MINIMUM": form.minimum,
    }  # fmt: skip


Planes = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""quants, high, scales, minimums, small"""


def _pointers(planes: Planes) -> tuple[torch.Tensor, ...]:
    """All that a kernel takes; what a kind has not is never read."""
    quants, high, scales, minimums, small = planes
    return (
        quants, quants if high is None else high, scales, scales if minimums is None else minimums,
        quants if small is None else small,
    )  # fmt: skip


def multiply_few(
    x: torch.Tensor, layout: str, planes: Planes, out: torch.Tensor, bias: torch.Tensor | None, add: bool,
    tile: ProductTile,
) -> None:  # fmt: skip
    """One or two rows."""
    outputs, blocks, _ = planes[0].shape
    _multiply_few[(triton.cdiv(outputs, tile.outputs),)](
        x, *_pointers(planes), out, x if bias is None else bias, outputs, x.stride(0), out.stride(0),
        BLOCKS=blocks, TWO=len(x) == 2, BIAS=bias is not None, ADD=add, **_known(layout), ROWS=tile.outputs,
        TILE=tile.inputs, num_warps=tile.warps,
    )  # fmt: skip


def multiply_more(
    x: torch.Tensor, layout: str, planes: Planes, out: torch.Tensor, bias: torch.Tensor | None, add: bool,
    tile: ProductTile,
) -> None:  # fmt: skip
    """Up to sixteen rows."""
    outputs, blocks, _ = planes[0].shape
    _multiply_more[(triton.cdiv(outputs, tile.outputs),)](
        x, *_pointers(planes), out, x if bias is None else bias, len(x), outputs, x.stride(0), out.stride(0),
        BLOCKS=blocks, BIAS=bias is not None, ADD=add, **_known(layout), ROWS=tile.outputs, TILE=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def expand(
    layout: str, planes: Planes, out: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *,
    chosen: bool,
) -> None:  # fmt: skip
    rows, blocks, _ = planes[0].shape
    _expand_rows[(len(out), triton.cdiv(blocks, EXPANDED_PIECES))](
        *choice, *_pointers(planes), out, choice[0].stride(0), out.stride(0), rows, BLOCKS=blocks,
        CHOSEN=chosen, **_known(layout), TILE=EXPANDED_PIECES, num_warps=4,
    )  # fmt: skip
