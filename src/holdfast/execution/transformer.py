"""One decoder, built from any ModelSpec: pre-norm attention and a gated MLP on a residual stream.

Takes a batch as an argument and keeps no state of requests; its buffers are allocated once, for the limits.
"""

from __future__ import annotations

import torch

from holdfast.execution.batch import StepBatch
from holdfast.execution.kv_store import KVStore
from holdfast.execution.ops import AttentionBackend, AttentionShape, Ops
from holdfast.execution.rope import Rotary
from holdfast.execution.weights import LayerWeights, Weights
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec

MLP_TILE = 512
"""Tokens the MLP takes at a time: bounds its buffers, and keeps them in cache."""


class Transformer:
    def __init__(
        self, spec: ModelSpec, weights: Weights, layout: KVLayout, ops: Ops, max_tokens: int, device: torch.device
    ) -> None:
        self.spec, self.weights, self.ops = spec, weights, ops
        self._places = {
            layer: (group.index, place) for group in layout.groups for place, layer in enumerate(group.layers)
        }
        self._rotary = Rotary(spec.rope, device, weights.rope_freqs)
        self.attention: AttentionBackend = ops.make_attention(
            AttentionShape(
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                scale=spec.attention_scale or spec.head_dim**-0.5,
                block_tokens=layout.block_tokens,
                places=layout.layers_per_page,
                dtype=weights.dtype,
            ),
            device,
        )
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

    @property
    def workspace_bytes(self) -> int:
        buffers = (self._stream, self._normed, self._qkv, self._attended, self._gate_up, self._inner)
        return sum(buffer.nbytes for buffer in buffers)

    def forward(self, batch: StepBatch, kv: KVStore, layers: int | None = None) -> torch.Tensor:
        """Normed hidden states [sampling rows, hidden] of the batch's sampling rows; writes KV pages.

        `layers`: only the first so many (a rehearsal needs the memory of one layer, not the time of all).
        """
        stream = self._stream[: batch.token_count]
        self.weights.embed.select(batch.tokens, stream)
        cos, sin = self._rotary.angles(batch.positions)
        for index, layer in enumerate(self.weights.layers[:layers]):
            group, place = self._places[index]
            self._attend(layer, batch, kv, group, place, stream, cos, sin)
            self._feed_forward(layer, stream)
        sampling = stream.index_select(0, batch.sampling_tokens)
        normed = torch.empty_like(sampling)
        self.ops.rms_norm(sampling, self.weights.final_norm, self.spec.norm_eps, normed)
        return normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.weights.head.write(hidden, out)

    def _attend(
        self,
        layer: LayerWeights,
        batch: StepBatch,
        kv: KVStore,
        group: int,
        place: int,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        spec, count = self.spec, batch.token_count
        normed, qkv, attended = self._normed[:count], self._qkv[:count], self._attended[:count]
        self.ops.rms_norm(stream, layer.attn_norm, spec.norm_eps, normed)
        layer.qkv.write(normed, qkv)
        rotated = self._query_width + self._kv_width
        heads = qkv.view(count, -1, spec.head_dim)
        self.ops.rotate(heads[:, : spec.heads + spec.kv_heads], cos, sin)
        self.ops.write_kv(kv, place, batch.token_rows[group], qkv[:, self._query_width : rotated], qkv[:, rotated:])
        self.attention.run(
            heads[:, : spec.heads],
            heads[:, spec.heads : spec.heads + spec.kv_heads],
            heads[:, spec.heads + spec.kv_heads :],
            kv,
            place,
            batch.attention_plans[group],
            attended.view(count, spec.heads, spec.head_dim),
        )
        layer.o.add(attended, stream)

    def _feed_forward(self, layer: LayerWeights, stream: torch.Tensor) -> None:
        for first in range(0, len(stream), MLP_TILE):
            part = stream[first : first + MLP_TILE]
            count = len(part)
            normed, gate_up, inner = self._normed[:count], self._gate_up[:count], self._inner[:count]
            self.ops.rms_norm(part, layer.mlp_norm, self.spec.norm_eps, normed)
            layer.gate_up.write(normed, gate_up)
            self.ops.gate(gate_up, self.spec.activation, inner)
            layer.down.add(inner, part)
