# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Experts on a GPU: tokens choose, and each expert is multiplied with the tokens that chose it, in tiles of its own.

    route      logits -> chosen experts, their weights; each pair takes a place in its expert's line
    products   x of the tokens in a line -> activation(gate) · up, a row a pair    dense.py, scaled.py, blocks.py
    products   those rows -> a row a pair                                          the same
    add_pairs  a token's rows, weighed -> its place in the stream

A pair is token · per_token + choice. Lines are as long as there are tokens; which programs have work is read on the
device, so that grids go by sizes alone: safe in a CUDA graph. Only chosen experts are read. Where a pair stands in its
line is left to chance and changes no result. Knows nothing of how matrices are kept.

Where a layer's experts do not all stay on the GPU they are in two stacks, and a table says where each one is:

    places[expert] = p    p >= 0: the p-th of those that stay; p < 0: the (-1 - p)-th of those that wait

Of ranks that have whole experts each knows its own: there are lines for those alone, in the order of their matrices.
Tokens choose among all; pairs whose expert is elsewhere stand in no line, and weigh nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import activate, activation_code
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others

SUMMED_COLUMNS = 1024
ROUTED_TOGETHER, MANY_ROUTED = (8, 32), 2048
"""Tokens that one program takes, of few and of so many and more: the more it has, the fewer programs wait for the same
line, and the longer each takes."""
NO_GATES, GATES_IN_MATRIX, GATES_IN_OUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

Activation = Literal["silu", "gelu", "gelu_tanh"]
Gates = Literal["matrix", "out"]
"""Where a gated product has its gates: an expert's matrix has gates above ups; or it has ups, and `out` the gates."""


class ExpertAssignments(NamedTuple):
    """Who goes to which expert, for one layer after the other."""

    counts: torch.Tensor
    """int32 [experts]: how many pairs are in each line."""
    pairs: torch.Tensor
    """int32 [experts, tokens]: the lines; what is beyond their counts means nothing."""
    weights: torch.Tensor
    """float32 [tokens, per_token]"""
    homes: torch.Tensor | None = None
    """int32 [experts of the model]: which line each one has, -1: it is elsewhere. None: all are here, in order."""

    @classmethod
    def allocate(
        cls, tokens: int, experts: int, per_token: int, device: torch.device, here: Sequence[int] | None = None
    ) -> ExpertAssignments:
        """`here`: which of the experts have lines, in the order of these; None: all."""
        lines, homes = experts if here is None else len(here), None
        if here is not None:
            found = torch.full((experts,), -1, dtype=torch.int32)
            found[list(here)] = torch.arange(lines, dtype=torch.int32)
            homes = found.to(device)
        return cls(
            torch.zeros(lines, dtype=torch.int32, device=device),
            torch.empty((lines, tokens), dtype=torch.int32, device=device),
            torch.empty((tokens, per_token), dtype=torch.float32, device=device),
            homes,
        )

    @property
    def chosen_from(self) -> int:
        """Experts that pairs are spread over, here or elsewhere."""
        return len(self.counts) if self.homes is None else len(self.homes)


