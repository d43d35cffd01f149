"""What is said of a plan before anything is loaded: the budget, the weights, every term, who else holds memory."""

from __future__ import annotations

import logging

from holdfast.hardware import memory_holders
from holdfast.observability.decisions import Decision
from holdfast.observability.ledger import term_lines
from holdfast.planner import Plan
from holdfast.planner.sizing.kv_cost import layout_cost
from holdfast.planner.sizing.rank_shares import part_words
from holdfast.records import MemoryTerm
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")


def log_plan(model: str, plan: Plan) -> None:
    """What people see before anything is loaded; its terms with verbose logging only."""
    log.info("%s", plan_line(model, plan))
    log.info("%s", weights_line(plan))
    for line in plan_details(plan):
        log.debug("%s", line)
    warn_if_short(plan)


def plan_line(model: str, plan: Plan) -> str:
    budget, planned = _budget(plan), format_bytes(sum(plan.terms.values()))
    return f"Memory plan for {model}: {planned} of a budget of {budget.value}: {budget.reason}"


def weights_line(plan: Plan) -> str:
    """How the weights are stored, and what they take."""
    how = ", expanded" if plan.engine.expand_weights and plan.engine.weights_format != plan.dtype else ""
    return f"weights: {plan.engine.weights_format}{how}, {format_bytes(plan.terms['weights'])}"


def plan_details(plan: Plan) -> list[str]:
    """Where the budget goes, term by term, and the limits."""
    limits, spec = plan.limits, plan.question.model.spec
    ranks = [
        f"  rank {rank}: {part_words(spec, nbytes, *plan.engine.part_of(rank))}"
        for rank, nbytes in enumerate(plan.engine.rank_weights)
    ]
    return [
        *term_lines(planned_terms(plan), plan.budget_bytes),
        *ranks,
        f"  limits: context {limits.max_model_len:,} tokens, {limits.max_num_seqs} sequences, "
        f"{limits.max_num_batched_tokens:,} tokens per step; "
        f"maximum concurrency at full context: {concurrency(plan):.1f}x",
    ]


def warn_if_short(plan: Plan) -> None:
    pool_is_set = any(decision.field == "kv_pool" and decision.source == "set" for decision in plan.decisions)
    if plan.engine.short and _budget(plan).source == "measured" and not pool_is_set and (holders := memory_holders()):
        log.warning("memory is short; others hold: %s", ", ".join(holders))


def planned_terms(plan: Plan) -> list[MemoryTerm]:
    tier = "ram" if plan.engine.gpu is None else "vram"
    return [MemoryTerm(tier=tier, term=name, planned_bytes=size) for name, size in plan.terms.items()]


def concurrency(plan: Plan, blocks: int | None = None) -> float:
    """Sequences of full length that the pool holds. `blocks`: its pages where they are not as planned."""
    layout, limits = plan.engine.layout, plan.limits
    cost = layout_cost(layout, limits.max_num_batched_tokens)
    pages = plan.engine.blocks if blocks is None else blocks
    return cost.concurrency((pages - 1) * layout.page_bytes, limits.max_model_len)


def _budget(plan: Plan) -> Decision:
    return next(decision for decision in plan.decisions if decision.field == "budget")
