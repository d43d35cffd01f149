"""Pages between the pool and the tiers below it: RAM, and a store on disk. It decides which page goes where and when,
and writes down what is on its way; who executes plans moves the bytes, and says when that is over.

    pool ──────── idle pages, before they are evicted; full pages of who may be preempted next ───────► RAM
      │  ◄─────── what a sequence waits for (a fetch): one load a page, whoever waits for it ────────── RAM or disk
      └────────── on the second use of a prefix ──────────────────────────────────────────────────────► disk

A page on its way has a reference of its own, so nobody is given it: what is loaded is in nobody's way, and what is
stored stays as it is. Of a copy that fails nothing is lost but the content: it is computed again.
Only what steps that were applied have written is stored: a row of another may still fail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from holdfast.kvcache.host_pages import HostPages, Key
from holdfast.kvcache.loads import PageLoad, PageLoads, stored_key
from holdfast.kvcache.pool import NULL_PAGE, Block, BlockPool, BlockState, Tier
from holdfast.kvcache.prefix import PrefixIndex
from holdfast.kvcache.tier_records import Fetch, FoundBelow, StepSize, StoredPages, TierLimits
from holdfast.records.steps import BlockCopy

SAVED_AHEAD = 2
"""Of those that run, the youngest, whose pages are saved before they are preempted; of a pool that shall shrink all for
whom there will be no room."""
RunningPages = tuple[Sequence[int], bool]
"""Of one that runs, and whether saving them is worth it."""
_NO_ROWS = StepSize()
WRITES_QUEUED = 8192
"""Pages that wait to be written to disk; more are not remembered."""


class LowerTiers:
    """Below `pool`, whose content `index` names. `stored`: on disk; None: there is no such store."""

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, groups: int, limits: TierLimits, stored: StoredPages | None
    ) -> None:
        self.limits, self.stored = limits, stored
        self._pool, self._index = pool, index
        self.host = HostPages(groups, limits.host_pages, self._left_host)
        self.next_copy, self.spare_wanted = 1, 0
        """`spare_wanted`: pages of the pool that are to be free, or saved in RAM, for a while: it shall shrink."""
        self.loaded_pages = {Tier.HOST: 0, Tier.DISK: 0}
        self.lost_pages = {Tier.HOST: 0, Tier.DISK: 0}
        """That were to be loaded, and did not come."""
        self.stored_pages = {Tier.HOST: 0, Tier.DISK: 0}
        self.failed_copies = self.dropped_writes = 0
        """`dropped_writes`: pages that were to be written to disk when too many waited for it, or it took none, or that
        left the pool while they waited."""
        self._loads = PageLoads(pool, index, self.host, groups)
        self._copies: dict[int, PageLoad | BlockCopy] = {}
        """Planned, and not over; of a page that is stored the copy itself."""
        self._stored_last = NULL_PAGE
        self._stores = 0
        """Pages on their way to RAM or disk."""
        self._writing: set[bytes] = set()
        """Keys of those to disk."""
        self._save_failed = False
        """Since the last step with rows."""
        self._owed = False
        """Pages of who runs are to be saved before the pool shrinks, and were not when the last plan was made."""
        self._to_write: OrderedDict[Key, None] = OrderedDict()
        self._unwanted: set[bytes] = set()
        """Keys of pages on their way to disk that were forgotten since."""

    # --- answers ---

    @property
    def copying(self) -> bool:
        """Something is on its way, or shall be."""
        return bool(self._copies) or self.queued > 0

    @property
    def queued(self) -> int:
        """Loads that are not planned yet, each of which will take a page of the pool, whoever waits for it."""
        return sum(map(len, self._loads.queued.values()))

    @property
    def pending(self) -> bool:
        """With what shall be written to disk, or saved because RAM has pages that nobody needs."""
        return self.copying or bool(self._to_write) or self._saving_ahead

    @property
    def _saving_ahead(self) -> bool:
        """Not where it has just failed: nobody asks for anything, and it may fail for ever."""
        if self._save_failed or not self.limits.saves_ahead or not self.host.free:
            return False
        return any(True for _ in self._pool.unsaved)

    @property
    def spared(self) -> bool:
        """As many pages are free or saved as are wanted for a while, or no more can be."""
        if self._pool.spare >= self.spare_wanted:
            return True
        return not self._stores and not (self.host.has_room and (self._owed or any(True for _ in self._pool.unsaved)))

    @property
    def most_storing(self) -> int:
        return min(self.limits.most_storing, max(1, int(self._pool.total * self.limits.storing_share)))

    def _stores_a_plan(self, step: StepSize) -> int:
        """Pages that a plan may begin to store: as many as it fills at least, so that those that are kept spare last.
        Where nobody computes, or the pool shall shrink, as many as may be on their way."""
        return self.limits.stores_a_plan + step.pages if step.tokens and not self.spare_wanted else self.most_storing

    @property
    def spare_pages(self) -> int:
        return min(self.limits.spare_pages, int(self._pool.total * self.limits.spare_share))

    def pages_coming(self, *, soon: bool) -> bool:
        """There are pages of the pool that can be had as soon as copies are over, and not before. `soon`: without those
        that wait for a disk, which may hang."""
        blocks, copies = self._pool.blocks, self._copies.values()
        return any(
            blocks[one.page].references == 1 and not (soon and one.tier is Tier.DISK)
            if isinstance(one, PageLoad)
            else blocks[one.source].references == 1
            for one in copies
        )

    @property
    def fetches_over(self) -> int:
        """Of all that sequences waited for: how often nothing of it was on its way any more."""
        return self._loads.fetches_over

    def in_flight(self, tier: Tier) -> int:
        """Pages that come from there."""
        return self._loads.in_flight[tier]

    def loading(self, tier: Tier) -> int:
        """With those that shall come."""
        return self._loads.in_flight[tier] + len(self._loads.queued[tier])

    def anywhere(self, group: int, *, disk: bool) -> Anywhere:
        """Its prefixes that the pool has, that can be had from below, or that are on their way."""
        stored = self.stored if disk else None
        return Anywhere(self._index.pages(group), self._loads.by_key[group], self.host.pages(group), group, stored)

    def count(self, hashes: Sequence[bytes], blocks: int, first_entries: tuple[int, ...]) -> FoundBelow:
        """What it would take to have these blocks in the pool; all of them are in it, or can be had from below."""
        held = idle = 0
        missing: dict[Tier, int] = {}
        for group, first in enumerate(first_entries):
            pages, loading, host = self._index.pages(group), self._loads.by_key[group], self.host.pages(group)
            for key in hashes[first:blocks]:
                held += 1
                page = pages.get(key)
                if page is not None:
                    idle += self._pool.blocks[page].references == 0
                elif key not in loading:
                    tier = Tier.HOST if key in host else Tier.DISK
                    missing[tier] = missing.get(tier, 0) + 1
        return FoundBelow(blocks, first_entries, held, idle, missing)

    # --- loads ---

    def begin(self, hashes: Sequence[bytes], found: FoundBelow, before: int) -> tuple[Fetch, list[list[int]]]:
        """Tables for all that was found. The caller has looked whether there will be pages for it."""
        return self._loads.ask(hashes, found, before)

    def drop(self, fetch: Fetch) -> None:
        """Nobody waits for it any more, and its pages were given back. What is on its way comes all the same, and stays
        as long as nobody needs the page; what has not been planned does not come."""
        self._loads.drop(fetch)

    # --- stores ---

    def note_use(self, group: int, keys: Sequence[bytes]) -> None:
        """A prefix was found: from now on it is worth a place on disk, and kept longer there."""
        if self.stored is None:
            return
        names = [stored_key(group, key) for key in keys]
        there = self.stored.has(names)
        self.stored.use(names[:there])
        for key in keys[there:]:
            if (group, key) in self._to_write:
                continue
            if len(self._to_write) < WRITES_QUEUED:
                self._to_write[group, key] = None
            else:
                self.dropped_writes += 1

    def used_before(self, keys: Sequence[bytes]) -> int:
        """How many in a row were computed before, by this process or another: computing them again is a second use."""
        return 0 if self.stored is None else self.stored.used_before(keys)

    def note_computed(self, keys: Sequence[bytes]) -> None:
        if self.stored is not None:
            self.stored.computed(keys)

    def _plan_writes(self, applied_step: int, budget: int) -> Iterator[BlockCopy]:
        """To disk, no more than it takes: the others wait. What has left the pool meanwhile is not written, and neither
        is what waits there already, asked for by an earlier use or by another process; what is on its way is tried
        again."""
        if not self._to_write or self.stored is None:
            return
        if not self.stored.takes():
            self.dropped_writes += len(self._to_write)
            self._to_write.clear()
        most = min(budget, min(self.limits.most_writing, self.stored.room()) - len(self._writing))
        for group, key in list(islice(self._to_write, max(0, most))):
            page = self._index.pages(group).get(key)
            block, name = None if page is None else self._pool.blocks[page], stored_key(group, key)
            if block is not None and (name in self._writing or not self._storable(block, applied_step)):
                self._to_write.move_to_end((group, key))
                continue
            del self._to_write[group, key]
            if self.stored.awaits(name):
                continue
            if block is None:
                self.dropped_writes += 1
            else:
                yield self._store(block, Tier.DISK, 0, name)

    def begin_sparing(self, pages: int) -> None:
        """So many are to be free or saved for a while. Before the next plan nobody knows that they are."""
        self.spare_wanted, self._owed = pages, True

    def plan_saves(
        self, running: Iterable[RunningPages], applied_step: int, step: StepSize = _NO_ROWS, *, ahead: bool = True
    ) -> list[BlockCopy]:
        """To RAM: idle pages in the order in which they would go, then those of who runs, the youngest first. While RAM
        has pages that nobody needs, all idle pages go there, some with each step: whoever comes with much finds them
        saved. Not `ahead`: no more than are to be spare, since nobody computes meanwhile."""
        spare, self._owed = max(self.spare_pages, self.spare_wanted), False
        room, copies = self.most_storing - self._stores, list[BlockCopy]()
        budget = min(room, self._stores_a_plan(step))
        if not self.host.total:
            return copies
        if step.awaited and not self.spare_wanted:  # The next plan is made while this one is computed.
            spare, ahead = min(spare, 2 * budget), False
        if self._pool.spare >= spare:
            more = self.limits.saves_ahead + step.pages if ahead and self.limits.saves_ahead else 0
            budget = min(budget, self.host.free, more)
        leaving = self._leaving(running) if self._pool.available < spare else []
        for pages in (self._next_idle(min(room, 4 * budget)), *leaving):
            for page in pages:
                if len(copies) >= budget:
                    break
                if (copy := self._save(self._pool.blocks[page], applied_step)) is not None:
                    copies.append(copy)
        if self.spare_wanted:
            self._owed = any(self._unsaved(self._pool.blocks[page]) for pages in leaving for page in pages)
        return copies

    def _next_idle(self, most: int) -> list[int]:
        """The first of those that would go, in the order of their numbers: pages beside each other go in one piece, to
        places beside each other. From where the last plan ended: pages with lower numbers may have come since."""
        pages = sorted(islice(self._pool.unsaved, max(0, most)))
        place = bisect_right(pages, self._stored_last)
        return pages[place:] + pages[:place]

    def _leaving(self, running: Iterable[RunningPages]) -> list[Sequence[int]]:
        """Pages of those that may be preempted next, or will be by a pool that shrinks; the youngest first."""
        lacking, found = self.spare_wanted - self._pool.available, list[Sequence[int]]()
        for number, (pages, worth) in enumerate(running):
            if number >= SAVED_AHEAD and lacking <= 0:
                break
            if number < SAVED_AHEAD or worth:
                found.append(pages)
            blocks = (self._pool.blocks[page] for page in pages)
            lacking -= sum(block.references - (block.state is BlockState.STORING) == 1 for block in blocks)
        return found

    def _unsaved(self, block: Block) -> bool:
        return block.hash is not None and not block.saved and not self.host.awaits(block.group, block.hash)

    def _save(self, block: Block, applied_step: int) -> BlockCopy | None:
        if not self._unsaved(block) or not self._storable(block, applied_step):
            return None
        assert block.hash is not None
        place = self.host.reserve(block.group, block.hash)
        return None if place is None else self._store(block, Tier.HOST, place, b"")

    def _storable(self, block: Block, applied_step: int) -> bool:
        return block.state is BlockState.RESIDENT and block.step <= applied_step

    def _store(self, block: Block, tier: Tier, place: int, key: bytes) -> BlockCopy:
        self._pool.begin_store(block)
        self._stored_last = block.id
        copy = BlockCopy(self._number(), Tier.DEVICE, block.id, tier, place, False, key)
        self._copies[copy.copy_id] = copy
        self._stores += 1
        if tier is Tier.DISK:
            self._writing.add(key)
        return copy

    def _left_host(self, key: Key) -> None:
        page = self._index.pages(key[0]).get(key[1])
        if page is not None:
            self._pool.note_saved(self._pool.blocks[page], False)

    def grow_host(self, pages: int) -> None:
        """To so many pages of RAM, if there are more. What they hold already may have come to the pool meanwhile."""
        if pages > self.host.total:
            self.host.grow(pages, self._saved_in_pool)

    def _saved_in_pool(self, key: Key) -> bool:
        """It lies in RAM from now on. Says whether the pool has it too."""
        page = self._index.pages(key[0]).get(key[1])
        if page is not None:
            self._pool.note_saved(self._pool.blocks[page], True)
        return page is not None

    # --- plans and results ---

    def plan(self, running: Iterable[RunningPages], applied_step: int, step: StepSize = _NO_ROWS) -> list[BlockCopy]:
        """Copies for the plan that is being made. `running`: the youngest first. The more tokens it has the longer it
        takes, and the next copies are planned when it is over."""
        copies, most_loading = list[BlockCopy](), self.limits.most_loading + step.tokens
        self._save_failed = self._save_failed and not step.tokens
        on_way, a_plan = self._loads.in_flight, self.limits.loads_a_plan + step.tokens
        for tier in on_way:
            most = min(most_loading - sum(on_way.values()), a_plan - len(copies))
            if tier is Tier.DISK:
                most = min(most, self.limits.most_loading_disk - on_way[tier])
            for load, copy in self._loads.plan(tier, max(0, most), self.next_copy):
                self._copies[copy.copy_id] = load
                copies.append(copy)
                self.next_copy = copy.copy_id + 1
        if (budget := min(self.most_storing - self._stores, self._stores_a_plan(step))) > 0:
            copies += self._plan_writes(applied_step, budget)
            copies += self.plan_saves(running, applied_step, step)
        return copies

    def end(self, copy_id: int, arrived: bool) -> bool:
        """A copy is over. False: it is none of these (it was planned before an engine started over)."""
        ended = self._copies.pop(copy_id, None)
        if ended is None:
            return False
        self.failed_copies += not arrived
        if isinstance(ended, PageLoad):
            self.loaded_pages[ended.tier] += arrived
            self.lost_pages[ended.tier] += not arrived
            self._loads.end(ended, arrived=arrived, intact=arrived)
            return True
        self._stores -= 1
        if ended.target_tier == Tier.DISK:
            self._end_write(ended, arrived)
        elif arrived:
            self.stored_pages[Tier.HOST] += 1
            self.host.arrived(ended.target, self._saved_in_pool)
        else:
            self._save_failed = True
            self.host.lost(ended.target)
        self._pool.end_transfer(ended.source)
        return True

    def _end_write(self, copy: BlockCopy, arrived: bool) -> None:
        self._writing.remove(copy.key)
        self.stored_pages[Tier.DISK] += arrived
        if copy.key in self._unwanted:
            self._unwanted.remove(copy.key)
            self._forget_stored([copy.key])

    def give_up(self, copies: Iterable[int]) -> None:
        """Loads that will never be over. They have not failed: nobody waited for them."""
        for copy_id in copies:
            load = self._copies.get(copy_id)
            if isinstance(load, PageLoad):
                del self._copies[copy_id]
                self._loads.end(load, arrived=False)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Of all groups, wherever it lies or is on its way to; the pool has forgotten it already."""
        groups = range(len(self._loads.by_key))
        for group in groups:
            for key in keys:
                self.host.forget(group, key)
                self._to_write.pop((group, key), None)
                self._loads.forget(group, key)
        names = [stored_key(group, key) for group in groups for key in keys]
        self._forget_stored(names)
        self._unwanted |= self._writing.intersection(names)

    def _forget_stored(self, names: Sequence[bytes]) -> None:
        if self.stored is not None:
            self.stored.forget(names)

    def reset(self) -> None:
        """Forgets what lies in RAM, and what is on its way; the store on disk keeps what it has."""
        self.host.clear()
        self._loads.forget_all()
        self._to_write.clear()

    def follow(self, before: LowerTiers) -> None:
        """Goes on counting where other books ended; of what these had planned nothing is known here."""
        self.next_copy = before.next_copy
        self.host.grow(before.host.total)
        self.loaded_pages, self.stored_pages = before.loaded_pages, before.stored_pages
        self.lost_pages = before.lost_pages
        self.failed_copies, self.dropped_writes = before.failed_copies, before.dropped_writes

    def check(self) -> None:
        """Raises AssertionError with what does not add up."""
        self.host.recount()
        moving = [block.id for block in self._pool.blocks if block.state in (BlockState.LOADING, BlockState.STORING)]
        loads = [one for one in self._copies.values() if isinstance(one, PageLoad)]
        stores = [one for one in self._copies.values() if isinstance(one, BlockCopy)]
        named = sorted([load.page for load in loads] + [copy.source for copy in stores])
        assert moving == named, f"pages {moving} are in transfer, copies are of {named}"
        for block in self._pool.blocks:
            saved = block.hash is not None and block.hash in self.host.pages(block.group)
            assert block.saved == saved, f"page {block.id} counts as saved: {block.saved}, and is: {saved}"
        self.host.check_doubles(
            [(block.group, block.hash) for block in self._pool.blocks if block.saved and block.hash]
        )
        writes = sorted(copy.key for copy in stores if copy.target_tier == Tier.DISK)
        assert sorted(self._writing) == writes, f"{len(self._writing)} pages count as going to disk, not {writes}"
        self._loads.check(loads)

    def _number(self) -> int:
        self.next_copy += 1
        return self.next_copy - 1


class Anywhere:
    """Prefixes of one group in the pool, on their way to it, in RAM, or, if there is one, in a store on disk."""

    def __init__(
        self,
        pages: Container[bytes],
        loading: Container[bytes],
        host: Container[bytes],
        group: int,
        stored: StoredPages | None,
    ) -> None:
        self._pages, self._loading, self._host, self._group, self._stored = pages, loading, host, group, stored

    def __contains__(self, key: object) -> bool:
        if key in self._pages or key in self._host or key in self._loading:
            return True
        return (
            self._stored is not None and isinstance(key, bytes) and self._stored.has([stored_key(self._group, key)]) > 0
        )
