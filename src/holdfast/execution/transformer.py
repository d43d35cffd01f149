"""One decoder, built from any ModelSpec: pre-norm attention and a gated MLP on a residual stream.

Takes a batch as an argument and keeps no state of requests; its buffers are allocated once, for the limits.
"""

from __future__ import annotations

import torch

from holdfast.execution.batch import StepBatch
from holdfast.execution.kv_store import KVStore
from holdfast.execution.linear import DenseLinear
from holdfast.execution.ops import AttentionBackend, AttentionShape, Heads, Ops, StepBuffers
from holdfast.execution.rope import Rotary
from holdfast.execution.weights import LayerWeights, Weights
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.planner.footprint import MLP_TILE

REHEARSED_ROWS = 16
"""More of them copy no more of a matrix."""


class Transformer:
    def __init__(
        self, spec: ModelSpec, weights: Weights, layout: KVLayout, ops: Ops, max_tokens: int, device: torch.device
    ) -> None:
        self.spec, self.weights, self.ops = spec, weights, ops
        self._places = {
            layer: (group.index, place) for group in layout.groups for place, layer in enumerate(group.layers)
        }
        self._rotary = Rotary(spec.rope, device, weights.rope_freqs)
        shape = AttentionShape(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            block_tokens=layout.block_tokens,
            places=layout.layers_per_page,
            dtype=weights.dtype,
        )
        self.attention: AttentionBackend = ops.make_attention(shape, device)
        self._fused = None if ops.fuse is None else ops.fuse(weights.layers, shape, spec.norm_eps, spec.activation)
        self._query_width, self._kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=weights.dtype, device=device)

        self._stream = buffer(max_tokens, spec.hidden_size)
        self._normed = buffer(max_tokens, spec.hidden_size)
        self._qkv = buffer(max_tokens, self._query_width + 2 * self._kv_width)
        self._attended = buffer(max_tokens, self._query_width)
        tile = min(max_tokens, MLP_TILE)
        self._gate_up = buffer(tile, 2 * spec.intermediate_size)
        self._inner = buffer(tile, spec.intermediate_size)

    def forward(self, batch: StepBatch, kv: KVStore, layers: int | None = None) -> torch.Tensor:
        """Normed hidden states [sampling rows, hidden] of the batch's sampling rows; writes KV pages.

        `layers`: only the first so many (a rehearsal needs the memory of one layer, not the time of all).
        """
        step = self._step(batch)
        self.weights.embed.select(batch.tokens, step.stream)
        if self._fused is not None:
            self._fused.begin(step, kv)
        # A prompt's chunk: of the last layer, only sampling rows need more than their keys and values.
        cut = layers is None and not len(batch.scored_tokens) and len(batch.sampling_tokens) < batch.token_count
        for index, layer in enumerate(self.weights.layers[:-1] if cut else self.weights.layers[:layers]):
            group, place = self._places[index]
            if self._fused is not None:
                self._fused.run(index, place, batch.token_rows[group], batch.attention_plans[group])
            else:
                self._attend(layer, step, batch, kv, group, place)
                layer.o.add(step.attended, step.stream)
                self._feed_forward(layer, step.stream, step)
        sampling = step.stream.index_select(0, batch.sampling_tokens)
        if cut:
            self._finish(self.weights.layers[-1], sampling, step, batch, kv)
        return self._final(sampling)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed hidden states of these tokens of the last step, one that scores and was therefore computed whole."""
        return self._final(self._stream.index_select(0, tokens))

    def _final(self, stream: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(stream)
        self.ops.rms_norm(stream, self.weights.final_norm, self.spec.norm_eps, normed)
        return normed

    def multiply_largest(self, tokens: int, sampling_rows: int) -> None:
        """One product with the head and one with the largest dense matrix of a layer, over as many rows as they will
        see: torch may copy such a matrix whole, and holds on to the copy."""
        layer = self.weights.layers[0]
        dense = [part for part in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(part, DenseLinear)]
        largest = [(max(dense, key=lambda part: part.nbytes), tokens)] if dense else []
        if isinstance(self.weights.head, DenseLinear):
            largest.append((self.weights.head, sampling_rows))
        for linear, rows in largest:
            ones = torch.ones((min(rows, REHEARSED_ROWS), linear.columns), dtype=linear.weight.dtype)
            linear.write(ones, ones.new_empty((len(ones), linear.rows)))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.weights.head.write(hidden, out)

    def _step(self, batch: StepBatch) -> StepBuffers:
        spec, count = self.spec, batch.token_count
        qkv, attended = self._qkv[:count], self._attended[:count]
        heads = qkv.view(count, -1, spec.head_dim)
        rotated = spec.heads + spec.kv_heads
        cos, sin = self._rotary.angles(batch.positions)
        return StepBuffers(
            stream=self._stream[:count],
            normed=self._normed[:count],
            qkv=qkv,
            heads=Heads(
                rotated=heads[:, :rotated],
                query=heads[:, : spec.heads],
                key=heads[:, spec.heads : rotated],
                value=heads[:, rotated:],
                key_rows=qkv[:, self._query_width : self._query_width + self._kv_width],
                value_rows=qkv[:, self._query_width + self._kv_width :],
            ),
            attended=attended,
            attended_heads=attended.view(count, spec.heads, spec.head_dim),
            gate_up=self._gate_up[:count],
            inner=self._inner[:count],
            cos=cos,
            sin=sin,
        )

    def _attend(
        self, layer: LayerWeights, step: StepBuffers, batch: StepBatch, kv: KVStore, group: int, place: int
    ) -> None:
        self.ops.rms_norm(step.stream, layer.attn_norm, self.spec.norm_eps, step.normed)
        layer.qkv.write(step.normed, step.qkv)
        heads = step.heads
        self.ops.rotate_and_store(heads, step.cos, step.sin, kv, place, batch.token_rows[group])
        if len(batch.sampling_tokens) or len(batch.scored_tokens) or layer is not self.weights.layers[-1]:
            plan = batch.attention_plans[group]
            self.attention.run(heads.query, heads.key, heads.value, kv, place, plan, step.attended_heads)

    def _finish(
        self, layer: LayerWeights, sampling: torch.Tensor, step: StepBuffers, batch: StepBatch, kv: KVStore
    ) -> None:
        """The last layer: all tokens leave their keys and values, the rest is added to the sampling rows alone."""
        self._attend(layer, step, batch, kv, *self._places[len(self.weights.layers) - 1])
        if len(sampling):
            layer.o.add(step.attended.index_select(0, batch.sampling_tokens), sampling)
            self._feed_forward(layer, sampling, step)

    def _feed_forward(self, layer: LayerWeights, stream: torch.Tensor, step: StepBuffers) -> None:
        for part in torch.split(stream, MLP_TILE):
            normed, gate_up, inner = (buffer[: len(part)] for buffer in (step.normed, step.gate_up, step.inner))
            self.ops.rms_norm(part, layer.mlp_norm, self.spec.norm_eps, normed)
            layer.gate_up.write(normed, gate_up)
            self.ops.gate(gate_up, self.spec.activation, inner)
            layer.down.add(inner, part)
