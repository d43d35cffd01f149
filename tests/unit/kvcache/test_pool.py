"""The block pool: order of reuse, references, transfers."""

from __future__ import annotations

import pytest

from holdfast.kvcache import NULL_PAGE, Block, BlockPool, BlockState


def make_pool(blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []

    def hear(block: Block) -> None:
        evicted.append(block.id)

    return BlockPool(blocks, hear), evicted


def cache(pool: BlockPool, block: Block, name: bytes) -> None:
    """As the manager does it: a hash while it is used, then nobody refers to it."""
    block.hash = name
    pool.release(block.id)


def test_the_null_page_is_never_handed_out() -> None:
    pool, _ = make_pool(5)
    assert pool.total == pool.available == 4
    assert NULL_PAGE not in {pool.allocate(0).id for _ in range(4)}
    assert pool.available == 0
    pool.recount()


def test_an_empty_pool_says_so() -> None:
    pool, _ = make_pool(2)
    pool.allocate(0)
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate(0)


def test_free_pages_are_used_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool, evicted = make_pool(5)
    blocks = [pool.allocate(0) for _ in range(4)]
    for block in blocks[:3]:
        cache(pool, block, bytes([block.id]))
    pool.release(blocks[3].id)
    assert pool.available == 4
    assert pool.allocate(0) is blocks[3]
    assert evicted == []
    pool.refer(blocks[0].id)
    pool.release(blocks[0].id)
    assert [pool.allocate(0) for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]
    assert evicted == [blocks[1].id, blocks[2].id, blocks[0].id]
    assert all(block.hash is None for block in blocks)
    pool.recount()


def test_a_page_in_use_is_not_available_until_its_last_reader_has_gone() -> None:
    pool, _ = make_pool(3)
    block = pool.allocate(0)
    pool.refer(block.id)
    pool.release(block.id)
    assert pool.available == 1
    pool.release(block.id)
    assert pool.available == 2
    assert block.state is BlockState.FREE
    pool.recount()


def test_giving_back_twice_is_caught() -> None:
    pool, _ = make_pool(3)
    block = pool.allocate(0)
    pool.release(block.id)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(block.id)


def test_nobody_can_refer_to_a_free_page() -> None:
    pool, _ = make_pool(3)
    with pytest.raises(AssertionError, match="is free"):
        pool.refer(1)


def test_a_forgotten_page_is_free_when_idle_and_stays_with_its_reader_when_used() -> None:
    pool, evicted = make_pool(3)
    idle, used = pool.allocate(0), pool.allocate(0)
    cache(pool, idle, b"idle")
    used.hash = b"used"
    pool.forget(idle)
    pool.forget(used)
    assert (idle.state, used.state) == (BlockState.FREE, BlockState.RESIDENT)
    assert pool.free_pages == [idle.id]
    pool.release(used.id)
    assert pool.available == 2
    assert evicted == []
    pool.recount()


@pytest.mark.parametrize("state", [BlockState.LOADING, BlockState.STORING])
def test_a_page_being_moved_is_held_until_the_transfer_ends(state: BlockState) -> None:
    pool, _ = make_pool(2)
    block = pool.allocate(0)
    pool.begin_transfer(block.id, state)
    pool.release(block.id)
    assert (block.references, pool.available) == (1, 0)
    pool.recount()
    pool.end_transfer(block.id)
    assert pool.available == 1
    pool.recount()


def test_a_stored_page_that_is_cached_becomes_idle() -> None:
    pool, _ = make_pool(2)
    block = pool.allocate(0)
    block.hash = b"name"
    pool.begin_transfer(block.id, BlockState.STORING)
    pool.release(block.id)
    pool.end_transfer(block.id)
    assert (block.state, pool.available, pool.free_pages) == (BlockState.RESIDENT, 1, [])


def test_transitions_that_make_no_sense_are_caught() -> None:
    pool, _ = make_pool(4)
    free, cached, used = pool.blocks[3], pool.allocate(0), pool.allocate(0)
    with pytest.raises(AssertionError, match="only a resident one moves"):
        pool.begin_transfer(free.id, BlockState.STORING)
    with pytest.raises(AssertionError, match="not a transfer"):
        pool.begin_transfer(used.id, BlockState.FREE)
    with pytest.raises(AssertionError, match="not being moved"):
        pool.end_transfer(used.id)
    pool.begin_transfer(used.id, BlockState.STORING)
    with pytest.raises(AssertionError, match="only a resident one moves"):
        pool.begin_transfer(used.id, BlockState.LOADING)
    cached.hash = b"name"
    with pytest.raises(AssertionError, match="loading would ruin it"):
        pool.begin_transfer(cached.id, BlockState.LOADING)
    pool.release(cached.id)
    with pytest.raises(AssertionError, match="idle"):
        pool.begin_transfer(cached.id, BlockState.STORING)


def test_recount_notices_a_page_in_two_places() -> None:
    pool, _ = make_pool(4)
    block = pool.allocate(0)
    block.references = 0
    with pytest.raises(AssertionError, match=f"page {block.id}"):
        pool.recount()
    block.references = 1
    pool.blocks[NULL_PAGE].references = 1
    with pytest.raises(AssertionError, match="null page"):
        pool.recount()
