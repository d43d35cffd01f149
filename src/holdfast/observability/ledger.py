"""The memory ledger: what was planned beside what is measured, term by term, and what nobody has accounted for.

Owns the sums, the JSON of /memory and the table for people. It is told what processes hold; it reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.records import (
    EngineInfo,
    EngineMemory,
    EngineStats,
    ExpertUse,
    KVStoreUse,
    KVTierUse,
    LinkUse,
    LowerTier,
    MemoryReport,
    MemoryTerm,
    RankMemory,
)
from holdfast.units import counted, format_bytes

VERSION = 1
"""Of the JSON. Names are added under the same version; one that changes its meaning or goes makes a new one."""

GIVEN_BACK, UNACCOUNTED = "given_back", "unaccounted"
"""Terms that are not planned. Activations, logits and scratch are given as the profile run saw them at their peak: what
is not held between steps is subtracted again, so that the sum of all is what the processes hold."""
BAR_WIDTH = 24
_BELOW_ZERO = {
    GIVEN_BACK: "(expected: held only during a step, so subtracted here)",
    UNACCOUNTED: "(expected: less is held now than when the terms were measured)",
}
"""Stands beside the figure, which would read like a fault without it."""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    resident_bytes: int
    peak_bytes: int
    files_bytes: int = 0
    """Of what is resident, pages of files."""


class TierMemory(msgspec.Struct, frozen=True, kw_only=True):
    tier: str
    total_bytes: int
    free_bytes: int
    """Before anything was loaded."""
    limited_by: str
    budget_bytes: int
    planned_bytes: int
    measured_bytes: int
    """What the processes hold now."""


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: int
    blocks: int
    blocks_touched: int
    blocks_used: int


class LoadingMemory(msgspec.Struct, frozen=True, kw_only=True):
    planned_bytes: int
    peak_bytes: int


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Its fields are the JSON of /memory, in this order."""

    version: int = VERSION
    model: str
    tiers: list[TierMemory]
    terms: list[MemoryTerm]
    processes: list[ProcessMemory]
    kv: KVMemory
    loading: LoadingMemory
    decisions: list[str]
    links: list[LinkUse] = []
    """Over which layers come that do not stay where they are computed."""
    experts: ExpertUse | None = None
    """Of a mixture whose experts are over VRAM and RAM; None: they are not."""
    kv_tiers: list[KVTierUse] = []
    """Of KV pages below the pool, by tier."""
    kv_store: KVStoreUse | None = None
    """On disk; its folder is nobody's business who asks over the network."""
    ranks: list[RankMemory] = []
    """Of each, where several compute the model together."""
    engines: list[EngineMemory] = []
    """Of each, where several have the whole model; everything else is of all together."""


def make_ledger(info: EngineInfo, stats: EngineStats, processes: Sequence[ProcessMemory]) -> Ledger | None:
    """As it stands now; None for an engine that keeps no books of memory."""
    report = info.memory
    if report is None:
        return None
    if report.tier == "vram":
        held = stats.device_bytes or report.held_bytes
        return _ledger(info, stats, list(processes), _device_terms(report, held), held)
    # The engine's own peak begins anew when it profiles; what loading took is in its report.
    processes = [
        msgspec.structs.replace(process, peak_bytes=max(process.peak_bytes, report.loading_peak_bytes))
        if process.name == "engine"
        else process
        for process in processes
    ]
    by_name = {process.name: process.resident_bytes for process in processes}
    files = {process.name: process.files_bytes for process in processes}
    touched = (stats.blocks_touched + 1) * report.page_bytes  # The null page is written at the start.
    now = {"kv_pool": touched}
    now |= {"front": by_name["front"]} if "front" in by_name else {}
    now["grammars"] = by_name.get("structured_output", 0)
    now |= {"libraries": files["engine"]} if files.get("engine") else {}
    terms = [
        msgspec.structs.replace(term, measured_bytes=now.get(term.term, term.measured_bytes)) for term in report.terms
    ]
    resident = sum(process.resident_bytes for process in processes)
    known = sum(term.measured_bytes or 0 for term in terms) - report.given_back_bytes
    terms += [
        MemoryTerm(tier=report.tier, term=GIVEN_BACK, planned_bytes=0, measured_bytes=-report.given_back_bytes),
        MemoryTerm(tier=report.tier, term=UNACCOUNTED, planned_bytes=0, measured_bytes=resident - known),
    ]
    return _ledger(info, stats, processes, terms, resident)


