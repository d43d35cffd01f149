"""Of experts over VRAM and RAM: what a larger KV cache would cost, and how fast other ways of placing it are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.planner.advice.offload import Tiers
from holdfast.planner.advice.throughput import shown_rate, throughput
from holdfast.planner.fit.expert_placement import ExpertPlacement
from holdfast.planner.fit.placement import STREAMED_TOKENS, place
from holdfast.planner.fit.result import Plan
from holdfast.units import counted, format_bytes


def expert_tiers(placed: ExpertPlacement) -> Tiers:
    plan, rank, rate = placed.plan, placed.plan.ranks[0], throughput(placed.plan)
    layers = len(plan.question.model.spec.layers)
    return Tiers(
        layers=layers,
        resident_layers=layers,
        gpu_bytes=sum(term.nbytes for term in rank.terms) + rank.pool_bytes,
        ram_bytes=placed.ram_bytes,
        nvme_bytes=0,
        moved_bytes=placed.places.moved_bytes,
        batch=1 if rate is None else rate.largest.batch,
        one=None if rate is None else rate.one.estimate,
        at_batch=None if rate is None or rate.largest.batch == 1 else rate.largest.estimate,
    )


def experts_price(placed: ExpertPlacement) -> str | None:
    """What as much KV again as the default would cost, for people; None: no expert is left that could make room."""
    plan, places = placed.plan, placed.places
    tokens = min(STREAMED_TOKENS, plan.question.model.spec.max_position)
    more = -(-plan.ranks[0].kv.needed_bytes(1, tokens) // max(places.sizes))
    if more > placed.resident_experts:
        return None
    share = more / sum(places.waiting)
    return (
        f"{counted(tokens, 'token')} more of KV: {counted(more, 'more expert')} in RAM, {share:.0%} more to"
        " compute there or to move"
    )


def other_ways(placed: ExpertPlacement) -> Iterator[str]:
    """What else could be done with the same model on the same machine, and how fast one sequence is then."""
    plan = placed.plan
    settings = replace(plan.question.settings, experts_wait=False, resident_experts=None, host_experts=False)
    layers = place(replace(plan.question, settings=settings))
    if layers is not None and layers.fits and (rate := _one(layers.plan)) is not None:
        yield f"{len(layers.streamed.layers)} whole layers streamed: about {rate} tokens/s of one sequence"
    if placed.places.host_sizes:
        rate, less = _one(_with_host(plan, False)), placed.ram_bytes - placed.places.pinned_bytes
        if rate is not None:
            yield f"--cpu-compute off: about {rate} tokens/s of one sequence, for {format_bytes(less)} less of RAM"
    elif placed.fits and placed.copy_short_bytes and (rate := _one(_with_host(plan, True))) is not None:
        more = format_bytes(placed.copy_short_bytes)
        yield f"{more} more of RAM: the CPU computes experts that wait, about {rate} tokens/s of one sequence"


def _with_host(plan: Plan, computes: bool) -> Plan:
    settings = replace(plan.question.settings, host_experts=computes)
    return replace(plan, question=replace(plan.question, settings=settings), own=None)


def _one(plan: Plan) -> str | None:
    rate = throughput(plan)
    return None if rate is None else shown_rate(rate.one.estimate.tokens_per_s)
