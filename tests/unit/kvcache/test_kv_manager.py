"""The books: prefix hits over groups, growth, windows, eviction order, and a recount that notices."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

import pytest

from holdfast.kvcache import NULL_PAGE, KVCache, KVLayout, SequenceBlocks, form_groups
from holdfast.kvcache.prefix import chain_hashes, root_hash


def make_layout(windows: list[int | None], block_tokens: int = 4) -> KVLayout:
    groups, places = form_groups(windows)
    return KVLayout(
        groups=groups, block_tokens=block_tokens, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
    )


def compute(kv: KVCache, tokens: list[int], salt: str = "", chunk: int | None = None) -> tuple[SequenceBlocks, int]:
    """As a scheduler would: the hit, then chunks until every token is scheduled."""
    book = kv.open(salt)
    prefix = kv.find_prefix(book, tokens)
    kv.adopt(book, prefix, len(tokens))
    while book.length < len(tokens):
        kv.release_outside_window(book, book.length)
        end = min(len(tokens), book.length + (chunk or len(tokens)))
        assert kv.blocks_missing(book, end) == 0
        kv.grow(book, end)
        kv.note_scheduled(book, end, tokens)
        kv.check_invariants()
    return book, prefix.tokens


def test_a_second_sequence_shares_the_full_blocks_of_the_first() -> None:
    kv = KVCache(make_layout([None]), 20)
    tokens = list(range(10))
    first, _ = compute(kv, tokens)
    second, hit = compute(kv, tokens)
    assert hit == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    assert kv.blocks_used == 4
    assert (kv.queries_total, kv.hits_total) == (20, 8)


def test_at_least_one_token_is_left_to_compute() -> None:
    kv = KVCache(make_layout([None]), 20)
    compute(kv, list(range(8)))
    assert compute(kv, list(range(8)))[1] == 4
    assert compute(kv, list(range(9)))[1] == 8


def test_salts_and_histories_are_kept_apart() -> None:
    kv = KVCache(make_layout([None]), 30)
    compute(kv, [1] * 9, salt="one")
    assert compute(kv, [1] * 9, salt="two")[1] == 0
    assert compute(kv, [1] * 9, salt="one")[1] == 8
    compute(kv, [2] * 4 + [1] * 4 + [0])
    assert compute(kv, [3] * 4 + [1] * 4 + [0])[1] == 0


def test_hashes_depend_on_everything_before() -> None:
    assert root_hash("a") != root_hash("b")
    assert chain_hashes(root_hash(""), [1, 2], 2) != chain_hashes(root_hash(""), [2, 1], 2)
    assert chain_hashes(root_hash(""), [1, 2], 2) != chain_hashes(root_hash("x"), [1, 2], 2)
    assert chain_hashes(root_hash(""), [2**40], 1) != chain_hashes(root_hash(""), [0], 1)
    whole = chain_hashes(root_hash("a"), list(range(40)), 4)
    assert len(set(whole)) == 10
    assert whole[3:] == chain_hashes(whole[2], list(range(12, 40)), 4)


def test_hashes_stay_those_that_stores_on_disk_have() -> None:
    """Of the hash before, and the block's tokens as 64-bit numbers."""
    parent, tokens = b"parent of a page", [5, 128_000, 7, 0]
    numbers = b"".join(token.to_bytes(8, sys.byteorder) for token in tokens)
    assert chain_hashes(parent, tokens, 4) == [blake2b(parent + numbers, digest_size=16).digest()]


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    kv = KVCache(make_layout([None]), 20, prefix_caching=False)
    compute(kv, list(range(9)))
    assert compute(kv, list(range(9)))[1] == 0
    assert (kv.queries_total, kv.hits_total, kv.blocks_indexed) == (0, 0, 0)


def test_the_first_writer_wins_and_a_duplicate_stays_private() -> None:
    kv = KVCache(make_layout([None]), 20)
    tokens = list(range(5))
    books = [kv.open(), kv.open()]
    for book in books:
        kv.adopt(book, kv.find_prefix(book, tokens), 5)
        kv.grow(book, 5)
    for book in books:
        kv.note_scheduled(book, 5, tokens)
    kv.check_invariants()
    assert kv.blocks_indexed == 1
    kv.close(books[1])
    assert len(kv.free_pages) == 19 - 2
    third, hit = compute(kv, tokens)
    assert (hit, third.tables[0][0]) == (4, books[0].tables[0][0])


