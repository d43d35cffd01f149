"""What the front writes down of an engine process: what it holds, and counters that outlive it. Talks to nobody."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.hardware import resident
from holdfast.observability.ledger import Ledger, ProcessMemory, asleep_ledger, make_ledger
from holdfast.records import EngineInfo, EngineStats, KVStoreUse, KVTierUse

Number = TypeVar("Number", int, float)


def process_memory(name: str, pid: int) -> ProcessMemory | None:
    held = resident(pid)
    if held is None:
        return None
    return ProcessMemory(
        name=name,
        pid=pid,
        resident_bytes=held.now_bytes,
        peak_bytes=held.peak_bytes,
        files_bytes=held.files_bytes,
    )


def ledger_of(
    info: EngineInfo | None,
    stats: EngineStats,
    engine_pid: int | None,
    others: Sequence[ProcessMemory] = (),
    *,
    asleep: bool,
    kept: int = 0,
    with_front: bool = True,
) -> Ledger | None:
    """Of this process, the engine's and others; None while there is no engine, unless it sleeps. `kept`:
    bytes of KV pages in RAM, then. `with_front`: False where this process is counted with another engine."""
    front = process_memory("front", os.getpid())
    if info is None or front is None:
        return None
    beside = [front, *others] if with_front else [*others]
    if asleep:
        return asleep_ledger(info, beside, kept)
    engine = None if engine_pid is None else process_memory("engine", engine_pid)
    return None if engine is None else make_ledger(info, stats, [engine, *_ranks(info), *beside])


def _ranks(info: EngineInfo) -> list[ProcessMemory]:
    """The other ranks of an engine that has several, on this machine. Pages of files are the engine process's too, and
    counted there."""
    rows = [] if info.memory is None else [row for row in info.memory.ranks[1:] if row.node == 0]
    held = [process_memory(f"rank {row.rank}", row.pid) for row in rows]
    return [
        msgspec.structs.replace(one, resident_bytes=one.resident_bytes - one.files_bytes, files_bytes=0)
        for one in held
        if one is not None
    ]


def continued(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on where the process before left them."""
    return msgspec.structs.replace(
        now,
        steps_total=before.steps_total + now.steps_total,
        preemptions_total=before.preemptions_total + now.preemptions_total,
        prefix_queries_total=before.prefix_queries_total + now.prefix_queries_total,
        prefix_hits_total=before.prefix_hits_total + now.prefix_hits_total,
        prefix_below_queries_total=before.prefix_below_queries_total + now.prefix_below_queries_total,
        kv_tiers=_continued_tiers(before.kv_tiers, now.kv_tiers),
        kv_store=_continued_store(before.kv_store, now.kv_store),
        failed_copies_total=before.failed_copies_total + now.failed_copies_total,
        fetches_not_worth_total=before.fetches_not_worth_total + now.fetches_not_worth_total,
        pool_resizes_total=before.pool_resizes_total + now.pool_resizes_total,
        stood_still_s_total=before.stood_still_s_total + now.stood_still_s_total,
    )


def _continued_tiers(before: Sequence[KVTierUse], now: Sequence[KVTierUse]) -> list[KVTierUse]:
    counted = {tier.tier: tier for tier in before}
    return [
        msgspec.structs.replace(
            tier,
            hit_tokens_total=counted[tier.tier].hit_tokens_total + tier.hit_tokens_total,
            loaded_bytes_total=counted[tier.tier].loaded_bytes_total + tier.loaded_bytes_total,
            stored_bytes_total=counted[tier.tier].stored_bytes_total + tier.stored_bytes_total,
        )
        if tier.tier in counted
        else tier
        for tier in now
    ]


def _continued_store(before: KVStoreUse | None, now: KVStoreUse | None) -> KVStoreUse | None:
    if before is None or now is None:
        return now
    return msgspec.structs.replace(
        now,
        dropped_writes_total=before.dropped_writes_total + now.dropped_writes_total,
        dropped_by_reason=_added(before.dropped_by_reason, now.dropped_by_reason),
        missed_by_reason=_added(before.missed_by_reason, now.missed_by_reason),
        waited_s_by_use=_added(before.waited_s_by_use, now.waited_s_by_use),
    )


def _added(before: Mapping[str, Number], now: Mapping[str, Number]) -> dict[str, Number]:
    return {reason: before.get(reason, 0) + now.get(reason, 0) for reason in {**before, **now}}


def at_rest(stats: EngineStats) -> EngineStats:
    """Of an engine whose process was ended: it holds nothing, and has counted what it has counted."""
    return msgspec.structs.replace(
        stats,
        running=0,
        waiting=0,
        blocks_used=0,
        blocks_touched=0,
        step_tokens=0,
        device_bytes=0,
        links=[],
        running_adapters=[],
        waiting_adapters=[],
        arriving_adapters=[],
    )
