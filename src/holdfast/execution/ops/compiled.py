"""The compiled CPU forms, for float32: attention straight from pages, one pass for each small operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from holdfast.execution import native
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.layers.linear import Linear, StackedLinear
from holdfast.execution.ops import cpu, reference
from holdfast.execution.ops.interface import (
    Activation,
    AttentionShape,
    Heads,
    Integers,
    LayerScales,
    Ops,
    StepBuffers,
    StepRows,
)
from holdfast.execution.weights.decoder_weights import GatedWeights, LayerWeights
from holdfast.kvcache.groups import KVGroup


class CompiledAttention:
    name = "compiled"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape

    def plan(self, rows: StepRows, group: KVGroup, tables: Integers) -> native.AttentionRows:
        alone = rows.single == len(rows.starts)  # Row i has token i and no other.
        return native.AttentionRows(
            tables.astype(numpy.int32),
            (rows.starts + rows.counts).astype(numpy.int32),
            block_tokens=self._shape.block_tokens,
            counts=None if alone else rows.counts.astype(numpy.int32),
            firsts=None if alone else rows.firsts.astype(numpy.int32),
            window=group.window,
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: KVPool,
        place: int,
        plan: native.AttentionRows,
        out: torch.Tensor,
    ) -> None:
        pool, shape = native.PoolPlace(kv.pages, place), self._shape
        native.paged_attention(query, pool, plan, shape.scale, out, softcap=shape.softcap)


def rotate_and_store(
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KVPool,
    place: int,
    rows: torch.Tensor,
    center: torch.Tensor | None = None,
) -> None:
    key_rows, value_rows = kv.token_rows_at(place)
    native.rotate_and_store(heads.query, heads.key, heads.value, cos, sin, rows, key_rows, value_rows, center=center)


def norm_in_place(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """By the same code for any number of tokens: what a token becomes does not hang on its company."""
    if x.dim() == 2:
        native.rms_norm(x, weight, epsilon, x)
        return
    # A matrix of rows is all heads of a token, or one head of all tokens: whichever takes fewer calls.
    for rows in x if x.shape[0] <= x.shape[1] else x.unbind(1):
        native.rms_norm(rows, weight, epsilon, rows)


def gate(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    if activation == "gelu":
        cpu.gate(gate_up, activation, out)
    else:
        native.activate_and_multiply(gate_up, out, activation)


class CompiledLayers:
    """Whole layers, as many in one call as the caller wants: a step of few tokens does not wait for Python between
    operations. `sums`, `branch`: of layers that several ranks share."""

    def __init__(
        self,
        layers: list[native.DecoderLayer],
        sums: native.CompiledSums | None = None,
        branch: torch.Tensor | None = None,
    ) -> None:
        self._layers, self._sums, self._branch = layers, sums, branch
        self._kv: KVPool | None = None
        self._scales: LayerScales | None = None
        self._stack: native.DecoderStack | None = None
        self._step: native.DecoderStep | None = None
        self.layer_bytes = max(layer.nbytes for layer in layers)

    def begin(self, step: StepBuffers, kv: KVPool, places: Sequence[int], scales: LayerScales) -> None:
        if kv is not self._kv or scales is not self._scales:
            self._kv, self._scales = kv, scales
            self._stack = native.DecoderStack(
                [
                    native.PlacedLayer(layer, native.PoolPlace(kv.pages, place), scales.of(index), scales.center(index))
                    for index, (layer, place) in enumerate(zip(self._layers, places, strict=True))
                ],
                self._sums,
            )
        self._step = native.DecoderStep(
            stream=step.stream,
            normed=step.normed,
            qkv=step.qkv,
            attended=step.attended,
            gate_up=step.gate_up,
            inner=step.inner,
            cos=step.angles[0][0],
            sin=step.angles[0][1],
            branch=self._branch,
        )

    def run(self, first: int, last: int, token_rows: torch.Tensor, plan: native.AttentionRows) -> None:
        assert self._step is not None, "call begin first"
        assert self._stack is not None, "call begin first"
        self._stack.run(self._step, token_rows, plan, first, last)


def fuse(
    layers: Sequence[LayerWeights],
    shape: AttentionShape,
    epsilon: float,
    activation: Activation,
    sums: native.CompiledSums | None = None,
    branch: torch.Tensor | None = None,
) -> CompiledLayers | None:
    """None when some matrix is not compiled, or the activation is not."""
    if activation == "gelu":
        return None
    fused = [_fused(layer, shape, epsilon, activation) for layer in layers]
    found = [layer for layer in fused if layer is not None]
    return CompiledLayers(found, sums, branch) if len(found) == len(fused) else None


def _fused(
    layer: LayerWeights, shape: AttentionShape, epsilon: float, activation: Activation
) -> native.DecoderLayer | None:
    if layer.attn_norm is None or layer.mlp_norm is None or not isinstance(layer.mlp, GatedWeights):
        return None
    parts = [_block_matrices(linear) for linear in (layer.qkv, layer.o, *layer.mlp.linears)]
    if any(part is None for part in parts):
        return None
    qkv, o, gate_up, down = (part for part in parts if part is not None)
    return native.DecoderLayer(
        attention_norm=layer.attn_norm.weight,
        qkv=qkv,
        o=o[0],
        mlp_norm=layer.mlp_norm.weight,
        gate_up=gate_up,
        down=down[0],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dim=shape.head_dim,
        epsilon=epsilon,
        scale=shape.scale,
        activation=activation,
    )


def _block_matrices(linear: Linear) -> list[native.CompiledMatrix] | None:
    parts = linear.parts if isinstance(linear, StackedLinear) else (linear,)
    found = [part for part in parts if isinstance(part, native.CompiledMatrix)]
    return found if len(found) == len(parts) else None


OPS = Ops(
    name="compiled",
    rms_norm=native.rms_norm,
    layer_norm=reference.layer_norm,
    norm_in_place=norm_in_place,
    rotate_and_store=rotate_and_store,
    gate=gate,
    activate=reference.activate_in_place,
    make_attention=CompiledAttention,
    fuse=fuse,
)
