"""The experts of a layer on a GPU, over buffers that all layers share and that never move.

Routing, products and sums are kernels whose grids go by the number of tokens alone: everything here may be captured in
a graph. More tokens than the buffers hold are taken in turns.

    rows    [pairs, hidden]   products of the last matrices; before, a token's rounded inputs lie in it, or inputs of
                              pairs in the order of their experts' columns
    inner   [pairs, inner]    activation(gate) · up; rounded inputs of the last matrices replace it row by row:
                              codes, then their scales
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.int4_experts import expert_cut, multiply_int4
from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.gpu.layers.rounded_linear import rounds_inputs
from holdfast.execution.layers.experts import (
    DenseStack,
    ExpertWeights,
    PlacedStack,
    QuantizedStack,
    SharedExpert,
    Stack,
)
from holdfast.execution.ops.interface import Activation
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_exchange import Apart
from holdfast.execution.triton_kernels import layer as layer_kernels
from holdfast.execution.triton_kernels.experts import launch as kernels
from holdfast.execution.triton_kernels.experts.blocks import multiply_blocks
from holdfast.execution.triton_kernels.experts.direct import ROUNDED_GROUP, multiply_dense, multiply_rounded
from holdfast.execution.triton_kernels.experts.ordering import gather_expert_columns
from holdfast.execution.triton_kernels.experts.planes import RoundedRows, ScaledPlanes
from holdfast.execution.triton_kernels.experts.rounding import round_rows
from holdfast.execution.triton_kernels.experts.scaled import multiply_scaled
from holdfast.execution.triton_kernels.host.exchange import add_replies, fetch, send
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.experts import GPU_TOKENS, SHARE_COLUMNS
from holdfast.footprint.scaled_layouts import PIECE
from holdfast.models import ExpertsSpec


@dataclass(frozen=True, slots=True)
class GpuExpertBuffers:
    """For so many tokens at a time."""

    tokens: int
    lines: kernels.ExpertAssignments
    logits: torch.Tensor
    inner: torch.Tensor
    rows: torch.Tensor
    shared: torch.Tensor
    """[tokens, 3·inner of the shared expert and one more]"""


class ExpertGpuMaker:
    """Makes experts for layers of one decoder, which share their buffers."""

    def __init__(self, hidden: int, activation: Activation, like: torch.Tensor, scratch: Scratch) -> None:
        """`like`: any buffer with a row for every token that a step may have."""
        self._hidden, self._activation, self._like, self._scratch = hidden, activation, like, scratch
        self._tokens = min(len(like), GPU_TOKENS)
        self._buffers: dict[ExpertsSpec, GpuExpertBuffers] = {}

    def make(self, weights: ExpertWeights, placed: LayerExperts | None = None) -> ExpertGpuMlp:
        """`placed`: of a layer whose experts do not all stay on the GPU."""
        spec = weights.spec
        if spec not in self._buffers:
            self._buffers[spec] = self._allocate(spec)
        return ExpertGpuMlp(weights, self._activation, self._buffers[spec], self._scratch, placed)

    def _allocate(self, spec: ExpertsSpec) -> GpuExpertBuffers:
        tokens, pairs = self._tokens, self._tokens * spec.per_token
        return GpuExpertBuffers(
            tokens=tokens,
            lines=kernels.ExpertAssignments.allocate(
                tokens, spec.count, spec.per_token, self._like.device, spec.numbers if spec.here else None
            ),
            logits=self._like.new_empty((tokens, spec.count)),
            inner=self._like.new_empty((pairs, spec.intermediate_size)),
            rows=self._like.new_empty((pairs, self._hidden)),
            shared=self._like.new_empty((tokens, 3 * spec.shared_intermediate_size + SHARE_COLUMNS)),
        )


class LayerExperts(NamedTuple):
    experts: DeviceExperts
    layer: int


class ExpertGpuMlp:
    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        buffers: GpuExpertBuffers,
        scratch: Scratch,
        placed: LayerExperts | None,
    ) -> None:
        self._spec, self._activation, self._buffers, self._placed = weights.spec, activation, buffers, placed
        self._gate_up = [_products(stack, scratch) for stack in weights.gate_up]
        self._down = _products(weights.down, scratch)
        self._same_order = weights.same_order
        if placed is not None:
            stacks = [stack for stack in (*weights.gate_up, weights.down) if isinstance(stack, PlacedStack)]
            waiting = [plane for stack in stacks for plane in _planes(stack.waiting)]
            resident = [plane for stack in stacks if stack.resident is not None for plane in _planes(stack.resident)]
            ordered = any(isinstance(stack.waiting, QuantizedStack) and _in_order(stack.waiting) for stack in stacks)
            take = None if ordered else partial(self._take, weights, scratch)
            placed.experts.know(placed.layer, waiting, resident, take)
        self._router = gpu_linear(weights.router, scratch)
        self._shared = None if weights.shared is None else _Shared(weights.shared, activation, scratch)

    def _take(
        self,
        weights: ExpertWeights,
        scratch: Scratch,
        resident: Sequence[torch.Tensor],
        waiting: Sequence[torch.Tensor],
    ) -> None:
        """Other planes, in the order in which they were told, for other numbers of experts: those that were there are
        not used any more."""
        stay, wait = iter(resident), iter(waiting)
        for stack in (*weights.gate_up, weights.down):
            assert isinstance(stack, PlacedStack)
            count = len(_planes(stack.waiting))
            like, kept = stack.waiting, [next(stay) for _ in range(count if resident else 0)]
            stack.resident = _with_planes(like, kept) if resident else None
            stack.waiting = _with_planes(like, [next(wait) for _ in range(count)])
        self._gate_up = [_products(stack, scratch) for stack in weights.gate_up]
        self._down = _products(weights.down, scratch)

    @property
    def kind(self) -> tuple[object, ...]:
        stacks = (*self._gate_up, self._down)
        return "experts", self._router.kind, self._spec, self._same_order, *(stack.kind for stack in stacks)

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        layer_kernels.rms_norm(stream, norm, epsilon, normed)
        self.run(normed, stream, add=True)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        tokens, placed = self._buffers.tokens, self._placed
        apart = None if placed is None else placed.experts.begin(placed.layer, len(x))
        for part, target in zip(torch.split(x, tokens), torch.split(out, tokens), strict=True):
            self._run(part, target, add, apart)
        if placed is not None:
            placed.experts.end(placed.layer, len(x))

    def _run(self, x: torch.Tensor, out: torch.Tensor, add: bool, apart: Apart | None) -> None:
        spec, buffers, lines = self._spec, self._buffers, self._buffers.lines
        count, pairs = len(x), len(x) * spec.per_token
        logits, inner, rows = buffers.logits[:count], buffers.inner[:pairs], buffers.rows[:pairs]
        self._router.write(x, logits)
        exchange = None if apart is None else apart.exchange
        chosen = None if exchange is None else exchange.experts[:count]
        slots = None if apart is None else apart.slots
        kernels.route(logits, lines, normalized=spec.normalized, chosen=chosen, slots=slots)
        if apart is not None and exchange is not None and chosen is not None:
            send(x, chosen, lines, apart.places, apart.uses, exchange)
        if apart is not None and apart.fetched is not None and (exchange is None or exchange.over_link):
            fetch(lines, apart.places, apart.uses if exchange is None else None, apart.fetched, pairs)
        self._multiply_gated(x, lines, inner, rows, apart)
        self._down.multiply(self._down.inputs(inner, lines, inner), lines, rows, by_token=False, apart=apart)
        if exchange is None:
            kernels.add_pairs(rows, lines, out, add=add, padded=slots is not None)
        else:
            add_replies(rows, lines, exchange, out, add=add)
        if self._shared is not None:
            self._shared.add(x, out, buffers.shared[:count], rows[:count])

    def _multiply_gated(
        self,
        x: torch.Tensor,
        lines: kernels.ExpertAssignments,
        inner: torch.Tensor,
        room: torch.Tensor,
        apart: Apart | None,
    ) -> None:
        first, activation = self._gate_up[0], self._activation
        if len(self._gate_up) == 1:
            taken = first.inputs(x, lines, room)
            first.multiply(taken, lines, inner, by_token=True, activation=activation, apart=apart)
            return
        up, taken = self._gate_up[1], first.inputs(x, lines, room)
        first.multiply(taken, lines, inner, by_token=True, apart=apart)
        taken = taken if self._same_order else up.inputs(x, lines, room)
        up.multiply(taken, lines, inner, by_token=True, activation=activation, gates="out", apart=apart)


class _Shared:
    """The expert of all tokens, weighed by the sigmoid of one more product."""

    def __init__(self, weights: SharedExpert, activation: Activation, scratch: Scratch) -> None:
        self._gate_up, self._down = gpu_linear(weights.gate_up, scratch), gpu_linear(weights.down, scratch)
        self._router = gpu_linear(weights.router, scratch)
        self._activation, self._width = activation, weights.down.columns

    def add(self, x: torch.Tensor, out: torch.Tensor, buffer: torch.Tensor, found: torch.Tensor) -> None:
        gate_up, inner, last = buffer.split((2 * self._width, self._width, SHARE_COLUMNS), dim=1)
        share = last[:, :1]
        self._gate_up.write(x, gate_up)
        layer_kernels.gate(gate_up, self._activation, inner)
        self._down.write(inner, found)
        self._router.write(x, share)
        out.addcmul_(found, share.sigmoid_())


class _Products(Protocol):
    """With a matrix for every expert."""

    @property
    def kind(self) -> tuple[object, ...]: ...

    def inputs(
        self, x: torch.Tensor, lines: kernels.ExpertAssignments, room: torch.Tensor
    ) -> torch.Tensor | RoundedRows:
        """What `multiply` takes for x, a row of it a token's. Where that is not x itself it goes to `room`: rounded, as
        many rows, which may be x's; in the order of columns, a row for each pair."""

    def multiply(
        self,
        x: torch.Tensor | RoundedRows,
        lines: kernels.ExpertAssignments,
        out: torch.Tensor,
        *,
        by_token: bool,
        activation: Activation | None = None,
        gates: kernels.Gates = "matrix",
        apart: Apart | None = None,
    ) -> None: ...


