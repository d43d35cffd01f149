# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Inputs of experts put into the order in which an expert's matrix has its columns (GPTQ's act-order).

Every expert has an order of its own, so that a row of a token becomes one for each of its pairs; products then read
them as rows of pairs, whichever kernel multiplies. Lines are those of launch.py. Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.launch import ExpertAssignments, line_pairs, line_part
from holdfast.execution.triton_kernels.experts.tiles import most_tiles
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others

COLUMNS = 256
FEW_ROWS, SOME_ROWS = 1, 8
"""Of a line that one program takes, of few pairs and of more than experts have on the average."""


@triton.jit
def _gather(
    x, order, out, counts, pairs, x_stride, out_stride, pairs_stride, columns, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    wait_for_others(EARLY)
    expert, first, length = line_part(tl.program_id(0) // across, counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    taken = tl.load(order + expert.to(tl.int64) * columns + column, mask=inside, other=0)
    wanted = live[:, None] & inside[None, :]
    found = tl.load(x + (pair // SHARED_BY)[:, None] * x_stride + taken[None, :], mask=wanted, other=0.0)
    let_others_start(EARLY)
    tl.store(out + pair[:, None] * out_stride + column[None, :], found, mask=wanted)


def gather_expert_columns(
    x: torch.Tensor, order: torch.Tensor, lines: ExpertAssignments, out: torch.Tensor, *, by_token: bool
) -> None:
    """out [pairs, columns]: of each pair its row of x, its columns as `order` [experts, columns] of its expert says.
    `by_token`: a row of x is a token's, and all its pairs take it; else it is a pair's. Rows of no pair stay."""
    (pairs, columns), (experts, _), per_token = out.shape, order.shape, lines.weights.shape[1]
    if pairs == 0:
        return
    rows, early = FEW_ROWS if pairs <= lines.chosen_from else SOME_ROWS, starts_early()
    tiles = most_tiles(pairs // per_token, per_token, experts, rows)
    _gather[(tiles * triton.cdiv(columns, COLUMNS),)](
        x, order, out, lines.counts, lines.pairs, x.stride(0), out.stride(0), lines.pairs.stride(0), columns,
        EXPERTS=experts, BLOCK=triton.next_power_of_2(experts), SHARED_BY=per_token if by_token else 1, ROWS=rows,
        COLUMNS=COLUMNS, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
