"""`Plan` and `Rank`: the result of planning, used by `holdfast plan` and by the engine at start. Records and derived
sums only.

    budget = what the device may use          room = budget - every term but KV
    needed = KV of the required sequences     fits = room >= needed on every rank, and budget >= what loading takes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from holdfast.footprint.cpu import Limits
from holdfast.footprint.expert_places import ExpertPlaces
from holdfast.footprint.layouts import Quantize
from holdfast.footprint.streamed import StreamedLayers
from holdfast.kvcache.groups import KVLayout
from holdfast.models.shards import Shard
from holdfast.models.stages import LayerStage
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import STREAMED_SEQUENCE_TOKENS, USEFUL_TOKENS, Device, Question
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.planner.sizing.sharded_weights import stage_layers
from holdfast.planner.sizing.terms import Term
from holdfast.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One device's share."""

    device: Device
    stage: int
    budget_bytes: int
    terms: tuple[Term, ...]
    kv: KVCost
    loading: tuple[Term, ...] = ()
    """What is held at the peak of loading, which comes before activations and KV; empty: not known, or less."""
    null_bytes: int = 0
    """The null page."""
    most_kv_bytes: int | None = None
    """Upper limit for KV where the engine would not use all that is left; None: no limit."""
    held_bytes: int | None = None
    """Where the context that was asked for does not fit: what sequences get with the longest that does, whose tables
    are smaller. None: as much as there is room."""

    @property
    def loading_bytes(self) -> int:
        return sum(term.nbytes for term in self.loading)

    @property
    def loading_short_bytes(self) -> int:
        """Lacking of the budget while it is loaded; 0: none."""
        return max(0, self.loading_bytes - self.budget_bytes)

    @property
    def left_bytes(self) -> int:
        """Of the budget once it is loaded, for sequences; negative when not even the rest fits."""
        return self.budget_bytes - sum(term.nbytes for term in self.terms) - self.null_bytes

    @property
    def kv_bytes(self) -> int:
        """What sequences would have."""
        return self.room_bytes if self.held_bytes is None else self.held_bytes

    @property
    def room_bytes(self) -> int:
        """For sequences in the KV pool; negative when not even the rest fits."""
        left = self.left_bytes
        return left if self.most_kv_bytes is None else min(left, self.most_kv_bytes)

    @property
    def pool_bytes(self) -> int:
        """Of the KV pool as it would be allocated."""
        return max(0, self.room_bytes) + self.null_bytes

    @property
    def unused_bytes(self) -> int:
        """Budget minus terms minus pool."""
        return max(0, self.budget_bytes - sum(term.nbytes for term in self.terms) - self.pool_bytes)

    @property
    def uncertain_bytes(self) -> int:
        """How far the estimated terms may be off together, either way."""
        return int(sum(term.nbytes * term.uncertainty for term in self.terms))

    @property
    def safe_bytes(self) -> int:
        """For sequences even if every estimate is too low: what is not used pays for it first, then the pool."""
        return self.room_bytes - max(0, self.uncertain_bytes - self.unused_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    index: int
    """In the driver's order."""
    uuid: str
    name: str
    engines: int = 1
    """Of this server, that divide it; free and total bytes are then of this one's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """What only this engine chooses: how weights lie, what computes, and the pages of its pool."""

    layout: KVLayout
    blocks: int
    """Pages of the pool, the null page included."""
    most_blocks: int
    """The pool may grow to so many where terms took less than was planned: more would be of no use, or were not asked
    for. As many as `blocks` where the pool is not simply what is left of the budget."""
    expand_weights: bool
    quantize: Quantize | None = None
    """What plain matrices of linear layers become while they are loaded."""
    weights_format: str = ""
    """Of the weights as they are read, for people: AWQ int4 g128, GGUF Q4_K, bfloat16."""
    compiled: bool = False
    """Products with what is kept as stored are computed by compiled kernels, in float32."""
    compiled_attention: bool = False
    streamed: StreamedLayers | None = None
    """Layers that come for every step: from a disk, and on a GPU from pinned RAM as well. None: all stay."""
    expert_places: ExpertPlaces | None = None
    """Experts that do not all stay on the GPU, whose layers do otherwise. None: all stay, or whole layers come."""
    short: bool = False
    """Less was given than the model allows or than is usual, for want of memory."""
    gpu: GpuChoice | None = None
    """None: it runs on the CPU."""
    rank_gpus: tuple[GpuChoice, ...] = ()
    """Of each rank, where there are several; `gpu` is then the first one's. `layout` is of the rank with most KV heads
    then, as are terms and budget: each rank has a pool of its own."""
    kv_ram_bytes: int = 0
    """Beside a GPU: pinned RAM for KV pages that leave it."""
    shards: tuple[Shard, ...] = ()
    """Of each rank that computes its layers with others; empty: one has all of them. `layout` then counts the KV heads
    of all ranks: its pages are what all of them hold of a page together."""
    stages: tuple[LayerStage, ...] = ()
    """Of a pipeline, each with the ranks of `shards` or with one; empty: every rank has a part of all layers."""
    rank_weights: tuple[int, ...] = ()
    """Bytes of each rank's weights."""
    rank_terms: tuple[Mapping[str, int], ...] = ()
    """Of each rank on a CPU, where there are several: bytes by term of what it alone takes, `staging` while it loads
    among them, weights and pool not. What of a term none of them has is the first rank's."""
    slot_bytes: int = 0
    """Of what one rank shows the others of its stage at a time."""
    stream_bytes: int = 0
    """Of what a stage hands on to the next."""
    answer_bytes: int = 0
    """Of what a rank of the last stage shows the first rank at a time."""
    prompt_tokens_beside: int | None = None
    """In a step in which answers go on as well; None: as many as a step has."""

    @property
    def rank_count(self) -> int:
        return max(1, len(self.shards)) * max(1, len(self.stages))

    def part_of(self, rank: int) -> tuple[LayerStage | None, Shard | None]:
        """The stage of a rank, and its place in it; None: there is one."""
        stage, place = divmod(rank, max(1, len(self.shards)))
        return self.stages[stage] if self.stages else None, self.shards[place] if self.shards else None

    def layout_of(self, rank: int) -> KVLayout:
        """What this rank has of the pages."""
        stage, shard = self.part_of(rank)
        heads = self.layout.kv_heads if shard is None else shard.kv_head_count
        if stage is None:
            return replace(self.layout, kv_heads=heads)
        return self.layout.of_layers(stage.first, stage.last, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    question: Question
    dtype: str
    kv_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    utilization: float
    limits: Limits
    """max_model_len is what would be served: as asked, or what the model allows and memory holds."""
    ranks: tuple[Rank, ...]
    weights_bytes: int
    """Of the whole model, over all ranks once."""
    weights_dtype: str
    """What plain matrices are kept in: often what is computed in."""
    weights_as: str
    """The same as sharded_weights.py counts it: a type, or as the file has each of them."""
    required_tokens: int
    """Of each sequence that must fit beside the others: the traffic's, else one of the context that was asked for."""
    required_sequences: int
    fits: bool
    short_bytes: int
    """Of the rank that lacks most; 0 when it fits."""
    longest_tokens: int
    """The longest sequence that memory holds, within the model's own context; limits that are not set as low as can
    be."""
    decisions: tuple[Decision, ...]
    stage_ranks: tuple[Rank, ...] = ()
    """Of this engine's stages on GPUs that differ, of each the rank whose GPU has the least room; `ranks` is then the
    first of them, or the one that lacks most. Empty: the rank of `ranks` stands for all."""
    stage_ends: tuple[int, ...] = ()
    """Where layers are cut into stages whose GPUs differ: 0, and the layer behind the last of each. Empty: evenly."""
    serve_settings: Mapping[str, object] = field(default_factory=dict)
    """What `holdfast serve` must be told beside what was asked for, so as to do this."""
    own: EngineChoices | None = None
    """None: it is not this engine that would run it, or on a GPU only planned for it."""

    @property
    def engine(self) -> EngineChoices:
        assert self.own is not None
        return self.own

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """Layers of each stage."""
        if not self.stage_ends:
            return stage_layers(len(self.question.model.spec.layers), self.pipeline_parallel)
        return tuple(range(first, last) for first, last in pairwise(self.stage_ends))

    @property
    def device(self) -> Device:
        """Of the first rank: of this engine the only one, as are its budget, terms and loading."""
        return self.ranks[0].device

    def device_of(self, rank: int) -> Device:
        """Of a rank of this engine, the GPU that its part is planned for."""
        stage = rank // max(1, len(self.engine.shards))
        return self.stage_ranks[stage].device if self.stage_ranks else self.device

    @property
    def budget_bytes(self) -> int:
        return self.ranks[0].budget_bytes

    @property
    def terms(self) -> Mapping[str, int]:
        """Planned bytes of this engine by name, its pool among them."""
        pool = {"kv_pool": self.engine.blocks * self.engine.layout.page_bytes}
        return {term.name: term.nbytes for term in self.ranks[0].terms} | pool

    @property
    def loading_bytes(self) -> int:
        """At the peak of loading; the terms of a step and the pool come after it."""
        return self.ranks[0].loading_bytes

    @property
    def length_is_set(self) -> bool:
        """By the user: it may not be shortened."""
        return self.question.settings.max_model_len is not None

    @property
    def reserve_bytes(self) -> int:
        """Free at start and not to be used: what a share of it leaves. Nothing of a GPU, and nothing beside a budget in
        bytes: that is ours while it is free, whatever becomes of the rest."""
        share = self.device.kind == "cpu" and self.device.budget_bytes is None
        return max(0, self.device.free_bytes - self.budget_bytes) if share else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers and ranks as stored: what one more token costs once windows are full."""
        return sum(rank.kv.growing_bytes for rank in self.ranks)

    @property
    def kv_bytes_fixed_per_sequence(self) -> int:
        return sum(rank.kv.window_bytes + rank.kv.fixed_bytes for rank in self.ranks)

    @property
    def kv_tokens(self) -> int:
        return min(rank.kv.held_tokens(rank.kv_bytes, max(1, self.limits.max_model_len)) for rank in self.ranks)

    def concurrency(self, tokens: int) -> float:
        """Sequences of that length that the tightest rank holds."""
        return max(0.0, min(rank.kv.concurrency(rank.kv_bytes, tokens) for rank in self.ranks))

    def needed_bytes(self, rank: Rank) -> int:
        """KV that must fit on this rank."""
        asked = self.question.settings.max_model_len
        return needed_bytes(rank.kv, self.required_sequences, self.required_tokens, asked)

    def lacks_for_loading(self, rank: Rank) -> bool:
        """Whether this rank lacks more while the model is loaded than it would for terms and KV afterwards."""
        short = rank.loading_short_bytes
        return short > 0 and short >= self.needed_bytes(rank) - rank.left_bytes

    @property
    def uncertain_bytes(self) -> int:
        return max(rank.uncertain_bytes for rank in self.ranks)

    @property
    def usual_tokens(self) -> int:
        """Length of a sequence to count with where many run at once: the traffic's, else an ordinary one, or one that
        the pool was made for beside layers that are streamed."""
        traffic, streamed = self.question.traffic, self.question.settings.offloads
        usual = STREAMED_SEQUENCE_TOKENS if streamed and self.device.kind == "gpu" else USEFUL_TOKENS
        return max(1, traffic.length if traffic is not None else min(self.limits.max_model_len, usual))


def needed_bytes(kv: KVCost, sequences: int, tokens: int, one_of: int | None) -> int:
    """KV of the sequences asked for, and of one that is as long as the context that was asked for."""
    return max(kv.needed_bytes(sequences, tokens), 0 if one_of is None else kv.sequence_bytes(one_of))


def device_budget(device: Device, utilization: float) -> int:
    """What may be used: an absolute budget as it is, else a share of a GPU's total, or of the RAM that is free. Never
    more than is free."""
    if device.budget_bytes is not None:
        return min(device.budget_bytes, device.free_bytes)
    if device.kind == "cpu":
        return int(device.free_bytes * utilization)
    return min(int(device.total_bytes * utilization), device.free_bytes)


def describe_devices(devices: Sequence[Device]) -> str:
    """By kind: 2 x rtx4090 and rtx3090."""
    counts = Counter(device.name for device in devices)
    return " and ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def describe_budget(rank: Rank, utilization: float) -> str:
    device = rank.device
    if device.budget_bytes is not None:
        return f"{format_bytes(rank.budget_bytes)}, as set"
    of = device.free_bytes if device.kind == "cpu" else device.total_bytes
    return f"{utilization:g} of {format_bytes(of)} = {format_bytes(rank.budget_bytes)}"