def test_a_block_with_a_token_not_yet_known_is_indexed_when_it_becomes_known() -> None:
    kv = KVCache(make_layout([None]), 20)
    tokens = [1, 2, 3]
    book, _ = compute(kv, tokens)
    kv.grow(book, 4)
    kv.note_scheduled(book, 4, tokens)
    assert kv.blocks_indexed == 0
    kv.note_known(book, [*tokens, 9])
    assert kv.blocks_indexed == 1
    assert compute(kv, [1, 2, 3, 9, 0])[1] == 4


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = KVCache(make_layout([None]), 6)
    book, _ = compute(kv, list(range(17)))
    kv.close(book)
    other, _ = compute(kv, [50] * 9)
    kv.close(other)
    assert compute(kv, list(range(17)))[1] == 8


def test_growing_is_all_or_nothing_and_asking_evicts_nothing() -> None:
    kv = KVCache(make_layout([None, 3]), 5)
    book = kv.open()
    assert kv.reach(book) == 8
    assert kv.blocks_missing(book, 8) == 0
    assert kv.blocks_missing(book, 9) == 2
    with pytest.raises(AssertionError, match="2 pages are missing"):
        kv.grow(book, 9)
    assert (kv.blocks_used, book.entries) == (0, 0)
    kv.grow(book, 8)
    assert kv.blocks_used == 4


def test_a_windowed_group_gives_back_what_left_the_window() -> None:
    kv = KVCache(make_layout([None, 6]), 40)
    book, _ = compute(kv, list(range(14)))
    kv.release_outside_window(book, 14)
    kv.check_invariants()
    # Position 14 sees 9..14: entries 0 and 1 hold 0..7.
    assert book.tables[1][:2] == [NULL_PAGE, NULL_PAGE]
    assert book.tables[1][2] != NULL_PAGE
    assert NULL_PAGE not in book.tables[0]
    assert book.held == 4 + 2
    assert kv.blocks_used == 6


def test_a_hit_needs_of_a_windowed_group_only_the_window() -> None:
    kv = KVCache(make_layout([None, 6]), 40)
    tokens = list(range(30))
    book, _ = compute(kv, tokens, chunk=4)
    kv.close(book)
    second, hit = compute(kv, tokens)
    assert hit == 28
    # A query at 28 sees 23..28, so entries 0..4 (positions 0..19) were not taken.
    assert second.tables[1][:5] == [NULL_PAGE] * 5
    assert NULL_PAGE not in second.tables[1][5:]


def test_groups_agree_on_the_longest_length_that_all_of_them_have() -> None:
    kv = KVCache(make_layout([None, 6, 10], block_tokens=2), 100)
    tokens = list(range(21))
    book, _ = compute(kv, tokens)
    pool = kv._pool
    # Forget one block of the small window: lengths whose window holds it are gone for every group.
    lost = pool.blocks[book.tables[1][7]]
    assert lost.hash is not None
    kv._index.remove(1, lost.hash)
    pool.forget(lost)
    # Entry 7 is positions 14..15; a query at 20 sees from 15 on, one at 22 from 17 on.
    assert kv.find_prefix(kv.open(), tokens).tokens == 14
    kv.grow(book, 23)
    kv.note_scheduled(book, 23, list(range(23)))
    assert kv.find_prefix(kv.open(), list(range(23))).tokens == 22


