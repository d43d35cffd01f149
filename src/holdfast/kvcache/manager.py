"""The books of every sequence: which page holds which of its tokens, in each KV group. It decides; it moves nothing.

A book's table of one group, with blocks of 4 tokens, a window of 6, and the next query at position 14:

    tokens   0..3     4..7     8..11    12..15   16..
    entry  [ null  | null   | page 7 | page 3 |         ◄─ entries: how many each table has, the same in every group
             ▲        ▲        ▲        ▲
             │        │        │        └ being filled: never shared, never indexed
             │        │        └ full: indexed once its tokens are known, shared without a copy, never written again
             │        └ position 14 sees 9..14: a page is given back when all of it lies before position 9
             └ given back (or, after a prefix hit, never taken): released[group] counts these null entries

What is promised to a caller who plans steps ahead of the runner, because plans are executed strictly in order and
every layer writes its KV before attention reads it:
  - a page given back may be handed out at once: who read it before is executed before;
  - a block is indexed when the row that fills it is *scheduled*: who hits it is executed in that step or later.
Nothing may be scheduled and then taken back after `note_scheduled`; of what could not be executed `forget` is told.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.kvcache.audit import check_books
from holdfast.kvcache.groups import KVLayout
from holdfast.kvcache.pool import NULL_PAGE, Block, BlockPool, Tier
from holdfast.kvcache.prefix import PrefixIndex, chain_hashes, root_hash
from holdfast.kvcache.tier_records import Fetch, FoundBelow, StepSize, StoredPages, TierLimits
from holdfast.kvcache.tiers import LowerTiers
from holdfast.records.steps import BlockCopy


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What one sequence holds. Read by the scheduler, changed by KVCache alone."""

    root: bytes
    tables: list[list[int]]
    """One a group; the first `released[group]` entries are the null page, the others pages."""
    released: list[int]
    entries: int = 0
    """Of each table."""
    length: int = 0
    """Positions [0, length) are written, or will be when the plans made so far are executed."""
    window_moves_at: int = 0
    """Before a query at this position there is nothing to give back."""
    hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the first full blocks of known tokens; they outlive a preemption."""
    indexed: int = 0
    """Blocks that have been offered to the index."""
    noted: int = 0
    """Blocks whose computing has been noted; it outlives a preemption, which is no second use."""
    used_before: int = 0
    """Blocks from the first on that somebody had computed before: where this one does it again, they go to disk."""
    counted: bool = False
    """Its lookup is in the counters already (a preempted sequence looks itself up again)."""
    stale: bool = False
    """It holds content from before a reset of the cache: nothing of it may be indexed any more."""
    fetch: Fetch | None = None
    """What it waits for, and has pages for already: see `begin_fetch`."""

    @property
    def unplaced(self) -> int:
        """Entries of its tables for which it waits, and that have no page yet."""
        return 0 if self.fetch is None else self.fetch.unplaced

    @property
    def held(self) -> int:
        """Pages in its tables."""
        return len(self.tables) * self.entries - sum(self.released) - self.unplaced


@dataclass(frozen=True, slots=True)
class Prefix:
    """An answer of `find_prefix`: valid until anything is allocated, released or reset."""

    tokens: int
    first_entries: tuple[int, ...]
    """Of each group: entries before this are not needed."""
    held: int
    """Pages it would put into the tables."""
    idle: int
    """Of these, pages nobody refers to now: adopting them makes them unavailable to others."""


class KVCache:
    """`blocks` pages of `layout`, the null page included. `tiers`: what lies below them; None: nothing. `stored`: on
    disk."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        prefix_caching: bool = True,
        tiers: TierLimits | None = None,
        stored: StoredPages | None = None,
    ) -> None:
        self.layout = layout
        self.prefix_caching = prefix_caching
        self.queries_total = 0
        self.hits_total = 0
        self.below_queries_total = 0
        """Tokens looked up that the pool did not have."""
        self.below_hits_total = {Tier.HOST: 0, Tier.DISK: 0}
        self._index = PrefixIndex(len(layout.groups))
        self._pool = BlockPool(blocks, evicted=self._forget_evicted)
        self.tiers: LowerTiers | None = None
        if tiers is not None and prefix_caching:
            self.tiers = LowerTiers(self._pool, self._index, len(layout.groups), tiers, stored)
        self.step = self.applied_step = 0
        """The step that is being planned, and the newest whose result is known."""
        self._books: set[SequenceBlocks] = set()
        self._full_groups = [group.index for group in layout.groups if group.window is None]
        self._windows = {group.index: group.window for group in layout.groups if group.window is not None}

    # --- answers: nothing below changes anything but the memo of hashes ---

    @property
    def blocks_total(self) -> int:
        """Pages that sequences can have."""
        return self._pool.total

    @property
    def blocks_available(self) -> int:
        """Pages that can be had now, those with cached content of nobody included."""
        return self._pool.available

    @property
    def blocks_promised(self) -> int:
        """Of these, pages that loads will take which somebody waits for. Planning them changes both alike."""
        return 0 if self.tiers is None else self.tiers.queued

    @property
    def blocks_used(self) -> int:
        return self._pool.total - self._pool.available

    @property
    def blocks_touched(self) -> int:
        """Pages ever handed out, by these books or by those they follow."""
        return self._pool.touched

    @property
    def blocks_indexed(self) -> int:
        return len(self._index)

    @property
    def free_pages(self) -> list[int]:
        """Pages that are neither used nor cached: nobody may read them before somebody has written them."""
        return self._pool.free_pages

    def reach(self, book: SequenceBlocks) -> int:
        """The end up to which `grow` could take this book with the pages available now."""
        return (book.entries + self._pool.available // len(book.tables)) * self.layout.block_tokens

    def blocks_missing(self, book: SequenceBlocks, end: int) -> int:
        """How many pages are lacking to hold positions up to `end`; 0: `grow` will succeed."""
        wanted = (self.layout.blocks_for(end) - book.entries) * len(book.tables)
        return max(0, wanted - self._pool.available)

    def blocks_owed(self, held: int, tokens: int, step_tokens: int) -> int:
        """Pages that who holds `held` may still want on the way to `tokens` tokens, in steps of `step_tokens`."""
        return max(0, self.layout.peak_blocks(tokens, step_tokens) - held)

    def find_prefix(self, book: SequenceBlocks, tokens: Sequence[int]) -> Prefix:
        """The longest cached prefix all groups agree on; at least one token is left to compute.

        A full group needs every block of it, a windowed one only those a query right behind it still sees.
        """
        containers = [self._index.pages(group.index) for group in self.layout.groups]
        length = self._longest_hit(book, tokens, containers) if self.prefix_caching else 0
        first_entries = self._first_entries(length)
        held = idle = 0
        for group, first in enumerate(first_entries):
            pages = self._index.pages(group)
            for entry in range(first, length):
                held += 1
                idle += self._pool.blocks[pages[book.hashes[entry]]].references == 0
        return Prefix(length * self.layout.block_tokens, first_entries, held, idle)

    def begins_in_pool(self, book: SequenceBlocks, tokens: Sequence[int]) -> bool:
        """Whether the first block is there, as far as any group needs it: without, nothing is."""
        if len(tokens) <= self.layout.block_tokens:
            return False
        self._hash_blocks(book, tokens, 1)
        return all(book.hashes[0] in self._index.pages(group) for group in self._full_groups)

    def find_below(self, book: SequenceBlocks, tokens: Sequence[int], *, disk: bool) -> FoundBelow | None:
        """The longest prefix that the pool, RAM and, if asked, the disk hold together; None: there are no tiers."""
        tiers = self.tiers
        if tiers is None:
            return None
        containers = [tiers.anywhere(group.index, disk=disk) for group in self.layout.groups]
        length = self._longest_hit(book, tokens, containers)
        return tiers.count(book.hashes, length, self._first_entries(length))

    # --- changes ---

    def open(self, salt: str = "", adapter: str = "") -> SequenceBlocks:
        """A book with empty tables; kept until `close`. Prefixes are shared with the same salt and LoRA adapter."""
        groups = len(self.layout.groups)
        book = SequenceBlocks(root_hash(salt, adapter), [[] for _ in range(groups)], [0] * groups)
        self._books.add(book)
        return book

    def close(self, book: SequenceBlocks) -> None:
        self.free(book)
        self._books.remove(book)

    def adopt(self, book: SequenceBlocks, prefix: Prefix, tokens_looked_up: int) -> None:
        """Fills the empty tables with a prefix just found."""
        assert book.entries == 0, "only a book with empty tables can adopt a prefix"
        length = prefix.tokens // self.layout.block_tokens
        for group, first in enumerate(prefix.first_entries):
            pages = self._index.pages(group)
            found = [pages[key] for key in book.hashes[first:length]]
            for page in found:
                self._pool.refer(page)
            book.tables[group] = [NULL_PAGE] * first + found
            book.released[group] = first
        book.length = prefix.tokens
        book.entries = book.indexed = length
        if not book.counted and self.prefix_caching:
            book.counted = True
            self._count_hit(book, prefix, tokens_looked_up)
        book.fetch = None

    def _count_hit(self, book: SequenceBlocks, prefix: Prefix, tokens_looked_up: int) -> None:
        tokens, fetch, block_tokens = prefix.tokens, book.fetch, self.layout.block_tokens
        in_pool = tokens if fetch is None else min(tokens, fetch.before * block_tokens)
        self.queries_total += tokens_looked_up
        self.hits_total += in_pool
        if self.tiers is None:
            return
        self.below_queries_total += tokens_looked_up - in_pool
        for tier, came in ({} if fetch is None else fetch.came(tokens, block_tokens)).items():
            self.below_hits_total[tier] += came
        found_blocks = tokens // block_tokens
        for group, first in enumerate(prefix.first_entries):
            self.tiers.note_use(group, book.hashes[first:found_blocks])
        book.used_before = found_blocks + self.tiers.used_before(book.hashes[found_blocks:])

    def begin_fetch(self, book: SequenceBlocks, found: FoundBelow, before: Prefix) -> None:
        """Fills the empty tables with pages of what was just found; what the pool lacks is loaded, and gets its pages
        when that is planned. Until all of it has come nothing but `free` may be done with the book. `before`: what the
        pool has of it."""
        assert book.entries == 0, "only a book with empty tables can fetch a prefix"
        assert self.tiers is not None, "there is nothing to fetch from"
        assert found.wanted <= self._pool.available, "ask whether there are pages before a fetch"
        book.fetch, tables = self.tiers.begin(book.hashes, found, before.tokens // self.layout.block_tokens)
        book.tables, book.released = tables, list(found.first_entries)
        book.entries = book.indexed = found.blocks
        book.length = found.blocks * self.layout.block_tokens

    def end_fetch(self, book: SequenceBlocks) -> None:
        """Gives back what came, to be adopted in the same breath: it is indexed by now."""
        fetch, book.fetch = book.fetch, None
        self.free(book)
        book.fetch = fetch

    def plan_copies(
        self,
        running: Iterable[tuple[SequenceBlocks, bool]],
        step_tokens: int = 0,
        *,
        awaited: bool = False,
        saves_only: bool = False,
    ) -> list[BlockCopy]:
        """Between tiers, for the plan that is being made, which has so many tokens. `running`: the youngest first, and
        whether it is worth it to save what each holds. `awaited`: nothing is computed until the plan has been made."""
        if self.tiers is None:
            return []
        pages = (([page for table in book.tables for page in table if page], worth) for book, worth in running)
        filled = self.layout.blocks_for(step_tokens) * len(self.layout.groups) if step_tokens else 0
        step = StepSize(step_tokens, filled, awaited and step_tokens > 0)
        if saves_only:
            return self.tiers.plan_saves(pages, self.applied_step, step, ahead=False)
        return self.tiers.plan(pages, self.applied_step, step)

    def end_copies(self, finished: Iterable[int], failed: Iterable[int], host_pages: int = 0) -> bool:
        """These are over. `host_pages`: of RAM that may be used by now, if there are more. Says whether anything
        changed for who waits in line: most pages of a long prefix that come make no difference yet."""
        if self.tiers is None:
            return False
        before = self._pool.available, self.tiers.fetches_over
        self.tiers.grow_host(host_pages)
        for copy in finished:
            self.tiers.end(copy, True)
        failures = [self.tiers.end(copy, False) for copy in failed]
        return any(failures) or before != (self._pool.available, self.tiers.fetches_over)

    def grow(self, book: SequenceBlocks, end: int) -> None:
        """Pages for positions up to `end`, all of them; the caller has asked `reach` or `blocks_missing` first."""
        fresh = self.layout.blocks_for(end) - book.entries
        if fresh <= 0:
            return
        missing = self.blocks_missing(book, end)
        assert missing == 0, f"{missing} pages are missing to reach position {end}: ask before growing"
        for group, table in enumerate(book.tables):
            table.extend(self._pool.allocate(group).id for _ in range(fresh))
        book.entries += fresh

    def note_scheduled(self, book: SequenceBlocks, end: int, tokens: Sequence[int]) -> None:
        """The plan being made writes positions up to `end`; `tokens` are those known so far."""
        assert end <= book.entries * self.layout.block_tokens, f"position {end - 1} has no page"
        book.length = end
        self.note_known(book, tokens)

    def note_known(self, book: SequenceBlocks, tokens: Sequence[int]) -> None:
        """Indexes the blocks that are full of scheduled and known tokens. A block whose last token is sampled but
        not yet known waits for it."""
        full = min(book.length, len(tokens)) // self.layout.block_tokens
        if full <= book.indexed or not self.prefix_caching:
            return
        if not book.stale:
            self._hash_blocks(book, tokens, full)
            for entry in range(book.indexed, full):
                self._index_entry(book, entry)
            if self.tiers is not None and full > book.noted:
                self.tiers.note_computed(book.hashes[max(book.noted, book.indexed) : full])
                book.noted = full
        book.indexed = full

    def take_back(self, book: SequenceBlocks, end: int) -> bool:
        """What was scheduled from position `end` on will be written once more. False: that is not possible, because the
        page is in the index already, where others may have found it."""
        if end // self.layout.block_tokens < book.indexed:
            return False
        book.length = end
        return True

    def release_outside_window(self, book: SequenceBlocks, position: int) -> bool:
        """Gives back what no query at `position` or later will read. Says whether there was something."""
        if position < book.window_moves_at or not self._windows:
            return False
        held = book.held
        size, moves_at = self.layout.block_tokens, []
        for group, window in self._windows.items():
            table, released = book.tables[group], book.released[group]
            outside = min(self.layout.groups[group].first_needed(position) // size, book.entries)
            for entry in range(released, outside):
                self._pool.release(table[entry])
                table[entry] = NULL_PAGE
            book.released[group] = max(released, outside)
            # The first query that no longer sees the last position of the first block still held.
            moves_at.append((book.released[group] + 1) * size - 1 + window)
        book.window_moves_at = min(moves_at)
        return book.held < held

    def free(self, book: SequenceBlocks) -> None:
        """Gives everything back and empties the tables. From the tail, so that of a prefix the tail is evicted first:
        a beginning without its tail is still a hit, a tail without its beginning is not."""
        for entry in range(book.entries - 1, -1, -1):
            for table in book.tables:
                if table[entry] != NULL_PAGE:
                    self._pool.release(table[entry])
        for table in book.tables:
            table.clear()
        book.released = [0] * len(book.tables)
        book.entries = book.length = book.indexed = book.window_moves_at = 0
        book.stale = False
        if book.fetch is not None:
            assert self.tiers is not None
            fetch, book.fetch = book.fetch, None
            self.tiers.drop(fetch)

    def cached(self) -> list[tuple[int, bytes, int]]:
        """Group, chain hash and page of all cached content of nobody, in the order in which it would go."""
        blocks = (self._pool.blocks[page] for page in self._pool.idle)
        return [(block.group, block.hash, block.id) for block in blocks if block.hash is not None]

    def restore(self, group: int, key: bytes) -> int:
        """A page for content that other books had: it counts as cached from now on, so it is to be filled at once."""
        block = self._pool.allocate(group)
        if self._index.insert(group, key, block.id):
            block.hash = key
        self._pool.release(block.id)
        return block.id

    def emptied(self) -> KVCache:
        """New books of the same pages, which know nothing of what these hold, and go on counting."""
        limits, stored = (None, None) if self.tiers is None else (self.tiers.limits, self.tiers.stored)
        fresh = KVCache(self.layout, self.blocks_total + 1, self.prefix_caching, limits, stored)
        fresh.queries_total, fresh.hits_total = self.queries_total, self.hits_total
        fresh.below_queries_total, fresh.below_hits_total = self.below_queries_total, self.below_hits_total
        fresh.step, fresh.applied_step = self.step, self.applied_step
        fresh._pool.touched = self.blocks_touched
        if fresh.tiers is not None and self.tiers is not None:
            fresh.tiers.follow(self.tiers)
        return fresh

    def begin_alike(self, book: SequenceBlocks, other: SequenceBlocks, entry: int) -> bool:
        """Whether both have the same tokens up to the end of this block, as far as blocks of theirs have been known."""
        return len(book.hashes) > entry < len(other.hashes) and book.hashes[entry] == other.hashes[entry]

    def forget(self, book: SequenceBlocks, first: int, *, below: bool = False) -> None:
        """Its blocks from this entry on are no longer cached, whoever's pages hold them; nor will they be, from this
        book, before it starts anew. `below`: nor in RAM or on disk."""
        for key in book.hashes[first:]:
            for group in range(len(self.layout.groups)):
                page = self._index.pages(group).get(key)
                if page is not None:
                    self._forget_evicted(self._pool.blocks[page])
                    self._pool.forget(self._pool.blocks[page])
        if below and self.tiers is not None:
            self.tiers.forget(book.hashes[first:])
        book.stale = book.entries > 0

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content. Running sequences keep their pages, but nothing of theirs is indexed again
        before they start anew."""
        for group in range(len(self.layout.groups)):
            for page in self._index.pages(group).values():
                self._pool.forget(self._pool.blocks[page])
        self._index.clear()
        if self.tiers is not None:
            self.tiers.reset()
        for book in self._books:
            book.stale = book.entries > 0

    def resize(self, blocks: int) -> dict[int, int]:
        """To so many pages, the null page included, of which more must be there than are used. Returns which pages were
        moved where: their content is to be copied before anything else is done with these books."""
        if blocks > self.blocks_total:
            self._pool.grow(blocks)
            return {}
        moved = self._pool.shrink(blocks)
        self._index.move(moved)
        for book in self._books:
            book.tables = [[moved.get(page, page) for page in table] for table in book.tables]
        return moved

    def check_invariants(self) -> None:
        """Recounts everything and raises AssertionError with what does not add up. Walks the whole pool."""
        self._pool.recount()
        check_books(self.layout, self._pool, self._index, self._books)
        if self.tiers is not None:
            self.tiers.check()

    # --- inside ---

    def _first_entry(self, group: int, blocks: int) -> int:
        """Of a prefix of `blocks` full blocks: the first whose content a query right behind it still reads."""
        size = self.layout.block_tokens
        return min(blocks, self.layout.groups[group].first_needed(blocks * size) // size)

    def _first_entries(self, blocks: int) -> tuple[int, ...]:
        return tuple(self._first_entry(group.index, blocks) for group in self.layout.groups)

    def _longest_hit(self, book: SequenceBlocks, tokens: Sequence[int], containers: Sequence[Container[bytes]]) -> int:
        """In blocks. `containers`: of each group, what can be had."""
        length = (len(tokens) - 1) // self.layout.block_tokens
        self._hash_blocks(book, tokens, length)
        hashes = book.hashes
        for group in self._full_groups:
            pages = containers[group]
            length = next((entry for entry, key in enumerate(hashes[:length]) if key not in pages), length)
        # A block missing from the window of one length is in the window of every shorter length that ends
        # behind it, so the next candidate ends just before it. Each round starts over for all groups.
        settled = False
        while not settled:
            settled = True
            for group in self._windows:
                pages = containers[group]
                for entry in range(length - 1, self._first_entry(group, length) - 1, -1):
                    if hashes[entry] not in pages:
                        length, settled = entry, False
                        break
        return length

    def _hash_blocks(self, book: SequenceBlocks, tokens: Sequence[int], blocks: int) -> None:
        size, hashes = self.layout.block_tokens, book.hashes
        if blocks > len(hashes):
            parent = hashes[-1] if hashes else book.root
            hashes += chain_hashes(parent, tokens[len(hashes) * size : blocks * size], size)

    def _index_entry(self, book: SequenceBlocks, entry: int) -> None:
        key = book.hashes[entry]
        for group, table in enumerate(book.tables):
            page = table[entry]
            if page != NULL_PAGE and self._index.insert(group, key, page):
                block = self._pool.blocks[page]
                block.hash, block.step = key, self.step
                block.saved = self.tiers is not None and self.tiers.host.note_pool(group, key, True)
            if self.tiers is not None and self._first_entry(group, book.used_before) <= entry < book.used_before:
                self.tiers.note_use(group, [key])

    def _forget_evicted(self, block: Block) -> None:
        assert block.hash is not None
        self._index.remove(block.group, block.hash)
        if block.saved and self.tiers is not None:
            self.tiers.host.note_pool(block.group, block.hash, False)
