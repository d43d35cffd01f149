"""The plan that a server on GPUs starts with: which GPU, and limits that fit on it; of several ranks, on that of each.
Same arithmetic as `holdfast plan`.

No torch and no CUDA context: free memory comes from the driver library. `settle_pool` corrects it after loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from holdfast import hardware
from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import CheckpointError, ConfigurationError
from holdfast.footprint.cpu import expands, kv_layout, weights_bytes
from holdfast.footprint.gpu import LEAST_CAPABILITY
from holdfast.footprint.identity_key import Same
from holdfast.hardware import Memory, Processor
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.fit.count import experts_on_gpu, streamed_on_gpu
from holdfast.planner.fit.cpu import Pool
from holdfast.planner.fit.expert_placement import wants_offload
from holdfast.planner.fit.placement import may_stream
from holdfast.planner.fit.result import EngineChoices, Plan, Rank, describe_budget
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.machine import measured_device
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS, Device, Machine, PlannedModel, Question, settings_of
from holdfast.planner.models.requested import requested
from holdfast.planner.serve import refusals
from holdfast.planner.serve.cpu_plan import planned_model, without_tensors
from holdfast.planner.serve.offload import alternative, host_share, with_offload
from holdfast.planner.serve.ranks import expert_parallel_said, refuse_with_ranks
from holdfast.planner.serve.refused_settings import check_of_a_gpu, require_together
from holdfast.planner.serve.settle import longest_context
from holdfast.planner.serve.shares.engines import ram_share
from holdfast.planner.serve.shares.gpu_ranks import (
    choice_of,
    gpus_of_nodes,
    of_node,
    rank_decision,
    stage_devices,
    tightest,
)
from holdfast.planner.sizing.default_limits import check_step
from holdfast.planner.sizing.dtype import is_fp8
from holdfast.planner.sizing.engine_weights import EngineWeights, engine_weights
from holdfast.planner.sizing.rank_shares import RankShares, gpu_rank_shares
from holdfast.units import MIB, counted, format_bytes

TOO_OLD, NOT_THERE, MIXED_KV = "HF122", "HF121", "HF126"


def too_old(gpus: Sequence[NvidiaGpu]) -> ConfigurationError:
    newest = max(gpus, key=lambda gpu: gpu.capability or (0, 0))
    major, minor = newest.capability or (0, 0)
    return ConfigurationError(
        f"{newest.name} is too old for the GPU kernels",
        code=TOO_OLD,
        needed=f"compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (RTX 30, A100 or later)",
        found=f"{major}.{minor}",
        fix="--device cpu",
        field="device",
    )


def choose_gpu(gpus: Sequence[NvidiaGpu]) -> tuple[NvidiaGpu, Decision]:
    """The one with most memory free, the first of equals; why, for people to read."""
    if not gpus:
        raise ConfigurationError(
            "a GPU was planned for, but the driver shows none",
            code=NOT_THERE,
            needed="an NVIDIA GPU",
            found="none",
            fix="--device cpu; or check nvidia-smi and CUDA_VISIBLE_DEVICES",
            field="device",
        )
    able = [gpu for gpu in gpus if gpu.capability is None or gpu.capability >= LEAST_CAPABILITY]
    if not able:
        raise too_old(gpus)
    chosen = max(able, key=lambda gpu: gpu.free_bytes)
    reason = f"{format_bytes(chosen.free_bytes)} of {format_bytes(chosen.total_bytes)} free"
    if chosen.engines > 1:
        reason += f", which is its part: {chosen.engines} engines of this server divide this GPU"
    if len(gpus) > 1:
        reason += f", the most of {len(gpus)} GPUs; CUDA_VISIBLE_DEVICES={chosen.uuid} selects it explicitly"
    return chosen, Decision("device", f"GPU {chosen.index}, {chosen.name}", reason, "measured")


def make_gpu_plan(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    config: EngineConfig,
    gpus: Sequence[NvidiaGpu],
    *,
    name: str = "the model",
    gguf: bool = False,
    host: Memory | None = None,
    front_bytes: int = 0,
    processor: Processor | None = None,
    compiled_kernels: bool = True,
    of_ranks: bool = False,
) -> Plan:
    """`stored`: the checkpoint's tensors by canonical name; None: dummies. `gguf`: they are of a GGUF file. `host`: RAM
    that layers may wait in which the GPU does not hold, less `front_bytes` of the process in front of the engine's;
    None: none. `processor`: of the host (None: this one), which may compute what waits there where it has
    `compiled_kernels`. `of_ranks`: `gpus` are those of all ranks, in their order, on however many nodes."""
    refuse_with_ranks(config, spec, stored, compiled_kernels=compiled_kernels)
    model_made = planned_model(spec, stored, name)
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if ranks > 1:  # Of several engines each is given its own already.
        if not of_ranks and config.data_parallel_size == 1:
            gpus = gpus_of_nodes(gpus, ranks, config.nnodes)
        require_together(config, spec, gpus)
        host = None

    def attempt(tried: EngineConfig) -> Plan:
        wanted = requested(tried.asked_quantization, spec.quantization, gguf=gguf, name=name)
        found = _gpu_plan(model_made(wanted.made), wanted.decisions, tried, gpus, front_bytes)
        by_hand = host is not None and wants_offload(found.question)
        if host is not None and (by_hand or (not found.fits and may_stream(found.question))):
            there = hardware.processor() if processor is None else processor
            own = replace(tried, ram=ram_share(tried))
            share = host_share(host, own, found, front_bytes, processor=there, computes=compiled_kernels)
            found = with_offload(found, tried, share)
        if not found.fits:
            raise _refusal(found, tried.nnodes)
        chosen, decision = (gpus[0], _ranks_decision(gpus, tried)) if ranks > 1 else choose_gpu(gpus)
        found = _with_pool(found, tried, chosen, decision)
        return without_tensors(_with_ranks(found, tried, gpus) if ranks > 1 else found)

    try:
        found = attempt(config)
        asked = found.question.settings.offload
        if not found.question.settings.offloads or asked.by_hand or asked.experts_by_hand:
            return found
        return replace(found, decisions=(*found.decisions, *alternative(config, attempt)))
    except refusals.PlanRefusal as refusal:
        candidates = refusals.gpu_candidates
        raise refusals.with_remedies(refusal, config, spec.max_position, attempt, candidates) from None


def _gpu_plan(
    model: PlannedModel,
    decisions: tuple[Decision, ...],
    config: EngineConfig,
    gpus: Sequence[NvidiaGpu],
    front_bytes: int,
) -> Plan:
    """Which may not fit."""
    spec = model.spec
    check_step(config.max_num_seqs, config.max_num_batched_tokens)
    check_of_a_gpu(config, spec)
    chosen, _ = choose_gpu(gpus)
    device, where = measured_device(0, chosen), ""
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        rank, device = tightest(gpus, config.gpu_memory_utilization)
        chosen = replace(gpus[rank], free_bytes=device.free_bytes)
        where = of_node(rank, len(gpus), config.nnodes)
    _check_layouts(model, chosen)
    device = replace(device, budget_bytes=config.vram, limited_by=f"GPU {chosen.index}{where}")
    of_stages = _stage_devices(gpus, config)
    if config.vram is not None and config.vram > chosen.free_bytes:
        raise refusals.PlanRefusal(
            f"a budget of {format_bytes(config.vram)} was requested, but less is free on {chosen.name}{where}",
            needed=format_bytes(config.vram),
            found=f"{format_bytes(chosen.free_bytes)}"
            + (f"; others hold: {', '.join(device.held_by)}" if device.held_by else ""),
            changes=({"vram": f"{chosen.free_bytes // MIB}MiB"}, {"vram": None}),
            field="vram",
        )
    question = Question(
        model=model,
        machine=Machine(devices=of_stages[:1] or (device,), stage_devices=of_stages),
        settings=settings_of(
            config,
            graphs=not config.enforce_eager,
            max_loras=config.lora_places,
            max_lora_rank=config.lora_rank,
            ranks=config.tensor_parallel_size,
            stages=config.pipeline_parallel_size,
            nodes=config.nnodes,
            expert_parallel=config.enable_expert_parallel and config.tensor_parallel_size > 1,
            expert_placement=config.expert_placement_strategy,
            front_bytes=front_bytes,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        ),
        decisions=(*decisions, *expert_parallel_said(config)),
    )
    found = fit(question)
    if found.kv_dtype != found.dtype and not is_fp8(found.kv_dtype):
        raise ConfigurationError(
            f"on a GPU the KV cache is kept in dtype, {found.dtype}, or in fp8",
            code=MIXED_KV,
            needed=f"kv_cache_dtype {found.dtype}, fp8 or fp8_e5m2",
            found=f"kv_cache_dtype {found.kv_dtype}",
            fix=f"leave --kv-cache-dtype out, or --kv-cache-dtype fp8, or --dtype {found.kv_dtype}",
            field="kv_cache_dtype",
        )
    return found


def _stage_devices(gpus: Sequence[NvidiaGpu], config: EngineConfig) -> tuple[Device, ...]:
    """Of each stage the GPU with the least room; empty: one budget holds for all."""
    if config.pipeline_parallel_size == 1 or config.vram is not None:
        return ()
    found = stage_devices(gpus, config.pipeline_parallel_size, config.gpu_memory_utilization)
    return tuple(
        replace(device, limited_by=f"GPU {gpus[rank].index}{of_node(rank, len(gpus), config.nnodes)}")
        for rank, device in found
    )


def _check_layouts(model: PlannedModel, gpu: NvidiaGpu) -> None:
    """Before anything is loaded: that there are kernels for how the weights are quantized."""
    weights = engine_weights(Same(model))
    lacking = [] if weights is None else list(weights.missing_kernels(gpu.capability or LEAST_CAPABILITY))
    if lacking:
        raise CheckpointError(
            "the GPU kernels do not multiply weights that are quantized like these",
            needed="another quantization of this model, such as AWQ, FP8 per row or in blocks of 128 x 128, or GGUF",
            found="; ".join(lacking[:2]),
            fix="use such a checkpoint, or --device cpu",
            field="quantization_config",
        )


def _with_pool(found: Plan, config: EngineConfig, chosen: NvidiaGpu, decision: Decision) -> Plan:
    rank, limits, spec = found.ranks[0], found.limits, found.question.model.spec
    weights = engine_weights(Same(found.question.model))
    assert weights is not None, "a server plans what it has matched"
    layout = kv_layout(spec, block_tokens=config.block_size, kv_dtype=found.kv_dtype)
    pages = [layout.page_bytes]
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        shares = _shares(weights, config, found)
        stages: list[int | None] = [*range(len(found.stage_ranks))] or [None]
        # Of stages that differ rank 0's is shown; the others have as many pages, of their own layers.
        each = [shares.gpu_kv_layout(one, block_tokens=config.block_size, kv_dtype=found.kv_dtype) for one in stages]
        layout, pages = each[0], [one.page_bytes for one in each]
    page, pool_bytes = layout.page_bytes, config.kv_cache_memory_bytes
    blocks = rank.pool_bytes // page
    if pool_bytes is not None:
        blocks = _blocks_set(found, pool_bytes, blocks, pages)
    useful = 1 + layout.blocks_side_by_side(limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
    blocks = min(blocks, useful)
    # What is set stays; what is left of the budget may turn out to be more.
    most = blocks if pool_bytes is not None else min(useful, rank.budget_bytes // page)
    why = "what is left of the budget"
    if found.stage_ranks and blocks < useful and pool_bytes is None:
        least = _fewest(found, pages)
        why = f"{why} of stage {least.stage}, on {least.device.limited_by}, which holds the fewest blocks"
    decisions = [
        Decision("budget", format_bytes(rank.budget_bytes), describe_budget(rank, found.utilization), "measured"),
        decision,
        *found.decisions,
        Pool(blocks, why, "planner").decision(page),
    ]
    decisions += _weights_decisions(weights, found, chosen)
    plan = replace(
        found,
        decisions=tuple(decisions),
        own=EngineChoices(
            layout=layout,
            blocks=blocks,
            most_blocks=max(blocks, most),
            expand_weights=False,
            quantize=weights.quantize,
            streamed=streamed_on_gpu(found.question),
            expert_places=experts_on_gpu(found.question),
            weights_format=weights.format or found.dtype,
            short=limits.max_model_len < spec.max_position and config.max_model_len is None,
            gpu=choice_of(chosen),
        ),
    )
    return plan if pool_bytes is None else _within_pool(plan, max(pages))


def _ranks_decision(gpus: Sequence[NvidiaGpu], config: EngineConfig) -> Decision:
    rank, _ = tightest(gpus, config.gpu_memory_utilization)
    return rank_decision(gpus, rank, config.nnodes)


def _shares(weights: EngineWeights, config: EngineConfig, found: Plan) -> RankShares:
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    placement = config.expert_placement_strategy if config.enable_expert_parallel else None
    return gpu_rank_shares(Same(weights), *sizes, placement, dtype=found.dtype, ends=found.stage_ends)


def _with_ranks(found: Plan, config: EngineConfig, gpus: Sequence[NvidiaGpu]) -> Plan:
    """What each of several ranks has of the model, and on which GPU."""
    weights = engine_weights(Same(found.question.model))
    assert weights is not None, "a server plans what it has matched"
    shares = _shares(weights, config, found)
    held = shares.rank_weights(dtype=found.dtype)
    choices = map(choice_of, gpus)
    return replace(
        found,
        tensor_parallel=config.tensor_parallel_size,
        pipeline_parallel=config.pipeline_parallel_size,
        decisions=(*found.decisions, *shares.decisions(held)),
        own=replace(
            found.engine,
            shards=shares.shards,
            stages=shares.stages,
            rank_weights=held,
            slot_bytes=shares.gpu_slot_bytes(found.limits, dtype=found.dtype),
            stream_bytes=shares.stream_bytes(found.limits, dtype=found.dtype),
            answer_bytes=shares.gpu_answer_bytes(found.limits, dtype=found.dtype),
            rank_gpus=tuple(choices),
        ),
    )


def _weights_decisions(weights: EngineWeights, found: Plan, chosen: NvidiaGpu) -> Iterator[Decision]:
    """How quantized weights are multiplied on this GPU, and why."""
    if weights.in_blocks and weights.stored is not None:
        budget = found.ranks[0].budget_bytes
        expanded = weights_bytes(weights.spec, weights.stored, dtype=found.dtype, expand=True)
        _, reason = expands(found.weights_bytes, expanded, dtype=found.dtype, fast_blocks=True, budget_bytes=budget)
        yield Decision("weights", "quantized", reason, "planner")
    elif weights.quantized:
        size = format_bytes(found.weights_bytes)
        reason = "kept as codes with their scales, which kernels read: fewer bytes for each token"
        yield Decision("weights", f"{weights.format}, {size}", reason, "model")
    if chosen.capability is not None and found.device.gpu is None:  # Of a GPU that is known, the plan says it.
        yield from weights.products(chosen.capability, chosen.name)


def _blocks_set(found: Plan, pool_bytes: int, most: int, pages: Sequence[int]) -> int:
    """Of a pool of so many bytes on each GPU: the stage with the largest pages has the fewest, and no pool has more.
    `most`: what budgets leave; `pages`: bytes of one, of each stage that differs."""
    page = max(pages)
    blocks = pool_bytes // page
    if blocks <= most:
        return blocks
    where = ""
    if found.stage_ranks:
        least = _fewest(found, pages)
        page, where = pages[least.stage], f" of stage {least.stage}, on {least.device.limited_by}"
    raise refusals.PlanRefusal(
        "the requested KV pool does not fit",
        needed=format_bytes(blocks * page),
        found=f"{format_bytes(most * page)} left of the budget{where}",
        changes=({"kv_cache_memory_bytes": f"{most * max(pages) // MIB}MiB"}, {"kv_cache_memory_bytes": None}),
        field="kv_cache_memory_bytes",
    )


def _fewest(found: Plan, pages: Sequence[int]) -> Rank:
    """Of stages that differ the one that has room for the fewest pages."""
    return min(found.stage_ranks, key=lambda one: one.left_bytes // pages[one.stage])


def _within_pool(plan: Plan, page: int) -> Plan:
    """Of a pool that was set: with the longest context that it holds, or refused where the context was set as well.
    `page`: bytes of the largest of any stage's."""
    engine, limits = plan.engine, plan.limits
    wanted, held = limits.max_model_len, longest_context(plan, engine.blocks)
    if held == wanted:
        return plan
    pool = engine.blocks * page
    enough = (1 + engine.layout.peak_blocks(wanted, limits.max_num_batched_tokens)) * page
    if plan.length_is_set or held < min(CPU_USEFUL_TOKENS, wanted):
        changes: list[refusals.SettingsChange] = [{"max_model_len": held}] if held >= CPU_USEFUL_TOKENS else []
        changes += [{"kv_cache_memory_bytes": f"{-(-enough // MIB)}MiB"}, {"kv_cache_memory_bytes": None}]
        raise refusals.PlanRefusal(
            f"one sequence of {counted(wanted, 'token')} does not fit in the KV pool",
            needed=f"{format_bytes(enough)} for max_model_len {wanted:,}",
            found=f"{format_bytes(pool)}, as set: {format_bytes(enough - pool)} short",
            changes=changes,
            field="max_model_len",
        )
    reason = "the longest sequence that the KV pool, as set, holds"
    decision = Decision("max_model_len", f"{held:,}", reason, "planner", lowered=True)
    return replace(
        plan,
        limits=replace(limits, max_model_len=held),
        decisions=(*plan.decisions, decision),
        own=replace(engine, short=True),
    )