def longest_by_hand(kv: KVCache, hashes: list[bytes], tokens: int) -> int:
    """Tries every length from the longest down, as the definition says it."""
    size = kv.layout.block_tokens
    for length in range((tokens - 1) // size, 0, -1):
        needed = [
            (group.index, entry)
            for group in kv.layout.groups
            for entry in range(length)
            if (entry + 1) * size > group.first_needed(length * size)
        ]
        if all(hashes[entry] in kv._index.pages(group) for group, entry in needed):
            return length * size
    return 0


@pytest.mark.parametrize("windows", [[None], [5], [1], [None, 6], [None, 3, 9], [4, 11], [2, 2, 30]])
def test_the_longest_hit_is_what_its_definition_says(windows: list[int | None]) -> None:
    choice = random.Random(1)
    for block_tokens in (1, 2, 3, 4):
        layout = make_layout(windows, block_tokens)
        for _ in range(40):
            kv = KVCache(layout, 300)
            tokens = [choice.randint(0, 1) for _ in range(choice.randint(1, 40))]
            book, _ = compute(kv, tokens)
            hashes = list(book.hashes)
            for table in book.tables:
                for page in table:
                    block = kv._pool.blocks[page]
                    if block.hash is not None and choice.random() < 0.15:
                        kv._index.remove(block.group, block.hash)
                        kv._pool.forget(block)
            found = kv.find_prefix(kv.open(), tokens)
            assert found.tokens == longest_by_hand(kv, hashes, len(tokens))


@pytest.mark.parametrize("windows", [[None], [3], [None, 3]])
def test_a_reset_forgets_everything_and_what_runs_is_not_indexed_again(windows: list[int | None]) -> None:
    kv = KVCache(make_layout(windows), 60)
    gone, _ = compute(kv, [5] * 9)
    kv.close(gone)
    running, _ = compute(kv, list(range(9)))
    kv.reset_prefix_cache()
    kv.check_invariants()
    assert kv.blocks_indexed == 0
    assert compute(kv, [5] * 9)[1] == 0
    # What it computes from now on still stands on KV from before the reset.
    tokens = list(range(14))
    kv.grow(running, 14)
    kv.note_scheduled(running, 14, tokens)
    kv.check_invariants()
    assert kv.find_prefix(kv.open(), tokens).tokens == 0
    # Started anew, it is indexed again.
    kv.close(running)
    compute(kv, tokens)
    assert kv.find_prefix(kv.open(), tokens).tokens == 12


def test_a_preempted_book_counts_its_lookup_once() -> None:
    kv = KVCache(make_layout([None]), 20)
    book, _ = compute(kv, list(range(9)))
    kv.free(book)
    prefix = kv.find_prefix(book, list(range(9)))
    kv.adopt(book, prefix, 9)
    assert prefix.idle == prefix.held == 2
    assert (kv.queries_total, kv.hits_total) == (9, 0)


def test_what_is_owed_counts_windows_and_what_is_held() -> None:
    kv = KVCache(make_layout([None, 6]), 50)
    assert kv.blocks_owed(0, 100, 4) == 25 + 4
    assert kv.blocks_owed(20, 100, 4) == 9
    assert kv.blocks_owed(99, 100, 4) == 0


class TestRecount:
    """What check_invariants says when the books are cooked."""

    def cooked(self) -> tuple[KVCache, SequenceBlocks, SequenceBlocks]:
        kv = KVCache(make_layout([None, 6]), 40)
        first, _ = compute(kv, list(range(14)))
        second, _ = compute(kv, [*range(12), 50, 51])
        return kv, first, second

    def test_a_leaked_reference(self) -> None:
        kv, first, _ = self.cooked()
        kv._pool.blocks[first.tables[0][0]].references += 1
        with pytest.raises(AssertionError, match=r"3 references, but is in 2"):
            kv.check_invariants()

    def test_a_page_of_another_sequence(self) -> None:
        kv, first, second = self.cooked()
        kv._pool.release(first.tables[0][3])
        first.tables[0][3] = second.tables[0][3]
        kv._pool.refer(second.tables[0][3])
        with pytest.raises(AssertionError, match="may still be written"):
            kv.check_invariants()

    def test_an_index_that_points_elsewhere(self) -> None:
        kv, first, _ = self.cooked()
        kv._pool.blocks[first.tables[0][0]].hash = b"other"
        with pytest.raises(AssertionError, match=r"holds another prefix|not its own"):
            kv.check_invariants()

    def test_a_window_given_back_too_early(self) -> None:
        kv, first, _ = self.cooked()
        kv.release_outside_window(first, 22)
        with pytest.raises(AssertionError, match="reads it"):
            kv.check_invariants()

    def test_a_hash_without_an_index_entry(self) -> None:
        kv, first, _ = self.cooked()
        kv._index.remove(0, first.hashes[0])
        with pytest.raises(AssertionError, match="in the index"):
            kv.check_invariants()


def test_a_page_is_referred_to_by_as_many_as_share_it() -> None:
    kv = KVCache(make_layout([None]), 40)
    books = [compute(kv, [1] * 9)[0] for _ in range(16)]
    assert kv.blocks_used == 2 + 16
    assert kv._pool.blocks[books[0].tables[0][0]].references == 16
    for book in books:
        kv.close(book)
    kv.check_invariants()
    assert kv.blocks_used == 0