@triton.jit(do_not_specialize=["present"])
def _route(
    logits, counts, pairs, weights, experts, slots, homes, present, tokens, logits_stride, pairs_stride,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALIZED: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, ALONE: tl.constexpr, TOLD: tl.constexpr, PADDED: tl.constexpr,
    APART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens, which stand one behind the other in a line. The softmax is over all experts; what is taken is left
    out of the next choice. ALONE: there is no other program. TOLD: `experts` gets what each token chose. PADDED: those
    without a slot are no tokens, and choose nothing. APART: some experts are elsewhere, as `homes` says."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, BLOCK)
    there, known = (token < tokens)[:, None], (expert < EXPERTS)[None, :]
    source = logits + token.to(tl.int64)[:, None] * logits_stride + expert[None, :]
    home, here = expert, expert < EXPERTS
    if APART:
        home = tl.load(homes + expert, mask=here, other=-1)
        here = home >= 0
    wait_for_others(EARLY)
    live = token < tokens
    if PADDED:
        live = live & (tl.load(slots + token, mask=token < present, other=-1) >= 0)
    wide = tl.load(source, mask=there & known, other=float("-inf")).to(tl.float32)
    # Rows that nobody reads may hold anything: they get experts that there are, and weights of no meaning.
    left = tl.where(known, tl.where(wide > -1e30, tl.minimum(wide, 1e30), -1e30), float("-inf"))
    largest = tl.max(left, 1)
    total = tl.sum(tl.exp(left - largest[:, None]), 1)
    index = tl.arange(0, CHOICES)[None, :]
    shares = tl.zeros((TOKENS, CHOICES), tl.float32)
    away = tl.zeros((TOKENS, CHOICES), tl.int32)
    number = tl.full((TOKENS, BLOCK), -1, tl.int32)
    for choice in tl.static_range(PER_TOKEN):
        best, chosen = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
        shares = tl.where(index == choice, tl.exp(best - largest)[:, None], shares)
        if APART:
            found = tl.load(homes + chosen) >= 0
            away = tl.where((index == choice) & ~found[:, None], 1, away)
        mine = expert[None, :] == chosen[:, None]
        number = tl.where(mine, choice, number)
        if TOLD:
            tl.store(experts + token * PER_TOKEN + choice, tl.where(live, chosen, -1), mask=token < tokens)
        left = tl.where(mine, float("-inf"), left)
    let_others_start(EARLY)
    if NORMALIZED:
        total = tl.sum(shares, 1)
    taken = ((number >= 0) & live[:, None] & here[None, :]).to(tl.int32)
    totals = tl.sum(taken, 0)
    if ALONE:
        tl.store(counts + home, totals, mask=here)
        place = tl.cumsum(taken, 0) - taken
    else:
        first = tl.atomic_add(counts + home, totals, mask=totals > 0)
        place = first[None, :] + tl.cumsum(taken, 0) - taken
    line = pairs + home.to(tl.int64)[None, :] * pairs_stride
    tl.store(line + place, token[:, None] * PER_TOKEN + number, mask=taken > 0)
    target = weights + token[:, None] * PER_TOKEN + index
    kept = live[:, None] & (away == 0)
    tl.store(target, tl.where(kept, shares / total[:, None], 0.0), mask=there & (index < PER_TOKEN))


def route(
    logits: torch.Tensor,
    lines: ExpertAssignments,
    *,
    normalized: bool,
    chosen: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Every row of logits [tokens, experts] takes its likeliest experts and stands in their lines; `lines` is for at
    least as many tokens. `normalized`: the weights of a token add up to one. `chosen` int32 [tokens, per_token]: gets
    its experts, the likeliest first. `slots` int32 [rows]: rows that have none (less than 0), and those beyond it, pad
    a step: they choose nothing (-1), and have no weights. None: all are tokens."""
    (tokens, experts), per_token = logits.shape, lines.weights.shape[1]
    block = triton.next_power_of_2(experts)
    together = max(1, min(triton.next_power_of_2(tokens), ROUTED_TOGETHER[tokens >= MANY_ROUTED]))
    alone, early = 0 < tokens <= together, starts_early()
    if not alone:
        lines.counts.zero_()
    if tokens:
        _route[(triton.cdiv(tokens, together),)](
            logits, lines.counts, lines.pairs, lines.weights, chosen, slots, lines.homes,
            0 if slots is None else len(slots), tokens, logits.stride(0), lines.pairs.stride(0), EXPERTS=experts,
            PER_TOKEN=per_token, NORMALIZED=normalized, CHOICES=triton.next_power_of_2(per_token), BLOCK=block,
            TOKENS=together, ALONE=alone, TOLD=chosen is not None, PADDED=slots is not None,
            APART=lines.homes is not None, EARLY=early, num_warps=min(8, max(1, together * block // 128)),
            launch_pdl=early,
        )  # fmt: skip


@triton.jit
def line_part(tile, counts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first place in its line, length of the line) of a tile; beyond the last tile 0, 0, 0."""
    expert = tl.arange(0, BLOCK)
    lengths = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    tiles = (lengths + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    chosen = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = expert == chosen
    first = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * ROWS
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    found = length > 0
    return tl.where(found, chosen, 0), tl.where(found, first, 0), length


@triton.jit
def expert_place(places, expert, PLACED: tl.constexpr):
    """(where an expert is in its stack, whether that is the stack of those that stay)"""
    if PLACED:
        place = tl.load(places + expert)
        return tl.maximum(place, -1 - place), place >= 0
    else:
        return expert, True


@triton.jit
def line_pairs(pairs, pairs_stride, expert, first, length, ROWS: tl.constexpr):
    """(pair, whether there is one) of each row of a tile."""
    row = first + tl.arange(0, ROWS)
    live = row < length
    return tl.load(pairs + expert.to(tl.int64) * pairs_stride + row, mask=live, other=0).to(tl.int64), live


@triton.jit
def gated(gate_sums, up_sums, kind: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(gate) · up in float32, rounded where a separate product and gate would round."""
    activated = activate(gate_sums.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    return activated * up_sums.to(kind).to(tl.float32)


@triton.jit
def gated_by_out(out, index, inside, up_sums, ACTIVATION: tl.constexpr):
    """The same, where out still holds the gates."""
    kind: tl.constexpr = out.dtype.element_ty
    return gated(tl.load(out + index, mask=inside, other=0.0), up_sums, kind, ACTIVATION)


def gates_of(activation: Activation | None, gates: Gates) -> tuple[int, int]:
    """(activation, where gates are) as kernels call them."""
    if activation is None:
        return 0, NO_GATES.value
    return activation_code(activation), (GATES_IN_MATRIX if gates == "matrix" else GATES_IN_OUT).value


@triton.jit
def _add_pairs(
    rows, weights, out, rows_stride, out_stride, columns, PER_TOKEN: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, SPARSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = out + token * out_stride + column
    total = tl.zeros((BLOCK,), tl.float32)
    wait_for_others(EARLY)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        weight = tl.load(weights + pair)
        read = inside
        if SPARSE:  # Rows of no line were not written. Not chosen after the product: it and the sum are one,
            read = column < tl.where(weight > 0.0, columns, 0)  # rounded once, where nothing stands between them.
        line = tl.load(rows + pair * rows_stride + column, mask=read, other=0.0).to(tl.float32)
        total += line * weight
    let_others_start(EARLY)
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def add_pairs(
    rows: torch.Tensor, lines: ExpertAssignments, out: torch.Tensor, *, add: bool, padded: bool = False
) -> None:
    """out [tokens, columns] = (or +=) the rows [pairs, columns] of each token by their weights: in float32, rounded
    once. `padded`: some rows are no tokens, and chose nothing. Of experts that are elsewhere nothing is added."""
    (tokens, columns), early = out.shape, starts_early()
    sparse = padded or lines.homes is not None
    if tokens:
        _add_pairs[(tokens, triton.cdiv(columns, SUMMED_COLUMNS))](
            rows, lines.weights, out, rows.stride(0), out.stride(0), columns, PER_TOKEN=lines.weights.shape[1],
            ADD=add, BLOCK=SUMMED_COLUMNS, SPARSE=sparse, EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
