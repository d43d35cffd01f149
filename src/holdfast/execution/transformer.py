"""One decoder, built from any ModelSpec: attention and an MLP on a residual stream, with norms where the spec has them.

Takes a batch as an argument and keeps no state of requests; its buffers are allocated once, for the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from holdfast.execution.batch import StepBatch
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.kv_scales import KVScales
from holdfast.execution.layers.linear import DenseLinear
from holdfast.execution.layers.mlp import Mlp, make_mlps
from holdfast.execution.layers.rope import rotaries
from holdfast.execution.lora.products import Current, PlacedRows, adapt_layers
from holdfast.execution.lora.slots import AdapterPlaces
from holdfast.execution.ops import AttentionBackend, AttentionShape, FusedLayers, Heads, Ops, StepBuffers
from holdfast.execution.parallel.layers.norms import RowNorms
from holdfast.execution.parallel.layers.routing import Crowding, routed_by_first
from holdfast.execution.parallel.layers.rows import multiplied_together
from holdfast.execution.parallel.pipeline import PipelineStage
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.weights.decoder_weights import LayerWeights, Norm, Weights
from holdfast.footprint.cpu import MLP_TILE, sums_apart
from holdfast.footprint.experts import mlp_width
from holdfast.kvcache.groups import KVLayout
from holdfast.models import DecoderSpec, ModelSpec

PROFILED_ROWS = 16
"""More of them copy no more of a matrix."""
BYTES_AT_ONCE = 1 << 30
"""Of the weights of layers that run in one call, times a step's tokens: less than a second between two beats, with the
portable kernels too."""


class Transformer:
    """`context`: the longest that any sequence may get, by default what the model was made for; some rotations go by
    it. `beat`: called after each layer. `share`: of a model that several ranks compute; spec and weights are this
    rank's, and what attention and MLP add to the stream is summed over all of them. `stage`: of one whose layers are
    on several ranks in turn; spec, weights and layout are those of this one's."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: KVLayout,
        ops: Ops,
        max_tokens: int,
        device: torch.device,
        *,
        context: int | None = None,
        adapters: AdapterPlaces | None = None,
        beat: Callable[[], None] | None = None,
        share: RankShare | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self._beat, self._share, self._stage = beat, share, stage
        self._begins, self._ends = stage is None or stage.is_first, stage is None or stage.is_last
        self._crowding = Crowding()
        if share is not None:
            layers = routed_by_first(weights.layers, share.collectives, self._crowding)
            weights = replace(weights, layers=multiplied_together(layers, share.collectives))
        self._row_norms: RowNorms | None = None
        if share is not None and spec.decoder.query_key_norm == "whole":
            self._row_norms = RowNorms(share.collectives, share.kv_heads, spec.head_dim)
        self._base, self._adapters = weights.layers, Current()
        self._placed: PlacedRows | None = None
        if adapters is not None:
            weights = replace(weights, layers=adapt_layers(weights.layers, adapters.factors(), self._adapters))
        self.spec, self.weights, self.ops = spec, weights, ops
        self._places = {
            layer: (group.index, place) for group in layout.groups for place, layer in enumerate(group.layers)
        }
        self._place_of = [self._places[layer][1] for layer in range(len(spec.layers))]
        self.kv_scales = KVScales.ones(len(spec.layers))
        """How pages hold keys and values: of float8 pages alone anything but as they are."""
        self._rotaries, self._rotary_of = rotaries(spec, device, weights, context or spec.max_position)
        shape = AttentionShape(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            block_tokens=layout.block_tokens,
            places=layout.layers_per_page,
            dtype=weights.dtype,
            softcap=spec.decoder.attention_softcap,
        )
        self.attention: AttentionBackend = ops.make_attention(shape, device)
        self._query_width, self._kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        # As the weights' own type has it: models were trained with the rounded number.
        self._embedding_scale = float(torch.tensor(spec.decoder.embedding_scale, dtype=weights.dtype))

        def buffer(rows: int, columns: int) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=weights.dtype, device=device)

        self._stream = buffer(max_tokens, spec.hidden_size)
        self._normed = buffer(max_tokens, spec.hidden_size)
        self._qkv = buffer(max_tokens, self._query_width + 2 * self._kv_width)
        self._attended = buffer(max_tokens, self._query_width)
        tile = min(max_tokens, MLP_TILE)
        self._gate_up = buffer(tile, 2 * mlp_width(spec))
        self._inner = buffer(tile, mlp_width(spec))
        self._branch = buffer(tile, spec.hidden_size) if sums_apart(spec) or share is not None else None
        # Outside the layers a decoder may do as it likes: what is fused is a layer.
        fusible = _layers_alone(spec.decoder) == DecoderSpec() and len(self._rotaries) == 1
        fuse = ops.fuse if fusible and (share is None or share.sums is not None) else None
        sums = None if share is None else share.sums
        own = (self._base, shape, spec.norm_eps, spec.activation)
        self._fused = None if fuse is None else fuse(*own, sums, self._branch)
        self._mlps = make_mlps(spec, weights, ops, self._gate_up, self._inner)
        self._cut: StepBuffers | None = None
        self._runs_of: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def forward(self, batch: StepBatch, kv: KVPool, layers: int | None = None) -> torch.Tensor:
        """Normed hidden states [sampling rows, hidden] of the batch's sampling rows, which only the last of several
        stages has: of others nothing of as many rows. Writes KV pages.

        `layers`: only the first so many (a profile run needs the memory of one layer, not the time of all).
        """
        step = self._step(batch)
        self._crowding.on = layers is not None
        self._begin(batch, step.stream)
        self._place(batch.adapted)
        # A fused layer knows no adapters; its parts give the same, bit for bit.
        fused = self._fused if batch.adapted is None else None
        if fused is not None:
            fused.begin(step, kv, self._place_of, self.kv_scales)
        # A prompt's chunk: of the last layer, only sampling rows need more than their keys and values.
        scored, sampled = batch.scored_tokens.shape[0], batch.sampling_tokens.shape[0]
        cut = layers is None and not scored and sampled < batch.token_count and self._ends
        count = len(self.weights.layers[:-1] if cut else self.weights.layers[:layers])
        slots = self.weights.slots
        for first, last in self._runs(count, batch.token_count, fused):
            if slots is not None:
                slots.begin(first, self._beat)
            if fused is not None:
                group, _ = self._places[first]
                fused.run(first, last, batch.token_rows[group], batch.attention_plans[group])
            else:
                layer = self.weights.layers[first]
                self._attend(first, step, batch, kv)
                self._add_attended(layer, step.attended, step.stream, step)
                self._feed_forward(layer, self._mlps[first], step.stream, step)
            if slots is not None:
                slots.end(first)
            if self._beat is not None:
                self._beat()
        if self._stage is not None and not self._ends:
            self._stage.hand_on(step.stream)
            return step.stream.new_empty((sampled, 0))
        sampling = step.stream.index_select(0, batch.sampling_tokens)
        if cut:
            self._finish(sampling, step, batch, kv)
        self._place(None)
        return self._norm(self.weights.final_norm, sampling, torch.empty_like(sampling))

    def _runs(self, count: int, tokens: int, fused: FusedLayers | None) -> list[tuple[int, int]]:
        """The first `count` layers, those together that run in one call: all of one KV group, few enough to beat in
        time, and one by one where they are not fused or do not stay in memory."""
        together = 1
        if fused is not None and self.weights.slots is None:
            together = max(1, min(count, BYTES_AT_ONCE // (fused.layer_bytes * tokens)))
        known = self._runs_of.get((count, together))
        if known is None:
            known = self._runs_of[count, together] = []
            for layer in range(count):
                first = known[-1][0] if known else layer
                if known and layer - first < together and self._places[layer][0] == self._places[first][0]:
                    known[-1] = first, layer + 1
                else:
                    known.append((layer, layer + 1))
        return known

    def frequencies(self) -> list[torch.Tensor]:
        """Radians that a position turns each pair of dimensions by, of every layer."""
        return [self._rotaries[kind].frequencies for kind in self._rotary_of]

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed hidden states of these tokens of the step that ran last, by their place in its batch."""
        if not self._ends:
            return self._stream.new_empty((len(tokens), 0))
        chosen = self._stream.index_select(0, tokens)
        return self._norm(self.weights.final_norm, chosen, torch.empty_like(chosen))

    def multiply_largest(self, tokens: int, sampling_rows: int) -> None:
        """One product with the head and one with the largest dense matrix of a layer, over as many rows as they will
        see: torch may copy such a matrix whole, and holds on to the copy."""
        layer = self._base[0]
        dense = [part for part in (layer.qkv, layer.o, *layer.mlp.linears) if isinstance(part, DenseLinear)]
        largest = [(max(dense, key=lambda part: part.nbytes), tokens)] if dense else []
        if isinstance(self.weights.head, DenseLinear) and self._ends:
            largest.append((self.weights.head, sampling_rows))
        for linear, rows in largest:
            ones = torch.ones((min(rows, PROFILED_ROWS), linear.columns), dtype=linear.weight.dtype)
            linear.write(ones, ones.new_empty((len(ones), linear.rows)))

    def _begin(self, batch: StepBatch, stream: torch.Tensor) -> None:
        """The stream before this decoder's first layer."""
        if self._stage is not None and not self._begins:
            self._stage.take(stream)
            return
        self._embed(batch.tokens, stream)
        if self._embedding_scale != 1.0:
            stream.mul_(self._embedding_scale)

    def _embed(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if self._share is None:
            self.weights.embed.select(tokens, out)
        else:
            self._share.embed(self.weights.embed.select, tokens, out)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Into `out`, of several ranks the first one's alone."""
        decoder = self.spec.decoder
        if self._stage is not None:
            if not self._stage_logits(self._stage, hidden, out):
                return
        elif self._share is None:
            self.weights.head.write(hidden, out)
        elif not self._share.logits(self.weights.head.write, hidden, out):
            return
        if decoder.logits_scale != 1.0:
            out.mul_(decoder.logits_scale)
        if decoder.logits_softcap:
            out.div_(decoder.logits_softcap).tanh_().mul_(decoder.logits_softcap)

    def _stage_logits(self, stage: PipelineStage, hidden: torch.Tensor, out: torch.Tensor) -> bool:
        """Computed by the last stage, and shown to the rank that samples: whether this is that one."""
        if stage.samples:
            stage.collect(out, [out.shape[1]] if self._share is None else self._share.widths)
        elif self._share is not None:
            stage.show(self._share.part(self.weights.head.write, hidden))
        else:
            self.weights.head.write(hidden, out)
            stage.show(out)
        return stage.samples

    def _place(self, rows: PlacedRows | None) -> None:
        """The rows of the stream that is computed from here on."""
        self._placed, self._adapters.rows = rows, None

    def _adapt(self, first: int, count: int) -> None:
        """The products that come next have so many rows of the stream."""
        if self._placed is not None:
            self._adapters.rows = self._placed.part(first, count)

    def _step(self, batch: StepBatch) -> StepBuffers:
        """Cut anew only where the step before had another number of tokens: most that decode have not."""
        angles = tuple(rotary.angles(batch.positions) for rotary in self._rotaries)
        if self._cut is None or self._cut.stream.shape[0] != batch.token_count:
            self._cut = self._buffers_of(batch.token_count)
        return replace(self._cut, angles=angles)

    def _buffers_of(self, count: int) -> StepBuffers:
        """For so many tokens; angles are the step's own."""
        spec = self.spec
        qkv, attended = self._qkv[:count], self._attended[:count]
        heads = qkv.view(count, -1, spec.head_dim)
        rotated = spec.heads + spec.kv_heads
        return StepBuffers(
            stream=self._stream[:count],
            normed=self._normed[:count],
            qkv=qkv,
            heads=Heads(
                rotated=heads[:, :rotated],
                query=heads[:, : spec.heads],
                key=heads[:, spec.heads : rotated],
                value=heads[:, rotated:],
                query_rows=qkv[:, : self._query_width],
                key_rows=qkv[:, self._query_width : self._query_width + self._kv_width],
                value_rows=qkv[:, self._query_width + self._kv_width :],
            ),
            attended=attended,
            attended_heads=attended.view(count, spec.heads, spec.head_dim),
            gate_up=self._gate_up[:count],
            inner=self._inner[:count],
            angles=(),
        )

    def _norm(self, norm: Norm | None, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out`, or x itself where the decoder has no norm here."""
        if norm is None:
            return x
        if self.spec.decoder.norm == "layer":
            self.ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps, out)
        else:
            self.ops.rms_norm(x, norm.weight, self.spec.norm_eps, out)
        return out

    def _attend(self, index: int, step: StepBuffers, batch: StepBatch, kv: KVPool) -> None:
        layer, (group, place) = self.weights.layers[index], self._places[index]
        self._adapt(0, len(step.stream))
        layer.qkv.write(self._norm(layer.attn_norm, step.stream, step.normed), step.qkv)
        heads = step.heads
        if layer.query_norm is not None and layer.key_norm is not None and self._row_norms is not None:
            norms = (layer.query_norm, layer.key_norm)
            self._row_norms.run(heads.query_rows, heads.key_rows, norms, self.spec.norm_eps)
        elif layer.query_norm is not None and layer.key_norm is not None:
            apart = self.spec.decoder.query_key_norm == "head"
            epsilon = self.spec.norm_eps
            self.ops.norm_in_place(heads.query if apart else heads.query_rows, layer.query_norm, epsilon)
            self.ops.norm_in_place(heads.key if apart else heads.key_rows, layer.key_norm, epsilon)
        key_scale, value_scale = self.kv_scales.of(index)
        if key_scale != 1.0:  # Turning and attending are linear: scaled before, and scaled back behind.
            heads.query_rows.mul_(key_scale)
            heads.key_rows.mul_(1.0 / key_scale)
        if value_scale != 1.0:
            heads.value_rows.mul_(1.0 / value_scale)
        cos, sin = step.angles[self._rotary_of[index]]
        rows, center = batch.token_rows[group], self.kv_scales.center(index)
        self.ops.rotate_and_store(heads, cos, sin, kv, place, rows, center)
        last = self._ends and layer is self.weights.layers[-1]
        if len(batch.sampling_tokens) or len(batch.scored_tokens) or not last:
            plan = batch.attention_plans[group]
            self.attention.run(heads.query, heads.key, heads.value, kv, place, plan, step.attended_heads)
            if value_scale != 1.0:
                step.attended.mul_(value_scale)

    def _finish(self, sampling: torch.Tensor, step: StepBuffers, batch: StepBatch, kv: KVPool) -> None:
        """The last layer: all tokens leave their keys and values, the rest is added to the sampling rows alone."""
        layer, last, slots = self.weights.layers[-1], len(self.weights.layers) - 1, self.weights.slots
        if slots is not None:
            slots.begin(last, self._beat)
        self._attend(last, step, batch, kv)
        if len(sampling):
            self._place(batch.adapted_sampling)
            self._add_attended(layer, step.attended.index_select(0, batch.sampling_tokens), sampling, step)
            self._feed_forward(layer, self._mlps[-1], sampling, step)
        if slots is not None:
            slots.end(last)

    def _add_attended(
        self, layer: LayerWeights, attended: torch.Tensor, stream: torch.Tensor, step: StepBuffers
    ) -> None:
        if self._branch is None:
            self._adapt(0, len(stream))
            layer.o.add(attended, stream)
            return
        tiles = zip(torch.split(attended, MLP_TILE), torch.split(stream, MLP_TILE), strict=True)
        for tile, (x, part) in enumerate(tiles):
            self._adapt(tile * MLP_TILE, len(part))
            branch = self._branch[: len(part)]
            layer.o.write(x, branch)
            self._add_up(branch)
            self._add_branch(layer.post_attn_norm, branch, part, step)

    def _feed_forward(self, layer: LayerWeights, mlp: Mlp, stream: torch.Tensor, step: StepBuffers) -> None:
        for tile, part in enumerate(torch.split(stream, MLP_TILE)):
            self._adapt(tile * MLP_TILE, len(part))
            x = self._norm(layer.mlp_norm, part, step.normed[: len(part)])
            if self._branch is None:
                mlp.run(x, part, add=True)
                continue
            branch = self._branch[: len(part)]
            mlp.run(x, branch, add=False)
            self._add_up(branch)
            self._add_branch(layer.post_mlp_norm, branch, part, step)

    def _add_up(self, branch: torch.Tensor) -> None:
        """Over all ranks, where there are several."""
        if self._share is not None:
            self._share.collectives.all_reduce(branch)

    def _add_branch(self, norm: Norm | None, branch: torch.Tensor, stream: torch.Tensor, step: StepBuffers) -> None:
        added = self._norm(norm, branch, step.normed[: len(branch)])
        stream.add_(added, alpha=self.spec.decoder.residual_scale)


def _layers_alone(decoder: DecoderSpec) -> DecoderSpec:
    return replace(decoder, embedding_scale=1.0, logits_scale=1.0, logits_softcap=0.0)