class _Dense:
    """`waiting`: in their slot."""

    def __init__(self, stack: DenseStack, waiting: DenseStack | None) -> None:
        self._weight, self._waiting = stack.weight, None if waiting is None else waiting.weight

    @property
    def kind(self) -> tuple[object, ...]:
        return "dense", *self._weight.shape

    def inputs(self, x: torch.Tensor, lines: kernels.ExpertAssignments, room: torch.Tensor) -> torch.Tensor:
        return x

    def multiply(
        self,
        x: torch.Tensor | RoundedRows,
        lines: kernels.ExpertAssignments,
        out: torch.Tensor,
        *,
        by_token: bool,
        activation: Activation | None = None,
        gates: kernels.Gates = "matrix",
        apart: Apart | None = None,
    ) -> None:
        assert isinstance(x, torch.Tensor)
        multiply_dense(
            x, self._weight, lines, out, by_token=by_token, activation=activation, gates=gates,
            places=_places(apart), waiting=self._waiting,
        )  # fmt: skip


class _Blocks:
    """GGUF's."""

    def __init__(self, matrix: QuantizedMatrix, waiting: QuantizedMatrix | None) -> None:
        self._planes, self._waiting = _block_planes(matrix), None if waiting is None else _block_planes(waiting)

    @property
    def kind(self) -> tuple[object, ...]:
        return self._planes.layout, *self._planes.quants.shape

    def inputs(self, x: torch.Tensor, lines: kernels.ExpertAssignments, room: torch.Tensor) -> torch.Tensor:
        return x

    def multiply(
        self,
        x: torch.Tensor | RoundedRows,
        lines: kernels.ExpertAssignments,
        out: torch.Tensor,
        *,
        by_token: bool,
        activation: Activation | None = None,
        gates: kernels.Gates = "matrix",
        apart: Apart | None = None,
    ) -> None:
        assert isinstance(x, torch.Tensor)
        multiply_blocks(
            x, self._planes, lines, out, by_token=by_token, activation=activation, gates=gates,
            places=_places(apart), waiting=self._waiting,
        )  # fmt: skip


