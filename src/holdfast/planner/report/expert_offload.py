"""Of an answer, a mixture of experts that does not fit on its GPU: which experts live where, who computes them, how
fast that is and what other ways reach. Works out nothing that the placement does not say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.planner.advice.expert_offload import other_ways
from holdfast.planner.fit.expert_placement import ExpertPlacement
from holdfast.planner.fit.placement import Placement, pinned_room
from holdfast.planner.sizing.host_cores import ASSUMED, host_gb_s
from holdfast.units import counted, format_bytes


def ram_needed(placed: Placement | ExpertPlacement) -> str:
    """Of a machine, or of the budget that was set for the whole server."""
    machine, needed = placed.plan.question.machine, format_bytes(placed.free_ram_bytes)
    if machine.pinned_bytes is None or machine.ram_bytes is None:
        return f"{needed} must be free with the server's own processes"
    return f"with the server's own processes {needed}, of {format_bytes(machine.ram_bytes)} (--ram)"


def what_is_where(placed: ExpertPlacement) -> str:
    waiting = sum(placed.places.waiting)
    by = ", computed by the CPU or copied" if placed.places.host_sizes else ", read or copied over the link"
    return f"{waiting:,} of {placed.all_experts:,} experts in RAM{by}"


def expert_tier_lines(placed: ExpertPlacement) -> Iterator[str]:
    plan, places, rank = placed.plan, placed.places, placed.plan.ranks[0]
    terms = {term.name: format_bytes(term.nbytes) for term in rank.terms}
    others = sum(term.nbytes for term in rank.terms if term.name not in ("weights", "expert_slots"))
    yield (
        f"VRAM  all that is of no expert and {placed.resident_experts:,} of {placed.all_experts:,} experts,"
        f" {terms['weights']}; {counted(places.slots_used, 'slot')}, {terms['expert_slots']}; KV"
        f" {format_bytes(rank.pool_bytes)}, a context of {plan.limits.max_model_len:,}; the rest {format_bytes(others)}"
    )
    room = pinned_room(plan.question)
    limit = "" if room is None else f", of {format_bytes(room)} that weights may take"
    host = "" if not places.host_sizes else f", and {format_bytes(places.host_bytes)} of all experts for the CPU"
    yield (
        f"RAM   {sum(places.waiting):,} experts of {counted(len(places.layers), 'layer')},"
        f" {format_bytes(places.pinned_bytes)} pinned{host}{limit}; {ram_needed(placed)}"
    )
    yield _computing(placed)
    gpu = plan.device.gpu
    link = "the link to the host" if gpu is None else f"{gpu.host_link.name}, {gpu.host_link.gb_s:g} GB/s stated"
    yield f"steps with many tokens, of prompts or of many sequences, move {places.moved_bytes / 1e9:.1f} GB over {link}"


def _computing(placed: ExpertPlacement) -> str:
    if placed.idle_reason:
        return f"steps with few tokens read experts over the link, as {placed.idle_reason}"
    host = placed.plan.question.machine.host
    known = "" if host is not None else " (assumed)"
    return (
        f"steps with few tokens have the CPU compute what waits: {(host or ASSUMED).cores} cores{known} that read"
        f" {host_gb_s(host):.0f} GB/s (assumed); calibrated at start"
    )


def other_way_lines(placed: ExpertPlacement) -> Iterator[str]:
    yield from (f"instead: {way}" for way in other_ways(placed))


def expert_document(placed: ExpertPlacement) -> dict[str, Any]:
    places, host = placed.places, placed.plan.question.machine.host
    return {
        "layers": list(places.layers),
        "experts_per_layer": places.experts,
        "resident": list(places.resident),
        "resident_experts": placed.resident_experts,
        "all_experts": placed.all_experts,
        "expert_bytes": list(places.sizes),
        "waiting_bytes": sum(places.waiting_bytes),
        "slots": places.slots_used,
        "slot_bytes": places.slot_bytes,
        "cpu_computes": bool(places.host_sizes),
        "cpu_idle_reason": placed.idle_reason or None,
        "cpu_bytes": places.host_bytes,
        "cpu_gb_s_assumed": host_gb_s(host),
        "exchange_bytes": placed.exchange_bytes,
        "other_ways": list(other_ways(placed)),
    }
