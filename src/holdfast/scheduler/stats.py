"""What a scheduler tells of itself: lines, pages and totals as one record, and pages that are wanted."""

from __future__ import annotations

from collections.abc import Sequence as Line

from holdfast.kvcache import KVCache, KVLayout
from holdfast.records import EngineStats
from holdfast.scheduler.limits import SchedulerLimits
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


def blocks_wanted(line: Line[Sequence], layout: KVLayout, limits: SchedulerLimits, ahead_tokens: int) -> int:
    """Pages, the null page included, with which as many of the first in line as may run at once would have room for so
    many tokens more each. `line`: who runs, and then who waits."""
    several, step = line[: limits.max_num_seqs], limits.max_num_batched_tokens
    lengths = (min(one.longest, len(one.tokens) + ahead_tokens) for one in several)
    set_aside = len(layout.groups) * (len(several) + 1)
    return 1 + set_aside + sum(layout.peak_blocks(length, step) for length in lengths)