class _Scaled:
    """Codes with scales."""

    def __init__(self, matrix: ScaledMatrix, experts: int, scratch: Scratch, waiting: ScaledMatrix | None) -> None:
        layout = matrix.layout
        if not rounds_inputs(matrix):
            layout = replace(layout, inputs="plain", static_inputs=False, input_group=0)
        if matrix.order is not None and layout.inputs != "plain":
            raise EngineError("experts in act-order whose inputs are rounded have no products on a GPU")
        whole = PIECE if layout.inputs == "plain" else ROUNDED_GROUP
        if layout.group % whole:
            raise EngineError(
                f"experts in {layout} have no products on a GPU",
                needed=f"groups of a multiple of {whole} columns",
                found=str(layout.group),
            )
        self._planes = ScaledPlanes(layout, matrix.codes, matrix.scales, matrix.zeros)
        self._static, self._order = matrix.inputs if layout.static_inputs else None, matrix.order
        # Kernels in CUDA C++ read one stack.
        self._in_cuda = waiting is None and scratch.quantized.against_experts(matrix, experts) is None
        self._waiting = None
        if waiting is not None:
            self._waiting = ScaledPlanes(layout, waiting.codes, waiting.scales, waiting.zeros)

    @property
    def kind(self) -> tuple[object, ...]:
        return self._planes.layout, *self._planes.codes.shape

    def inputs(
        self, x: torch.Tensor, lines: kernels.ExpertAssignments, room: torch.Tensor
    ) -> torch.Tensor | RoundedRows:
        layout, columns = self._planes.layout, x.shape[1]
        if self._order is not None:
            gather_expert_columns(x, self._order, lines, room, by_token=True)
            return room
        if layout.inputs == "plain":
            return x
        # Codes take at most half of a row of numbers, and scales a quarter of the rest.
        line = room[: len(x), :columns].view(torch.uint8)
        groups = columns // layout.group if layout.group else 1
        scales = line[:, columns : columns + 4 * groups].view(torch.float32)
        codes = line[:, :columns] if layout.inputs == "fp8" else line[:, :columns].view(torch.int8)
        round_rows(x, codes, scales, self._static, bound=layout.input_bound, powers=layout.input_powers)
        return RoundedRows(codes, scales)

    def multiply(
        self,
        x: torch.Tensor | RoundedRows,
        lines: kernels.ExpertAssignments,
        out: torch.Tensor,
        *,
        by_token: bool,
        activation: Activation | None = None,
        gates: kernels.Gates = "matrix",
        apart: Apart | None = None,
    ) -> None:
        by_token = by_token and self._order is None
        if isinstance(x, RoundedRows):
            multiply_rounded(
                x, self._planes, lines, out, by_token=by_token, activation=activation, gates=gates,
                places=_places(apart), waiting=self._waiting,
            )  # fmt: skip
        elif self._in_cuda and (cut := expert_cut(len(out), lines.chosen_from, x.shape[1])) is not None:
            multiply_int4(x, self._planes, lines, out, by_token=by_token, activation=activation, gates=gates, cut=cut)
        else:
            multiply_scaled(
                x, self._planes, lines, out, by_token=by_token, activation=activation, gates=gates,
                places=_places(apart), waiting=self._waiting,
            )  # fmt: skip


