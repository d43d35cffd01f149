# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""GGUF's denser blocks expanded to rows: for products with many rows, and for embeddings.

blocks.py hands over what is of these kinds; codes and scales are read by kquant_codes.py. Safe in a CUDA graph. Knows
nothing of files.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import token_of
from holdfast.execution.triton_kernels.quantized.kquant_codes import FORMS, load_codes, load_scales

KQUANTS = frozenset(FORMS)
EXPANDED_PIECES = 32
"""Pieces of a row that a program expands at a time."""


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


def expand(
    layout: str, planes: Planes, out: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *,
    chosen: bool,
) -> None:  # fmt: skip
    rows, blocks, _ = planes[0].shape
    _expand_rows[(len(out), triton.cdiv(blocks, EXPANDED_PIECES))](
        *choice, *_pointers(planes), out, choice[0].stride(0), out.stride(0), rows, BLOCKS=blocks,
        CHOSEN=chosen, **_known(layout), TILE=EXPANDED_PIECES, num_warps=4,
    )  # fmt: skip
