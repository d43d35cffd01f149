"""A KV pool that breathes: given up while nothing is asked, and where other processes need memory; taken again when a
request comes, or when they have left.

    full ──idle for so long──► floor ──a request──► full, or as much of it as is free
      └──a neighbour grows──► less ──it has left──► full

Before it shrinks, cached prefixes that would be lost go to the RAM tier, beside steps. The floor is one sequence of
full length: whatever is promised to a request can be kept without asking anybody. Decides when and how far; the loop
resizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.core.neighbours import Neighbours, NeighbourWatch
from holdfast.errors import HoldfastError
from holdfast.records import PoolChange
from holdfast.scheduler import Scheduler
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

SAVE_IDLE_S, SAVE_S = 30.0, 1.0
"""The longest that prefixes are saved before the pool shrinks: while nobody asks, and while a neighbour waits."""
AGAIN_S = 5.0
"""Between two tries to take what was not free, while there are requests."""


Resize = Callable[[int], HoldfastError | None]
"""To so many pages; returns why not, where it stays as it is."""


class PoolMemory(Protocol):
    """Of the device that the pool is on."""

    @property
    def pool_bytes(self) -> int:
        """Held by it."""

    def blocks_of(self, pool_bytes: int) -> int:
        """Pages of a pool that holds no more than so much, the null page included."""

    def blocks_within_free(self, margin_bytes: int) -> int:
        """Pages that it could have now, with so much left free."""

    def full_blocks(self, blocks: int) -> int:
        """Pages that it would have with no neighbour; `blocks`: at its start, or as a budget was last set."""

    def budget_was_set(self) -> None:
        """By somebody: no more than that is full."""

    def budget_with_pool(self) -> int | None:
        """That holds the pool as it is now; None: it is as it was."""


@dataclass(frozen=True, slots=True)
class _Shrink:
    blocks: int
    reason: str
    until_s: float
    idle: bool


class Breathing:
    """`idle_release_s`: None: an idle pool stays. `neighbours` and `watch`: None: others are not looked at."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        idle_release_s: float | None = None,
        neighbours: Neighbours | None = None,
        watch: NeighbourWatch | None = None,
    ) -> None:
        self._memory, self._idle_release_s = memory, idle_release_s
        self._neighbours, self._watch = neighbours, watch
        self._margin = 0
        self._full: int | None = None
        self._shrink: _Shrink | None = None
        self._idle_since_s: float | None = None
        self._released = False
        self._lacking = False
        self._again_s = 0.0

    @property
    def saving(self) -> bool:
        """Steps are to be planned, be it without rows: prefixes go to RAM."""
        return self._shrink is not None

    @property
    def released(self) -> bool:
        """The pool was given up while nobody asked: that it is small says nothing of what is wanted."""
        return self._released

    def resized(self, scheduler: Scheduler) -> None:
        """By somebody else, who knows what it shall be."""
        self._end(scheduler)
        self._memory.budget_was_set()
        self._full, self._released, self._lacking, self._idle_since_s = None, False, False, None

    def look(self, scheduler: Scheduler, now_s: float, *, idle: bool, resize_kv: Resize) -> PoolChange | None:
        """What was changed, if something was. Cheap enough to be called for every step."""
        blocks = scheduler.kv.blocks_total + 1
        if self._full is None:
            self._full = blocks
        if not idle:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        if self._shrink is not None:
            return self._go_on(scheduler, now_s, idle, resize_kv)
        if not idle and (self._released or (self._lacking and now_s >= self._again_s)):
            return self._take(scheduler, blocks, now_s, resize_kv)
        found = self._of_neighbours(scheduler, blocks, now_s, resize_kv)
        if found is not None or self._shrink is not None:
            return found
        idle_s = 0.0 if self._idle_since_s is None else now_s - self._idle_since_s
        if self._idle_release_s is None or self._released or not idle or idle_s < self._idle_release_s:
            return None
        if blocks <= scheduler.least_blocks:
            return None
        reason = f"no request for {self._idle_release_s:g} s"
        return self._begin(scheduler, _Shrink(scheduler.least_blocks, reason, now_s + SAVE_IDLE_S, True), resize_kv)

    def _of_neighbours(self, scheduler: Scheduler, blocks: int, now_s: float, resize_kv: Resize) -> PoolChange | None:
        sample = None if self._watch is None else self._watch.take()
        if sample is None or self._neighbours is None or self._full is None:
            return None
        self._margin = self._neighbours.margin_bytes(sample.total_bytes)
        pool, page = self._memory.pool_bytes, scheduler.kv.layout.page_bytes
        self._full = max(self._full, self._memory.full_blocks(self._full))
        full = pool if self._released else self._full * page
        wish = self._neighbours.judge(sample, pool, full, now_s)
        if wish is None:
            return None
        if wish.pool_bytes > pool:
            # A device gives memory in pieces, and the full pool may need but a part of its last one.
            whole = wish.pool_bytes >= self._full * page
            wanted = self._full if whole else min(self._full, self._memory.blocks_of(wish.pool_bytes))
            return self._grow(scheduler, blocks, wanted, wish.reason, resize_kv)
        wanted = max(scheduler.least_blocks, self._memory.blocks_of(max(0, wish.pool_bytes)))
        if wanted >= blocks:
            log.warning(
                "the KV pool cannot give way to neighbours: %s is one sequence of full length (%s)",
                format_bytes(pool),
                wish.reason,
            )
            return None
        self._lacking = False
        return self._begin(scheduler, _Shrink(wanted, wish.reason, now_s + SAVE_S, False), resize_kv)

    def _begin(self, scheduler: Scheduler, shrink: _Shrink, resize_kv: Resize) -> PoolChange | None:
        tiers, self._shrink = scheduler.kv.tiers, shrink
        if tiers is None or not tiers.host.total:
            return self._shrink_now(scheduler, resize_kv)
        tiers.begin_sparing(scheduler.kv.blocks_total + 1 - shrink.blocks)
        return None

    def _go_on(self, scheduler: Scheduler, now_s: float, idle: bool, resize_kv: Resize) -> PoolChange | None:
        shrink, tiers = self._shrink, scheduler.kv.tiers
        assert shrink is not None
        if shrink.idle and not idle:  # Somebody asks: nothing has been given up yet.
            self._end(scheduler)
            return None
        if now_s < shrink.until_s and tiers is not None and not tiers.spared:
            return None
        return self._shrink_now(scheduler, resize_kv)

    def _shrink_now(self, scheduler: Scheduler, resize_kv: Resize) -> PoolChange | None:
        shrink, blocks, held = self._shrink, scheduler.kv.blocks_total + 1, self._memory.pool_bytes
        assert shrink is not None
        self._end(scheduler)
        if shrink.blocks > scheduler.kv.blocks_total:
            return None
        if (problem := resize_kv(shrink.blocks)) is not None:
            raise problem
        self._released = self._released or shrink.idle
        return self._changed(scheduler, blocks, held, shrink.reason, lowered=True)

    def _end(self, scheduler: Scheduler) -> None:
        self._shrink = None
        if scheduler.kv.tiers is not None:
            scheduler.kv.tiers.spare_wanted = 0

    def _take(self, scheduler: Scheduler, blocks: int, now_s: float, resize_kv: Resize) -> PoolChange | None:
        """What was given back while nobody asked, or as much of it as is free."""
        assert self._full is not None
        first, self._released, self._again_s = self._released, False, now_s + AGAIN_S
        wanted = min(self._full, self._memory.blocks_within_free(self._margin))
        self._lacking = wanted < self._full
        if wanted <= blocks:
            if first:
                self._say_lacking(scheduler)
            return None
        found = self._grow(scheduler, blocks, wanted, "a request came", resize_kv)
        if self._lacking and first:
            self._say_lacking(scheduler)
        return found

    def _say_lacking(self, scheduler: Scheduler) -> None:
        assert self._full is not None
        full, page = self._full, scheduler.kv.layout.page_bytes
        if scheduler.kv.blocks_total + 1 < full:
            held = format_bytes((scheduler.kv.blocks_total + 1) * page)
            log.warning("the KV pool is %s instead of %s: others have taken the rest", held, format_bytes(full * page))

    def _grow(
        self, scheduler: Scheduler, blocks: int, wanted: int, reason: str, resize_kv: Resize
    ) -> PoolChange | None:
        held = self._memory.pool_bytes
        if wanted <= blocks:
            return None
        if (problem := resize_kv(wanted)) is not None:  # Somebody was faster: it goes on as it is.
            self._lacking = True
            log.warning("the KV pool stays at %s: %s", format_bytes(held), problem.message)
            return None
        return self._changed(scheduler, blocks, held, reason, lowered=self._full is not None and wanted < self._full)

    def _changed(self, scheduler: Scheduler, blocks: int, held: int, reason: str, *, lowered: bool) -> PoolChange:
        """`blocks` and `held`: pages and bytes of the pool before. On a CPU it holds only what was written."""
        if self._watch is not None:
            self._watch.take()  # It is of the pool as it was: what was just given up would be given once more.
        found = PoolChange(
            blocks=scheduler.kv.blocks_total + 1,
            kv_bytes=self._memory.pool_bytes,
            reason=reason,
            lowered=lowered,
            budget_bytes=self._memory.budget_with_pool(),
        )
        page = scheduler.kv.layout.page_bytes
        sizes = f"{format_bytes(found.blocks * page)} instead of {format_bytes(blocks * page)}"
        log.info("KV pool: %s; %s held, %s before: %s", sizes, format_bytes(found.kv_bytes), format_bytes(held), reason)
        return found

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
