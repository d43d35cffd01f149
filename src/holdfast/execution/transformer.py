"""One decoder, built from any ModelSpec: pre-norm attention and a gated MLP on a residual stream.

Takes a batch as an argument and keeps no state of requests; its buffers are allocated once, for the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.execution.batch import StepBatch
from holdfast.execution.kv_store import KVStore
from holdfast.execution.ops import AttentionBackend, AttentionShape, Heads, Ops
from holdfast.execution.rope import Rotary
from holdfast.execution.weights import LayerWeights, Weights
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec

MLP_TILE = 512
"""Tokens the MLP takes at a time: bounds its buffers, and keeps them in cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The buffers as one step sees them: cut once a step, not once a layer."""

    stream: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    heads: Heads
    """Views of qkv."""
    attended: torch.Tensor
    attended_heads: torch.Tensor
    tiles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    """Stream, normed, gate beside up, inner: for each tile of the MLP."""
    cos: torch.Tensor
    sin: torch.Tensor


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
        step = self._step(batch)
        self.weights.embed.select(batch.tokens, step.stream)
        for index, layer in enumerate(self.weights.layers[:layers]):
            self._attend(layer, step, batch, kv, *self._places[index])
            self._feed_forward(layer, step)
        sampling = step.stream.index_select(0, batch.sampling_tokens)
        normed = torch.empty_like(sampling)
        self.ops.rms_norm(sampling, self.weights.final_norm, self.spec.norm_eps, normed)
        return normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.weights.head.write(hidden, out)

    def _step(self, batch: StepBatch) -> _Step:
        spec, count = self.spec, batch.token_count
        qkv, attended = self._qkv[:count], self._attended[:count]
        heads = qkv.view(count, -1, spec.head_dim)
        rotated = spec.heads + spec.kv_heads
        tiles = [
            (part, self._normed[: len(part)], self._gate_up[: len(part)], self._inner[: len(part)])
            for part in (self._stream[first : min(first + MLP_TILE, count)] for first in range(0, count, MLP_TILE))
        ]
        cos, sin = self._rotary.angles(batch.positions)
        return _Step(
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
            tiles=tiles,
            cos=cos,
            sin=sin,
        )

    def _attend(self, layer: LayerWeights, step: _Step, batch: StepBatch, kv: KVStore, group: int, place: int) -> None:
        self.ops.rms_norm(step.stream, layer.attn_norm, self.spec.norm_eps, step.normed)
        layer.qkv.write(step.normed, step.qkv)
        heads = step.heads
        self.ops.rotate_and_store(heads, step.cos, step.sin, kv, place, batch.token_rows[group])
        plan = batch.attention_plans[group]
        self.attention.run(heads.query, heads.key, heads.value, kv, place, plan, step.attended_heads)
        layer.o.add(step.attended, step.stream)

    def _feed_forward(self, layer: LayerWeights, step: _Step) -> None:
        for part, normed, gate_up, inner in step.tiles:
            self.ops.rms_norm(part, layer.mlp_norm, self.spec.norm_eps, normed)
            layer.gate_up.write(normed, gate_up)
            self.ops.gate(gate_up, self.spec.activation, inner)
            layer.down.add(inner, part)
