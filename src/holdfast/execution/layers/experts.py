"""The experts of a layer: how their matrices are kept, and how a CPU computes with them.

A token goes to few of many experts. Pairs of a token and an expert are sorted by expert, and each matrix stack is
multiplied in one call, group by group; experts that nobody chose are not read. Knows nothing of files or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from holdfast.execution import native
from holdfast.execution.layers.linear import Linear, quantized_inputs
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.experts import TILE_BYTES
from holdfast.models.spec import Activation, ExpertsSpec

TILE_ROWS = 8
"""Tiles have whole multiples of so many rows: grouped products want rows of 16 bytes."""

Gate = Callable[[torch.Tensor, Activation, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which lines of a sorted input belong to which expert."""

    present: torch.Tensor
    """int64: experts that have lines, in order."""
    ends: torch.Tensor
    """int32: where the lines of each of those end."""
    all_ends: torch.Tensor
    """int32 [experts]: the same for all, those without lines too."""


class Stack(Protocol):
    """A matrix [rows, columns] for every expert."""

    experts: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int: ...


class MultipliedStack(Stack, Protocol):
    def multiply(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[lines, rows]: each line of x [lines, columns] times its expert's matrix."""


class DenseStack:
    """Numbers [experts, rows, columns] as they are multiplied."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.experts, self.rows, self.columns = weight.shape
        self._turned = weight.transpose(1, 2)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return functional.grouped_mm(x, self._turned, offs=groups.all_ends)


class QuantizedStack:
    """Stays quantized, the rows of all experts one below the other; tiles of those that were chosen are expanded."""

    def __init__(self, matrix: QuantizedMatrix | ScaledMatrix, experts: int) -> None:
        self.matrix, self.experts = matrix, experts
        self.rows, self.columns = matrix.rows // experts, matrix.columns

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def multiply(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """The same rows of all experts that are present at a time, as many as a tile holds."""
        out, rounded = x.new_empty((len(x), self.rows)), quantized_inputs(x, self.matrix)
        count = len(groups.present)
        tile_rows = max(1, TILE_BYTES // (4 * self.columns * count * TILE_ROWS)) * TILE_ROWS
        first_rows = (groups.present * self.rows).unsqueeze(1)
        for first in range(0, self.rows, tile_rows):
            last = min(first + tile_rows, self.rows)
            rows = (first_rows + torch.arange(first, last)).view(-1)
            tile = rounded.new_empty((len(rows), self.columns))
            self.matrix.dequantize_some(rows, tile)
            turned = tile.view(count, last - first, self.columns).transpose(1, 2)
            out[:, first:last] = functional.grouped_mm(rounded, turned, offs=groups.ends)
        return out


class PlacedStack:
    """Of a GPU's layer whose experts do not all stay there: some do, if any, and the others are here while they are in
    their slot."""

    def __init__(self, resident: Stack | None, waiting: Stack) -> None:
        self.resident, self.waiting = resident, waiting
        self.experts = waiting.experts + (0 if resident is None else resident.experts)
        self.rows, self.columns = waiting.rows, waiting.columns

    @property
    def nbytes(self) -> int:
        """Of those that stay."""
        return 0 if self.resident is None else self.resident.nbytes


class BlockStack:
    """A compiled matrix for every expert; they are multiplied by `native.ExpertLayer` alone."""

    def __init__(self, matrices: Sequence[native.CompiledMatrix], nbytes: int) -> None:
        self.matrices, self.nbytes = matrices, nbytes
        self.experts, self.rows, self.columns = len(matrices), matrices[0].rows, matrices[0].columns


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """Every token goes through it too; its sum is weighed by the sigmoid of one more product."""

    gate_up: Linear
    down: Linear
    router: Linear

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes + self.router.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """What a layer has in place of gate, up and down."""

    spec: ExpertsSpec
    router: Linear
    gate_up: tuple[Stack, ...]
    """One stack, or two that are kept in different ways: their outputs stand side by side."""
    down: Stack
    shared: SharedExpert | None
    same_order: bool = False
    """Gate and up, in two stacks, take their inputs in one order (GPTQ's act-order): they need be put into it once."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those that all tokens are multiplied with."""
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down, self.shared.router)
        return self.router, *shared

    @property
    def nbytes(self) -> int:
        stacks = sum(stack.nbytes for stack in (*self.gate_up, self.down))
        return self.router.nbytes + stacks + (0 if self.shared is None else self.shared.nbytes)


class Experts(Protocol):
    """A layer's experts as a CPU computes with them."""

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """out [tokens, hidden] = or += what their experts make of x, like it; no more tokens than it was made for."""


def route(logits: torch.Tensor, per_token: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, experts int64), both [tokens, per_token]: the likeliest of a softmax over all."""
    weights, chosen = logits.float().softmax(-1).topk(per_token, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights), chosen


class TorchExperts:
    """With torch's grouped products, which loop over experts in compiled code."""

    def __init__(self, weights: ExpertWeights, activation: Activation, gate: Gate) -> None:
        self._weights, self._activation, self._gate = weights, activation, gate
        self._gate_up = [_multiplied(stack) for stack in weights.gate_up]
        self._down = _multiplied(weights.down)
        self._count, self._places = weights.down.experts, _places(weights.spec)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        spec = self._weights.spec
        logits = x.new_empty((len(x), spec.count))
        self._weights.router.write(x, logits)
        shares, chosen = route(logits, spec.per_token, spec.normalized)
        if not add:
            out.zero_()
        experts, order = self._sorted(chosen.view(-1))
        if not len(experts):
            return
        groups = _groups(experts, self._count)
        tokens = order.div(spec.per_token, rounding_mode="floor")
        lines = x.index_select(0, tokens)
        parts = [stack.multiply(lines, groups) for stack in self._gate_up]
        gate_up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        del parts, lines
        inner = gate_up.new_empty((len(gate_up), spec.intermediate_size))
        self._gate(gate_up, self._activation, inner)
        found = self._down.multiply(inner, groups)
        found *= shares.view(-1).index_select(0, order).unsqueeze(1)
        out.index_add_(0, tokens, found)

    def _sorted(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts by their places here, pairs) of those pairs whose expert is here, in the order of experts."""
        if self._places is None:
            return chosen.sort(stable=True)
        experts, order = self._places[chosen].sort(stable=True)
        elsewhere = int((experts < 0).sum())
        return experts[elsewhere:], order[elsewhere:]


class CompiledExperts:
    """All in one compiled call."""

    def __init__(
        self, weights: ExpertWeights, stacks: Sequence[BlockStack], activation: Activation, buffers: ExpertBuffers
    ) -> None:
        *gate_up, down = stacks
        self._router, self._buffers, self._spec = weights.router, buffers, weights.spec
        self._layer = native.ExpertLayer(
            gate_up=list(zip(*(stack.matrices for stack in gate_up), strict=True)),
            down=down.matrices,
            per_token=weights.spec.per_token,
            normalized=weights.spec.normalized,
            activation=activation,
            experts=weights.spec.count,
            numbers=weights.spec.numbers,
        )

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        if not add:
            out.zero_()
        logits = self._buffers.logits[: len(x)]
        self._router.write(x, logits)
        self._layer.add(x, logits, out, self._buffers.lines)


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Of compiled experts, for one layer after the other."""

    logits: torch.Tensor
    lines: native.NativeExpertBuffers

    @classmethod
    def allocate(cls, spec: ExpertsSpec, hidden: int, tokens: int) -> ExpertBuffers:
        lines = native.NativeExpertBuffers.allocate(
            tokens, spec.per_token, spec.count, hidden, spec.intermediate_size, spec.most_here
        )
        return cls(torch.empty((tokens, spec.count)), lines)


class ExpertMaker:
    """Makes a CPU's experts for layers of one decoder, which share their buffers."""

    def __init__(self, hidden: int, activation: Activation, gate: Gate, most_tokens: int) -> None:
        self._hidden, self._activation, self._gate, self._tokens = hidden, activation, gate, most_tokens
        self._buffers: dict[ExpertsSpec, ExpertBuffers] = {}

    def make(self, weights: ExpertWeights) -> Experts:
        stacks = [stack for stack in (*weights.gate_up, weights.down) if isinstance(stack, BlockStack)]
        routed: Experts
        if len(stacks) == len(weights.gate_up) + 1:
            if weights.spec not in self._buffers:
                self._buffers[weights.spec] = ExpertBuffers.allocate(weights.spec, self._hidden, self._tokens)
            routed = CompiledExperts(weights, stacks, self._activation, self._buffers[weights.spec])
        else:
            routed = TorchExperts(weights, self._activation, self._gate)
        if weights.shared is None:
            return routed
        return WithShared(routed, weights.shared, self._activation, self._gate)


class WithShared:
    """Routed experts, and one that all tokens share."""

    def __init__(self, routed: Experts, shared: SharedExpert, activation: Activation, gate: Gate) -> None:
        self._routed, self._shared, self._activation, self._gate = routed, shared, activation, gate

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        self._routed.run(x, out, add=add)
        shared, count = self._shared, len(x)
        gate_up, inner = x.new_empty((count, shared.gate_up.rows)), x.new_empty((count, shared.down.columns))
        shared.gate_up.write(x, gate_up)
        self._gate(gate_up, self._activation, inner)
        found, share = torch.empty_like(x), x.new_empty((count, 1))
        shared.down.write(inner, found)
        shared.router.write(x, share)
        out.addcmul_(found, share.sigmoid_())


def _multiplied(stack: Stack) -> MultipliedStack:
    assert isinstance(stack, DenseStack | QuantizedStack), "stacks of a layer are all compiled, or none is"
    return stack


def _places(spec: ExpertsSpec) -> torch.Tensor | None:
    """int64 [experts]: where each one's matrices lie, -1: elsewhere. None: all are here, in their order."""
    if not spec.here:
        return None
    places = torch.full((spec.count,), -1)
    places[list(spec.numbers)] = torch.arange(len(spec.numbers))
    return places


def _groups(experts: torch.Tensor, count: int) -> Groups:
    """`experts`: of every line, sorted."""
    counts = torch.bincount(experts, minlength=count)
    present = counts.nonzero().view(-1)
    ends = counts.cumsum(0).to(torch.int32)
    return Groups(present=present, ends=ends.index_select(0, present), all_ends=ends)
