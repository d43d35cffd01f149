"""Memory of one fully specified configuration (limits, tensor and pipeline parallel size) on every rank. Chooses
nothing.

A model that this engine runs on a CPU is counted by cpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise, starmap
from typing import Literal

from holdfast.checkpoints.validation.stored_dtypes import PLAIN
from holdfast.config.parts.offload import OffloadRequest
from holdfast.errors import ConfigurationError
from holdfast.footprint import cpu
from holdfast.footprint.cpu import KV_ELEMENT_BYTES, Limits
from holdfast.footprint.expert_places import ExpertPlaces, all_wait, spread_experts
from holdfast.footprint.experts import kinds
from holdfast.footprint.gpu import LEAST_CAPABILITY
from holdfast.footprint.identity_key import Same
from holdfast.footprint.streamed import (
    AHEAD,
    GATHERS_EMBEDDING,
    StreamedLayers,
    all_apart,
    beside_gpu,
    last_of_groups,
    page_tables_bytes,
    streamed_layers,
)
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.planner.compat.vllm_overhead import links_bytes
from holdfast.planner.compat.vllm_weights import beside_weights, expert_kernel
from holdfast.planner.fit.engine_stages import EngineStages, engine_stages
from holdfast.planner.fit.result import Plan, Rank, device_budget, needed_bytes
from holdfast.planner.fit.stage_cuts import Share, planned_ends
from holdfast.planner.inputs.expert_layers import expert_layers
from holdfast.planner.inputs.question import Device, PlannedModel, Question
from holdfast.planner.sizing import terms as byte_terms
from holdfast.planner.sizing.draft_cost import draft_token_bytes, draft_weights
from holdfast.planner.sizing.dtype import compute_dtype, kv_dtype
from holdfast.planner.sizing.engine_weights import EngineWeights, engine_weights
from holdfast.planner.sizing.kv_cost import KVCost, kv_cost, layout_cost
from holdfast.planner.sizing.rank_shares import RankShares, gpu_rank_shares
from holdfast.planner.sizing.sharded_weights import (
    AS_STORED,
    Weight,
    check_parallel,
    layouts_by_size,
    parallel_sizes,
    rank_bytes,
    stage_layers,
    total_bytes,
    weights_of,
)
from holdfast.planner.sizing.terms import Term

TOO_FEW_DEVICES, CONTEXT_TOO_LONG = "HF133", "HF111"


def count_plan(question: Question, tensor_parallel: int, limits: Limits) -> Plan:
    """`limits`: those that were asked for or chosen; a context that is not set is the longest that these leave."""
    spec, settings = question.model.spec, question.settings
    sequences, tokens = question.required
    apart = _engine_stages(question, limits) if question.machine.stage_devices else None
    ranks, ends = _ranks(question, tensor_parallel, limits) if apart is None else (apart.ranks, apart.ends)
    if any(rank.loading_short_bytes for rank in ranks):
        needed = (needed_bytes(rank.kv, sequences, tokens, settings.max_model_len) for rank in ranks)
        ranks = tuple(_not_loaded(rank, size) for rank, size in zip(ranks, needed, strict=True))
    # Of a hundred GPUs most are alike.
    unlike = {(id(rank.terms), rank.budget_bytes): rank for rank in ranks}.values()
    longest = min(rank.kv.longest(rank.kv_bytes, spec.max_position) for rank in unlike)
    lacking = [needed_bytes(one.kv, sequences, tokens, settings.max_model_len) - one.room_bytes for one in unlike]
    short, stage_ranks = max(lacking), tuple[Rank, ...]()
    if apart is not None:
        stage_ranks = ranks if short > 0 else apart.with_equal_pools()
        ranks = (ranks[lacking.index(short)] if short > 0 else stage_ranks[0],)
    dtype, kept = compute_dtype(question, len(ranks)), weights_as(question, len(ranks))
    return Plan(
        question=question,
        dtype=dtype,
        kv_dtype=kv_dtype(question, len(ranks)),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        utilization=question.utilization,
        limits=replace(limits, max_model_len=longest if settings.max_model_len is None else settings.max_model_len),
        ranks=ranks,
        weights_bytes=_own_bytes(question, len(ranks)) or _whole_bytes(Same(question.model), kept),
        weights_dtype=dtype if kept != AS_STORED else plain_type(Same(question.model)) or dtype,
        weights_as=kept,
        required_tokens=tokens,
        required_sequences=sequences,
        fits=short <= 0,
        short_bytes=max(0, short),
        longest_tokens=longest,
        decisions=(),
        stage_ranks=stage_ranks,
        stage_ends=ends,
    )


def _not_loaded(rank: Rank, needed: int) -> Rank:
    """One that cannot even be loaded holds nothing, and has room for sequences less by what loading lacks."""
    short = rank.loading_short_bytes
    return replace(rank, most_kv_bytes=needed - short, held_bytes=0) if short else rank


def _ranks(question: Question, tensor_parallel: int, limits: Limits) -> tuple[tuple[Rank, ...], tuple[int, ...]]:
    """Each with its own device, and where layers are cut; nowhere named: evenly."""
    devices, stages = question.machine.devices, question.settings.pipeline_parallel
    utilization, ranks, count = question.utilization, [], len(question.model.spec.layers)
    ends = _ends(question, tensor_parallel, limits) if stages > 1 else ()
    cut = tuple(starmap(range, pairwise(ends))) if ends else stage_layers(count, stages)
    for stage, layers in enumerate(cut):
        shares: dict[str | None, Share] = {}
        for device in devices[stage * tensor_parallel : (stage + 1) * tensor_parallel]:
            kind = None if device.gpu is None else device.gpu.key
            if kind not in shares:
                shares[kind] = _share(question, device, stage, layers, tensor_parallel, limits)
            terms, kv, loading = shares[kind]
            budget = device_budget(device, utilization)
            ranks.append(Rank(device=device, stage=stage, budget_bytes=budget, terms=terms, kv=kv, loading=loading))
    return tuple(ranks), ends


def _ends(question: Question, tensor_parallel: int, limits: Limits) -> tuple[int, ...]:
    layers, cut = range(len(question.model.spec.layers)), question.settings.stage_cut
    if cut is not None:
        told = len(cut) == question.settings.pipeline_parallel and sum(cut) == len(layers)
        return (0, *accumulate(cut)) if told else ()
    weights = [stored_bytes(question, tensor_parallel, range(layer, layer + 1)) for layer in layers]

    def share(device: Device, stage: int, of_stage: range) -> Share:
        return _share(question, device, stage, of_stage, tensor_parallel, limits)

    return tuple(planned_ends(question, tensor_parallel, share, weights, limits.max_num_seqs))


def _share(
    question: Question, device: Device, stage: int, layers: range, tensor_parallel: int, limits: Limits
) -> Share:
    model, settings, spec = question.model, question.settings, question.model.spec
    stages, every = settings.pipeline_parallel, tensor_parallel * settings.pipeline_parallel
    dtype, stored_kv = compute_dtype(question, every), kv_dtype(question, every)
    held = stored_bytes(question, tensor_parallel, layers)
    cost = kv_cost(
        spec,
        element_bytes=KV_ELEMENT_BYTES[stored_kv],
        state_bytes=KV_ELEMENT_BYTES[dtype],
        tensor_parallel=tensor_parallel,
        layers=layers,
        block_tokens=settings.block_tokens,
        step_tokens=limits.max_num_batched_tokens,
    )
    if device.kind == "cpu":
        found = byte_terms.cpu_terms(
            spec,
            limits,
            dtype=dtype,
            weights_bytes=held,
            block_tokens=settings.block_tokens,
            max_loras=settings.max_loras,
            max_lora_rank=settings.max_lora_rank,
        )
        return tuple(found), cost, ()
    whose = counted_for(question, device, every)
    drafting = model if model.draft is not None and stage == stages - 1 else None
    if whose == "llama.cpp":
        loras = settings.max_loras, settings.max_lora_rank
        found = byte_terms.llama_gpu_terms(
            spec,
            limits,
            weights_bytes=held,
            vendor="nvidia" if device.gpu is None else device.gpu.vendor,
            adapters=byte_terms.adapters_bytes(spec, dtype, layers, *loras, tensor_parallel),
        )
        return *_with_draft(drafting, found, cost, AS_STORED, stored_kv, tensor_parallel), ()
    if whose == "holdfast":
        return _engine_share(question, device, limits, _own_bytes(question, every) or held)
    gpu, vllm = device.gpu, question.vllm  # Of a model that this engine does not run: what the engine keeps that would.
    kernel = expert_kernel(gpu, vllm, adapters=settings.max_loras > 0)
    beside = beside_weights(model, kernel, dtype=dtype, tensor_parallel=tensor_parallel, layers=layers)
    found = byte_terms.gpu_terms(
        spec,
        limits,
        dtype=dtype,
        weights_bytes=held,
        tensor_parallel=tensor_parallel,
        layers=layers,
        last_stage=stage == stages - 1,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        graphs=settings.graphs,
        vendor="nvidia" if gpu is None else gpu.vendor,
        rotary_bytes=beside.rotary,
        padding_bytes=beside.padding,
        links_bytes=links_bytes(gpu, every, vllm),
        unified=gpu is not None and gpu.unified and gpu.vendor == "nvidia",
        sorts=vllm.has("sorts-vocabulary"),
    )
    return *_with_draft(drafting, found, cost, dtype, stored_kv, tensor_parallel), ()


def _engine_stages(question: Question, limits: Limits) -> EngineStages:
    weights, types = engine_weights(Same(question.model)), (compute_dtype(question, 1), kv_dtype(question, 1))
    assert weights is not None, "a server plans what it has matched"

    def share(device: Device, stage: int | None, ends: tuple[int, ...]) -> Share:
        return _engine_share(question, device, limits, 0, stage, ends)

    return engine_stages(question, weights, partial(_gpu_shares, question, weights, types[0]), share, types, limits)


def _gpu_shares(question: Question, weights: EngineWeights, dtype: str, ends: tuple[int, ...] = ()) -> RankShares:
    settings = question.settings
    placement = settings.expert_placement if settings.expert_parallel else None
    return gpu_rank_shares(Same(weights), settings.ranks, settings.stages, placement, dtype=dtype, ends=ends)


def _engine_share(
    question: Question,
    device: Device,
    limits: Limits,
    held: int,
    stage: int | None = None,
    ends: tuple[int, ...] = (),
) -> Share:
    """Of this engine on one GPU, or of the rank that holds most where several ranks have one each: of a stage, where
    layers are cut at `ends`, or (None) of all. `held`: of all weights."""
    model, settings, spec = question.model, question.settings, question.model.spec
    dtype, streamed, places = compute_dtype(question, 1), streamed_on_gpu(question), experts_on_gpu(question)
    slots: tuple[Term, ...] = ()
    if streamed is not None:
        held += streamed.resident_bytes - sum(_by_layer(question)) - streamed.embedding_bytes
        tables = Term("page_tables", page_tables_bytes(streamed.pinned_bytes))
        slots = (Term("layer_slots", streamed.slots_bytes), tables)
    elif places is not None:
        held -= sum(places.waiting_bytes)
        tables = Term("page_tables", page_tables_bytes(places.pinned_bytes))
        slots = (Term("expert_slots", places.slots_bytes + places.tables_bytes), tables)
    weights, largest = engine_weights(Same(model)), _largest_quantized(Same(model))
    capability = None if device.gpu is None else device.gpu.compute_capability
    ranked, adapted = tuple[Term, ...](), tuple[ModelSpec, ...]()
    layout = cpu.kv_layout(spec, block_tokens=settings.block_tokens, kv_dtype=kv_dtype(question, 1))
    if settings.ranks * settings.stages > 1 and weights is not None:
        shares = _gpu_shares(question, weights, dtype, ends)
        held = shares.most_weights(stage, dtype=dtype)
        layout = shares.gpu_kv_layout(stage, block_tokens=settings.block_tokens, kv_dtype=kv_dtype(question, 1))
        # The first place has most; of stages all layers, any of which may be the widest.
        spec = rank_spec(spec, None, shares.shards[0] if shares.shards else None)
        ranked = shares.gpu_terms(limits, dtype=dtype, nodes=settings.nodes)
        adapted = shares.specs(stage)
        largest = max(largest, shares.gpu_staging_bytes(stage, dtype=dtype))
    found = byte_terms.engine_gpu_terms(
        spec,
        limits,
        dtype=dtype,
        weights_bytes=held,
        slots=slots,
        block_tokens=settings.block_tokens,
        quantized=weights is not None and weights.quantized,
        rounded=weights is not None and weights.rounds_inputs(capability),
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        adapted=adapted,
        graphs=settings.graphs and streamed is None,
        experts_apart=places is not None,
    )
    cost = layout_cost(layout, limits.max_num_batched_tokens)
    return (*found, *ranked), cost, byte_terms.engine_gpu_loading(held, slots, largest)


def _with_draft(
    model: PlannedModel | None, terms: list[Term], cost: KVCost, dtype: str, stored_kv: str, tensor_parallel: int
) -> tuple[tuple[Term, ...], KVCost]:
    """`model` None: it has no draft model here."""
    if model is None or model.draft is None:
        return tuple(terms), cost
    if dtype == AS_STORED and model.draft.stored is None:
        dtype = model.draft.spec.stored_dtype
    weights = draft_weights(model, dtype=dtype, tensor_parallel=tensor_parallel)
    more = draft_token_bytes(model, element_bytes=KV_ELEMENT_BYTES[stored_kv], tensor_parallel=tensor_parallel)
    return (*terms, Term("draft", weights)), replace(cost, growing_bytes=cost.growing_bytes + more)


def counted_for(question: Question, device: Device, ranks: int) -> Literal["holdfast", "vllm", "llama.cpp"]:
    """Whose terms a GPU has: where llama.cpp was asked for its own; of what this engine runs this engine's; of a GGUF
    that it does not run llama.cpp's, unless another engine was asked for; of the rest vLLM's."""
    if question.engine == "llama.cpp":
        return "llama.cpp"
    if ranks == 1 and engine_runs_on(device, question.model.spec):
        return "holdfast"
    return "llama.cpp" if question.model.format == "gguf" and question.engine is None else "vllm"


def _own_bytes(question: Question, ranks: int) -> int | None:
    """Of the weights as this engine allocates them, to the byte; None: another one would, or it is not known how they
    are stored."""
    device = question.machine.devices[0]
    if device.kind == "cpu" or counted_for(question, device, ranks) != "holdfast":
        return None
    weights = engine_weights(Same(question.model))
    return None if weights is None else weights.nbytes(dtype=compute_dtype(question, ranks))


def streamed_on_gpu(question: Question) -> StreamedLayers | None:
    """Of this engine on one GPU; None: all layers stay in its memory."""
    settings, model = question.settings, Same(question.model)
    if not settings.streamed_layers or engine_weights(model) is None:
        return None
    placed = settings.streamed_layers, settings.layers_on_disk, settings.embedding_on_disk
    return _streamed(model, compute_dtype(question, 1), settings.offload, *placed)


@lru_cache(maxsize=256)
def _streamed(
    model: Same[PlannedModel], dtype: str, asked: OffloadRequest, layers: int, on_disk: int | None, embedding: bool
) -> StreamedLayers:
    """`embedding`: it is on the disk too. Every count of layers is asked for once for each remedy that is tried."""
    weights = engine_weights(model)
    assert weights is not None, "asked of what this engine streams"
    by_layer = weights.by_layer(dtype=dtype)
    chosen = layers if asked.groups is None else last_of_groups(len(by_layer), *asked.groups)
    found = streamed_layers(by_layer, chosen, on_disk)
    ahead = 0 if asked.ahead == AHEAD and all_apart(found.layers) else asked.ahead
    found = beside_gpu(replace(found, ahead=ahead, saved=weights.saved_by_layer(dtype=dtype)), by_layer)
    gathered = weights.gathered_bytes(dtype=dtype) if GATHERS_EMBEDDING else 0
    return replace(found, embedding_bytes=gathered, embedding_on_disk=embedding and gathered > 0)


def _by_layer(question: Question) -> tuple[int, ...]:
    weights = engine_weights(Same(question.model))
    assert weights is not None, "asked of what this engine streams"
    return weights.by_layer(dtype=compute_dtype(question, 1))


def experts_on_gpu(question: Question) -> ExpertPlaces | None:
    """Of this engine on one GPU; None: all experts stay in its memory, or come with their layers."""
    settings, weights = question.settings, engine_weights(Same(question.model))
    if not settings.experts_wait or weights is None or not kinds(question.model.spec):
        return None  # A smaller model may be tried that has none.
    dtype, asked, spec = compute_dtype(question, 1), settings.offload, question.model.spec
    sizes = weights.expert_sizes(dtype=dtype)
    host = weights.host_expert_sizes() if settings.host_experts else None
    experts = kinds(spec)[0].count
    if asked.experts_by_hand:
        return all_wait(sizes, experts, expert_layers(asked, spec), host)
    assert settings.resident_experts is not None
    return spread_experts(sizes, experts, settings.resident_experts, host)


def weights_as(question: Question, ranks: int) -> str:
    """What plain weights are counted in: llama.cpp keeps those of a GGUF as they are, others compute in one type."""
    device = question.machine.devices[0]
    if question.model.format != "gguf" or question.model.stored is None:
        return compute_dtype(question, ranks)
    theirs = device.kind == "cpu" or counted_for(question, device, ranks) == "llama.cpp"
    return AS_STORED if theirs else compute_dtype(question, ranks)


def engine_runs_on(device: Device, spec: ModelSpec) -> bool:
    """Whether this engine runs such a model there, so that its own allocations are known. A way of storing weights or
    KV that it does not read yet changes nothing of them."""
    gpu = device.gpu
    able = gpu is None or (gpu.vendor == "nvidia" and (gpu.compute_capability or (0, 0)) >= LEAST_CAPABILITY)
    return able and spec.runnable


# Ways out plan the same models dozens of times: what does not depend on memory is counted once.


@lru_cache(maxsize=64)
def sizes(key: Same[ModelSpec], most: int) -> tuple[int, ...]:
    return parallel_sizes(key.held, most)


@lru_cache(maxsize=64)
def _largest_quantized(key: Same[PlannedModel]) -> int:
    """As stored, of those that are put in another order on the way; 0: none are."""
    weights = engine_weights(key)
    return 0 if weights is None else weights.largest_quantized_bytes


@lru_cache(maxsize=64)
def plain_type(key: Same[PlannedModel]) -> str | None:
    """Of a file most of which is plain numbers; None: most of it is quantized."""
    return PLAIN.get(next(iter(layouts_by_size((key.held.stored or {}).values())), ""))


@lru_cache(maxsize=64)
def _weights(key: Same[PlannedModel], dtype: str) -> tuple[Weight, ...]:
    return tuple(weights_of(key.held, dtype=dtype))


@lru_cache(maxsize=64)
def _whole_bytes(key: Same[PlannedModel], dtype: str) -> int:
    return total_bytes(_weights(key, dtype))


@lru_cache(maxsize=1024)
def _held_bytes(key: Same[PlannedModel], dtype: str, tensor_parallel: int, layers: range) -> int:
    return rank_bytes(_weights(key, dtype), key.held.spec, tensor_parallel=tensor_parallel, layers=layers)


@lru_cache(maxsize=64)
def _expert_bytes(key: Same[PlannedModel], dtype: str, tensor_parallel: int, layers: range) -> int:
    """Of the experts, which ranks of all replicas divide among them."""
    of_experts = (weight for weight in _weights(key, dtype) if weight.tensor is not None and weight.tensor.experts)
    stacks = tuple(weight for weight in of_experts if weight.tensor is not None and len(weight.tensor.shape) > 1)
    return rank_bytes(stacks, key.held.spec, tensor_parallel=tensor_parallel, layers=layers)


def stored_bytes(question: Question, tensor_parallel: int, layers: range) -> int:
    """Of the weights of a rank with these layers as they are stored, which is as most engines hold them."""
    kept = weights_as(question, tensor_parallel * question.settings.pipeline_parallel)
    held = _held_bytes(Same(question.model), kept, tensor_parallel, layers)
    replicas = question.settings.data_parallel if question.settings.expert_parallel else 1
    if replicas == 1:
        return held
    experts = _expert_bytes(Same(question.model), kept, tensor_parallel, layers)
    return held - experts + -(-experts // replicas)


def cannot_hold_weights(question: Question) -> bool:
    """All GPUs together have less than the weights take, whatever the split: nothing else needs to be counted."""
    devices, utilization = question.machine.devices, question.utilization
    if question.machine.kind != "gpu" or question.settings.ranks * question.settings.stages > 1:
        return False
    settings = question.settings
    together = settings.data_parallel if settings.expert_parallel else 1  # Replicas divide experts among them.
    return together * sum(device_budget(device, utilization) for device in devices) < least_bytes(question)


def least_bytes(question: Question) -> int:
    """Of the weights, over all GPUs: a split repeats some and saves none."""
    whole, own = _whole_bytes(Same(question.model), weights_as(question, 1)), _own_bytes(question, 1)
    return whole if own is None else min(whole, own)


def check(question: Question, tensor_parallel: int) -> None:
    spec, settings, devices = question.model.spec, question.settings, question.machine.devices
    check_parallel(spec, tensor_parallel, settings.pipeline_parallel, unchecked=question.model.unchecked)
    wanted = tensor_parallel * settings.pipeline_parallel
    if wanted > len(devices):
        raise ConfigurationError(
            f"{tensor_parallel} x {settings.pipeline_parallel} ranks need {wanted} devices",
            code=TOO_FEW_DEVICES,
            needed=f"{wanted} devices",
            found=f"{len(devices)}: {', '.join(device.name for device in devices)}",
            fix=f"--gpu with x{wanted}, or a smaller -tp or -pp",
            field="tensor_parallel_size",
        )
    if settings.max_model_len is not None and settings.max_model_len > spec.max_position:
        raise ConfigurationError(
            f"max_model_len is {settings.max_model_len:,}, but the model's context length is"
            f" {spec.max_position:,} tokens",
            code=CONTEXT_TOO_LONG,
            needed=f"at most {spec.max_position:,}",
            found=f"{settings.max_model_len:,}",
            fix=f"--max-model-len {spec.max_position}, or leave it out",
            field="max_model_len",
        )
