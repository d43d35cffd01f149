"""What fits, decided once and with the reason: from a model, a machine and a config to limits that hold.

Needs headers only, and no torch: it is made before anything is loaded, and what cannot be is refused here. What was
measured after loading is held against it by `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint.cpu import BOOK_BYTES
from holdfast.hardware import Memory, Processor
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.serve import refusals
from holdfast.planner.serve.plan import Plan
from holdfast.planner.sizing import default_limits
from holdfast.planner.sizing.cpu_budget import Pool
from holdfast.planner.sizing.cpu_choices import CpuChoices
from holdfast.planner.sizing.default_limits import length_decision
from holdfast.units import counted, format_bytes


def make_plan(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    config: EngineConfig,
    machine: Memory,
    processor: Processor,
    *,
    compiled_kernels: bool = False,
    front_bytes: int = 0,
) -> Plan:
    """`stored`: the checkpoint's tensors by canonical name; None: dummies. `compiled_kernels`: this installation has
    them, and this CPU can run them. `front_bytes`: of another process that comes out of the same budget."""

    def attempt(tried: EngineConfig) -> Plan:
        default_limits.check_step(tried.max_num_seqs, tried.max_num_batched_tokens)
        decisions: list[Decision] = []
        budget = _budget(tried, machine, decisions)
        measure = CpuChoices(
            spec=spec,
            stored=stored,
            config=tried,
            processor=processor,
            compiled_kernels=compiled_kernels,
            budget_bytes=budget,
            front_bytes=front_bytes,
        )
        return _fill(measure, machine, decisions)

    try:
        return attempt(config)
    except DoesNotFitError as refusal:
        raise refusals.with_remedies(refusal, config, spec, machine, attempt) from None


def _fill(measure: CpuChoices, machine: Memory, decisions: list[Decision]) -> Plan:
    """The longest context that is wanted and fits, and the pool beside it."""
    _check_length(measure.spec, measure.config)
    rung, room, chosen = measure.chosen()
    wanted = room.most
    asked = room.config.kv_cache_memory_bytes
    if 0 < room.loading_bytes - room.budget_bytes == room.short_bytes(room.least):
        raise refusals.loading_does_not_fit(room)
    if asked is not None and asked > room.left(1):
        raise refusals.pool_does_not_fit(room)
    if asked is not None and room.pool(1).blocks < 2:
        raise refusals.pool_holds_no_block(room)
    length = room.longest(wanted)
    if length == 0 or (length < room.least and room.config.max_model_len is None):
        raise refusals.nothing_fits(room)
    if length < room.least:
        raise refusals.length_does_not_fit(room, wanted, length)
    pool, page = room.pool(length), room.layout.page_bytes
    decisions += [*chosen, *_limits_said(measure, rung, length), pool_decision(pool, page)]
    allowed = measure.config.max_model_len or room.spec.max_position
    if length < allowed:
        decisions.append(length_decision(length, allowed, measure.longest_tokens()))
    terms = room.terms(length)
    choices, cores = room.choices, measure.config.threads or measure.processor.cores
    beside = default_limits.prompt_tokens_beside(room.spec.active_parameters, cores, room.config.step_tokens)
    if beside < room.config.step_tokens:
        decisions.append(default_limits.beside_decision(beside, cores))
    return Plan(
        dtype=choices.dtype,
        kv_dtype=choices.kv_dtype,
        expand_weights=choices.expand_weights,
        compiled=choices.compiled,
        compiled_attention=choices.compiled_attention,
        layout=room.layout,
        limits=room.limits(length),
        blocks=pool.blocks,
        most_blocks=max(pool.blocks, room.most_blocks(length)) if pool.cut else pool.blocks,
        memory=machine,
        budget_bytes=room.budget_bytes,
        terms={**terms, "buffers": terms["buffers"] + pool.blocks * BOOK_BYTES, "kv_pool": pool.blocks * page},
        loading_bytes=room.loading_bytes,
        decisions=tuple(decisions),
        length_is_set=room.config.max_model_len is not None,
        budget_is_set=room.config.ram is not None,
        short=length < allowed or rung > 0 or pool.cut,
        prompt_tokens_beside=beside,
    )


def _limits_said(measure: CpuChoices, rung: int, length: int) -> list[Decision]:
    """Only where the defaults were not taken."""
    config = measure.config
    if not rung:
        return []
    return default_limits.decisions(
        measure.rungs,
        rung,
        sequences=None if config.max_num_seqs is not None else ("the default", "default"),
        step_is_set=config.max_num_batched_tokens is not None,
        fits=True,
        beside=default_limits.context_said(length),
    )


def pool_decision(pool: Pool, page: int) -> Decision:
    value = f"{format_bytes(pool.blocks * page)} ({counted(pool.blocks - 1, 'block')} and the null page)"
    return Decision("kv_pool", value, pool.reason, pool.source, lowered=pool.cut)


def _budget(config: EngineConfig, machine: Memory, decisions: list[Decision]) -> int:
    free = f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})"
    if config.ram is not None:
        if config.ram > machine.available_bytes:
            raise refusals.budget_is_not_there(config.ram, machine)
        decisions.append(Decision("budget", format_bytes(config.ram), f"set with ram; {free}", "set"))
        return config.ram
    budget = int(machine.available_bytes * config.gpu_memory_utilization)
    decisions.append(
        Decision("budget", format_bytes(budget), f"{config.gpu_memory_utilization:g} of {free}", "measured")
    )
    return budget


def _check_length(spec: ModelSpec, config: EngineConfig) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigurationError(
            f"max_model_len is {config.max_model_len:,}, but the model's context length is"
            f" {spec.max_position:,} tokens",
            code="HF111",
            needed=f"at most {spec.max_position:,}",
            found=f"{config.max_model_len:,}",
            fix=f"--max-model-len {spec.max_position}, or leave it out",
            field="max_model_len",
        )


def settle_pool(plan: Plan, available_bytes: int, measured: Mapping[str, int] | None = None) -> Plan:
    """The plan with the pool that memory really holds, `available_bytes` being free for it and for what stays free.

    Beside a budget that is a share of what was free at start, the rest stays free. `measured`: bytes by term. What
    these took beyond their plan, all in all, is taken from the pool unless the budget has it to spare; what they did
    not take goes to the pool, up to `most_blocks`. Where one sequence of full length no longer fits, the context
    becomes shorter, or it is refused when its length was set.
    """
    page, found = plan.layout.page_bytes, measured or {}
    over = sum(found.values()) - sum(plan.terms.get(name, 0) for name in found)
    if over < 0:
        within_budget = plan.blocks + min(plan.most_blocks - plan.blocks, (_unused(plan) - over) // _block_bytes(plan))
    else:
        within_budget = min(plan.blocks, max(0, plan.terms["kv_pool"] - max(0, over - _unused(plan))) // page)
    blocks = min(within_budget, max(0, available_bytes - plan.reserve_bytes) // page)
    if blocks == plan.blocks:
        return plan
    if blocks > plan.blocks:
        return _grown(plan, blocks, -over)
    length = longest_context(plan, blocks)
    if length == 0 or (length < plan.limits.max_model_len and plan.length_is_set):
        needed = (1 + plan.layout.peak_blocks(plan.limits.max_model_len, plan.limits.max_num_batched_tokens)) * page
        held = min(available_bytes - plan.reserve_bytes, plan.terms["kv_pool"] - max(0, over - _unused(plan)))
        raise refusals.became_short(plan.reserve_bytes, needed, needed - held, available_bytes, max(0, over))
    planned = counted(plan.blocks, "block")
    reason = f"{format_bytes(available_bytes)} are free after loading; the plan was {planned}"
    if within_budget == blocks:
        reason = f"loading and a step took {format_bytes(over)} more than planned; the plan was {planned}"
    settled = f"{format_bytes(blocks * page)} ({counted(blocks, 'block')})"
    decisions = [Decision("kv_pool", settled, reason, "measured", lowered=True)]
    if length < plan.limits.max_model_len:
        decisions.append(
            Decision("max_model_len", f"{length:,}", "the longest sequence that the KV pool holds", "measured", True)
        )
    return replace(
        plan,
        blocks=blocks,
        limits=replace(plan.limits, max_model_len=length),
        terms={**plan.terms, "kv_pool": blocks * page},
        decisions=(*plan.decisions, *decisions),
        short=True,
    )


def _block_bytes(plan: Plan) -> int:
    """Of the budget, for one more block: its books are in RAM, and no part of a GPU's budget."""
    return plan.layout.page_bytes + (BOOK_BYTES if plan.gpu is None else 0)


def _grown(plan: Plan, blocks: int, under: int) -> Plan:
    page, more = plan.layout.page_bytes, blocks - plan.blocks
    planned = counted(plan.blocks, "block")
    reason = f"loading and a step took {format_bytes(under)} less than planned; the plan was {planned}"
    said = Decision("kv_pool", f"{format_bytes(blocks * page)} ({counted(blocks, 'block')})", reason, "measured")
    books = more * (_block_bytes(plan) - page)
    terms = {**plan.terms, "kv_pool": blocks * page, "buffers": plan.terms.get("buffers", 0) + books}
    return replace(plan, blocks=blocks, terms=terms, decisions=(*plan.decisions, said))


def longest_context(plan: Plan, blocks: int) -> int:
    """The longest context up to the plan's that these pages hold; 0: none."""
    low, high = 0, plan.limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if plan.layout.peak_blocks(middle, plan.limits.max_num_batched_tokens) < blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _unused(plan: Plan) -> int:
    """Of the budget."""
    return max(0, plan.budget_bytes - sum(plan.terms.values()))
