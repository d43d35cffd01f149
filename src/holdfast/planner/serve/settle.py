"""Resizes the KV pool of a plan by what was measured after loading. A context that no longer fits is shortened, or
refused where the user set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.footprint.cpu import BOOK_BYTES, FRAMEWORK_BYTES
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import Plan
from holdfast.planner.serve.refusals import became_short
from holdfast.planner.sizing.kv_cost import largest
from holdfast.units import counted, format_bytes

RUNNING_ALREADY = ("front", "libraries")


def settle_pool(
    plan: Plan, available_bytes: int, measured: Mapping[str, int] | None = None, within_blocks: int | None = None
) -> Plan:
    """The plan with the pool that memory really holds, `available_bytes` being free for it and for what stays free.

    Beside a budget that is a share of what was free at start, the rest stays free. `measured`: bytes by term. What
    these took beyond their plan, all in all, is taken from the pool unless the budget has it to spare; what they did
    not take goes to the pool, up to `most_blocks`. Where one sequence of full length no longer fits, the context
    becomes shorter, or it is refused when its length was set. `within_blocks`: of stages that differ, whose budgets are
    not this plan's alone (see `stage_blocks`), in the place of `measured`.
    """
    engine, limits, terms, found = plan.engine, plan.limits, plan.terms, measured or {}
    page, pool = engine.layout.page_bytes, terms["kv_pool"]
    over = sum(found.values()) - sum(terms.get(name, 0) for name in found)
    unused = max(0, plan.budget_bytes - sum(terms.values()))
    # Books of blocks are in RAM, and no part of a GPU's budget.
    book = BOOK_BYTES if engine.gpu is None else 0
    held_bytes = pool - max(0, over - unused)
    if within_blocks is not None:
        within_budget, held_bytes = min(engine.most_blocks, within_blocks), within_blocks * page
    elif over < 0:
        within_budget = engine.blocks + min(engine.most_blocks - engine.blocks, (unused - over) // (page + book))
    else:
        within_budget = min(engine.blocks, max(0, held_bytes) // page)
    blocks = min(within_budget, max(0, available_bytes - plan.reserve_bytes) // page)
    if blocks == engine.blocks:
        return plan
    length = limits.max_model_len if blocks > engine.blocks else longest_context(plan, blocks)
    if length == 0 or (length < limits.max_model_len and plan.length_is_set):
        needed = (1 + engine.layout.peak_blocks(limits.max_model_len, limits.max_num_batched_tokens)) * page
        held = min(available_bytes - plan.reserve_bytes, held_bytes)
        raise became_short(plan.reserve_bytes, needed, needed - held, available_bytes, max(0, over))
    if within_blocks is not None and blocks == within_budget:
        why = "what is left of the budget of each stage after loading and a step"
    elif blocks > engine.blocks or blocks == within_budget:
        why = f"loading and a step took {format_bytes(abs(over))} {'less' if over < 0 else 'more'} than planned"
    else:
        why = f"{format_bytes(available_bytes)} are free after loading"
    reason = f"{why}; the plan was {counted(engine.blocks, 'block')}"
    settled = f"{format_bytes(blocks * page)} ({counted(blocks, 'block')})"
    decisions = [Decision("kv_pool", settled, reason, "measured", lowered=blocks < engine.blocks)]
    if length < limits.max_model_len:
        said = "the longest sequence that the KV pool holds"
        decisions.append(Decision("max_model_len", f"{length:,}", said, "measured", lowered=True))
    (rank,) = plan.ranks
    if blocks > engine.blocks:
        books = (blocks - engine.blocks) * book
        grown = (replace(one, nbytes=one.nbytes + books) if one.name == "buffers" else one for one in rank.terms)
        rank = replace(rank, terms=tuple(grown))
    return replace(
        plan,
        ranks=(rank,),
        own=replace(engine, blocks=blocks, short=engine.short or blocks < engine.blocks),
        limits=replace(limits, max_model_len=length),
        decisions=(*plan.decisions, *decisions),
    )


def stage_blocks(plan: Plan, stage: int, taken: Mapping[str, int], page_bytes: int) -> int:
    """Of a stage on GPUs that differ: pages that its budget leaves beside what a rank of it took, by term, and what it
    did not measure."""
    share = plan.stage_ranks[stage]
    terms = {**{term.name: term.nbytes for term in share.terms}, **taken}
    return max(0, share.budget_bytes - sum(terms.values())) // page_bytes


def coming_bytes(terms: Mapping[str, int]) -> int:
    """Of terms of the machine that an engine starts on, what is still to come when its process has imported torch and
    has not started its other ranks: these bring a framework each, and its own is part of what is not free."""
    rest = {name: size for name, size in terms.items() if name not in ("framework", *RUNNING_ALREADY)}
    return sum(rest.values()) + max(0, terms.get("framework", 0) - FRAMEWORK_BYTES)


def longest_context(plan: Plan, blocks: int) -> int:
    """The longest context up to the plan's that these pages hold; 0: none."""
    layout, step = plan.engine.layout, plan.limits.max_num_batched_tokens
    return largest(0, plan.limits.max_model_len, lambda length: layout.peak_blocks(length, step) < blocks)


def largest_pool(plan: Plan, total_bytes: int) -> int:
    """Pages that a budget may ever give the pool: more would be of no use, or is not there."""
    layout, limits = plan.engine.layout, plan.limits
    useful = layout.blocks_side_by_side(limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
    return max(plan.engine.most_blocks, min(1 + useful, total_bytes // layout.page_bytes))
