"""A decoder's weights in memory: what is multiplied and normed in each layer, however it is stored. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.execution.layers.linear import DenseLinear, Linear, QuantizedLinear
from holdfast.execution.native import BlockMatrix
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk.layer_slots import LayerSlots
from holdfast.execution.streaming.host_mlps import HostMlps


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class MlpWeights(Protocol):
    """What `mlp.make_mlps` builds the MLP of a layer from, by its type."""

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GatedWeights:
    gate_up: Linear
    """Gate beside up."""
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class PlainWeights:
    up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.up, self.down

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Norms that a model's decoder has not got are None."""

    attn_norm: Norm | None
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    """[head dim], or [heads · head dim] where a token's heads are normed together."""
    o: Linear
    post_attn_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MlpWeights
    post_mlp_norm: Norm | None

    @property
    def nbytes(self) -> int:
        norms = (self.attn_norm, self.post_attn_norm, self.mlp_norm, self.post_mlp_norm, self.query_norm, self.key_norm)
        return sum(part.nbytes for part in (*norms, self.qkv, self.o, self.mlp) if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    dtype: torch.dtype
    """Of activations, and of every matrix that is not quantized."""
    embed: DenseLinear | QuantizedLinear | BlockMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    """The embedding itself where they are tied."""
    classifier: torch.Tensor | None
    """[labels, hidden] in float32, of a model that classifies."""
    rope_freqs: torch.Tensor | None
    """What a checkpoint divides rotary frequencies by."""
    rope_freqs_long: torch.Tensor | None
    """The same for contexts beyond those the model was first made for, where it has two."""
    layouts: tuple[str, ...]
    """How the matrices lie in memory: number types, and quantized layouts that were kept."""
    slots: LayerSlots | DeviceLayers | None = None
    """Of layers that do not stay in memory, on a GPU in its own."""
    experts: DeviceExperts | None = None
    """Of layers whose experts do not all stay on the GPU."""
    host_mlps: HostMlps | None = None
    """Of streamed layers whose MLPs the host computes in steps of few tokens."""

    def rope_factors(self, context: int, original: int) -> torch.Tensor | None:
        """`context`: the longest that a sequence may get; `original`: what the model was first made for."""
        return self.rope_freqs_long if self.rope_freqs_long is not None and context > original else self.rope_freqs

    @property
    def nbytes(self) -> int:
        """Without what does not stay where it is computed, at the moment."""
        gathered = isinstance(self.slots, DeviceLayers) and self.slots.embedding is not None
        total = (0 if gathered else self.embed.nbytes) + self.final_norm.nbytes
        if self.head is not self.embed:
            total += self.head.nbytes
        if self.classifier is not None:
            total += self.classifier.nbytes
        slots = self.slots or ()
        if isinstance(self.slots, DeviceLayers):
            total += self.slots.resident_bytes
        return total + sum(layer.nbytes for index, layer in enumerate(self.layers) if index not in slots)
