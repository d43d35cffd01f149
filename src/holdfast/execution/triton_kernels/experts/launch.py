# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Experts on a GPU: tokens choose, and each expert is multiplied with the tokens that chose it, in tiles of its own.

    route      logits -> chosen experts, their weights; each pair takes a place in its expert's line
    gate_up    x of the tokens in a line -> activation(gate) · up, a row a pair
    multiply   those rows -> a row a pair
    add_pairs  a token's rows, weighed -> its place in the stream

A pair is token · per_token + choice. Lines are as long as there are tokens; which programs have work is read on the
device, so that grids go by sizes alone: safe in a CUDA graph. Only chosen experts are read. Where a pair stands in its
line is left to chance and changes no result. Knows nothing of quantized blocks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.experts.tiles import ExpertTile, expert_tile, most_tiles
from holdfast.execution.triton_kernels.layer import activate, activation_code

SUMMED_COLUMNS = 1024


class ExpertAssignments(NamedTuple):
    """Who goes to which expert, for one layer after the other."""

    counts: torch.Tensor
    """int32 [experts]: how many pairs are in each line."""
    pairs: torch.Tensor
    """int32 [experts, tokens]: the lines; what is beyond their counts means nothing."""
    weights: torch.Tensor
    """float32 [tokens, per_token]"""

    @classmethod
    def allocate(cls, tokens: int, experts: int, per_token: int, device: torch.device) -> ExpertAssignments:
        return cls(
            torch.zeros(experts, dtype=torch.int32, device=device),
            torch.empty((experts, tokens), dtype=torch.int32, device=device),
            torch.empty((tokens, per_token), dtype=torch.float32, device=device),
        )


