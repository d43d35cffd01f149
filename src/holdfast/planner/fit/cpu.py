"""Memory of this engine on a CPU with given limits, and what is left for KV.

    budget ─ front ─ framework ─ libraries ─ weights ─ scratch ─ activations ─ logits ─ buffers ─ grammars
           = left for pages and their bookkeeping

The longer the context, the larger the buffers and the less is left, so the longest one that fits is found by
bisection. Only for models that this engine runs; count.py has the others. Raises only for settings that contradict
each other; a shortage is returned as `short_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from holdfast.errors import ConfigurationError
from holdfast.footprint import cpu, lora
from holdfast.footprint.cpu import BOOK_BYTES, Limits, kv_store_bytes
from holdfast.footprint.identity_key import Same
from holdfast.footprint.streamed import StreamedLayers, streamed_layers
from holdfast.footprint.structured_output import forms_bytes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import EngineChoices, Plan, Rank, device_budget, needed_bytes
from holdfast.planner.inputs.question import Question, Settings
from holdfast.planner.sizing.default_limits import core_flops, prompt_tokens_beside
from holdfast.planner.sizing.dtype import (
    asked_type,
    check_type,
    chosen_dtype,
    chosen_kv_dtype,
    compute_dtype,
    kv_dtype,
    multiplied_as_stored,
)
from holdfast.planner.sizing.engine_weights import EngineWeights, engine_weights
from holdfast.planner.sizing.kv_cost import largest, layout_cost
from holdfast.planner.sizing.rank_shares import RankShares, rank_shares
from holdfast.planner.sizing.terms import Term
from holdfast.units import GIB, counted, format_bytes

DEFAULT_KV_BYTES = 4 * GIB
"""RAM is shared with everything else on the machine, so the pool takes all of it only where a budget is set."""
_UNCERTAINTY: Mapping[str, float] = {"front": 0.25, "framework": 0.25, "libraries": 0.4, "activations": 0.25}
"""Of what is measured or estimated; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Pool:
    blocks: int
    """The null page included."""
    reason: str
    source: str
    cut: bool = False
    """It would be larger if more of the budget were left."""

    def decision(self, page_bytes: int) -> Decision:
        value = f"{format_bytes(self.blocks * page_bytes)} ({counted(self.blocks - 1, 'block')} and the null page)"
        return Decision("kv_pool", value, self.reason, self.source, lowered=self.cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCount:
    """With given limits, at any context length. Counts and compares; chooses nothing."""

    question: Question
    limits: Limits
    """With the longest context that is wanted."""
    weights: EngineWeights = field(repr=False)
    budget_bytes: int
    dtype: str
    layout: KVLayout
    expand: bool
    compiled: bool
    """Products with what is kept as stored are computed by compiled kernels, in float32."""
    streamed: StreamedLayers | None
    """Layers that do not stay in memory."""
    shares: RankShares
    """Of each rank, where several compute the model together."""
    loading_terms: Mapping[str, int]
    """At the peak of loading, before any of the terms of a step."""
    fixed_terms: Mapping[str, int]
    """Those of a step that no length changes, in their order, and 0 for the others."""
    of_ranks: tuple[Mapping[str, int], ...]
    """What each rank has of both."""

    @property
    def settings(self) -> Settings:
        return self.question.settings

    @property
    def spec(self) -> ModelSpec:
        return self.question.model.spec

    @property
    def weights_dtype(self) -> str:
        """Of plain matrices as they lie in memory."""
        spec, stored = self.weights.spec, self.weights.stored
        return cpu.kept_dtype(spec, stored, dtype=self.dtype, expand=self.expand, compiled=self.compiled)

    @property
    def flops(self) -> float:
        """That all cores do a second with the weights as they are kept."""
        machine = self.question.machine
        by_kernels = self.compiled and not self.expand and multiplied_as_stored(self.question)
        return machine.cores * core_flops(machine.cpu_features if by_kernels else None)

    @property
    def rank_weights(self) -> tuple[int, ...]:
        """Of each rank, where there are several."""
        if self.shares.count == 1:
            return ()
        return tuple(
            one.nbytes(dtype=self.dtype, expand=self.expand, compiled=self.compiled) for one in self.shares.weights
        )

    def rank_terms(self, length: int) -> tuple[Mapping[str, int], ...]:
        """What each rank alone takes of terms and loading, but for weights and pool; of the first without the tokens of
        requests and the books of the pool. Empty where there is one."""
        if self.shares.count == 1:
            return ()
        buffers = cpu.buffers_bytes(self.layout, replace(self.limits, max_model_len=length))
        return tuple({**one, "buffers": buffers} for one in self.of_ranks)

    @property
    def loading_bytes(self) -> int:
        return sum(self.loading_terms.values())

    def terms(self, length: int) -> dict[str, int]:
        """All but the pool and its books."""
        limits, tokens = replace(self.limits, max_model_len=length), self._most_pool_tokens()
        logits = cpu.logits_bytes(self.spec, limits, tokens)
        buffers = cpu.buffers_bytes(self.layout, limits, pool_tokens=tokens)
        buffers += self.shares.followers * cpu.buffers_bytes(self.layout, limits)
        terms = {**self.fixed_terms, "logits": logits, "buffers": buffers}
        return {name: size for name, size in terms.items() if size}

    def left(self, length: int) -> int:
        """Of the budget, for pages with their books; less than nothing when the model itself does not fit."""
        return self.budget_bytes - sum(self.terms(length).values())

    def one_sequence(self, length: int) -> int:
        """Pages that a sequence of full length needs, and the null page."""
        return 1 + self.layout.peak_blocks(length, self.limits.max_num_batched_tokens)

    def pages(self, length: int, blocks: int = 0) -> int:
        """That the pool must have: for one sequence of full length, and for `blocks` of concurrent sequences; the
        null page included."""
        return max(self.one_sequence(length), 1 + blocks)

    def pool(self, length: int) -> Pool:
        """As many pages as are set, or as are left and useful; possibly too few, or too many to fit."""
        page, pool_bytes = self.layout.page_bytes, self.settings.kv_cache_memory_bytes
        if pool_bytes is not None:
            return Pool(pool_bytes // page, "as set", "set")
        room, default = max(0, self.left(length)) // (page + BOOK_BYTES), self._most_by_default(length)
        found = Pool(room, "all that is left of the budget", "planner", cut=True)
        if default is not None and default < room:
            found = Pool(default, "the default; set --kv-cache-memory-bytes to change it", "planner")
        if (useful := self._most_useful(length)) < found.blocks:
            sequences = self.limits.max_num_seqs
            need = f"{counted(sequences, 'sequence')} of full length {'needs' if sequences == 1 else 'need'} no more"
            found = Pool(useful, need, "planner")
        return found

    def most_blocks(self, length: int) -> int:
        """More would not be taken of any budget, or be of use; nor can this one ever hold more."""
        most = min(self._most_useful(length), self.budget_bytes // self.layout.page_bytes)
        default = self._most_by_default(length)
        return most if default is None else min(most, default)

    def _most_by_default(self, length: int) -> int | None:
        """Pages of a pool whose size nobody set; None: the budget was set, and all of it may be used."""
        if self.question.machine.devices[0].budget_bytes is not None:
            return None
        return max(DEFAULT_KV_BYTES // self.layout.page_bytes, self.one_sequence(length))

    def _most_useful(self, length: int) -> int:
        limits = self.limits
        return 1 + self.layout.blocks_side_by_side(limits.max_num_seqs, length, limits.max_num_batched_tokens)

    def _most_pool_tokens(self) -> int:
        """No pool will hold more: a bound that does not depend on the length."""
        page, most, pool_bytes = self.layout.page_bytes, self.budget_bytes, self.settings.kv_cache_memory_bytes
        if pool_bytes is not None:
            most = min(most, pool_bytes)
        elif self.question.machine.devices[0].budget_bytes is None:
            most = min(most, max(DEFAULT_KV_BYTES, self.one_sequence(self.spec.max_position) * page))
        return most // page * self.layout.block_tokens // len(self.layout.groups)

    def fits(self, length: int, blocks: int = 0) -> bool:
        if self.loading_bytes > self.budget_bytes:
            return False
        pages = self.pool(length).blocks
        enough = pages >= self.pages(length, blocks)
        return enough and pages * (self.layout.page_bytes + BOOK_BYTES) <= self.left(length)

    def longest(self, most: int, *, least: int = 1, blocks: int = 0) -> int:
        """The longest context from `least` to `most` that fits in addition to `blocks`; 0: none does."""
        if self.fits(most, blocks):
            return most
        if least > most or not self.fits(least, blocks):
            return 0
        return largest(least, most - 1, lambda length: self.fits(length, blocks))

    def short_bytes(self, length: int, blocks: int = 0) -> int:
        """What is lacking for loading, and for one sequence of this length in addition to `blocks`: of the budget, or
        of the pool where its size was set. Nothing or less: it fits."""
        page, pages, pool_bytes = (
            self.layout.page_bytes,
            self.pages(length, blocks),
            self.settings.kv_cache_memory_bytes,
        )
        short = max(self.loading_bytes - self.budget_bytes, pages * (page + BOOK_BYTES) - self.left(length))
        return short if pool_bytes is None else max(short, pages * page - pool_bytes // page * page)


def count_on_cpu(question: Question, limits: Limits, *, expand: bool) -> CpuCount:
    settings, dtype, weights = question.settings, compute_dtype(question), engine_weights(Same(question.model))
    assert weights is not None, "asked of what runs_on_cpu says this engine runs"
    spec = weights.spec
    compiled = question.machine.compiled_kernels and dtype == "float32"
    split = settings.ranks, settings.stages, settings.expert_placement if settings.expert_parallel else None
    shares = rank_shares(Same(weights), *split, dtype=dtype, expand=expand, compiled=compiled)
    streamed = None
    if settings.streamed_layers:
        by_layer = weights.by_layer(dtype=dtype, expand=expand, compiled=compiled)
        streamed = streamed_layers(by_layer, settings.streamed_layers, settings.layers_on_disk)
    held = {
        "front": settings.front_bytes,
        "framework": shares.count * cpu.FRAMEWORK_BYTES,
        "libraries": cpu.LIBRARIES_BYTES,  # Pages of files, which all processes have together.
        "weights": sum(one.nbytes(dtype=dtype, expand=expand, compiled=compiled) for one in shares.weights)
        - (0 if streamed is None else streamed.weights_bytes),
        "layer_slots": 0 if streamed is None else streamed.slots_bytes,
    }
    held = {name: size for name, size in held.items() if size}
    of_ranks = _of_ranks(question, limits, shares, dtype=dtype, expand=expand, compiled=compiled)
    step_terms = {name: sum(rank[name] for rank in of_ranks) for name in of_ranks[0]}
    layout = shares.kv_layout(block_tokens=settings.block_tokens, kv_dtype=kv_dtype(question))
    stored_kv = kv_store_bytes(settings.kv_store_size, layout.page_bytes) if settings.kv_store_size else 0
    grammars = forms_bytes(spec.vocab_size, limits.max_num_seqs) if settings.structured_output else 0
    staging = shares.staging_bytes(dtype=dtype, expand=expand, compiled=compiled)
    return CpuCount(
        question=question,
        limits=limits,
        weights=weights,
        budget_bytes=device_budget(question.machine.devices[0], question.utilization),
        dtype=dtype,
        layout=layout,
        expand=expand,
        compiled=compiled,
        streamed=streamed,
        shares=shares,
        loading_terms={**held, "staging": sum(staging)},
        fixed_terms={
            **held, "scratch": step_terms["scratch"], "activations": step_terms["activations"],
            **shares.exchange(limits, dtype=dtype, nodes=settings.nodes), "adapters": step_terms["adapters"],
            "logits": 0, "buffers": 0, "grammars": grammars, **({"kv_store": stored_kv} if stored_kv else {}),
        },
        of_ranks=tuple(
            {"framework": cpu.FRAMEWORK_BYTES, **one, "staging": own}
            for one, own in zip(of_ranks, staging, strict=True)
        ),
    )  # fmt: skip


def _of_ranks(
    question: Question, limits: Limits, shares: RankShares, *, dtype: str, expand: bool, compiled: bool
) -> list[dict[str, int]]:
    """What the steps of each rank take beside weights, buffers and pool."""
    settings, step, found = question.settings, limits.max_num_batched_tokens, list[dict[str, int]]()
    attention, copies = _compiled_attention(settings, compiled), question.machine.processor.copies_matrices(dtype)
    for rank, one in enumerate(shares.weights):
        terms = {"scratch": 0, "activations": shares.step_bytes(rank, limits, dtype=dtype), "adapters": 0}
        if copies:
            terms["scratch"] = cpu.scratch_bytes(
                one.spec, one.stored, limits, dtype=dtype, expand=expand, compiled=compiled
            )
        decoded = one.in_codes(expand=expand) and not (compiled and one.compiles())
        terms["activations"] += cpu.activations_bytes(
            one.spec, limits, dtype=dtype, compiled_attention=attention, compiled=compiled and not decoded
        )
        terms["activations"] += cpu.decoding_bytes(one.spec, limits, rounded=one.rounds_inputs(None)) if decoded else 0
        if settings.max_loras:
            most, kept = settings.max_lora_rank, lora.copy_rows(settings.lora_copies, on_cpu=True)
            terms["adapters"] = lora.held_bytes(
                one.spec, dtype=dtype, places=settings.max_loras, max_rank=most, copies=kept
            )
            terms["activations"] += lora.step_bytes(one.spec, step, dtype=dtype, max_rank=most)
        found.append(terms)
    return found


def _compiled_attention(settings: Settings, compiled: bool) -> bool:
    backend = settings.attention_backend
    return compiled if backend == "auto" else backend == "compiled"


def count_cpu_plan(question: Question, limits: Limits, *, lowered: bool = False) -> Plan:
    """The longest context up to the one of `limits` that fits, with its pool; where none does, what is lacking for the
    shortest that would do. `lowered`: these limits are not the defaults.

    Traffic has the pool that it needs, and a context that leaves room for it; weights stay in blocks for it before
    limits are lowered."""
    found = _counted(question, limits, lowered)
    if question.traffic is None or found.fits or not found.engine.expand_weights:
        return found
    in_blocks = replace(question, settings=replace(question.settings, expand_weights="never"))
    found = _counted(in_blocks, limits, lowered)
    return replace(found, question=question, serve_settings={**found.serve_settings, "expand_weights": "never"})


@lru_cache(maxsize=64)
def _prompt_parameters(model: Same[ModelSpec]) -> int:
    return model.held.active_layer_parameters


def _counted(question: Question, limits: Limits, lowered: bool) -> Plan:
    spec, settings, traffic, blocks = question.model.spec, question.settings, question.traffic, 0
    flags: Mapping[str, object] = {}
    count, decisions = _chosen(question, limits)
    (sequences, tokens), most = question.required, limits.max_model_len
    least = settings.max_model_len or min(spec.max_position, tokens)
    if traffic is not None:
        blocks = count.layout.blocks_side_by_side(sequences, tokens, limits.max_num_batched_tokens)
        count, flags = _with_pool(count, blocks)
        # With the next higher limits, which take more memory, the context may be no longer than the traffic's either.
        most = least if lowered else most
    length = count.longest(most, least=least, blocks=blocks)
    longest, pool = length or count.longest(most), count.pool(length or least)
    pages, page = pool.blocks if length else count.pages(least, blocks), count.layout.page_bytes
    rank, short, step = _rank(count, length or least, pages), 0, limits.max_num_batched_tokens
    decisions += count.shares.decisions(count.rank_weights)
    if length:
        decisions.append(pool.decision(page))
    else:
        # Loading may lack more than the pool does.
        short = max(1, count.short_bytes(least, blocks))
        held = max(0, count.pool(longest).blocks - 1) * page if longest else 0
        lacking = needed_bytes(rank.kv, sequences, tokens, settings.max_model_len) - short
        rank = replace(rank, most_kv_bytes=lacking, held_bytes=held if traffic is None else None)
    return Plan(
        question=question,
        dtype=count.dtype,
        kv_dtype=kv_dtype(question),
        tensor_parallel=settings.ranks,
        pipeline_parallel=settings.stages,
        utilization=question.utilization,
        limits=replace(limits, max_model_len=settings.max_model_len or longest),
        ranks=(rank,),
        weights_bytes=count.loading_terms["weights"] + (0 if count.streamed is None else count.streamed.weights_bytes),
        weights_dtype=count.weights_dtype,
        weights_as=count.dtype,
        required_tokens=tokens,
        required_sequences=sequences,
        fits=length > 0,
        short_bytes=short,
        longest_tokens=longest,
        decisions=tuple(decisions),
        serve_settings=flags,
        own=EngineChoices(
            layout=count.layout,
            blocks=pages,
            most_blocks=max(pages, count.most_blocks(length)) if length and pool.cut else pages,
            expand_weights=count.expand,
            quantize=count.weights.quantize,
            weights_format=count.weights.format or count.weights_dtype,
            compiled=count.compiled,
            streamed=count.streamed,
            shards=count.shares.shards,
            stages=count.shares.stages,
            rank_weights=count.rank_weights,
            rank_terms=count.rank_terms(length or least),
            slot_bytes=count.shares.slot_bytes(limits, dtype=count.dtype),
            stream_bytes=count.shares.stream_bytes(limits, dtype=count.dtype),
            answer_bytes=count.shares.answer_bytes(limits, dtype=count.dtype),
            compiled_attention=_compiled_attention(settings, count.compiled),
            short=lowered or pool.cut or length < (settings.max_model_len or spec.max_position),
            prompt_tokens_beside=prompt_tokens_beside(_prompt_parameters(Same(spec)), count.flops, step),
        ),
    )


def _rank(count: CpuCount, length: int, pages: int) -> Rank:
    terms = count.terms(length)
    terms["buffers"] += pages * BOOK_BYTES
    return Rank(
        device=count.question.machine.devices[0],
        stage=0,
        budget_bytes=count.budget_bytes,
        terms=_named(terms),
        kv=layout_cost(count.layout, count.limits.max_num_batched_tokens),
        loading=_named(count.loading_terms),
        null_bytes=count.layout.page_bytes,
        most_kv_bytes=(pages - 1) * count.layout.page_bytes,
    )


def _named(terms: Mapping[str, int]) -> tuple[Term, ...]:
    return tuple(Term(name, size, _UNCERTAINTY.get(name, 0.0)) for name, size in terms.items())


def _with_pool(count: CpuCount, blocks: int) -> tuple[CpuCount, dict[str, object]]:
    """With the pool's size set where serve would otherwise take a smaller one than this traffic needs."""
    question, needed = count.question, (1 + blocks) * count.layout.page_bytes
    by_default = question.machine.devices[0].budget_bytes is None and needed > DEFAULT_KV_BYTES
    if not by_default and question.required[0] <= count.limits.max_num_seqs:
        return count, {}
    settings = replace(question.settings, kv_cache_memory_bytes=needed)
    return replace(count, question=replace(question, settings=settings)), {"kv_cache_memory_bytes": needed}


# Choices


def _chosen(question: Question, limits: Limits) -> tuple[CpuCount, list[Decision]]:
    """How weights lie and what computes, with the reasons. Weights are not expanded at the cost of context: more memory
    must not hold less."""
    spec, settings = question.model.spec, question.settings
    check_type(settings.dtype, spec)
    decisions = [chosen_dtype(question)] if asked_type(settings.dtype) is None else []
    if settings.kv_cache_dtype == "auto" and spec.kv_cache_fp8:
        decisions.append(chosen_kv_dtype(question))
    count = count_on_cpu(question, limits, expand=settings.expand_weights == "always")
    weights, dtype = count.weights, count.dtype
    if weights.quantized:
        count, decision = _expanded_or_not(count)
        decisions.append(decision)
    if settings.attention_backend == "compiled" and not count.compiled:
        raise ConfigurationError(
            "attention_backend is compiled, but there are no compiled kernels for this dtype",
            code="HF112",
            needed="dtype float32 and kernels built at install (a C compiler)",
            fix="--attention-backend auto, or reinstall with a C compiler",
            field="attention_backend",
        )
    if settings.attention_backend != "auto":
        decisions.append(Decision("attention_backend", settings.attention_backend, "as set", "set"))
    if count.weights_dtype != dtype and not weights.quantized:
        reason = f"kept as stored, which takes less memory: compiled kernels compute from them in {dtype}"
        decisions.append(Decision("weights", count.weights_dtype, reason, "hardware"))
    return count, decisions


def _expanded_or_not(count: CpuCount) -> tuple[CpuCount, Decision]:
    """Of weights that are quantized: as `count` has them, or expanded where that is left to us and worth its memory."""
    weights, setting, dtype = count.weights, count.settings.expand_weights, count.dtype
    stored, most = weights.stored, count.limits.max_model_len
    kept = _why_kept(count)
    if kept is not None and setting == "always":
        raise ConfigurationError(
            f"expand_weights is always, but these weights are not expanded: {kept}",
            needed="auto or never",
            found="always",
            fix="leave --expand-weights out",
            field="expand_weights",
        )
    if stored is None or kept is not None:
        return count, Decision("weights", weights.format or "quantized", kept or "dummies of that format", "model")
    held, expanded_bytes = (
        weights.nbytes(dtype=dtype, expand=expand, compiled=count.compiled) for expand in (False, True)
    )
    sizes = reason = cpu.weight_sizes(held, expanded_bytes, dtype)
    if setting == "auto":
        fast = count.compiled and multiplied_as_stored(count.question)
        expand, reason = cpu.expands(
            held, expanded_bytes, dtype=dtype, fast_blocks=fast, budget_bytes=count.budget_bytes
        )
        expanded = count_on_cpu(count.question, count.limits, expand=True) if expand else count
        if expanded.longest(most) >= count.longest(most):
            count = expanded
        else:
            reason = f"expanded, they would leave less context: {sizes}"
    how = "expanded" if count.expand else "quantized"
    return count, Decision("weights", how, reason, "planner" if setting == "auto" else "set")


def _why_kept(count: CpuCount) -> str | None:
    """Why quantized weights are held so in any case; None: they can be expanded."""
    if count.weights.quantize is not None:
        return "they are quantized while loading, as set"
    kept, expanded = (
        # Plain matrices count alike in both: whether they are kept in half precision is another question.
        count.weights.nbytes(dtype=count.dtype, expand=expand)
        for expand in (False, True)
    )
    return "their inputs are rounded too, which belongs to the product" if expanded == kept else None