def _places(apart: Apart | None) -> torch.Tensor | None:
    return None if apart is None else apart.places


def _block_planes(matrix: QuantizedMatrix) -> BlockPlanes:
    return BlockPlanes(matrix.layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small)


def _planes(stack: Stack) -> list[torch.Tensor]:
    """All that is kept of its experts, each expert's part in one piece."""
    if isinstance(stack, DenseStack):
        return [stack.weight]
    assert isinstance(stack, QuantizedStack)
    matrix = stack.matrix
    if isinstance(matrix, ScaledMatrix):
        kept = [matrix.codes, matrix.scales, matrix.zeros]
    else:
        kept = [matrix.quants, matrix.high, matrix.scales, matrix.minimums, matrix.small]
    return [plane for plane in kept if plane is not None]


def _in_order(stack: QuantizedStack) -> bool:
    """Its experts take their inputs in orders of their own."""
    return isinstance(stack.matrix, ScaledMatrix) and stack.matrix.order is not None


def _with_planes(like: Stack, planes: Sequence[torch.Tensor]) -> Stack:
    """One that is kept the same way, of as many experts as these planes have."""
    if isinstance(like, DenseStack):
        return DenseStack(planes[0])
    assert isinstance(like, QuantizedStack)
    experts = like.experts * planes[0].numel() // _planes(like)[0].numel()
    matrix = copy(like.matrix)
    matrix.rows = experts * like.rows
    names: tuple[str, ...] = ("codes", "scales", "zeros")
    if isinstance(matrix, QuantizedMatrix):
        names = ("quants", "high", "scales", "minimums", "small")
        matrix.forget_together()
    present = [name for name in names if getattr(matrix, name) is not None]
    for name, plane in zip(present, planes, strict=True):
        setattr(matrix, name, plane)
    return QuantizedStack(matrix, experts)


def _products(stack: Stack, scratch: Scratch) -> _Products:
    waiting: Stack | None = None
    if isinstance(stack, PlacedStack):
        # Where none stays, nothing is read of the first stack.
        waiting = stack.waiting
        stack = stack.resident or waiting
    if isinstance(stack, DenseStack):
        return _Dense(stack, waiting if isinstance(waiting, DenseStack) else None)
    if isinstance(stack, QuantizedStack):
        matrix, apart = stack.matrix, waiting.matrix if isinstance(waiting, QuantizedStack) else None
        if isinstance(matrix, ScaledMatrix):
            return _Scaled(matrix, stack.experts, scratch, apart if isinstance(apart, ScaledMatrix) else None)
        return _Blocks(matrix, apart if isinstance(apart, QuantizedMatrix) else None)
    raise EngineError(f"a {type(stack).__name__} has no products on a GPU")
