"""The experts of a layer on a GPU, over buffers that all layers share and that never move.

Routing, products and sums are kernels whose grids go by the number of tokens alone: everything here may be captured in
a graph. More tokens than the buffers hold are taken in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.layers.experts import DenseStack, ExpertWeights, QuantizedStack, SharedExpert, Stack
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as layer_kernels
from holdfast.execution.triton_kernels.experts import launch as kernels
from holdfast.execution.triton_kernels.experts.blocks import multiply_blocks
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.footprint.experts import GPU_TOKENS
from holdfast.models import ExpertsSpec


@dataclass(frozen=True, slots=True)
class GpuExpertBuffers:
    """For so many tokens at a time."""

    tokens: int
    lines: kernels.ExpertAssignments
    logits: torch.Tensor
    inner: torch.Tensor
    rows: torch.Tensor
    """[pairs, hidden]"""
    shared: torch.Tensor
    """[tokens, 3·inner of the shared expert and one more]"""


class ExpertGpuMaker:
    """Makes experts for layers of one decoder, which share their buffers."""

    def __init__(self, hidden: int, activation: Activation, like: torch.Tensor, scratch: Scratch) -> None:
        """`like`: any buffer with a row for every token that a step may have."""
        self._hidden, self._activation, self._like, self._scratch = hidden, activation, like, scratch
        self._tokens = min(len(like), GPU_TOKENS)
        self._buffers: dict[ExpertsSpec, GpuExpertBuffers] = {}
        self._gate_up: dict[ExpertsSpec, torch.Tensor] = {}

    def make(self, weights: ExpertWeights) -> ExpertGpuMlp:
        spec = weights.spec
        if spec not in self._buffers:
            self._buffers[spec] = self._allocate(spec)
        gate_up = None if _fused(weights) else self._gate_up_of(spec)
        return ExpertGpuMlp(weights, self._activation, self._buffers[spec], gate_up, self._scratch)

    def _allocate(self, spec: ExpertsSpec) -> GpuExpertBuffers:
        tokens, pairs = self._tokens, self._tokens * spec.per_token
        return GpuExpertBuffers(
            tokens=tokens,
            lines=kernels.ExpertAssignments.allocate(tokens, spec.count, spec.per_token, self._like.device),
            logits=self._like.new_empty((tokens, spec.count)),
            inner=self._like.new_empty((pairs, spec.intermediate_size)),
            rows=self._like.new_empty((pairs, self._hidden)),
            shared=self._like.new_empty((tokens, 3 * spec.shared_intermediate_size + 1)),
        )

    def _gate_up_of(self, spec: ExpertsSpec) -> torch.Tensor:
        if spec not in self._gate_up:
            self._gate_up[spec] = self._like.new_empty((self._tokens * spec.per_token, 2 * spec.intermediate_size))
        return self._gate_up[spec]


class ExpertGpuMlp:
    """`gate_up` [pairs, 2·inner]: where gate and up are not one dense matrix, which is gated where it is multiplied."""

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        buffers: GpuExpertBuffers,
        gate_up: torch.Tensor | None,
        scratch: Scratch,
    ) -> None:
        self._weights, self._activation, self._buffers, self._apart = weights, activation, buffers, gate_up
        self._router = gpu_linear(weights.router, scratch)
        self._shared = None if weights.shared is None else _Shared(weights.shared, activation, scratch)

    @property
    def kind(self) -> tuple[object, ...]:
        stacks = (*self._weights.gate_up, self._weights.down)
        return "experts", self._router.kind, self._weights.spec, *(_kind(stack) for stack in stacks)

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        layer_kernels.rms_norm(stream, norm, epsilon, normed)
        self.run(normed, stream, add=True)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        tokens = self._buffers.tokens
        for part, target in zip(torch.split(x, tokens), torch.split(out, tokens), strict=True):
            self._run(part, target, add)

    def _run(self, x: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        spec, buffers, lines = self._weights.spec, self._buffers, self._buffers.lines
        count, pairs = len(x), len(x) * spec.per_token
        logits, inner, rows = buffers.logits[:count], buffers.inner[:pairs], buffers.rows[:pairs]
        self._router.write(x, logits)
        kernels.route(logits, lines, normalized=spec.normalized)
        self._gate_up(x, lines, inner)
        _multiply(inner, self._weights.down, lines, rows, by_token=False)
        kernels.add_pairs(rows, lines, out, add=add)
        if self._shared is not None:
            self._shared.add(x, out, buffers.shared[:count], rows[:count])

    def _gate_up(self, x: torch.Tensor, lines: kernels.ExpertAssignments, inner: torch.Tensor) -> None:
        stacks = self._weights.gate_up
        if self._apart is None:
            assert isinstance(stacks[0], DenseStack)
            kernels.gate_up(x, stacks[0].weight, lines, inner, self._activation)
            return
        first, gate_up = 0, self._apart[: len(inner)]
        for stack in stacks:
            _multiply(x, stack, lines, gate_up[:, first : first + stack.rows], by_token=True)
            first += stack.rows
        layer_kernels.gate(gate_up, self._activation, inner)


class _Shared:
    """The expert of all tokens, weighed by the sigmoid of one more product."""

    def __init__(self, weights: SharedExpert, activation: Activation, scratch: Scratch) -> None:
        self._gate_up, self._down = gpu_linear(weights.gate_up, scratch), gpu_linear(weights.down, scratch)
        self._router = gpu_linear(weights.router, scratch)
        self._activation, self._width = activation, weights.down.columns

    def add(self, x: torch.Tensor, out: torch.Tensor, buffer: torch.Tensor, found: torch.Tensor) -> None:
        gate_up, inner, share = buffer.split((2 * self._width, self._width, 1), dim=1)
        self._gate_up.write(x, gate_up)
        layer_kernels.gate(gate_up, self._activation, inner)
        self._down.write(inner, found)
        self._router.write(x, share)
        out.addcmul_(found, share.sigmoid_())


def _fused(weights: ExpertWeights) -> bool:
    return len(weights.gate_up) == 1 and isinstance(weights.gate_up[0], DenseStack)


def _kind(stack: Stack) -> tuple[object, ...]:
    layout = stack.matrix.layout if isinstance(stack, QuantizedStack) else "dense"
    return layout, stack.rows, stack.columns


def _multiply(
    x: torch.Tensor, stack: Stack, lines: kernels.ExpertAssignments, out: torch.Tensor, *, by_token: bool
) -> None:
    if isinstance(stack, DenseStack):
        kernels.multiply(x, stack.weight, lines, out, by_token=by_token)
    elif isinstance(stack, QuantizedStack):
        matrix = stack.matrix
        if not isinstance(matrix, QuantizedMatrix):
            raise EngineError(f"experts in {matrix.layout} have no products on a GPU")
        planes = BlockPlanes(matrix.layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small)
        multiply_blocks(x, planes, lines, out, by_token=by_token)
    else:
        raise EngineError(f"a {type(stack).__name__} has no products on a GPU")
