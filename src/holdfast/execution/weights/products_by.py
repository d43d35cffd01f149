"""Which part of a model's weights torch itself multiplies, and which the compiled kernels do. Multiplies nothing."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.execution.layers.experts import DenseStack, ExpertWeights, QuantizedStack, Stack
from holdfast.execution.layers.linear import (
    DenseLinear,
    DividedLinear,
    GatheredLinear,
    Linear,
    PackedLinear,
    QuantizedLinear,
    StackedLinear,
)
from holdfast.execution.weights.decoder_weights import MlpWeights, Weights

_BY_TORCH = (DenseLinear, PackedLinear, QuantizedLinear, DenseStack, QuantizedStack)


def torch_share(weights: Weights) -> float:
    """Of the bytes that products read: 0 where all are compiled, 1 where none is."""
    parts = [part for linear in _multiplied(weights) for part in _parts(linear)]
    total = sum(part.nbytes for part in parts)
    return sum(part.nbytes for part in parts if isinstance(part, _BY_TORCH)) / max(1, total)


def _multiplied(weights: Weights) -> Iterator[Linear | Stack]:
    yield weights.head
    for layer in weights.layers:
        yield from (layer.qkv, layer.o, *_of_mlp(layer.mlp))


def _of_mlp(mlp: MlpWeights) -> Iterator[Linear | Stack]:
    yield from mlp.linears
    if isinstance(mlp, ExpertWeights):
        yield from (*mlp.gate_up, mlp.down)


def _parts(linear: Linear | Stack) -> tuple[Linear | Stack, ...]:
    if isinstance(linear, DividedLinear | GatheredLinear):
        return (linear.base,)
    return linear.parts if isinstance(linear, StackedLinear) else (linear,)
