"""Figures of several engines as one server's: what they say of themselves, their counters, their memory. Adds up; reads
nothing and knows no process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from msgspec.structs import asdict, replace

from holdfast.observability.ledger import KVMemory, Ledger, LoadingMemory, ProcessMemory, TierMemory
from holdfast.records import (
    EngineInfo,
    EngineMemory,
    EngineStats,
    ExpertUse,
    KVStoreUse,
    KVTierUse,
    LinkUse,
    MemoryTerm,
)

Item = TypeVar("Item")
Number = TypeVar("Number", int, float)


def sum_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """A request has one engine: the context is that of the shortest. What holds several requests is added up."""
    first = infos[0]
    said = (
        f"data_parallel_size = {len(infos)}: each engine has the whole model; a request goes to the one with the least"
    )
    return replace(
        first,
        device=f"{len(infos)} x {first.device}",
        blocks=sum(one.blocks for one in infos),
        max_model_len=min(one.max_model_len for one in infos),
        max_num_seqs=sum(one.max_num_seqs for one in infos),
        weights_bytes=sum(one.weights_bytes for one in infos),
        kv_pool_bytes=sum(one.kv_pool_bytes for one in infos),
        max_concurrency=sum(one.max_concurrency for one in infos),
        decisions=[f"{said} to compute", *first.decisions],
        lowered=[
            f"engine {number}: {line}" if len({tuple(other.lowered) for other in infos}) > 1 else line
            for number, one in enumerate(infos)
            for line in (one.lowered if number == 0 or one.lowered != first.lowered else [])
        ],
    )


_LISTS = ("kv_tiers", "links", "running_adapters", "waiting_adapters", "arriving_adapters")
_OTHERS = ("kv_store", "experts", *_LISTS)


def sum_stats(found: Sequence[EngineStats]) -> EngineStats:
    numbers = [asdict(one) for one in found]
    added = {name: sum(one[name] for one in numbers) for name in numbers[0] if name not in _OTHERS}
    experts = [one.experts for one in found if one.experts is not None]
    return EngineStats(
        **added,
        kv_tiers=_by_name([tier for one in found for tier in one.kv_tiers], lambda tier: tier.tier, _add_tiers),
        kv_store=_sum_stores([one.kv_store for one in found if one.kv_store is not None]),
        links=_by_name([link for one in found for link in one.links], lambda link: link.link, _add_links),
        experts=_add_experts(experts) if experts else None,
        running_adapters=sorted({name for one in found for name in one.running_adapters}),
        waiting_adapters=sorted({name for one in found for name in one.waiting_adapters}),
        arriving_adapters=sorted({number for one in found for number in one.arriving_adapters}),
    )


def sum_ledgers(ledgers: Sequence[tuple[int, Ledger]], rows: Sequence[EngineMemory], info: EngineInfo) -> Ledger | None:
    """Of the engines that have one, with their numbers. The front's own process is in one of them."""
    if not ledgers:
        return None
    first = ledgers[0][1]
    books = [ledger for _, ledger in ledgers]
    terms = [term for one in books for term in one.terms]
    on_ram = first.tiers[0].tier == "ram"
    return Ledger(
        model=info.model,
        tiers=_by_name([tier for one in books for tier in one.tiers], lambda tier: tier.tier, _sum_tiers(on_ram)),
        terms=_by_name(terms, lambda term: f"{term.tier} {term.term}", _sum_terms),
        processes=[_numbered(process, number) for number, one in ledgers for process in one.processes],
        kv=KVMemory(
            page_bytes=first.kv.page_bytes,
            blocks=sum(one.kv.blocks for one in books),
            blocks_touched=sum(one.kv.blocks_touched for one in books),
            blocks_used=sum(one.kv.blocks_used for one in books),
        ),
        loading=LoadingMemory(
            planned_bytes=sum(one.loading.planned_bytes for one in books),
            peak_bytes=sum(one.loading.peak_bytes for one in books),
        ),
        decisions=info.decisions,
        links=_by_name([link for one in books for link in one.links], lambda link: link.link, _add_links),
        experts=_add_experts(experts) if (experts := [one.experts for one in books if one.experts]) else None,
        kv_tiers=_by_name([tier for one in books for tier in one.kv_tiers], lambda tier: tier.tier, _add_tiers),
        kv_store=_sum_stores([one.kv_store for one in books if one.kv_store is not None]),
        ranks=[replace(rank, engine=number) for number, one in ledgers for rank in one.ranks],
        engines=list(rows),
    )


