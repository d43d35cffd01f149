"""The words of a server whose experts are over VRAM and RAM: what was decided and why, and what is refused with
numbers. Which experts stay is chosen in `fit.expert_placement`."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.config.parts.offload import OffloadRequest
from holdfast.observability.decisions import Decision
from holdfast.planner.advice.expert_offload import experts_price, other_ways
from holdfast.planner.advice.throughput import shown_rate, throughput
from holdfast.planner.fit.expert_placement import ExpertPlacement
from holdfast.planner.fit.result import Plan
from holdfast.planner.serve import refusals
from holdfast.units import counted, format_bytes

HAND_IS_SHORT = "HF116"


def check_experts(
    placed: ExpertPlacement, asked: OffloadRequest, pinned_bytes: int, host: str, nvme_path: str | None
) -> None:
    """`pinned_bytes`: of RAM, that weights may take; `host`: why so much."""
    if not placed.plan.fits:
        stays = f"{placed.resident_experts:,} of {placed.all_experts:,} experts"
        names = ("n_cpu_moe", "cpu_moe", "override_tensor")
        field = next(name for name in names if asked.flag.startswith(f"--{name.replace('_', '-')}"))
        fix = "fewer experts on the GPU, or --cpu-moe"
        raise too_few_by_hand(placed.plan, asked, stays, {field: None}, fix, field)
    if placed.fits:
        return
    places, name, gpu = placed.places, placed.plan.question.model.name, placed.plan.device.name
    to_disk = nvme_path is None and not asked.experts_by_hand
    raise refusals.PlanRefusal(
        f"{name} does not fit on {gpu}, and RAM does not hold the experts that would wait there: pinned, they would"
        " leave the machine without memory",
        needed=f"{format_bytes(places.pinned_bytes)} of pinned RAM for {sum(places.waiting):,} of"
        f" {placed.all_experts:,} experts",
        found=f"{format_bytes(pinned_bytes)} ({host}): {format_bytes(placed.ram_short_bytes)} short",
        fix="--nvme-path DIR on a fast disk: whole layers are then streamed, those that RAM does not hold from there"
        if to_disk
        else "more RAM, or a quantized model",
        kept="first" if to_disk else None,
        field="nvme_path" if to_disk else "ram",
        code=refusals.RAM_IS_SHORT,
    )


def too_few_by_hand(
    plan: Plan, asked: OffloadRequest, stays: str, change: refusals.SettingsChange, fix: str, field: str
) -> refusals.PlanRefusal:
    """What was asked for leaves more on the GPU than it holds. `stays`: that would."""
    rank = plan.ranks[0]
    needed = ", ".join(f"{term.name} {format_bytes(term.nbytes)}" for term in rank.terms)
    return refusals.PlanRefusal(
        f"{plan.question.model.name} does not fit on {plan.device.name} with {asked.flag}: {stays} would stay there",
        needed=f"{needed}, and {format_bytes(plan.needed_bytes(rank))} for the KV of"
        f" {counted(plan.required_tokens, 'token')}",
        found=f"{format_bytes(rank.budget_bytes)} of budget: {format_bytes(plan.short_bytes)} short",
        changes=(change,),
        fix=fix,
        field=field,
        code=HAND_IS_SHORT,
    )


def expert_decisions(placed: ExpertPlacement, host: str) -> Iterator[Decision]:
    """`host`: the RAM that there is, and why."""
    plan, places = placed.plan, placed.places
    asked = plan.question.settings.offload
    value = f"{placed.resident_experts:,} of {placed.all_experts:,} in VRAM, {format_bytes(sum(places.waiting_bytes))}"
    of_layers = counted(len(places.layers), "layer")
    reason, source = f"the others of {of_layers} wait in RAM; --no-offload refuses instead", "planner"
    if asked.experts_by_hand:
        reason, source = f"{asked.flag}: all experts of {of_layers}", "set"
    yield Decision("expert_places", f"{value} in RAM", reason, source, lowered=True)
    yield Decision("pinned_ram", format_bytes(places.pinned_bytes), f"of {host}", "planner", lowered=True)
    yield cpu_compute_decision(placed)
    rate = throughput(plan)
    if rate is not None:
        shown = [f"{shown_rate(one.estimate.tokens_per_s)} of {one.batch}" for one in rate.batches]
        link = plan.device.gpu.host_link.name if plan.device.gpu is not None else "the link"
        reason = (
            f"tokens/s of so many sequences, if all experts are used alike; steps with many tokens move"
            f" {places.moved_bytes / 1e9:.1f} GB over {link}; one is limited by {rate.one.limited_by}"
        )
        yield Decision("expected_speed", f"about {', '.join(shown)}", reason, "estimate", lowered=True)
    price = None if asked.experts_by_hand else experts_price(placed)
    if price is not None:
        yield Decision("kv_price", price, "what a larger KV cache costs every step", "estimate", lowered=True)
    for way in () if asked.experts_by_hand else other_ways(placed):
        yield Decision("alternative", way, "another way on this machine", "estimate")


def cpu_compute_decision(placed: ExpertPlacement) -> Decision:
    """Whether the host's cores compute experts that wait, and why not."""
    if placed.idle_reason:
        said, asked = f"{placed.idle_reason}: the GPU reads them over the link", placed.plan.question.settings.offload
        return Decision(
            "cpu_compute", "off", said, "planner" if asked.cpu_compute else "set", lowered=asked.cpu_compute
        )
    size = format_bytes(placed.places.host_bytes + placed.exchange_bytes)
    reason = f"{size} of RAM hold all experts of these layers once more, as the cores compute with them"
    return Decision("cpu_compute", "experts, in steps with few tokens", reason, "planner")