@triton.jit
def _route(
    logits, counts, pairs, weights, logits_stride, pairs_stride,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALIZED: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token. The softmax is over all experts; what is taken is left out of the next choice."""
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    known = expert < EXPERTS
    wide = tl.load(logits + token.to(tl.int64) * logits_stride + expert, mask=known, other=float("-inf")).to(tl.float32)
    # Rows that nobody reads may hold anything: they get experts that there are, and weights of no meaning.
    left = tl.where(known, tl.where(wide > -1e30, tl.minimum(wide, 1e30), -1e30), float("-inf"))
    largest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - largest), 0)
    index = tl.arange(0, CHOICES)
    shares = tl.zeros((CHOICES,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        best, chosen = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        shares = tl.where(index == choice, tl.exp(best - largest), shares)
        place = tl.atomic_add(counts + chosen, 1)
        tl.store(pairs + chosen.to(tl.int64) * pairs_stride + place, token * PER_TOKEN + choice)
        left = tl.where(expert == chosen, float("-inf"), left)
    if NORMALIZED:
        total = tl.sum(shares, 0)
    tl.store(weights + token * PER_TOKEN + index, shares / total, mask=index < PER_TOKEN)


def route(logits: torch.Tensor, lines: ExpertAssignments, *, normalized: bool) -> None:
    """Every row of logits [tokens, experts] takes its likeliest experts and stands in their lines; `lines` is for at
    least as many tokens. `normalized`: the weights of a token add up to one."""
    (tokens, experts), per_token = logits.shape, lines.weights.shape[1]
    lines.counts.zero_()
    if tokens:
        _route[(tokens,)](
            logits, lines.counts, lines.pairs, lines.weights, logits.stride(0), lines.pairs.stride(0), EXPERTS=experts,
            PER_TOKEN=per_token, NORMALIZED=normalized, CHOICES=triton.next_power_of_2(per_token),
            BLOCK=triton.next_power_of_2(experts), num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip


@triton.jit
def line_part(counts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first place in its line, length of the line) of this program's tile; beyond the last tile 0, 0, 0."""
    expert = tl.arange(0, BLOCK)
    lengths = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    tiles = (lengths + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    chosen = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = expert == chosen
    first = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * ROWS
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    found = length > 0
    return tl.where(found, chosen, 0), tl.where(found, first, 0), length


@triton.jit
def line_pairs(pairs, pairs_stride, expert, first, length, ROWS: tl.constexpr):
    """(pair, whether there is one) of each row of a tile."""
    row = first + tl.arange(0, ROWS)
    live = row < length
    return tl.load(pairs + expert.to(tl.int64) * pairs_stride + row, mask=live, other=0).to(tl.int64), live


@triton.jit
def put_gated_tile(out, index, inside, gate_sums, up_sums, ACTIVATION: tl.constexpr):
    """activation(gate) · up, rounded where a separate product and gate would round."""
    kind = out.dtype.element_ty
    activated = activate(gate_sums.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    tl.store(out + index, (activated * up_sums.to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _gate_up(
    x, weight, out, counts, pairs, x_stride, expert_stride, weight_stride, out_stride, pairs_stride, outputs,
    INPUTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, length = line_part(counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    output, column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    present = output < outputs
    inputs = x + (pair // PER_TOKEN)[:, None] * x_stride + column[None, :]
    line = weight + tl.cast(expert_stride, tl.int64) * expert + output.to(tl.int64)[:, None] * weight_stride
    gate_line = line + column[None, :]
    up_line = gate_line + tl.cast(outputs, tl.int64) * weight_stride
    gate_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in tl.range(0, INPUTS, COLUMNS):
        inside = (start + column < INPUTS)[None, :]
        part = tl.load(inputs + start, mask=live[:, None] & inside, other=0.0)
        gate_tile = tl.load(gate_line + start, mask=present[:, None] & inside, other=0.0)
        up_tile = tl.load(up_line + start, mask=present[:, None] & inside, other=0.0)
        gate_sums = tl.dot(part, gate_tile.T, gate_sums, input_precision="ieee")
        up_sums = tl.dot(part, up_tile.T, up_sums, input_precision="ieee")
    index = pair[:, None] * out_stride + output[None, :]
    put_gated_tile(out, index, live[:, None] & present[None, :], gate_sums, up_sums, ACTIVATION)


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    lines: ExpertAssignments,
    out: torch.Tensor,
    activation: Literal["silu", "gelu", "gelu_tanh"],
    *,
    tile: ExpertTile | None = None,
) -> None:
    """out [pairs, inner] = activation(gate) · up, of gate beside up = x [tokens, inputs] · weight [experts, 2·inner,
    inputs]ᵀ; rows of tokens that are in no line stay as they are."""
    (tokens, inputs), (experts, _, _), per_token = x.shape, weight.shape, lines.weights.shape[1]
    if tokens == 0:
        return
    outputs = out.shape[1]
    tile = tile or expert_tile(tokens * per_token, experts, x.element_size(), gated=True)
    grid = (most_tiles(tokens, per_token, experts, tile.rows), triton.cdiv(outputs, tile.outputs))
    _gate_up[grid](
        x, weight, out, lines.counts, lines.pairs, x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        lines.pairs.stride(0), outputs, INPUTS=inputs, EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
        PER_TOKEN=per_token, ACTIVATION=activation_code(activation), ROWS=tile.rows, OUTPUTS=tile.outputs,
        COLUMNS=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _multiply(
    x, weight, out, counts, pairs, x_stride, expert_stride, weight_stride, out_stride, pairs_stride, outputs,
    INPUTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SHARED_BY: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, length = line_part(counts, EXPERTS, BLOCK, ROWS)
    if first >= length:
        return
    pair, live = line_pairs(pairs, pairs_stride, expert, first, length, ROWS)
    output, column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    present = output < outputs
    inputs = x + (pair // SHARED_BY)[:, None] * x_stride + column[None, :]
    line = weight + tl.cast(expert_stride, tl.int64) * expert + output.to(tl.int64)[:, None] * weight_stride
    line += column[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in tl.range(0, INPUTS, COLUMNS):
        inside = (start + column < INPUTS)[None, :]
        part = tl.load(inputs + start, mask=live[:, None] & inside, other=0.0)
        tile = tl.load(line + start, mask=present[:, None] & inside, other=0.0)
        sums = tl.dot(part, tile.T, sums, input_precision="ieee")
    index = pair[:, None] * out_stride + output[None, :]
    tl.store(out + index, sums.to(out.dtype.element_ty), mask=live[:, None] & present[None, :])


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    tile: ExpertTile | None = None,
) -> None:
    """out [pairs, outputs] = x · weight [experts, outputs, inputs]ᵀ of each pair's expert. `by_token`: a row of x is a
    token's, and all its pairs take it; else it is a pair's."""
    pairs, (experts, outputs, inputs), per_token = len(out), weight.shape, lines.weights.shape[1]
    if pairs == 0:
        return
    tile = tile or expert_tile(pairs, experts, x.element_size(), gated=False)
    grid = (most_tiles(pairs // per_token, per_token, experts, tile.rows), triton.cdiv(outputs, tile.outputs))
    _multiply[grid](
        x, weight, out, lines.counts, lines.pairs, x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        lines.pairs.stride(0), outputs, INPUTS=inputs, EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
        SHARED_BY=per_token if by_token else 1, ROWS=tile.rows, OUTPUTS=tile.outputs, COLUMNS=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _add_pairs(
    rows, weights, out, rows_stride, out_stride, columns, PER_TOKEN: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = out + token * out_stride + column
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        line = tl.load(rows + pair * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += line * tl.load(weights + pair)
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def add_pairs(rows: torch.Tensor, lines: ExpertAssignments, out: torch.Tensor, *, add: bool) -> None:
    """out [tokens, columns] = (or +=) the rows [pairs, columns] of each token by their weights: in float32, rounded
    once."""
    tokens, columns = out.shape
    if tokens:
        _add_pairs[(tokens, triton.cdiv(columns, SUMMED_COLUMNS))](
            rows, lines.weights, out, rows.stride(0), out.stride(0), columns, PER_TOKEN=lines.weights.shape[1],
            ADD=add, BLOCK=SUMMED_COLUMNS, num_warps=4,
        )  # fmt: skip
