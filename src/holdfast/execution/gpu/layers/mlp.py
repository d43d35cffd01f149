"""The MLP of a layer on a GPU: one object a layer, over buffers that all layers share and that never move.

A further kind is a class with these methods, weights of a type of its own, and a line in `make_mlps`. Everything here
may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.layers.experts import ExpertGpuMaker, LayerExperts
from holdfast.execution.gpu.layers.host_mlp import HostedGpuMlp
from holdfast.execution.gpu.layers.linear import DenseGpuLinear, GpuLinear, Scratch, gpu_linear
from holdfast.execution.gpu.layers.quantized_linear import QuantizedGpuLinear
from holdfast.execution.gpu.layers.rounded_linear import RoundedGpuLinear
from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.weights.decoder_weights import GatedWeights, MlpWeights, PlainWeights, Weights
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision


class GpuMlp(Protocol):
    @property
    def kind(self) -> tuple[object, ...]:
        """How its matrices are kept: MLPs of a kind run the same kernels."""

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        """stream += MLP(rms_norm(stream)); may use `normed` (like stream)."""

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """out = (or +=) MLP(x), both [tokens, hidden] and apart."""


@dataclass(frozen=True, slots=True)
class MlpBuffers:
    """For as many tokens as a step may have."""

    gate_up: torch.Tensor
    inner: torch.Tensor


Beside = Callable[[str, GpuLinear], GpuLinear]
"""(product, base): the base product, with what LoRA adapters add to it where there are any."""


class GatedGpuMlp:
    def __init__(
        self, weights: GatedWeights, activation: Activation, buffers: MlpBuffers, scratch: Scratch, beside: Beside
    ) -> None:
        gate_up = gpu_linear(weights.gate_up, scratch)
        self._gate_up = beside("gate_up", gate_up)
        self._down = beside("down", gpu_linear(weights.down, scratch))
        self._activation, self._buffers = activation, buffers
        self.gating: Decision | None = None
        """Which kernel multiplies and gates many rows in `add_normed`, where there is a choice."""
        if isinstance(gate_up, DenseGpuLinear | QuantizedGpuLinear) and not isinstance(self._down, RoundedGpuLinear):
            self.gating = gate_up.gating

    @property
    def kind(self) -> tuple[object, ...]:
        return self._gate_up.kind, self._down.kind

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        gate_up, inner = self._buffers.gate_up[: len(stream)], self._buffers.inner[: len(stream)]
        gates_row = isinstance(self._gate_up, RoundedGpuLinear) and self._gate_up.gates_row(stream, norm)
        if isinstance(self._down, RoundedGpuLinear) and not gates_row:
            # It rounds its inputs anyway: gated in the same kernel, they are not written and read once more.
            self._gate_up.write_normed(stream, norm, epsilon, normed, gate_up)
            self._down.add_gated(gate_up, self._activation, stream)
            return
        self._gate_up.gated(stream, norm, epsilon, self._activation, normed, gate_up, inner)
        self._down.add(inner, stream)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        gate_up, inner = self._buffers.gate_up[: len(x)], self._buffers.inner[: len(x)]
        self._gate_up.write(x, gate_up)
        kernels.gate(gate_up, self._activation, inner)
        (self._down.add if add else self._down.write)(inner, out)


class PlainGpuMlp:
    def __init__(
        self, weights: PlainWeights, activation: Activation, buffers: MlpBuffers, scratch: Scratch, beside: Beside
    ) -> None:
        self._up = beside("up", gpu_linear(weights.up, scratch))
        self._down = beside("down", gpu_linear(weights.down, scratch))
        self._activation, self._buffers = activation, buffers

    @property
    def kind(self) -> tuple[object, ...]:
        return self._up.kind, self._down.kind

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        inner = self._buffers.inner[: len(stream)]
        self._up.write_normed(stream, norm, epsilon, normed, inner)
        kernels.activate_rows(inner, self._activation)
        self._down.add(inner, stream)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        inner = self._buffers.inner[: len(x)]
        self._up.write(x, inner)
        kernels.activate_rows(inner, self._activation)
        (self._down.add if add else self._down.write)(inner, out)


def gating_decisions(mlps: Iterable[GpuMlp]) -> list[Decision]:
    """Which kernel multiplies and gates many rows, where any matrix lets it choose: the first that does says it.
    `mlps`: those that are asked to `add_normed`."""
    return [mlp.gating for mlp in mlps if isinstance(mlp, GatedGpuMlp) and mlp.gating is not None][:1]


def make_mlps(
    spec: ModelSpec,
    weights: Weights,
    buffers: MlpBuffers,
    scratch: Scratch,
    beside: Callable[[int, str, GpuLinear], GpuLinear],
) -> tuple[GpuMlp, ...]:
    """One a layer. `beside`: (layer, product, base)."""

    experts = ExpertGpuMaker(spec.hidden_size, spec.activation, buffers.inner, scratch)

    def make(layer: int, part: MlpWeights) -> GpuMlp:
        adapted = partial(beside, layer)
        if isinstance(part, ExpertWeights):
            placed = weights.experts
            return experts.make(part, None if placed is None or layer not in placed else LayerExperts(placed, layer))
        if isinstance(part, GatedWeights):
            return GatedGpuMlp(part, spec.activation, buffers, scratch, adapted)
        if isinstance(part, PlainWeights):
            return PlainGpuMlp(part, spec.activation, buffers, scratch, adapted)
        raise EngineError(f"an MLP of {type(part).__name__} has no products on a GPU")

    made = [make(index, layer.mlp) for index, layer in enumerate(weights.layers)]
    if (hosts := weights.host_mlps) is not None:
        for layer in hosts.candidates:
            made[layer] = HostedGpuMlp(made[layer], hosts, layer)
    return tuple(made)
