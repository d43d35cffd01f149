"""What each rank of this engine holds where several compute one model: its weights and its KV, and what ranks share.

Takes divisions from shards.py and stages.py, and bytes from `footprint`; chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from math import prod

from holdfast.checkpoints import StoredTensor
from holdfast.checkpoints.checkpoint import piece_of
from holdfast.checkpoints.validation.stored_dtypes import PLAIN
from holdfast.footprint import cpu, gpu
from holdfast.footprint.cpu import Limits
from holdfast.footprint.experts import mlp_width
from holdfast.footprint.identity_key import Same
from holdfast.footprint.layouts import memory_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec, TensorSpec
from holdfast.models.shards import Shard
from holdfast.models.stages import LayerStage, rank_spec
from holdfast.observability.decisions import Decision
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.shards import Placement, divide
from holdfast.planner.sizing.stages import divide_stages, end_bytes, layer_bytes
from holdfast.planner.sizing.terms import Term
from holdfast.units import MIB, counted, format_bytes

MOST_SLOT_BYTES = 4 * MIB
"""That a rank shows the others at a time; what is larger goes in pieces."""
COLUMNS_TILE_BYTES = 4 * MIB
"""Of rows that a rank's columns are cut out of while it loads."""
EXCHANGE = "exchange"
"""The term of the memory that ranks share."""


