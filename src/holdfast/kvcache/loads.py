"""What comes to the pool from RAM or from a disk: one load a page, whoever waits for it. A load is asked for when
somebody begins to wait, planned in its turn, and over when its copy is. A page of the pool is taken for it when it is
planned, and not before: to take thousands at once would take as long as a step, and evict what is still used meanwhile.

    ask ──► queued (its source is held) ──plan──► in flight (it has a page) ──end──► in the index, or lost

Decides neither who waits nor how many are planned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.kvcache.host_pages import HostPages
from holdfast.kvcache.pool import NULL_PAGE, BlockPool, Tier
from holdfast.kvcache.prefix import PrefixIndex
from holdfast.kvcache.tier_records import Fetch, FoundBelow
from holdfast.records.steps import BlockCopy

Wait = tuple[Fetch, list[int], int]
"""Who waits, and where in which of its tables the page goes."""


@dataclass(slots=True, eq=False)
class PageLoad:
    group: int
    key: bytes
    tier: Tier
    source: int
    """Its page in RAM."""
    waits: list[Wait]
    page: int = NULL_PAGE
    """Of the pool, from when it is planned on."""
    forgotten: bool = False
    """The cache was reset since: it is indexed no more."""


class PageLoads:
    def __init__(self, pool: BlockPool, index: PrefixIndex, host: HostPages, groups: int) -> None:
        self._pool, self._index, self._host = pool, index, host
        self.by_key: list[dict[bytes, PageLoad]] = [{} for _ in range(groups)]
        """Of each group; without those that are forgotten."""
        self.queued = {Tier.DISK: OrderedDict[PageLoad, None](), Tier.HOST: OrderedDict[PageLoad, None]()}
        """By where they come from: who comes from RAM does not stand behind who comes from a disk, which may hang."""
        self._awaited: dict[Fetch, list[PageLoad]] = {}
        """What each fetch waits for, or did; until all has come, or it is dropped."""
        self.in_flight = {Tier.DISK: 0, Tier.HOST: 0}
        self.fetches_over = 0
        """Of which nothing is on its way any more."""

    def ask(self, hashes: Sequence[bytes], found: FoundBelow, before: int) -> tuple[Fetch, list[list[int]]]:
        """For all that was found, as tables: what is in the pool is referred to, the rest is loaded."""
        fetch, tables, tiers = Fetch(before), list[list[int]](), [int(Tier.DEVICE)] * found.blocks
        loads = list[PageLoad]()
        refer, pin, queued = self._pool.refer, self._host.pin, self.queued
        from_host, from_disk = Tier.HOST, Tier.DISK  # Of thousands of pages: looked up once.
        for group, first in enumerate(found.first_entries):
            pages, by_key, host = self._index.pages(group), self.by_key[group], self._host.pages(group)
            table, missing = [NULL_PAGE] * first, list[tuple[int, int]]()
            for place, key in enumerate(hashes[first : found.blocks], first):
                load = by_key.get(key)
                page = pages.get(key, NULL_PAGE) if load is None else load.page
                table.append(page)
                if page:
                    refer(page)
                if load is not None:
                    load.waits.append((fetch, table, place))
                    loads.append(load)
                    fetch.waiting += 1
                    fetch.unplaced += not page
                    tiers[place] = max(tiers[place], load.tier)
                elif not page:
                    missing.append((host.get(key, -1), place))
            # Those that lie beside each other in RAM go together, so that they get pages that do.
            for source, place in sorted(missing):
                key, tier = hashes[place], from_host
                if source < 0:
                    tier, source = from_disk, 0
                else:
                    pin(group, key)
                load = by_key[key] = PageLoad(group, key, tier, source, [(fetch, table, place)])
                queued[tier][load] = None
                loads.append(load)
                if tier > tiers[place]:
                    tiers[place] = tier
            fetch.waiting += len(missing)
            fetch.unplaced += len(missing)
            tables.append(table)
        if loads:
            self._awaited[fetch] = loads
        fetch.blocks = {tier: tiers.count(tier) for tier in (Tier.HOST, Tier.DISK)}
        return fetch, tables

    def plan(self, tier: Tier, most: int, number: int) -> Iterator[tuple[PageLoad, BlockCopy]]:
        """The next from there, no more than these, and than there are pages for. `number`: of the first copy."""
        queued, pool = self.queued[tier], self._pool
        loads = [queued.popitem(last=False)[0] for _ in range(min(most, len(queued), pool.available))]
        # In order, as those are that they come from.
        for load, page in zip(loads, sorted(pool.allocate(load.group).id for load in loads), strict=True):
            load.page = page
            pool.begin_load(page, load.group)
            for fetch, table, place in load.waits:
                if not fetch.dropped:
                    pool.refer(page)
                    table[place] = page
                    fetch.unplaced -= 1
            self.in_flight[tier] += 1
            stored = stored_key(load.group, load.key) if tier is Tier.DISK else b""
            yield load, BlockCopy(number, tier, load.source, Tier.DEVICE, page, False, stored)
            number += 1

    def drop(self, fetch: Fetch) -> None:
        """Nobody waits for it any more: what only it waits for, and has not been planned, does not come."""
        fetch.dropped = True
        for load in self._awaited.pop(fetch, ()):
            queued = self.queued[load.tier]
            if load in queued and all(one.dropped for one, _, _ in load.waits):
                del queued[load]
                self._leave(load, intact=True)

    def end(self, load: PageLoad, *, arrived: bool, intact: bool = True) -> None:
        """Its copy is over."""
        self.in_flight[load.tier] -= 1
        self._leave(load, intact=intact)
        block = self._pool.blocks[load.page]
        block.step = 0
        if arrived and not load.forgotten and self._index.insert(load.group, load.key, block.id):
            block.hash = load.key
            block.saved = self._host.note_pool(load.group, load.key, True)
        self._pool.end_transfer(block.id)

    def _leave(self, load: PageLoad, *, intact: bool) -> None:
        if load.tier is Tier.HOST:
            self._host.unpin(load.source, intact=intact)
        if not load.forgotten:
            del self.by_key[load.group][load.key]
        for fetch, _, _ in load.waits:
            fetch.waiting -= 1
            if not fetch.waiting:
                self.fetches_over += 1
                self._awaited.pop(fetch, None)

    def forget(self, group: int, key: bytes) -> None:
        if (load := self.by_key[group].pop(key, None)) is not None:
            load.forgotten = True

    def forget_all(self) -> None:
        for loads in self.by_key:
            for load in loads.values():
                load.forgotten = True
            loads.clear()

    def check(self, planned: Sequence[PageLoad]) -> None:
        """Raises AssertionError with what does not add up. `planned`: whose copies are not over."""
        queued = [load for loads in self.queued.values() for load in loads]
        assert not any(load.page for load in queued), "a load has a page before it is planned"
        assert all(any(not one.dropped for one, _, _ in load.waits) for load in queued), "nobody waits for a load"
        assert len({id(load) for load in queued}) == len(queued), "a load stands in line twice"
        unplaced = Counter(id(one) for load in queued for one, _, _ in load.waits)
        for one in (one for load in (*planned, *queued) for one, _, _ in load.waits if not one.dropped):
            assert one.unplaced == unplaced[id(one)], f"{one.unplaced} pages count as unplaced, {unplaced[id(one)]} are"
        awaited = {id(one) for load in (*planned, *queued) for one, _, _ in load.waits if not one.dropped}
        assert {id(one) for one in self._awaited} == awaited, "it is not known what a fetch waits for"
        known = {id(load) for loads in self.by_key for load in loads.values()}
        found = {id(load) for load in (*planned, *queued) if not load.forgotten}
        assert known == found, "a load is not where it is looked for"
        count = {tier: sum(load.tier is tier for load in planned) for tier in self.in_flight}
        assert count == self.in_flight, f"{self.in_flight} loads count as in flight, {count} are"


def stored_key(group: int, key: bytes) -> bytes:
    """Of a page in the store on disk."""
    return group.to_bytes(2, "little") + key
