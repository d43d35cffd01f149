"""What is said of a plan before anything is loaded: the budget, the weights, every term, who else holds memory. And
what is said after it: the plan beside what ranks have measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from holdfast.engine.ranks.messages import Measured
from holdfast.hardware import memory_holders
from holdfast.observability.decisions import Decision
from holdfast.observability.ledger import term_lines
from holdfast.planner import Plan
from holdfast.planner.serve.shares.nodes import node_loading, node_terms, page_bytes
from holdfast.planner.sizing.kv_cost import layout_cost
from holdfast.planner.sizing.rank_shares import part_words
from holdfast.records import LowerTier, MemoryReport, MemoryTerm
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


def memory_report(
    plan: Plan, settled: Plan, ranks: Sequence[Measured], measured: Mapping[str, int], below: list[LowerTier]
) -> MemoryReport:
    """The books of this machine: of several nodes those of the head, whose processes can be measured. `measured`: of
    all ranks."""
    nodes, planned, loading = plan.question.settings.nodes, plan.terms, plan.loading_bytes
    page, limited_by = plan.engine.layout.page_bytes, plan.device.limited_by
    if nodes > 1:
        ranks = ranks[: len(ranks) // nodes]
        measured = {name: sum(rank.terms.get(name, 0) for rank in ranks) for name in measured}
        measured["libraries"] = max(rank.terms["libraries"] for rank in ranks)
        page, loading = page_bytes(plan, 0, nodes), sum(node_loading(plan, 0, nodes).values())
        planned = node_terms(plan, 0, nodes) | {"kv_pool": plan.engine.blocks * page}
        limited_by = f"{limited_by.partition(';')[0]}; node 0 of {nodes}, this one"
    return MemoryReport(
        total_bytes=plan.device.total_bytes // nodes,
        free_bytes=plan.device.free_bytes // nodes,
        limited_by=limited_by,
        budget_bytes=plan.budget_bytes // nodes,
        terms=[
            MemoryTerm(
                tier=term.tier,
                term=term.term,
                planned_bytes=planned.get(term.term, 0),
                measured_bytes=measured.get(term.term),
            )
            for term in planned_terms(settled)
        ],
        page_bytes=page,
        given_back_bytes=sum(rank.given_back_bytes for rank in ranks),
        loading_bytes=loading,
        loading_peak_bytes=sum(rank.peak_bytes for rank in ranks),
        below=below,
    )