def asleep_ledger(info: EngineInfo, processes: Sequence[ProcessMemory], kept_bytes: int = 0) -> Ledger | None:
    """Of an engine that sleeps: `processes` are those that are left, and hold nothing of its terms but the front, and
    KV pages that are kept in RAM: of the pool where that is there too, else of the tier below it."""
    report = info.memory
    if report is None:
        return None
    held = sum(process.resident_bytes for process in processes) if report.tier == "ram" else 0
    named = {"front": held, "kv_pool": kept_bytes if report.tier == "ram" else 0}
    held += named["kv_pool"]
    terms = [msgspec.structs.replace(term, measured_bytes=named.get(term.term, 0)) for term in report.terms]
    below = [] if report.tier == "ram" or not kept_bytes else [_kept_tier(tier, kept_bytes) for tier in report.below]
    info = msgspec.structs.replace(info, memory=msgspec.structs.replace(report, below=below, ranks=[]))
    return _ledger(info, EngineStats(), list(processes), terms, held)


def _kept_tier(tier: LowerTier, kept_bytes: int) -> LowerTier:
    """Of a tier below a GPU, while the engine sleeps: pages of the pool that are kept, and nothing else."""
    held = {"kv_ram": kept_bytes}
    terms = [msgspec.structs.replace(term, measured_bytes=held.get(term.term, 0)) for term in tier.terms]
    return msgspec.structs.replace(tier, terms=terms)


def _device_terms(report: MemoryReport, held: int) -> list[MemoryTerm]:
    """On a GPU everything is taken at the start, the KV pool whole."""
    known = sum(term.measured_bytes or 0 for term in report.terms)
    rest = MemoryTerm(tier=report.tier, term=UNACCOUNTED, planned_bytes=0, measured_bytes=held - known)
    return [*report.terms, rest]


def _ledger(
    info: EngineInfo,
    stats: EngineStats,
    processes: list[ProcessMemory],
    terms: list[MemoryTerm],
    held: int,
) -> Ledger:
    report = info.memory
    assert report is not None
    below = [_with_pages(tier, stats.kv_tiers) for tier in report.below]
    return Ledger(
        model=info.model,
        tiers=[_tier(report, held), *map(_lower_tier, below)],
        terms=[*terms, *(term for tier in below for term in tier.terms)],
        processes=processes,
        kv=KVMemory(
            page_bytes=report.page_bytes,
            blocks=info.blocks,
            blocks_touched=stats.blocks_touched,
            blocks_used=stats.blocks_used,
        ),
        loading=LoadingMemory(planned_bytes=report.loading_bytes, peak_bytes=report.loading_peak_bytes),
        decisions=info.decisions,
        links=stats.links,
        experts=stats.experts,
        kv_tiers=[_as_stored(tier, stats.kv_store) for tier in stats.kv_tiers],
        kv_store=stats.kv_store,
        ranks=report.ranks,
    )


def _with_pages(tier: LowerTier, kv_tiers: Sequence[KVTierUse]) -> LowerTier:
    """With what has been pinned for KV pages by now: that comes while requests are served, and may end early."""
    pinned = next((one.total_bytes for one in kv_tiers if one.tier == tier.tier == "ram"), None)
    if pinned is None:
        return tier
    terms = [
        msgspec.structs.replace(term, measured_bytes=pinned) if term.term == "kv_ram" else term for term in tier.terms
    ]
    return msgspec.structs.replace(tier, terms=terms)


