"""A KV pool that breathes: given up while nothing is asked, and where other processes need memory; taken again when a
request comes, or when they have left. Where layers or experts may leave the GPU as well, neighbours are given of the
whole budget: what goes, and in which order, is then what another budget would make of it.

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
from typing import NamedTuple, Protocol

from holdfast.engine.core.neighbours import DeviceSample, Neighbours, NeighbourWatch
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.records import PoolChange, VramBudget, VramGrant
from holdfast.scheduler import Scheduler
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

SAVE_IDLE_S, SAVE_S = 30.0, 1.0
"""The longest that prefixes are saved before the pool shrinks: while nobody asks, and while a neighbour waits."""
AGAIN_S = 5.0
"""Between two tries to take what was not free, while there are requests."""


Resize = Callable[[int], HoldfastError | None]
"""To so many pages; returns why not, where it stays as it is."""
SetBudget = Callable[[VramBudget], HoldfastError | None]
"""Layers, or experts, and pages of KV become what this budget holds; returns why not, where all stays as it is."""


class Ways(NamedTuple):
    """In which the loop changes what is held."""

    resize_kv: Resize
    set_budget: SetBudget


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


class WholeBudget(Protocol):
    """Of a GPU on which weights may come to stay, and leave."""

    most_budget_bytes: int
    """That it may have when neighbours have left."""

    @property
    def kept_bytes(self) -> int:
        """By all shares and the pool now."""

    def blocks_with(self, asked: VramBudget, least_blocks: int) -> int:
        """Pages that the pool would have then."""

    def moves(self, asked: VramBudget, least_blocks: int) -> bool:
        """Whether that would change anything."""

    def granted(self) -> VramGrant:
        """What is kept to now."""


@dataclass(frozen=True, slots=True)
class _Shrink:
    blocks: int
    reason: str
    until_s: float
    idle: bool
    budget: VramBudget | None = None
    """Where more than the pool gives way."""


class Breathing:
    """`idle_release_s`: None: an idle pool stays. `neighbours` and `watch`: None: others are not looked at. `budget`:
    None: neighbours are given of the pool alone. `most_kv_bytes`: that the pool was set to; None: what a budget
    leaves."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        idle_release_s: float | None = None,
        neighbours: Neighbours | None = None,
        watch: NeighbourWatch | None = None,
        budget: WholeBudget | None = None,
        most_kv_bytes: int | None = None,
    ) -> None:
        self._memory, self._idle_release_s = memory, idle_release_s
        self._neighbours, self._watch = neighbours, watch
        self._budget, self._most_kv = budget, most_kv_bytes
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

    def look(self, scheduler: Scheduler, now_s: float, *, idle: bool, ways: Ways) -> PoolChange | None:
        """What was changed, if something was. Cheap enough to be called for every step."""
        blocks = scheduler.kv.blocks_total + 1
        if self._full is None:
            self._full = blocks
        if not idle:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        if self._shrink is not None:
            return self._go_on(scheduler, now_s, idle, ways)
        if not idle and (self._released or (self._lacking and now_s >= self._again_s)):
            return self._take(scheduler, blocks, now_s, ways.resize_kv)
        found = self._look_at_neighbours(scheduler, blocks, now_s, ways)
        if found is not None or self._shrink is not None:
            return found
        idle_s = 0.0 if self._idle_since_s is None else now_s - self._idle_since_s
        if self._idle_release_s is None or self._released or not idle or idle_s < self._idle_release_s:
            return None
        if blocks <= scheduler.least_blocks:
            # Neighbours have had it all. It neither grows while nobody asks, nor waits for them when somebody does.
            self._released = blocks < self._full
            return None
        reason = f"no request for {self._idle_release_s:g} s"
        return self._begin(scheduler, _Shrink(scheduler.least_blocks, reason, now_s + SAVE_IDLE_S, True), ways)

    def _look_at_neighbours(self, scheduler: Scheduler, blocks: int, now_s: float, ways: Ways) -> PoolChange | None:
        sample = None if self._watch is None else self._watch.take()
        if sample is None or self._neighbours is None or self._full is None:
            return None
        self._margin = self._neighbours.margin_bytes(sample.total_bytes)
        if self._budget is not None:
            return self._share(scheduler, self._budget, self._neighbours, sample, now_s, ways)
        return self._share_pool(scheduler, blocks, self._neighbours, sample, now_s, ways)

    def _share_pool(
        self,
        scheduler: Scheduler,
        blocks: int,
        neighbours: Neighbours,
        sample: DeviceSample,
        now_s: float,
        ways: Ways,
    ) -> PoolChange | None:
        assert self._full is not None
        pool, page = self._memory.pool_bytes, scheduler.kv.layout.page_bytes
        self._full = max(self._full, self._memory.full_blocks(self._full))
        full = pool if self._released else self._full * page
        wish = neighbours.judge(sample, pool, full, now_s)
        if wish is None:
            return None
        if wish.nbytes > pool:
            # A device gives memory in pieces, and the full pool may need but a part of its last one.
            whole = wish.nbytes >= self._full * page
            wanted = self._full if whole else min(self._full, self._memory.blocks_of(wish.nbytes))
            found = self._grow(scheduler, blocks, wanted, wish.reason, ways.resize_kv)
            if found is not None:
                neighbours.took_back(now_s)
            return found
        wanted = max(scheduler.least_blocks, self._memory.blocks_of(max(0, wish.nbytes)))
        if wanted >= blocks:
            log.warning(
                "the KV pool cannot give way to neighbours: %s is one sequence of full length (%s)",
                format_bytes(pool),
                wish.reason,
            )
            return None
        self._lacking = False
        return self._begin(scheduler, _Shrink(wanted, wish.reason, now_s + SAVE_S, False), ways)

    def _share(
        self,
        scheduler: Scheduler,
        budget: WholeBudget,
        neighbours: Neighbours,
        sample: DeviceSample,
        now_s: float,
        ways: Ways,
    ) -> PoolChange | None:
        """Of the whole budget: layers and KV go, and come, as with a budget that somebody asks for."""
        kept, least = budget.kept_bytes, scheduler.least_blocks
        # While nobody asks and the pool was given up, nothing is gained by more.
        wish = neighbours.judge(sample, kept, kept if self._released else budget.most_budget_bytes, now_s)
        if wish is None:
            return None
        # Nor shall layers leave for a pool that nobody wants now.
        most_kv = least * scheduler.kv.layout.page_bytes if self._released else self._most_kv
        asked = VramBudget(budget_bytes=max(0, wish.nbytes), at_most_free=True, kv_bytes=most_kv)
        try:
            if not budget.moves(asked, least):
                if wish.nbytes < kept:
                    log.warning(
                        "nothing can give way to neighbours: %s are the least (%s)", format_bytes(kept), wish.reason
                    )
                return None
            blocks = budget.blocks_with(asked, least)
        except DoesNotFitError as error:  # They were faster.
            log.warning("VRAM stays at %s: %s", format_bytes(kept), error.message)
            return None
        if wish.nbytes > kept:
            found = self._change_budget(scheduler, budget, asked, wish.reason, ways.set_budget)
            if found is not None and budget.kept_bytes > kept:
                neighbours.took_back(now_s)
            return found
        self._lacking = False
        return self._begin(scheduler, _Shrink(blocks, wish.reason, now_s + SAVE_S, False, asked), ways)

    def _change_budget(
        self, scheduler: Scheduler, budget: WholeBudget, asked: VramBudget, reason: str, set_budget: SetBudget
    ) -> PoolChange | None:
        before = budget.granted()
        if (problem := set_budget(asked)) is not None:
            log.warning("VRAM stays as it is shared: %s", problem.message)
            return None
        if self._watch is not None:
            self._watch.take()  # It is of what was held before.
        after = budget.granted()
        if not self._released:  # What is full is another pool now; one that was given up is taken as it was.
            self._full = scheduler.kv.blocks_total + 1
        log.info("VRAM: %s: %s", _said(before, after), reason)
        return PoolChange(
            blocks=after.blocks,
            kv_bytes=after.kv_bytes,
            reason=reason,
            lowered=after.budget_bytes < budget.most_budget_bytes,
            budget_bytes=after.budget_bytes,
            granted=after,
        )

    def _begin(self, scheduler: Scheduler, shrink: _Shrink, ways: Ways) -> PoolChange | None:
        tiers, self._shrink = scheduler.kv.tiers, shrink
        if tiers is None or not tiers.host.total:
            return self._shrink_now(scheduler, ways)
        tiers.begin_sparing(_fewer(scheduler, shrink))
        return None

    def _go_on(self, scheduler: Scheduler, now_s: float, idle: bool, ways: Ways) -> PoolChange | None:
        shrink, tiers = self._shrink, scheduler.kv.tiers
        assert shrink is not None
        if shrink.idle and not idle:  # Somebody asks: nothing has been given up yet.
            self._end(scheduler)
            return None
        if tiers is not None and tiers.spare_wanted != _fewer(scheduler, shrink):
            # Somebody asked for a resize meanwhile, for which pages were saved, and which was refused then.
            tiers.begin_sparing(_fewer(scheduler, shrink))
        if now_s < shrink.until_s and tiers is not None and not tiers.spared:
            return None
        return self._shrink_now(scheduler, ways)

    def _shrink_now(self, scheduler: Scheduler, ways: Ways) -> PoolChange | None:
        shrink, blocks, held = self._shrink, scheduler.kv.blocks_total + 1, self._memory.pool_bytes
        assert shrink is not None
        self._end(scheduler)
        if shrink.budget is not None and self._budget is not None:
            return self._change_budget(scheduler, self._budget, shrink.budget, shrink.reason, ways.set_budget)
        if shrink.blocks > scheduler.kv.blocks_total:
            return None
        if (problem := ways.resize_kv(shrink.blocks)) is not None:
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


def _fewer(scheduler: Scheduler, shrink: _Shrink) -> int:
    """Pages than there are now."""
    return max(0, scheduler.kv.blocks_total + 1 - shrink.blocks)


def _said(before: VramGrant, after: VramGrant) -> str:
    """What gave way, or came."""
    found = [f"{format_bytes(after.budget_bytes)} instead of {format_bytes(before.budget_bytes)}"]
    if before.layers is not None and after.layers is not None:
        found.append(f"{len(after.layers.streamed)} layers streamed ({len(before.layers.streamed)} before)")
    if before.experts is not None and after.experts is not None:
        found.append(f"{sum(after.experts.resident):,} experts stay ({sum(before.experts.resident):,} before)")
    return ", ".join([*found, f"KV pool of {format_bytes(after.kv_bytes)} ({format_bytes(before.kv_bytes)} before)"])
