"""What a layer does to each token by itself, between its second norm and the stream: one object a layer.

A further kind is a class with `run`, weights of a type of its own, and a line in `make_mlps`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.layers.experts import ExpertMaker, ExpertWeights
from holdfast.execution.ops import Ops
from holdfast.execution.weights.decoder_weights import GatedWeights, PlainWeights, Weights
from holdfast.models import ModelSpec


class Mlp(Protocol):
    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """out = (or +=) the MLP of x, both [tokens, hidden] and apart; at most as many tokens as buffers were made
        for. x stays as it is."""


class GatedMlp:
    """Works in `gate_up` [tokens, 2·inner] and `inner` [tokens, inner], which all layers share."""

    def __init__(
        self, weights: GatedWeights, spec: ModelSpec, ops: Ops, gate_up: torch.Tensor, inner: torch.Tensor
    ) -> None:
        self._weights, self._activation, self._gate = weights, spec.activation, ops.gate
        self._gate_up, self._inner = gate_up, inner

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        gate_up, inner = self._gate_up[: len(x)], self._inner[: len(x)]
        self._weights.gate_up.write(x, gate_up)
        self._gate(gate_up, self._activation, inner)
        (self._weights.down.add if add else self._weights.down.write)(inner, out)


class PlainMlp:
    """Works in `inner` [tokens, inner], which all layers share."""

    def __init__(self, weights: PlainWeights, spec: ModelSpec, ops: Ops, inner: torch.Tensor) -> None:
        self._weights, self._activation, self._activate = weights, spec.activation, ops.activate
        self._inner = inner

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        inner = self._inner[: len(x)]
        self._weights.up.write(x, inner)
        self._activate(inner, self._activation)
        (self._weights.down.add if add else self._weights.down.write)(inner, out)


def make_mlps(
    spec: ModelSpec, weights: Weights, ops: Ops, gate_up: torch.Tensor, inner: torch.Tensor
) -> tuple[Mlp, ...]:
    """One a layer; `gate_up` and `inner` are the decoder's buffers for as many tokens as an MLP takes at a time."""

    experts = ExpertMaker(spec.hidden_size, spec.activation, ops.gate, len(inner))

    def make(part: object) -> Mlp:
        if isinstance(part, ExpertWeights):
            return experts.make(part)
        if isinstance(part, GatedWeights):
            return GatedMlp(part, spec, ops, gate_up, inner)
        if isinstance(part, PlainWeights):
            return PlainMlp(part, spec, ops, inner)
        raise EngineError(f"an MLP of {type(part).__name__} has no products here")

    return tuple(make(layer.mlp) for layer in weights.layers)
