"""The decoder on a GPU: the same layers as `transformer`, in fused kernels, over buffers that never move.

Few rows read each matrix once at full bandwidth (kernels of our own); many rows go to cuBLAS, padded with rows that
nobody reads (see `ladder`). Takes where its rows lie as an argument, and may be captured in a graph when all rows are
single tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.batch_sizes import padded, padded_sizes
from holdfast.execution.gpu.cuda.module import kernel_decision
from holdfast.execution.gpu.layers.attention import DecodeRows, GpuAttention, PrefillRows
from holdfast.execution.gpu.layers.host_mlp import HostedGpuMlp
from holdfast.execution.gpu.layers.linear import GpuLinear, Scratch, arrange, gpu_linear
from holdfast.execution.gpu.layers.lora import GpuAdapters
from holdfast.execution.gpu.layers.mlp import GpuMlp, MlpBuffers, gating_decisions, make_mlps
from holdfast.execution.gpu.layers.prefill_kernel import expands_whole
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.kv_scales import KVScales
from holdfast.execution.layers.rope import rotaries
from holdfast.execution.parallel.gpu.share import GpuRankShare
from holdfast.execution.parallel.gpu.stage import GpuStage
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.weights.decoder_weights import LayerWeights, Norm, Weights
from holdfast.footprint.cpu import sums_apart
from holdfast.footprint.experts import mlp_width
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision


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
    weights: LayerWeights
    qkv: GpuLinear
    o: GpuLinear
    mlp: GpuMlp

    @property
    def kind(self) -> tuple[object, ...]:
        return self.qkv.kind, self.o.kind, self.mlp.kind


def arrange_layer(layer: LayerWeights, dtype: torch.dtype, device: torch.device) -> None:
    """Of one that leaves the GPU when it is loaded: whatever products change of its bytes is changed now."""
    for linear in (layer.qkv, layer.o, *layer.mlp.linears):
        arrange(linear, dtype, device)


class GpuDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: KVLayout,
        limits: RunnerLimits,
        slots: DeviceSlots,
        device: torch.device,
        adapters: GpuAdapters | None = None,
        beat: Callable[[], None] | None = None,
        share: GpuRankShare | None = None,
        stage: GpuStage | None = None,
    ) -> None:
        """`beat`: called while the host waits for a layer that comes from a disk. `share`: of a model that several
        ranks compute; spec, weights and layout are this rank's. `stage`: of one whose layers are on several in turn."""
        self.spec, self._slots, self._beat, self._share, self._stage = spec, slots, beat, share, stage
        self._places = {
            layer: (group.index, place) for group in layout.groups for place, layer in enumerate(group.layers)
        }
        self.kv_scales = KVScales.ones(len(spec.layers))
        """How pages hold keys and values: of float8 pages alone anything but as they are. Captured with graphs."""
        tokens = limits.max_num_batched_tokens
        self._rotaries, self._rotary_of = rotaries(spec, device, weights, limits.max_model_len)
        self._most_tokens, self._most_sampling = tokens, limits.max_num_seqs
        self._query, self._kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        # As the weights' own type has it: models were trained with the rounded number.
        self._embedding_scale = float(torch.tensor(spec.decoder.embedding_scale, dtype=weights.dtype))

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=weights.dtype, device=device)

        self._stream = buffer(tokens, spec.hidden_size)
        self._normed = buffer(tokens, spec.hidden_size)
        self._qkv = buffer(tokens, self._query + 2 * self._kv)
        self._attended = buffer(tokens, self._query)
        inner = MlpBuffers(buffer(tokens, 2 * mlp_width(spec)), buffer(tokens, mlp_width(spec)))
        self._branch = buffer(tokens, spec.hidden_size) if sums_apart(spec) or share is not None else None
        self._angles = [
            torch.empty((tokens, 2 * len(rotary.frequencies)), dtype=torch.float32, device=device)
            for rotary in self._rotaries
        ]
        self._sampling = buffer(limits.max_num_seqs, spec.hidden_size)
        self._sampling_normed = buffer(limits.max_num_seqs, spec.hidden_size)
        # Nobody needs these while attention runs.
        spare = max(inner.gate_up, self._normed, key=torch.Tensor.numel)
        self.attention = GpuAttention(spec, layout, limits, slots, device, spare)
        expanded_to = inner.gate_up if expands_whole(device) else None
        asked = (None, None) if share is None else (share.largest_of_parts, share.whole_of_rows)
        scratch = Scratch(weights.dtype, device, tokens, expanded_to, spec.activation, *asked)
        self._embed, self._head = gpu_linear(weights.embed, scratch), gpu_linear(weights.head, scratch)
        self._scratch = scratch
        self._final_norm = weights.final_norm
        self.classifier = weights.classifier

        def beside(layer: int, product: str, base: GpuLinear) -> GpuLinear:
            return base if adapters is None else adapters.beside(layer, product, base)

        self.streamed = weights.slots if isinstance(weights.slots, DeviceLayers) else None
        """Layers that do not stay on the GPU."""
        self.experts = weights.experts
        """Of layers whose experts do not all stay on the GPU."""
        self.host_mlps = weights.host_mlps
        """Of streamed layers whose MLPs the host computes in steps of few tokens."""
        self._layers = [
            _Layer(
                layer,
                beside(index, "qkv", gpu_linear(layer.qkv, scratch)),
                beside(index, "o", gpu_linear(layer.o, scratch)),
                mlp,
            )
            for index, (layer, mlp) in enumerate(
                zip(weights.layers, make_mlps(spec, weights, inner, scratch, beside), strict=True)
            )
        ]
        normed = [layer.mlp for layer in self._layers if self._norms_in_mlp(layer.weights.mlp_norm)]
        self.decisions = [self.attention.decision, *gating_decisions(normed)]
        """Which kernels prompts have."""

    def forward(self, rows: DeviceRows, pages: torch.Tensor, layers: int | None = None) -> torch.Tensor:
        """The residual stream after all layers, [tokens, hidden] and rows of no meaning; writes KV pages."""
        with self.step(len(rows.slots)) if layers is None else nullcontext():
            return self._forward(rows, pages, layers)

    def step(self, count: int) -> AbstractContextManager[None]:
        """Around whatever launches or captures a step of so many tokens: a host that computes some experts, or MLPs,
        does it meanwhile."""
        beside = self.experts or self.host_mlps
        return nullcontext() if beside is None else beside.step(padded(count, self._most_tokens))

    def _forward(self, rows: DeviceRows, pages: torch.Tensor, layers: int | None) -> torch.Tensor:
        count = len(rows.slots)
        stream = self._stream[: padded(count, self._most_tokens)]
        for rotary, angles in zip(self._rotaries, self._angles, strict=True):
            if len(rotary.frequencies):
                kernels.fill_cos_sin(rows.positions, rotary.frequencies, rotary.magnitude, angles[:count])
        if self._stage is None or self._stage.is_first:
            self._begin_stream(rows, stream[:count])
        else:
            self._stage.take(stream[:count])
        if self.experts is not None:
            self.experts.slots = rows.slots
        heads_apart = self.spec.decoder.query_key_norm == "head"
        streamed = self.streamed
        for index, layer in enumerate(self._layers[:layers]):
            if streamed is not None:
                streamed.begin(index, self._beat)
            qkv, attended = self._project(layer, stream)
            (group, place), (key_scale, value_scale) = self._places[index], self.kv_scales.of(index)
            kernels.rotate_and_store(
                qkv[:count],
                self._angles[self._rotary_of[index]][:count],
                rows.positions,
                rows.slots,
                pages,
                self._slots.tables[group],
                place=place,
                query_norm=layer.weights.query_norm if heads_apart else None,
                key_norm=layer.weights.key_norm if heads_apart else None,
                epsilon=self.spec.norm_eps,
                key_scale=key_scale,
                value_scale=value_scale,
                center=self.kv_scales.center(index),
            )
            scales = key_scale, value_scale
            self.attention.run(qkv[:count], pages, group, place, rows.decode, rows.prefill, attended[:count], scales)
            self._add_attended(layer, attended, stream)
            if streamed is not None:
                streamed.halfway(index, self._beat)
            self._feed(layer, stream)
            if streamed is not None:
                streamed.end(index)
        if self._stage is not None and not self._stage.is_last:
            self._stage.hand_on(stream[:count])
        return stream

    def _begin_stream(self, rows: DeviceRows, stream: torch.Tensor) -> None:
        of_file = None if self.streamed is None else self.streamed.embedding_rows
        if self._share is not None:
            self._share.embed(self._embed, self._slots.tokens, rows.slots, rows.positions, stream)
        elif of_file is None:
            self._embed.embed(self._slots.tokens, rows.slots, rows.positions, stream)
        else:
            of_file.embed(self._slots.tokens, rows.slots, rows.positions, stream, self._beat)
        if self._embedding_scale != 1.0:
            stream.mul_(self._embedding_scale)

    @property
    def product_decisions(self) -> list[Decision]:
        quantized, rounded = self._scratch.quantized, self._scratch.rounded
        rows = [*quantized.rows.found, *rounded.rows.found]
        found = [kernel_decision("row_products", rows)] if rows else []
        return [*quantized.decisions, *rounded.decisions, *found]

    def frequencies(self) -> list[torch.Tensor]:
        """Radians that a position turns each pair of dimensions by, of every layer."""
        return [self._rotaries[kind].frequencies for kind in self._rotary_of]

    def _norm(self, norm: Norm | None, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out`, or x itself where the decoder has no norm here."""
        if norm is None:
            return x
        if self.spec.decoder.norm == "layer":
            kernels.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps, out)
        else:
            kernels.rms_norm(x, norm.weight, self.spec.norm_eps, out)
        return out

    def _write_normed(
        self, linear: GpuLinear, norm: Norm | None, x: torch.Tensor, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out = norm(x)·Wᵀ, in one kernel where there is one."""
        if norm is None or self.spec.decoder.norm == "layer":
            linear.write(self._norm(norm, x, normed), out)
        else:
            linear.write_normed(x, norm.weight, self.spec.norm_eps, normed, out)

    def _project(self, layer: _Layer, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values, and where attention shall put what it gathers."""
        count, weights = len(stream), layer.weights
        qkv = self._qkv[:count]
        self._write_normed(layer.qkv, weights.attn_norm, stream, self._normed[:count], qkv)
        whole = self.spec.decoder.query_key_norm == "whole"
        if whole and weights.query_norm is not None and weights.key_norm is not None:
            query, key = qkv[:, : self._query], qkv[:, self._query : self._query + self._kv]
            if self._share is not None:
                both = weights.query_norm, weights.key_norm
                self._share.norm_heads_together(query, key, both, self.spec.norm_eps)
            else:  # Each row is read whole before it is written.
                kernels.rms_norm(query, weights.query_norm, self.spec.norm_eps, query)
                kernels.rms_norm(key, weights.key_norm, self.spec.norm_eps, key)
        return qkv, self._attended[:count]

    def _add_attended(self, layer: _Layer, attended: torch.Tensor, stream: torch.Tensor) -> None:
        if self._branch is None:
            layer.o.add(attended, stream)
            return
        branch = self._branch[: len(stream)]
        layer.o.write(attended, branch)
        self._add_branch(layer.weights.post_attn_norm, branch, stream)

    def _norms_in_mlp(self, norm: Norm | None) -> bool:
        """Whether a layer's MLP takes the stream before this norm, and may gate in its first product."""
        return self._branch is None and norm is not None and self.spec.decoder.norm == "rms"

    def _feed(self, layer: _Layer, stream: torch.Tensor) -> None:
        """The second half of a layer."""
        norm, normed = layer.weights.mlp_norm, self._normed[: len(stream)]
        if norm is not None and self._norms_in_mlp(norm):
            layer.mlp.add_normed(stream, norm.weight, self.spec.norm_eps, normed)
            return
        x = self._norm(norm, stream, normed)
        if self._branch is None:
            layer.mlp.run(x, stream, add=True)
            return
        branch = self._branch[: len(stream)]
        layer.mlp.run(x, branch, add=False)
        self._add_branch(layer.weights.post_mlp_norm, branch, stream)

    def _add_branch(self, norm: Norm | None, branch: torch.Tensor, stream: torch.Tensor) -> None:
        decoder = self.spec.decoder
        if self._share is not None and not self._share.alone:
            if norm is None and decoder.residual_scale == 1.0:
                self._share.collectives.add_reduced(branch, stream)
                return
            self._share.collectives.all_reduce(branch)
        if norm is not None and decoder.norm == "layer":
            branch, norm = self._norm(norm, branch, self._normed[: len(branch)]), None
        weight = None if norm is None else norm.weight
        kernels.add_branch(branch, weight, self.spec.norm_eps, decoder.residual_scale, stream)

    def logits(self, stream: torch.Tensor, sampling: torch.Tensor | None, out: torch.Tensor) -> None:
        """Of these tokens of the stream into the first rows of `out`, which has room for all that may sample; or of its
        first tokens where `sampling` is None."""
        if sampling is None:
            self._score(stream[: len(out)], out)
            return
        chosen = self._sampling[: padded(len(sampling), self._most_sampling)]
        torch.index_select(stream, 0, sampling, out=chosen[: len(sampling)])
        self._score(chosen, out[: len(chosen)])

    def states(self, stream: torch.Tensor, sampling: torch.Tensor | None, count: int) -> torch.Tensor:
        """Normed hidden states of the same tokens, in the buffer of the next such call."""
        chosen = self._sampling[:count]
        if sampling is None:
            chosen.copy_(stream[:count])
        else:
            torch.index_select(stream, 0, sampling, out=chosen)
        return self._norm(self._final_norm, chosen, self._sampling_normed[:count])

    def _score(self, chosen: torch.Tensor, out: torch.Tensor) -> None:
        normed, decoder = self._sampling_normed[: len(chosen)], self.spec.decoder
        if self._share is None:
            self._write_normed(self._head, self._final_norm, chosen, normed, out)
        else:
            part = self._share.own_logits(len(chosen))
            self._write_normed(self._head, self._final_norm, chosen, normed, part)
            if not self._share.alone:
                self._share.gather_logits(part, out)
            if not self._share.samples:
                return
        if decoder.logits_scale != 1.0 or decoder.logits_softcap:
            kernels.scale_and_cap(out, decoder.logits_scale, decoder.logits_softcap)

    def load_products(self, logits: torch.Tensor) -> None:
        """Multiplies once in every size that a step may be padded to, so that the code of all products is loaded.
        Layers whose matrices are kept alike have the same products. Each rank by itself: another's may be others."""
        if self._share is None:
            self._load_products(logits)
            return
        self._share.alone = True
        try:
            self._load_products(logits)
        finally:
            self._share.alone = False

    def _load_products(self, logits: torch.Tensor) -> None:
        alike = {layer.kind: layer for layer in self._layers}
        for size in padded_sizes(self._most_tokens):
            stream = self._stream[:size]
            for layer in alike.values():
                _, attended = self._project(layer, stream)
                self._add_attended(layer, attended, stream)
                self._feed(layer, stream)
        if self.host_mlps is not None:
            norm = self._layers[self.host_mlps.candidates[0]].weights.mlp_norm
            weight = norm.weight if self._norms_in_mlp(norm) and norm is not None else None
            HostedGpuMlp.load_kernels(self._stream[:1], weight, self.spec.norm_eps, self._normed[:1])
        last = self._stage is None or self._stage.is_last  # Others have no head.
        for size in padded_sizes(self._most_sampling) if last else ():
            self._score(self._sampling[:size], logits[:size])
