"""What tiers below the pool are told and asked: their limits, the store on disk as they see it, and what a sequence
waits for. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.kvcache.pool import Tier


class StoredPages(Protocol):
    """What a store on disk says it has, from what it knows without reading. It may be wrong: a read may fail."""

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of them in a row, from the first on."""

    def use(self, keys: Sequence[bytes]) -> None:
        """They were asked for, in the order of their chain, and need not be read."""

    def used_before(self, keys: Sequence[bytes]) -> int:
        """How many chain hashes in a row, from the first on, were `computed` before, in any process."""

    def computed(self, keys: Sequence[bytes]) -> None:
        """Blocks with these chain hashes were computed: next time is their second use."""

    def takes(self) -> bool:
        """Whether a page would be written now, as far as is known: the disk is well, and the day's budget not spent."""

    def room(self) -> int:
        """How many pages it would take at once now; others wait until it has written some."""

    def awaits(self, key: bytes) -> bool:
        """It is there, or waits to be written: a copy of it would be dropped."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Of these that are there, or wait to be written, nobody finds any again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    host_pages: int = 0
    """In RAM; more may come."""
    most_loading: int = 512
    """Pages on their way to the pool at once; others wait for their turn."""
    loads_a_plan: int = 256
    """Of these, that one plan begins: launching them takes time of who decodes. One more with each token of the plan,
    here as above: a long step would else leave the link idle."""
    most_loading_disk: int = 64
    """Of these, from disk: of one that nobody waits for any more the page is not free before it has come."""
    most_storing: int = 64
    """Pages on their way to RAM and to disk at once: they can be given to nobody meanwhile."""
    stores_a_plan: int = 1024
    """Of these, that one plan with rows begins, beside as many as its rows fill: planning them takes time of who
    decodes. All where the pool shall shrink."""
    saves_ahead: int = 0
    """Of these, that one plan begins while enough are spare, beside as many as its rows fill. 0: none."""
    most_writing: int = 64
    """Of these, to disk: they may go through memory of their own."""
    storing_share: float = 1.0
    """Of the pool as it is now: no more than so much of it is stored at once."""
    disk_share: float = 1.0
    """Of the disk, that pages have at most while a step is computed; 1: steps read no layers from it."""
    spare_pages: int = 256
    """Of the pool, that are to be free, or saved in RAM: while there are fewer, pages are saved."""
    spare_share: float = 1.0
    """Of the pool as it is now: no more than so much of it is to be spare."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Of the plan that copies are planned for."""

    tokens: int = 0
    """0: it has no rows, and nobody waits for what it takes to plan copies."""
    pages: int = 0
    """That its rows fill, about."""
    awaited: bool = False
    """Nothing is computed until it has been made."""


@dataclass(slots=True, eq=False)
class Fetch:
    """What one sequence waits for."""

    before: int
    """Blocks of its prefix that were in the pool already."""
    waiting: int = 0
    """Pages that have not come yet."""
    unplaced: int = 0
    """Of these, for which no page of the pool has been taken so far."""
    blocks: dict[Tier, int] = field(default_factory=dict)
    """Of its prefix, that came from each tier."""
    dropped: bool = False

    def came(self, tokens: int, block_tokens: int) -> dict[Tier, int]:
        """Of so many tokens of the prefix, those from each tier. What others computed meanwhile came from none."""
        left, found = max(0, tokens - self.before * block_tokens), dict[Tier, int]()
        for tier, blocks in self.blocks.items():
            found[tier] = min(left, blocks * block_tokens)
            left -= found[tier]
        return found


@dataclass(frozen=True, slots=True)
class FoundBelow:
    """An answer of `find_below`: valid until anything is allocated, released, reset or has come."""

    blocks: int
    first_entries: tuple[int, ...]
    held: int
    """Pages it would put into the tables."""
    idle: int
    """Of these, pages of the pool that nobody refers to now."""
    missing: dict[Tier, int]
    """Of these, pages to be loaded, by where they lie. Pages that are on their way already are in neither."""

    @property
    def wanted(self) -> int:
        """Pages of the pool that become unavailable to others."""
        return self.idle + sum(self.missing.values())
