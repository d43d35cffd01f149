"""What a scheduler tells of itself: lines, pages and totals as one record. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence as Line

from holdfast.kvcache import KVCache
from holdfast.records import EngineStats
from holdfast.scheduler.lora import LoraScheduler
from holdfast.scheduler.sequence import Sequence


def figures(
    running: Line[Sequence],
    waiting: list[Sequence],
    kv: KVCache,
    adapters: LoraScheduler,
    *,
    step_tokens: int,
    steps_total: int,
    preemptions_total: int,
) -> EngineStats:
    return EngineStats(
        running=len(running),
        waiting=len(waiting),
        blocks_total=kv.blocks_total,
        blocks_used=kv.blocks_used,
        blocks_touched=kv.blocks_touched,
        step_tokens=step_tokens,
        steps_total=steps_total,
        preemptions_total=preemptions_total,
        prefix_queries_total=kv.queries_total,
        prefix_hits_total=kv.hits_total,
        running_adapters=adapters.running,
        waiting_adapters=adapters.asked_for(waiting),
    )