def _as_stored(tier: KVTierUse, store: KVStoreUse | None) -> KVTierUse:
    """The scheduler's books do not know what the disk holds: other processes write there, too."""
    if tier.tier != "disk" or store is None:
        return tier
    return msgspec.structs.replace(tier, held_bytes=store.held_bytes, total_bytes=store.total_bytes)


def _tier(report: MemoryReport, resident: int) -> TierMemory:
    return TierMemory(
        tier=report.tier,
        total_bytes=report.total_bytes,
        free_bytes=report.free_bytes,
        limited_by=report.limited_by,
        budget_bytes=report.budget_bytes,
        planned_bytes=sum(term.planned_bytes for term in report.terms),
        measured_bytes=resident,
    )


def _lower_tier(tier: LowerTier) -> TierMemory:
    planned = sum(term.planned_bytes for term in tier.terms)
    return TierMemory(
        tier=tier.tier,
        total_bytes=tier.total_bytes,
        free_bytes=tier.free_bytes,
        limited_by=tier.limited_by,
        budget_bytes=planned,
        planned_bytes=planned,
        measured_bytes=sum(term.measured_bytes or 0 for term in tier.terms),
    )


def term_lines(terms: Sequence[MemoryTerm], budget_bytes: int) -> list[str]:
    """A line for each term, a bar of its share of the budget, and both sums. Measured only where something is."""
    measured = any(term.measured_bytes is not None for term in terms)
    lines = [f"  {'':<12} {'planned':>11}" + (f" {'measured':>11}" if measured else "")]
    for term in terms:
        line = _line(term.term, term.planned_bytes, term.measured_bytes, measured, budget_bytes)
        below_zero = (term.measured_bytes or 0) < 0
        lines.append(f"{line}  {_BELOW_ZERO[term.term]}" if below_zero and term.term in _BELOW_ZERO else line)
    sums = sum(term.planned_bytes for term in terms), sum(term.measured_bytes or 0 for term in terms)
    return [*lines, _line("sum", sums[0], sums[1], measured, budget_bytes)]


def _line(name: str, planned: int, found: int | None, with_measured: bool, budget_bytes: int) -> str:
    text = f"  {name:<12} {format_bytes(planned):>11}"
    if with_measured:
        text += f" {'-' if found is None else format_bytes(found):>11}"
    return f"{text}  {'#' * round(BAR_WIDTH * min(1.0, planned / max(1, budget_bytes)))}".rstrip()


def summary_lines(ledger: Ledger) -> list[str]:
    """For people, on a few lines a tier: weights, KV pool, all other terms, and what they leave of what was free. Of
    the tiers below the first, each term: what waits there."""
    lines: list[str] = []
    for place, tier in enumerate(ledger.tiers):
        below = [term.term for term in ledger.terms if term.tier == tier.tier] if place else []
        parts = {name: [0, 0] for name in below or ("weights", "kv_pool", "rest")}
        for term in ledger.terms:
            if term.tier == tier.tier:
                part = parts[term.term if term.term in parts else "rest"]
                part[0] += term.planned_bytes
                part[1] += term.measured_bytes or 0
        parts["sum"] = [tier.planned_bytes, tier.measured_bytes]
        parts["free"] = [tier.free_bytes - used for used in parts["sum"]]
        notes = {
            "kv_pool": "  taken as it is used" if place == 0 and parts["kv_pool"][1] < parts["kv_pool"][0] else "",
            "sum": f"  of a budget of {format_bytes(tier.budget_bytes)}",
            "free": f"  of {format_bytes(tier.free_bytes)} before loading ({tier.limited_by})",
        }
        lines.append(f"{tier.tier + ' in use':<14} {'planned':>11} {'measured':>11}")
        for name, (planned, measured) in parts.items():
            row = f"  {name:<12} {format_bytes(planned):>11} {format_bytes(measured):>11}"
            lines.append(row + notes.get(name, ""))
    return [*lines, *use_lines(ledger)]