def _refusal(found: Plan, nodes: int) -> refusals.PlanRefusal:
    rank = found.ranks[0]
    needed = ", ".join(f"{term.name} {format_bytes(term.nbytes)}" for term in rank.terms)
    kv = found.needed_bytes(rank)
    others = f"; others hold: {', '.join(rank.device.held_by)}" if rank.device.held_by else ""
    where = f" ({rank.device.limited_by})" if nodes > 1 else ""
    if found.stage_ranks:
        where = f" ({rank.device.limited_by}, stage {rank.stage})"
    return refusals.PlanRefusal(
        f"{found.question.model.name} does not fit on {rank.device.name}{where}",
        needed=f"{needed}, and {format_bytes(kv)} for the KV of {counted(found.required_tokens, 'token')}",
        found=f"{format_bytes(rank.budget_bytes)} of budget ({describe_budget(rank, found.utilization)}): "
        f"{format_bytes(found.short_bytes)} short{others}",
        changes=_remedies(found),
        fix=f"holdfast plan {found.question.model.name} shows other remedies",
        field="max_model_len",
    )


def _remedies(found: Plan) -> Iterator[refusals.SettingsChange]:
    """Searched only when they are asked for: most refusals are those of candidates."""
    ways = (way for way in ways_out(found) if way.kind in ("utilization", "context", "sequences"))
    yield from (way.settings for way in islice(ways, refusals.MOST_REMEDIES))