@dataclass(frozen=True, slots=True)
class RankShares:
    """Ranks of one stage follow one another: rank 5 of `-tp 2 -pp 4` is the second of the third stage."""

    spec: ModelSpec = field(repr=False)
    """Of the whole model."""
    weights: tuple[EngineWeights, ...] = field(repr=False)
    """Of each rank; of one alone all of them."""
    shards: tuple[Shard, ...] = ()
    """Of the ranks of each stage. Empty: one rank has all of its layers."""
    stages: tuple[LayerStage, ...] = ()
    """Empty: every rank has a part of all layers."""
    placement: Placement | None = None
    """Of whole experts; None: ranks have a part of every one, or there are none."""
    by_room: bool = False
    """Stages are cut for GPUs that differ."""

    @property
    def count(self) -> int:
        return len(self.weights)

    @property
    def followers(self) -> int:
        return self.count - 1

    def kv_layout(self, *, block_tokens: int, kv_dtype: str) -> KVLayout:
        """Of all ranks together: KV heads that several have are counted for each, as are the places of every stage."""
        heads = sum(shard.kv_head_count for shard in self.shards)
        spec = replace(self.spec, kv_heads=heads) if self.shards else self.spec
        ranges = [(stage.first, stage.last) for stage in self.stages]
        return cpu.kv_layout(spec, block_tokens=block_tokens, kv_dtype=kv_dtype, stages=ranges)

    def _of(self, rank: int) -> tuple[LayerStage | None, Shard | None]:
        stage, place = divmod(rank, max(1, len(self.shards)))
        return self.stages[stage] if self.stages else None, self.shards[place] if self.shards else None

    def decisions(self, rank_weights: Sequence[int]) -> list[Decision]:
        """A row for each rank, where there are several. `rank_weights`: bytes of each one's weights."""
        if self.count == 1:
            return []
        rows = "; ".join(_rows(self.spec, [(nbytes, *self._of(rank)) for rank, nbytes in enumerate(rank_weights)]))
        ranks = Decision("tensor_parallel_size", str(len(self.shards)), "in each stage" if self.stages else rows, "set")
        stages = Decision("pipeline_parallel_size", str(len(self.stages)), f"{self._cut_words()}: {rows}", "set")
        return [*([ranks] if self.shards else ()), *([stages] if self.stages else ()), *self._dealt_out()]

    def _cut_words(self) -> str:
        return "stages by bytes and by the room of their GPUs, for the most KV" if self.by_room else "stages by bytes"

    def _dealt_out(self) -> Iterator[Decision]:
        if self.placement is not None:
            counts = ", ".join(str(shard.expert_count) for shard in self.shards)
            kept = "attention, shared experts and the vocabulary are divided as without it"
            reason = f"{self.placement}: ranks have {counts} whole experts of each layer; {kept}"
            yield Decision("enable_expert_parallel", counts, reason, "set")

    def rank_weights(self, *, dtype: str) -> tuple[int, ...]:
        """Bytes of each rank's, as they lie on a GPU."""
        return tuple(one.nbytes(dtype=dtype) for one in self.weights)

    def _weights_of(self, stage: int | None) -> tuple[EngineWeights, ...]:
        """Of the ranks of a stage; None: of all."""
        each = max(1, len(self.shards))
        return self.weights if stage is None else self.weights[stage * each : (stage + 1) * each]

    def most_weights(self, stage: int | None = None, *, dtype: str) -> int:
        """Bytes of the rank that has most, of a stage or (None) of all."""
        return max(one.nbytes(dtype=dtype) for one in self._weights_of(stage))

    def specs(self, stage: int | None = None) -> tuple[ModelSpec, ...]:
        """Of each rank, of a stage or (None) of all."""
        return tuple(one.spec for one in self._weights_of(stage))

    def gpu_kv_layout(self, stage: int | None = None, *, block_tokens: int, kv_dtype: str) -> KVLayout:
        """Of all layers, in pages of the rank that has most of each, of a stage or (None) of all: on GPUs every rank
        has a pool of its own."""
        heads = max((shard.kv_head_count for shard in self.shards), default=self.spec.kv_heads)
        ranges = [(stage.first, stage.last) for stage in self.stages]
        spec = replace(self.spec, kv_heads=heads)
        layout = cpu.kv_layout(spec, block_tokens=block_tokens, kv_dtype=kv_dtype, stages=ranges)
        ranges = ranges if stage is None else ranges[stage : stage + 1]
        places = max((layout.of_layers(*one, heads).layers_per_page for one in ranges), default=layout.layers_per_page)
        return replace(layout, layers_per_page=places)

    def gpu_slot_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what one rank shows the others of its stage on GPUs; 0: there are none."""
        if not self.shards:
            return 0
        vocab = max(shard.vocab_rows for shard in self.shards)
        return gpu.exchange_slot_bytes(self.spec.hidden_size, limits.max_num_batched_tokens, vocab, dtype=dtype)

    def gpu_terms(self, limits: Limits, *, dtype: str, nodes: int = 1) -> tuple[Term, ...]:
        """Of a rank on its GPU, beside what one alone would have. What goes to another node lies in RAM."""
        exchange = 0
        if self.shards:
            exchange += gpu.exchange_memory_bytes(self.gpu_slot_bytes(limits, dtype=dtype))
            vocab, ranks = self.shards[0].vocab_rows, len(self.shards)
            exchange += gpu.beside_ranks_bytes(self.spec, limits, vocab, ranks, dtype=dtype)
            exchange += max(_gathered_on_gpu(self.spec, one, limits, dtype=dtype) for one in self.weights)
        if self.stages:
            stream = self.stream_bytes(limits, dtype=dtype) if len(self.stages) > nodes else 0
            answer = self.gpu_answer_bytes(limits, dtype=dtype) if nodes == 1 else 0
            exchange += gpu.line_memory_bytes(max(stream, answer))
        return (Term(EXCHANGE, exchange),)

    def gpu_answer_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what the last stage shows the first rank on GPUs: all logits of a step, or hidden states."""
        if not self.stages:
            return 0
        columns = max(self.spec.vocab_size, self.spec.hidden_size)
        return _pages(limits.max_num_seqs * columns * cpu.ELEMENT_BYTES[dtype])

    def step_bytes(self, rank: int, limits: Limits, *, dtype: str) -> int:
        """Of one rank, beside its activations, where there are several."""
        if self.count == 1:
            return 0
        one, (stage, shard) = self.weights[rank], self._of(rank)
        vocab = self.spec.vocab_size if shard is None else shard.vocab_rows
        shows = stage.is_last if stage is not None else shard is not None
        own = _step_bytes(one.spec, limits, dtype=dtype, vocab=vocab if shows else 0, sums=shard is not None)
        gathered = _gathered_bytes(self.spec, one.spec, limits, dtype=dtype) if one.gathers_inputs() else 0
        return own + gathered + (_divided_bytes(one.spec, limits) if one.divides_inputs() else 0)

    def staging_bytes(self, *, dtype: str, expand: bool, compiled: bool) -> tuple[int, ...]:
        """Of each rank, which load side by side: what it holds beside its weights in place."""
        if self.count == 1:
            (alone,) = self.weights
            return (cpu.staging_bytes(alone.stored) + alone.quantizing_bytes,)
        return tuple(_staging_bytes(Same(one), dtype, expand, compiled) for one in self.weights)

    def gpu_staging_bytes(self, stage: int | None = None, *, dtype: str) -> int:
        """On the GPU of a rank, beside its weights in place while it loads: matrices of codes are whole there for a
        moment, because formats have their own orders of codes and scales of whole rows. The most of a stage, or (None)
        of all."""
        return max(_whole_bytes(Same(one), dtype) for one in self._weights_of(stage))

    def gpu_layers(self, whole: EngineWeights, *, dtype: str) -> tuple[list[int], int, int]:
        """Bytes of each layer on the rank that has most of it, and of what the first stage and the last one have
        beside."""
        parts = [_share(whole, None, shard) for shard in self.shards or (None,)]
        sizes = [(part.spec, part.by_name(dtype=dtype)) for part in parts]
        layers = [max(of_one) for of_one in zip(*(layer_bytes(*one) for one in sizes), strict=True)]
        before, behind = zip(*(end_bytes(*one) for one in sizes), strict=True)
        return layers, max(before), max(behind)

    def slot_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what one rank shows the others of its stage; 0: there are no other ranks."""
        if self.count == 1:
            return 0
        rows = min(limits.max_num_batched_tokens, cpu.MLP_TILE) * self.spec.hidden_size
        vocab = max((shard.vocab_rows for shard in self.shards), default=0)
        logits = cpu.head_rows(self.spec.vocab_size, limits.max_num_seqs) * vocab
        largest = min(max(rows, logits) * cpu.ELEMENT_BYTES[dtype], MOST_SLOT_BYTES)
        return _pages(largest if self.shards else 1)

    def stream_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what a stage hands on to the next, where there are several."""
        element = cpu.ELEMENT_BYTES[dtype]
        return _pages(limits.max_num_batched_tokens * self.spec.hidden_size * element) if self.stages else 0

    def answer_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what a rank of the last stage shows the first rank: logits, or hidden states."""
        if not self.stages:
            return 0
        vocab = max((shard.vocab_rows for shard in self.shards), default=self.spec.vocab_size)
        rows = cpu.head_rows(self.spec.vocab_size, limits.max_num_seqs)
        return _pages(rows * max(vocab, self.spec.hidden_size) * cpu.ELEMENT_BYTES[dtype])

    def exchange(self, limits: Limits, *, dtype: str, nodes: int = 1) -> Mapping[str, int]:
        """The term of what ranks share, where there are several; of one of several `nodes` with what goes to others."""
        if self.count == 1:
            return {}
        slots = 2 * self.count * self.slot_bytes(limits, dtype=dtype)
        between = max(0, len(self.stages) - 1) * self.stream_bytes(limits, dtype=dtype)
        answers = max(1, len(self.shards)) * self.answer_bytes(limits, dtype=dtype)
        mails = max(1, len(self.stages)) * cpu.MAIL_BYTES
        sent = self._sent_bytes(limits, nodes, dtype=dtype) if nodes > 1 and self.stages else 0
        return {EXCHANGE: slots + between + answers + mails + sent + cpu.SLOT_PAGE_BYTES}

    def _sent_bytes(self, limits: Limits, nodes: int, *, dtype: str) -> int:
        """Of a node: each rank that hands on to another one keeps a copy until it is sent. Of whole stages that is the
        last of the node."""
        of_a_node, of_a_stage = self.count // nodes, max(1, len(self.shards))
        senders = of_a_node if of_a_node % of_a_stage else of_a_stage
        return senders * max(self.stream_bytes(limits, dtype=dtype), self.answer_bytes(limits, dtype=dtype))


Part = tuple[int, LayerStage | None, Shard | None]
"""Bytes of a rank's weights, its stage, and its place in it."""


