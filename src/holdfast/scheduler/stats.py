"""What a scheduler tells of itself: lines, pages and totals as one record; pages that are wanted, and whether there are
enough for one more. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Line

from holdfast.kvcache import FoundBelow, KVCache, KVLayout, Tier
from holdfast.records import EngineStats, KVTierUse
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
    fetches_not_worth_total: int = 0,
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
        arriving_adapters=adapters.arriving,
        prefix_below_queries_total=kv.below_queries_total,
        kv_tiers=_tiers(kv),
        failed_copies_total=0 if kv.tiers is None else kv.tiers.failed_copies,
        fetches_not_worth_total=fetches_not_worth_total,
    )


def _tiers(kv: KVCache) -> list[KVTierUse]:
    tiers, page_bytes = kv.tiers, kv.layout.page_bytes
    if tiers is None:
        return []
    there = {
        Tier.HOST: ("ram", tiers.limits.host_pages + tiers.host.total > 0),
        Tier.DISK: ("disk", tiers.stored is not None),
    }
    return [
        KVTierUse(
            tier=name,
            hit_tokens_total=kv.below_hits_total[tier],
            loaded_bytes_total=tiers.loaded_pages[tier] * page_bytes,
            stored_bytes_total=tiers.stored_pages[tier] * page_bytes,
            held_bytes=len(tiers.host) * page_bytes if tier is Tier.HOST else 0,
            total_bytes=tiers.host.total * page_bytes if tier is Tier.HOST else 0,
        )
        for tier, (name, exists) in there.items()
        if exists
    ]


def blocks_wanted(line: Line[Sequence], layout: KVLayout, limits: SchedulerLimits, ahead_tokens: int) -> int:
    """Pages, the null page included, with which as many of the first in line as may run at once would have room for so
    many tokens more each. `line`: who runs, and then who waits."""
    several, step = line[: limits.max_num_seqs], limits.max_num_batched_tokens
    lengths = (min(one.longest, len(one.tokens) + ahead_tokens) for one in several)
    set_aside = len(layout.groups) * (len(several) + 1)
    return 1 + set_aside + sum(layout.peak_blocks(length, step) for length in lengths)


def set_aside(kv: KVCache, running: Line[Sequence], fetching: Iterable[Sequence], step_tokens: int) -> int:
    """Pages to leave for these (and one more) when somebody is admitted: a block each to grow into, what their prompts
    still need, and what loads will take. `fetching`: who waits with pages, and will run."""
    waiting = list(fetching)
    prefills = [other for other in running if other.pending > 1] + waiting
    # What they wait for is no part of what each still needs: one load serves all who wait for it, and takes one page.
    books = ((other.book.held + other.book.unplaced, len(other.tokens)) for other in prefills)
    promised = kv.blocks_promised + sum(kv.blocks_owed(held, tokens, step_tokens) for held, tokens in books)
    return len(kv.layout.groups) * (len(running) + len(waiting) + 1) + promised


def may_fetch(
    kv: KVCache,
    sequence: Sequence,
    found: FoundBelow,
    running: Line[Sequence],
    fetching: Line[Sequence],
    step_tokens: int,
) -> bool:
    """Whether there are pages for what it would wait for, and for the rest of its prompt."""
    if not running and not fetching:
        return found.wanted + len(kv.layout.groups) <= kv.blocks_available
    wanted = found.wanted + kv.blocks_owed(found.held, len(sequence.tokens), step_tokens)
    return wanted + set_aside(kv, running, fetching, step_tokens) <= kv.blocks_available
