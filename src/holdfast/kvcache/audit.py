"""The recount: holds tables, references and index against each other. For tests and debug runs; changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from holdfast.kvcache.groups import KVLayout
from holdfast.kvcache.pool import NULL_PAGE, BlockPool, BlockState
from holdfast.kvcache.prefix import PrefixIndex


class BookLike(Protocol):
    @property
    def tables(self) -> list[list[int]]: ...
    @property
    def released(self) -> list[int]: ...
    @property
    def entries(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def hashes(self) -> list[bytes]: ...
    @property
    def unplaced(self) -> int: ...


def check_books(layout: KVLayout, pool: BlockPool, index: PrefixIndex, books: Iterable[BookLike]) -> None:
    """Raises AssertionError naming the page, the entry and the numbers that do not agree."""
    occurrences: Counter[int] = Counter()
    for book in books:
        _check_tables(layout, pool, book)
        occurrences.update(page for table in book.tables for page in table if page != NULL_PAGE)
    for block in pool.blocks:
        moving = block.state in (BlockState.LOADING, BlockState.STORING)
        assert block.references == occurrences[block.id] + moving, (
            f"page {block.id} has {block.references} references, but is in {occurrences[block.id]} table entries"
            f"{' and one transfer' if moving else ''}"
        )
    _check_index(layout, pool, index)


def _check_tables(layout: KVLayout, pool: BlockPool, book: BookLike) -> None:
    size, entries = layout.block_tokens, book.entries
    assert book.length <= entries * size, f"{book.length} tokens scheduled into {entries} blocks of {size}"
    unplaced = 0
    for group, table in zip(layout.groups, book.tables, strict=True):
        released = book.released[group.index]
        assert len(table) == entries, f"group {group.index} has {len(table)} entries, not {entries}"
        assert all(page == NULL_PAGE for page in table[:released]), f"group {group.index}: a released entry has a page"
        assert released <= group.first_needed(book.length) // size, (
            f"group {group.index}: entry {released - 1} was released, but the query at {book.length} reads it"
        )
        there = [entry for entry in range(released, entries) if table[entry] != NULL_PAGE]
        unplaced += entries - released - len(there)
        assert len({table[entry] for entry in there}) == len(there), f"group {group.index}: a page is twice in a table"
        for entry in there:
            block = pool.blocks[table[entry]]
            assert block.group == group.index, f"page {block.id} is of group {block.group}, not {group.index}"
            if block.references > 1 or block.hash is not None:
                assert (entry + 1) * size <= book.length, (
                    f"page {block.id} is shared or indexed, and entry {entry} may still be written (at {book.length})"
                )
            if block.hash is not None:
                assert block.hash == book.hashes[entry], f"page {block.id}: entry {entry} holds another prefix"
    assert unplaced == book.unplaced, f"{unplaced} entries are null pages, and {book.unplaced} wait for one"


def _check_index(layout: KVLayout, pool: BlockPool, index: PrefixIndex) -> None:
    for group in layout.groups:
        for key, page in index.pages(group.index).items():
            block = pool.blocks[page]
            assert block.group == group.index, f"page {page} is indexed under group {group.index}, not {block.group}"
            assert block.hash == key, f"page {page} of group {group.index} is indexed under a hash that is not its own"
            assert block.state is not BlockState.LOADING, f"page {page} is indexed before its content has come"
    named = sum(block.hash is not None for block in pool.blocks)
    assert named == len(index), f"{named} pages have a hash, {len(index)} are in the index"