def _rows(spec: ModelSpec, parts: Sequence[Part]) -> Iterator[str]:
    """What ranks have, for people: those that follow one another with as much in one row."""
    number = 0
    for words, alike in groupby(part_words(spec, *part) for part in parts):
        count = len(list(alike))
        who = f"rank {number} has" if count == 1 else f"ranks {number} to {number + count - 1} have"
        yield f"{who} {words}{'' if count == 1 else ' each'}"
        number += count


def whole_experts(spec: ModelSpec, stage: LayerStage | None, shard: Shard | None) -> int:
    """That a rank has of each of its layers with experts; 0: a part of every one, or none. `spec`: of the model."""
    layers = spec.layers if stage is None else spec.layers[stage.first : stage.last]
    return shard.expert_count if shard is not None and any(layer.experts is not None for layer in layers) else 0


def part_words(spec: ModelSpec, nbytes: int, stage: LayerStage | None, shard: Shard | None) -> str:
    parts = [f"{format_bytes(nbytes)} of weights"]
    if stage is not None:
        parts.append(layer_words(stage))
    if shard is not None:
        parts.append(f"{counted(shard.head_count, 'head')} over {counted(shard.kv_head_count, 'KV head')}")
    if experts := whole_experts(spec, stage, shard):
        parts.append(f"{counted(experts, 'expert')} of each layer")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def layer_words(stage: LayerStage) -> str:
    return f"layers {stage.first} to {stage.last - 1}" if stage.layers > 1 else f"layer {stage.first}"


