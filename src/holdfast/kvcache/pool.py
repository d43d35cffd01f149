"""The pool of equal pages: who is free, who is referred to, who may be evicted next. Knows no tokens and no tensors.

    page 0          the null page: table entries of pages given back point to it; never handed out
    free            never cached, or forgotten; used first (last given back, first used: it is warm)
    idle            nobody refers to it, but its content is cached; the least recently used is evicted first, and of all
                    those first of which a copy lies in RAM (saved): nothing is lost with them
    used            referred to by tables, or by a transfer

             allocate                    release (cached)
      free ───────────► used ◄────────────────────────────► idle
        ▲                │                 refer               │
        └────────────────┘                                     │ evicted by allocate, or forgotten
        ▲  release (not cached)                                │
        └──────────────────────────────────────────────────────┘

Every operation takes constant time, but for those that change how many pages there are: new ones come behind the
others, and the last ones go, what they hold having been moved to pages before them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NULL_PAGE = 0


class BlockState(enum.Enum):
    FREE = "free"
    RESIDENT = "resident"
    LOADING = "loading"
    """Its content is on the way here; not cached until it has come."""
    STORING = "storing"
    """Its content is being copied away; it may be read, not given up."""


class Tier(enum.IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(slots=True, eq=False)
class Block:
    id: int
    references: int = 0
    hash: bytes | None = None
    """Chain hash under which the prefix index knows it; None: it is not indexed."""
    group: int = 0
    """KV group its content belongs to; means something only while it is used or cached."""
    state: BlockState = BlockState.FREE
    tier: Tier = Tier.DEVICE
    saved: bool = False
    """A copy of what it is indexed for lies in RAM."""
    step: int = 0
    """The newest step that may have written what it is indexed for: until it is applied nobody knows whether it did."""


class BlockPool:
    """`blocks` pages on one tier, page 0 included. `evicted` hears of a cached block just before its page is reused."""

    def __init__(self, blocks: int, evicted: Callable[[Block], None], *, tier: Tier = Tier.DEVICE) -> None:
        assert blocks >= 2, f"a pool of {blocks} pages has nothing to give besides the null page"
        self.blocks = [Block(index, tier=tier) for index in range(blocks)]
        self._evicted = evicted
        self._free = list(range(blocks - 1, NULL_PAGE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._saved: OrderedDict[int, None] = OrderedDict()
        """Idle as well."""
        self.touched = 0
        """Pages handed out since they came. New ones go out in the order of their ids: the highest id counts them."""

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return len(self.blocks) - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now: free ones, then idle ones."""
        return len(self._free) + len(self._idle) + len(self._saved)

    @property
    def unsaved(self) -> Iterable[int]:
        """Idle pages of which there is no copy below, in the order in which they would be evicted."""
        return self._idle

    @property
    def idle(self) -> Iterable[int]:
        """Pages of nobody with cached content, those first that would be evicted first."""
        return (*self._saved, *self._idle)

    @property
    def spare(self) -> int:
        """Pages that can be handed out and nothing is lost that a copy could save."""
        return len(self._free) + len(self._saved)

    @property
    def free_pages(self) -> list[int]:
        """Pages without content that anybody may read."""
        return list(self._free)

    def allocate(self, group: int) -> Block:
        """A page with one reference and no known content. The caller has looked at `available` first."""
        if self._free:
            block = self.blocks[self._free.pop()]
            self.touched = max(self.touched, block.id)
        else:
            assert self._idle or self._saved, "allocate was called on an empty pool"
            block = self._evict()
        block.references = 1
        block.group = group
        block.state = BlockState.RESIDENT
        return block

    def refer(self, block_id: int) -> None:
        """One more reader of a block that is used or idle."""
        block = self.blocks[block_id]
        assert block.state is not BlockState.FREE, f"page {block_id} is free and cannot be referenced"
        if block.references == 0:
            del self._idle_line(block)[block_id]
        block.references += 1

    def release(self, block_id: int) -> None:
        """One reader less. The last one leaves it idle (newest in line) when it is cached, else free."""
        block = self.blocks[block_id]
        assert block.references > 0, f"page {block_id} was released more often than taken"
        block.references -= 1
        if block.references == 0:
            if block.hash is not None:
                self._idle_line(block)[block_id] = None
            else:
                self._make_free(block)

    def forget(self, block: Block) -> None:
        """Its content is no longer cached; an idle page becomes free."""
        idle = self._idle_line(block)
        block.hash, block.saved = None, False
        if block.id in idle:
            del idle[block.id]
            self._make_free(block)

    def note_saved(self, block: Block, saved: bool) -> None:
        """Whether a copy of it lies in RAM from now on. One whose copy has gone is evicted no sooner for it."""
        if block.saved == saved:
            return
        idle = block.references == 0
        if idle:
            del self._idle_line(block)[block.id]
        block.saved = saved
        if idle:
            self._idle_line(block)[block.id] = None

    def begin_transfer(self, block_id: int, state: BlockState) -> None:
        """The transfer holds a reference of its own, so the page can be neither evicted nor handed out."""
        block = self.blocks[block_id]
        assert state in (BlockState.LOADING, BlockState.STORING), f"{state} is not a transfer"
        assert block.state is BlockState.RESIDENT, f"page {block_id} is {block.state.value}; only a resident one moves"
        assert block.references > 0, f"page {block_id} is idle; take a reference before it moves"
        assert state is BlockState.STORING or block.hash is None, f"page {block_id} is cached; loading would ruin it"
        block.references += 1
        block.state = state

    def begin_load(self, block_id: int, group: int) -> None:
        """A transfer to a page that was just allocated, whose reference is the transfer's own from now on."""
        block = self.blocks[block_id]
        assert (block.references, block.hash) == (1, None), f"page {block_id} is not a fresh one"
        block.group, block.state = group, BlockState.LOADING

    def begin_store(self, block: Block) -> None:
        """A transfer of a cached page, idle or not: of thousands at once, so in one piece."""
        assert block.state is BlockState.RESIDENT, f"page {block.id} is {block.state.value}; only a resident one moves"
        if block.references == 0:
            del (self._saved if block.saved else self._idle)[block.id]
        block.references += 1
        block.state = BlockState.STORING

    def end_transfer(self, block_id: int) -> None:
        block = self.blocks[block_id]
        assert block.state in (BlockState.LOADING, BlockState.STORING), f"page {block_id} is not being moved"
        block.state = BlockState.RESIDENT
        self.release(block_id)

    def grow(self, blocks: int) -> None:
        """To so many pages, page 0 included. New ones are handed out when no other is free."""
        assert blocks >= len(self.blocks), f"a pool of {len(self.blocks)} pages does not grow to {blocks}"
        tier, new = self.blocks[NULL_PAGE].tier, range(len(self.blocks), blocks)
        self.blocks += [Block(index, tier=tier) for index in new]
        self._free[:0] = reversed(new)

    def shrink(self, blocks: int) -> dict[int, int]:
        """To so many pages, page 0 included: those that are used must be fewer. Returns, of pages that go and hold
        something, which page holds it from now on. Of cached content of nobody the least recently used is evicted, as
        much as there is no page for."""
        used = self.total - self.available
        assert used < blocks <= len(self.blocks), f"{used} pages of {len(self.blocks)} are used; {blocks} do not do"
        assert all(block.state in (BlockState.FREE, BlockState.RESIDENT) for block in self.blocks[blocks:]), (
            "in transfer"
        )
        while len(self._idle) + len(self._saved) > blocks - 1 - used:
            self._make_free(self._evict())
        self._free = [page for page in self._free if page < blocks]
        moved = dict[int, int]()
        for block in self.blocks[blocks:]:
            if block.state is BlockState.RESIDENT:
                target = self.blocks[self._free.pop()]
                target.references, target.hash, target.group = block.references, block.hash, block.group
                target.state, target.saved, target.step = block.state, block.saved, block.step
                moved[block.id] = target.id
        self._idle = OrderedDict.fromkeys(moved.get(page, page) for page in self._idle)
        self._saved = OrderedDict.fromkeys(moved.get(page, page) for page in self._saved)
        del self.blocks[blocks:]
        self.touched = min(max((self.touched, *moved.values())), self.total)
        return moved

    def recount(self) -> None:
        """Every page is in exactly one place. Raises AssertionError; walks the whole pool."""
        free, idle = set(self._free), {*self._idle, *self._saved}
        assert len(idle) == len(self._idle) + len(self._saved), "a page is idle twice"
        assert all(self.blocks[page].saved for page in self._saved), "a page counts as saved and is not"
        assert not any(self.blocks[page].saved for page in self._idle), "a saved page does not count as saved"
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, f"free and idle at once: {sorted(free & idle)}"
        null = self.blocks[NULL_PAGE]
        assert NULL_PAGE not in free | idle, "the null page would be handed out"
        assert (null.references, null.hash) == (0, None), "the null page was handed out"
        for block in self.blocks[1:]:
            held = block.references > 0
            assert held + (block.id in free) + (block.id in idle) == 1, (
                f"page {block.id} has {block.references} references, free={block.id in free}, idle={block.id in idle}"
            )
            assert (block.state is BlockState.FREE) == (block.id in free), f"page {block.id}: state {block.state}"
            assert block.id not in free or block.hash is None, f"page {block.id} is free and has a hash"
            assert block.id not in idle or block.hash is not None, f"page {block.id} is idle without a hash"

    def _evict(self) -> Block:
        """The idle page that was used least recently; it is nobody's then."""
        block = self.blocks[(self._saved or self._idle).popitem(last=False)[0]]
        self._evicted(block)
        block.hash, block.saved = None, False
        return block

    def _idle_line(self, block: Block) -> OrderedDict[int, None]:
        return self._saved if block.saved else self._idle

    def _make_free(self, block: Block) -> None:
        block.state = BlockState.FREE
        self._free.append(block.id)
