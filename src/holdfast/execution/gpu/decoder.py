"""The decoder on a GPU: the same layers as `transformer`, in fused kernels, over buffers that never move.

Few rows read each matrix once at full bandwidth (kernels of our own); many rows go to cuBLAS, padded with rows that
nobody reads (see `ladder`). Takes where its rows lie as an argument, and may be captured in a graph when all rows are
single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.attention import DecodeRows, GpuAttention, PrefillRows
from holdfast.execution.gpu.ladder import padded, padded_sizes
from holdfast.execution.gpu.linear import GpuLinear, Scratch, gpu_linear
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.rope import Rotary
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.weights import LayerWeights, Weights
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """One step's tokens on the device. Single tokens come first, in the order of their rows."""

    slots: torch.Tensor
    """Of each token; -1: padding."""
    positions: torch.Tensor
    decode: DecodeRows | None
    """The rows of one token."""
    prefill: PrefillRows | None
    """The others."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: torch.Tensor
    qkv: GpuLinear
    o: GpuLinear
    mlp_norm: torch.Tensor
    gate_up: GpuLinear
    down: GpuLinear

    @property
    def linears(self) -> tuple[GpuLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def _layer_of(layer: LayerWeights, scratch: Scratch) -> _Layer:
    return _Layer(
        layer.attn_norm, gpu_linear(layer.qkv, scratch), gpu_linear(layer.o, scratch), layer.mlp_norm,
        gpu_linear(layer.gate_up, scratch), gpu_linear(layer.down, scratch),
    )  # fmt: skip


class GpuDecoder:
    def __init__(
        self, spec: ModelSpec, weights: Weights, layout: KVLayout, limits: RunnerLimits, slots: DeviceSlots,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self._slots = spec, slots
        self._places = {
            layer: (group.index, place) for group in layout.groups for place, layer in enumerate(group.layers)
        }
        self._windows = [group.window for group in layout.groups]
        rotary = Rotary(spec.rope, device, weights.rope_freqs)
        self._frequencies, self._magnitude = rotary.frequencies, rotary.magnitude
        tokens = limits.max_num_batched_tokens
        self._most_tokens, self._most_sampling = tokens, limits.max_num_seqs
        self._query, self._kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=weights.dtype, device=device)

        self._stream = buffer(tokens, spec.hidden_size)
        self._normed = buffer(tokens, spec.hidden_size)
        self._qkv = buffer(tokens, self._query + 2 * self._kv)
        self._attended = buffer(tokens, self._query)
        self._gate_up = buffer(tokens, 2 * spec.intermediate_size)
        self._inner = buffer(tokens, spec.intermediate_size)
        self._angles = torch.empty((tokens, spec.rope.dim), dtype=torch.float32, device=device)
        self._sampling = buffer(limits.max_num_seqs, spec.hidden_size)
        self._sampling_normed = buffer(limits.max_num_seqs, spec.hidden_size)
        self.attention = GpuAttention(spec, layout, limits, slots, device)
        scratch = Scratch(weights.dtype, device)
        self._embed, self._head = gpu_linear(weights.embed, scratch), gpu_linear(weights.head, scratch)
        self._final_norm = weights.final_norm
        self._layers = [_layer_of(layer, scratch) for layer in weights.layers]

    def forward(self, rows: DeviceRows, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        """The residual stream after all layers, [tokens, hidden] and rows of no meaning; writes KV pages."""
        count = len(rows.slots)
        stream = self._stream[: padded(count, self._most_tokens)]
        kernels.fill_cos_sin(rows.positions, self._frequencies, self._magnitude, self._angles[:count])
        self._embed.embed(self._slots.tokens, rows.slots, rows.positions, stream[:count])
        for index, layer in enumerate(self._layers[:layers]):
            qkv, attended = self._project(layer, stream)
            group, place = self._places[index]
            kernels.rotate_and_store(
                qkv[:count], self._angles[:count], rows.positions, rows.slots, pages, self._slots.tables[group],
                place=place,
            )  # fmt: skip
            self.attention.run(qkv[:count], pages, group, place, rows.decode, rows.prefill, attended[:count])
            self._feed(layer, attended, stream)
        return stream

    def _project(self, layer: _Layer, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values, and where attention shall put what it gathers."""
        count = len(stream)
        normed, qkv = self._normed[:count], self._qkv[:count]
        layer.qkv.write_normed(stream, layer.attn_norm, self.spec.norm_eps, normed, qkv)
        return qkv, self._attended[:count]

    def _feed(self, layer: _Layer, attended: torch.Tensor, stream: torch.Tensor) -> None:
        """From attention to the end of the layer."""
        spec, count = self.spec, len(stream)
        layer.o.add(attended, stream)
        normed, gate_up, inner = self._normed[:count], self._gate_up[:count], self._inner[:count]
        layer.gate_up.gated(stream, layer.mlp_norm, spec.norm_eps, spec.activation, normed, gate_up, inner)
        layer.down.add(inner, stream)

    def logits(self, stream: torch.Tensor, sampling: torch.Tensor | None, out: torch.Tensor) -> None:
        """Of these tokens of the stream into the first rows of `out`, which has room for all that may sample; or of its
        first tokens where `sampling` is None."""
        if sampling is None:
            self._score(stream[: len(out)], out)
            return
        chosen = self._sampling[: padded(len(sampling), self._most_sampling)]
        torch.index_select(stream, 0, sampling, out=chosen[: len(sampling)])
        self._score(chosen, out[: len(chosen)])

    def _score(self, chosen: torch.Tensor, out: torch.Tensor) -> None:
        normed = self._sampling_normed[: len(chosen)]
        self._head.write_normed(chosen, self._final_norm, self.spec.norm_eps, normed, out)

    def load_products(self, logits: torch.Tensor) -> None:
        """Multiplies once in every size that a step may be padded to, so that the code of all products is loaded.
        Layers whose matrices are kept alike have the same products."""
        alike = {tuple(linear.kind for linear in layer.linears): layer for layer in self._layers}
        for size in padded_sizes(self._most_tokens):
            stream = self._stream[:size]
            for layer in alike.values():
                _, attended = self._project(layer, stream)
                self._feed(layer, attended, stream)
        for size in padded_sizes(self._most_sampling):
            self._score(self._sampling[:size], logits[:size])