def _pages(nbytes: int) -> int:
    return -(-nbytes // cpu.SLOT_PAGE_BYTES) * cpu.SLOT_PAGE_BYTES


def _step_bytes(spec: ModelSpec, limits: Limits, *, dtype: str, vocab: int, sums: bool) -> int:
    """Of one rank, beside its activations: its sums before they are added up, and its part of the logits. `vocab`: rows
    of the vocabulary that it has. `sums`: it is not the only rank of its stage."""
    apart = min(limits.max_num_batched_tokens, cpu.MLP_TILE) * spec.hidden_size
    apart = 0 if cpu.sums_apart(spec) or not sums else apart
    return (apart + cpu.head_rows(spec.vocab_size, limits.max_num_seqs) * vocab) * cpu.ELEMENT_BYTES[dtype]


@lru_cache(maxsize=256)
def _staging_bytes(weights: Same[EngineWeights], dtype: str, expand: bool, compiled: bool) -> int:
    """Of one rank: the largest of what it reads of a tensor at a time, with what that becomes before it is cut."""
    one, most = weights.held, 0
    for tensor in one.spec.tensors:
        kept = None if one.stored is None else one.stored.get(tensor.name)
        if kept is not None or one.stored is None:
            layout = memory_layout(
                tensor,
                kept,
                dtype=dtype,
                expand=expand,
                compiled=compiled,
                quantization=one.spec.quantization,
                quantize=one.quantize,
            )
            most = max(most, _staged_bytes(tensor, kept, layout, dtype))
    return cpu.STAGING_BYTES + most + one.quantizing_bytes


@lru_cache(maxsize=256)
def _whole_bytes(weights: Same[EngineWeights], dtype: str) -> int:
    one, most = weights.held, 0
    for tensor in one.spec.tensors:
        kept = None if one.stored is None else one.stored.get(tensor.name)
        if tensor.cut is None or (kept is None and one.stored is not None):
            continue
        layout = memory_layout(
            tensor,
            kept,
            dtype=dtype,
            expand=False,
            compiled=False,
            quantization=one.spec.quantization,
            quantize=one.quantize,
        )
        if isinstance(layout, ScaledLayout):
            most = max(most, _staged_bytes(tensor, kept, layout, dtype))
    return most + one.quantizing_bytes


def _staged_bytes(tensor: TensorSpec, kept: StoredTensor | None, layout: str | ScaledLayout, dtype: str) -> int:
    """`kept`: this rank's part of what is stored; None: it is made up. Experts come one by one."""
    experts = tensor.experts or 1
    own = 0 if kept is None else kept.nbytes // experts
    piece = tensor.cut
    if piece is None:
        return own
    whole = prod(piece.whole) // experts
    made = layout.bytes_for(*piece.whole[-2:]) if isinstance(layout, ScaledLayout) else 0
    if kept is None:
        return made or whole * cpu.ELEMENT_BYTES[dtype]
    if kept.packed is None and not (made and kept.layout in PLAIN):
        # Ranges of rows where they go; columns are cut out of rows a tile at a time.
        return own + (COLUMNS_TILE_BYTES if piece.axis == len(piece.whole) - 1 else 0)
    return own * whole // (tensor.elements // experts) + (made or whole * cpu.ELEMENT_BYTES[dtype])


def _divided_bytes(spec: ModelSpec, limits: Limits) -> int:
    """Of one rank's inputs once more in float32, divided by what ranks find together."""
    widest = max(_widths(spec))
    return min(limits.max_num_batched_tokens, cpu.MLP_TILE) * widest * 4


def _gathered_bytes(whole: ModelSpec, spec: ModelSpec, limits: Limits, *, dtype: str) -> int:
    """Of the whole rows that ranks gather, and of those of one rank's columns in their order."""
    widest = max(sum(_widths(one)[place] for one in (whole, spec)) for place in range(2))
    return min(limits.max_num_batched_tokens, cpu.MLP_TILE) * widest * cpu.ELEMENT_BYTES[dtype]


def _gathered_on_gpu(whole: ModelSpec, one: EngineWeights, limits: Limits, *, dtype: str) -> int:
    """For o and down, one after the other."""
    if not one.gathers_inputs():
        return 0
    widths = max(_widths(whole)), max(_widths(one.spec))
    return gpu.gathered_rows_bytes(*widths, limits, dtype=dtype)


def _widths(spec: ModelSpec) -> tuple[int, int]:
    """Of what comes into o, and into down."""
    return spec.heads * spec.head_dim, mlp_width(spec)


@lru_cache(maxsize=64)
def rank_shares(
    weights: Same[EngineWeights],
    size: int,
    stages: int = 1,
    placement: Placement | None = None,
    *,
    dtype: str,
    expand: bool,
    compiled: bool,
    ends: tuple[int, ...] = (),
) -> RankShares:
    """Of `size` ranks in each of so many stages. How weights are held decides what a stage's layers take, unless the
    stages are cut already (`ends`). `placement`: of whole experts; None: ranks have a part of every one. Raises
    ConfigurationError for sizes that cannot be."""
    whole = weights.held
    shards = divide(whole.spec, whole.stored, size, placement, whole.quantize) if size > 1 else ()
    divided: tuple[LayerStage, ...] = ()
    if stages > 1:
        nbytes = whole.by_name(dtype=dtype, expand=expand, compiled=compiled)
        divided = divide_stages(whole.spec, nbytes, stages, ends)
    ranks = tuple(_share(whole, stage, shard) for stage in divided or (None,) for shard in shards or (None,))
    placement = placement if any(one.experts for one in shards) else None
    return RankShares(whole.spec, ranks, shards, divided, placement, by_room=bool(ends))


def gpu_rank_shares(
    weights: Same[EngineWeights],
    size: int,
    stages: int = 1,
    placement: Placement | None = None,
    *,
    dtype: str,
    ends: tuple[int, ...] = (),
) -> RankShares:
    """Of ranks on GPUs, which keep weights as they are stored."""
    return rank_shares(weights, size, stages, placement, dtype=dtype, expand=False, compiled=False, ends=ends)


def _share(whole: EngineWeights, stage: LayerStage | None, shard: Shard | None) -> EngineWeights:
    if stage is None and shard is None:
        return whole
    spec = rank_spec(whole.spec, stage, shard)
    if whole.stored is None:
        return replace(whole, spec=spec)
    stored = whole.stored
    pieces = {tensor.name: piece_of(stored[tensor.name], tensor) for tensor in spec.tensors if tensor.name in stored}
    return replace(whole, spec=spec, stored=pieces)