def describe_starting(progress: Sequence[tuple[int, str]]) -> str:
    """Of those that start, for people; empty: none does."""
    return "; ".join(f"engine {number}: {said}" for number, said in progress if said)


def _numbered(process: ProcessMemory, engine: int) -> ProcessMemory:
    """front and structured_output are the server's; engine 1, and its ranks."""
    if process.name == "engine":
        return replace(process, name=f"engine {engine}")
    return replace(process, name=f"engine {engine} {process.name}") if process.name.startswith("rank") else process


def _by_name(items: Sequence[Item], name: Callable[[Item], str], add: Callable[[Sequence[Item]], Item]) -> list[Item]:
    """Those of one name as one, in the order in which names come."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return [add(group) for group in groups.values()]


def _sum_terms(terms: Sequence[MemoryTerm]) -> MemoryTerm:
    measured = [term.measured_bytes for term in terms if term.measured_bytes is not None]
    return replace(
        terms[0],
        planned_bytes=sum(term.planned_bytes for term in terms),
        measured_bytes=sum(measured) if measured else None,
    )


def _sum_tiers(on_ram: bool) -> Callable[[Sequence[TierMemory]], TierMemory]:
    """`on_ram`: engines compute on the CPU and have planned for a share each of what was free; below a GPU likewise.
    GPUs are of one engine each, and added up."""

    def add(tiers: Sequence[TierMemory]) -> TierMemory:
        first = tiers[0]
        shared = on_ram or first.tier != "vram"
        return replace(
            first,
            total_bytes=first.total_bytes if shared else sum(one.total_bytes for one in tiers),
            free_bytes=sum(one.free_bytes for one in tiers),
            limited_by=first.limited_by.partition(";")[0] if shared else f"{len(tiers)} GPUs",
            budget_bytes=sum(one.budget_bytes for one in tiers),
            planned_bytes=sum(one.planned_bytes for one in tiers),
            measured_bytes=sum(one.measured_bytes for one in tiers),
        )

    return add


def _add_tiers(tiers: Sequence[KVTierUse]) -> KVTierUse:
    added = {name: sum(getattr(one, name) for one in tiers) for name in KVTierUse.__struct_fields__ if name != "tier"}
    if tiers[0].tier == "disk":  # One folder for all.
        added |= {name: max(getattr(one, name) for one in tiers) for name in ("held_bytes", "total_bytes")}
    return KVTierUse(tier=tiers[0].tier, **added)


def _sum_stores(stores: Sequence[KVStoreUse]) -> KVStoreUse | None:
    """All use one folder, and what is in it is counted once; what was not written is of each process."""
    if not stores:
        return None
    return replace(
        stores[0],
        held_bytes=max(one.held_bytes for one in stores),
        written_today_bytes=max(one.written_today_bytes for one in stores),
        dropped_writes_total=sum(one.dropped_writes_total for one in stores),
        dropped_by_reason=_add_reasons([one.dropped_by_reason for one in stores]),
        missed_by_reason=_add_reasons([one.missed_by_reason for one in stores]),
        waited_s_by_use=_add_reasons([one.waited_s_by_use for one in stores]),
        failing=any(one.failing for one in stores),
    )


def _add_reasons(counts: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    return {reason: sum(one.get(reason, 0) for one in counts) for reason in dict.fromkeys(chain(*counts))}


def _add_links(links: Sequence[LinkUse]) -> LinkUse:
    """Rates are of one of them: times add up as bytes do."""
    first = links[0]
    return replace(
        first,
        copied_bytes=sum(one.copied_bytes for one in links),
        busy_s=sum(one.busy_s for one in links),
        stalled_s=sum(one.stalled_s for one in links),
        over_s=sum(one.over_s for one in links),
    )


def _add_experts(found: Sequence[ExpertUse]) -> ExpertUse:
    return ExpertUse(**{name: sum(getattr(one, name) for one in found) for name in ExpertUse.__struct_fields__})