def use_lines(ledger: Ledger) -> list[str]:
    """For people: what each of several engines or ranks has, and how links and experts over VRAM and RAM were used so
    far."""
    experts = [] if ledger.experts is None else [_experts_line(ledger.experts)]
    several = any(rank.node for rank in ledger.ranks)
    ranks = [(f"engine {rank.engine} " if ledger.engines else "") + _rank_line(rank, several) for rank in ledger.ranks]
    rows = [*map(_engine_line, ledger.engines), *ranks]
    return [*rows, *map(_link_line, ledger.links), *experts]


def _engine_line(engine: EngineMemory) -> str:
    process = "" if engine.pid is None else f" (pid {engine.pid})"
    again = f"; restarted {counted(engine.restarts, 'time')}" if engine.restarts else ""
    return (
        f"engine {engine.engine}{process}: {engine.status}, {engine.device}, {format_bytes(engine.weights_bytes)} of"
        f" weights, KV pool {format_bytes(engine.kv_pool_bytes)}; {engine.running} running, {engine.waiting} waiting"
        f"{again}"
    )


def _rank_line(rank: RankMemory, of_nodes: bool) -> str:
    experts = f", {counted(rank.experts, 'expert')} of each layer" if rank.experts else ""
    return (
        f"{f'node {rank.node} ' if of_nodes else ''}rank {rank.rank} (pid {rank.pid}):"
        f" {format_bytes(rank.weights_bytes)} of weights,"
        f" {format_bytes(rank.kv_pool_bytes)} of the KV pool, {_layers(rank)}{counted(rank.heads, 'head')} over"
        f" {counted(rank.kv_heads, 'KV head')}{experts}, {counted(rank.threads, 'thread')}"
    )


def _layers(rank: RankMemory) -> str:
    """Which it has, as those of a pipeline are told apart by."""
    return f"layers {rank.first_layer} to {rank.first_layer + rank.layers - 1}, " if rank.layers else ""


def _link_line(link: LinkUse) -> str:
    rate, share = link.copied_bytes / max(link.busy_s, 1e-9), link.stalled_s / max(link.over_s, 1e-9)
    possible = f" of {link.possible_bytes_per_s / 1e9:.1f}" if link.possible_bytes_per_s else ""
    who, done = ("steps", "read") if link.link == "nvme-ram" else ("the GPU", "copied")
    waited = f"; {who} waited for it {share:.0%} of the time since the start" if link.stalled_s else ""
    return f"link {link.link}: {format_bytes(link.copied_bytes)} {done} at {rate / 1e9:.1f} GB/s{possible}{waited}"


def _experts_line(use: ExpertUse) -> str:
    """Hit rate, what the host computed, and what changed places."""
    if not use.pairs:
        return "experts: no step with few tokens so far"
    host = f"; {use.host_pairs / use.pairs:.0%} computed by the CPU" if use.host_pairs else ""
    return f"experts: {use.hits / use.pairs:.0%} of uses found in VRAM{host}; {use.swaps:,} changed places"


def ledger_lines(ledger: Ledger) -> list[str]:
    """For people: each tier with its terms, then who holds it."""
    lines: list[str] = []
    for tier in ledger.tiers:
        lines.append(
            f"{tier.tier}: {format_bytes(tier.measured_bytes)} used of a budget of {format_bytes(tier.budget_bytes)}; "
            f"{format_bytes(tier.free_bytes)} of {format_bytes(tier.total_bytes)} were free ({tier.limited_by})"
        )
        terms = [term for term in ledger.terms if term.tier == tier.tier]
        lines += term_lines(terms, tier.budget_bytes)
    for process in ledger.processes:
        lines.append(
            f"  {process.name} (pid {process.pid}): {format_bytes(process.resident_bytes)} now, "
            f"{format_bytes(process.peak_bytes)} at its peak"
        )
    return [*lines, *use_lines(ledger)]
