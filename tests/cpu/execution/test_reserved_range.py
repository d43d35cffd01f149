"""The range of GPU addresses behind the KV pool: it grows and shrinks in pieces, and what the driver refuses changes
nothing. The driver is a fake."""

from __future__ import annotations

import random

import pytest
import torch
from fake_cuda_driver import GRANULE, FakeDriver, FakeRange, fake_kv_range

from holdfast.errors import EngineError
from holdfast.execution.gpu.memory import virtual_memory
from holdfast.execution.gpu.memory.virtual_memory import PIECE_BYTES, RangeError
from holdfast.kvcache.groups import KVLayout, form_groups


def made(nbytes: int = 10 * GRANULE) -> tuple[FakeRange, FakeDriver]:
    driver = FakeDriver()
    return FakeRange(nbytes, driver), driver


def sizes(driver: FakeDriver) -> list[int]:
    """Of pieces, in granules; they lie side by side from the first address on."""
    (start,) = driver.reserved
    found, at = list[int](), start
    while at in driver.mapped:
        found.append(driver.mapped[at][0] // GRANULE)
        at += driver.mapped[at][0]
    assert len(found) == len(driver.mapped) == len(driver.handles) == len(driver.accessible)
    return found


@pytest.mark.parametrize("call", ["create", "map", "access"])
def test_what_is_refused_changes_nothing_and_can_be_tried_again(call: str) -> None:
    one, driver = made()
    one.back(1)
    before = (dict(driver.handles), dict(driver.mapped), one.mapped_bytes)
    driver.fail = call
    with pytest.raises(RangeError) as caught:
        one.back(3 * GRANULE)
    assert caught.value.out_of_memory == (call != "map")
    assert (driver.handles, driver.mapped, one.mapped_bytes) == before
    one.back(3 * GRANULE)
    assert one.mapped_bytes == 3 * GRANULE
    assert sizes(driver) == [1, 1, 1]
    one.close()


def test_a_device_that_has_failed_keeps_nobody_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, driver = made()
    one.back(GRANULE)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    freed = list[int]()
    monkeypatch.setattr(one._memory, "wait", broken)
    monkeypatch.setattr(driver, "cuMemAddressFree", lambda at, nbytes: freed.append(nbytes))
    one.close()
    one.close()
    assert (freed, one.mapped_bytes) == ([10 * GRANULE], 0)


@pytest.mark.parametrize("call", ["create", "map", "access", "unmap", "release", "free"])
def test_ctrl_c_in_a_call_that_succeeds_leaves_books_as_the_driver_has_them(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with the same pool resizes it again, and closes it."""
    granule = 1 << 12
    monkeypatch.setattr(virtual_memory, "PIECE_BYTES", 1 << 16)
    layout = KVLayout(
        groups=form_groups([None])[0], block_tokens=4, layers_per_page=3, kv_heads=2, head_dim=16, element_bytes=2
    )
    driver = FakeDriver(granule)
    pool = fake_kv_range(layout, 600, torch.float16, driver)
    pool.resize(150)
    changes = [lambda: pool.resize(500), lambda: pool.resize(50), pool.close]
    changes = {"unmap": changes[1:], "release": changes[1:], "free": changes[2:]}.get(call, changes[:1])
    for change in changes:
        driver.interrupt = call
        with pytest.raises(KeyboardInterrupt):
            change()
        held = sum(size for size, _ in driver.mapped.values())
        assert held == sum(driver.handles.values()) == sum(driver.accessible.values()) == pool.nbytes
        assert pool.nbytes >= pool.blocks * layout.page_bytes or not driver.reserved
    if driver.reserved:
        for blocks in (600, 2):
            pool.resize(blocks)
            assert pool.nbytes == pool.backed_bytes(blocks) == sum(driver.handles.values())
    pool.close()
    assert driver.reserved == driver.handles == driver.mapped == {}


def test_memory_that_ends_after_some_pieces_changes_nothing() -> None:
    one, driver = made(100 * GRANULE)
    one.back(20 * GRANULE)
    before, driver.memory_bytes = sizes(driver), 60 * GRANULE
    with pytest.raises(RangeError):
        one.back(90 * GRANULE)
    assert sizes(driver) == before
    one.back(60 * GRANULE)
    assert one.mapped_bytes == 60 * GRANULE
    one.close()


def test_pieces_lie_side_by_side_and_grow_to_the_largest_size() -> None:
    one, driver = made(148 * GRANULE - 1)
    assert one.reserved_bytes == 148 * GRANULE
    for nbytes in (1, GRANULE, GRANULE + 1, 7, 50 * GRANULE, 51 * GRANULE, 148 * GRANULE):
        one.back(nbytes)
    assert PIECE_BYTES == 32 * GRANULE
    assert sizes(driver) == [1, 1, 2, 4, 8, 16, 16, 2, 1, 1, 4, 8, 32, 32, 16, 4]
    with pytest.raises(EngineError, match="shorter"):
        one.back(148 * GRANULE + 1)
    one.close()


def test_a_tail_is_given_back_by_whole_pieces() -> None:
    one, driver = made(100 * GRANULE)
    one.back(72 * GRANULE)
    assert sizes(driver) == [32, 32, 8]
    for cut_to, left in ((65, 72), (64, 64), (33, 64), (32, 32), (1, 32), (0, 0)):
        assert one.mapped_for(cut_to * GRANULE) == left * GRANULE
        one.cut(cut_to * GRANULE)
        assert one.mapped_bytes == left * GRANULE == GRANULE * sum(sizes(driver))
    one.back(72 * GRANULE)
    assert [one.largest_within(n * GRANULE + 9) // GRANULE for n in (73, 72, 71, 63, 31)] == [73, 72, 64, 32, 0]
    assert one.largest_within(999 * GRANULE) == one.reserved_bytes
    one.close()


def test_closing_gives_everything_back_once() -> None:
    one, driver = made()
    one.back(GRANULE)
    one.back(4 * GRANULE)
    one.close()
    one.close()
    assert driver.reserved == driver.handles == driver.mapped == {}
    assert one.mapped_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        one.back(GRANULE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_pages_keep_what_they_hold_while_others_come_and_go(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random; pages that are gone read as NaN, and those that are there never do."""
    granule, piece = 1 << 12, 1 << 16
    monkeypatch.setattr(virtual_memory, "PIECE_BYTES", piece)
    layout = KVLayout(
        groups=form_groups([None])[0], block_tokens=4, layers_per_page=3, kv_heads=2, head_dim=16,
        element_bytes=dtype.itemsize,
    )  # fmt: skip
    driver, dice = FakeDriver(granule), random.Random(0)
    pool = fake_kv_range(layout, 600, dtype, driver)
    pages, held = pool.pages.view(torch.uint8).view(600, -1), dict[int, int]()
    for _ in range(60):
        blocks = dice.randint(2, 600)
        wanted, grows = blocks * layout.page_bytes, blocks * layout.page_bytes >= pool.nbytes
        within = pool.blocks_within(wanted)
        assert pool.backed_bytes(within) <= wanted
        assert wanted - pool.backed_bytes(within) < (granule if grows else piece)
        expected = pool.backed_bytes(blocks)
        pool.resize(blocks)
        assert pool.nbytes == expected == sum(driver.handles.values()) >= wanted
        assert pool.nbytes - wanted < piece
        held = {page: number for page, number in held.items() if page < blocks}
        held |= {page: dice.randrange(1, 100) for page in dice.sample(range(1, blocks), min(20, blocks - 1))}
        for page, number in held.items():
            pages[page].fill_(number)
        assert all(bool((pages[page] == number).all()) for page, number in held.items())
        assert bool(pool.pages[-(-pool.nbytes // layout.page_bytes) :].isnan().all())
        assert not pages[0].any()
    for wrong in (1, 601):
        with pytest.raises(EngineError, match="so many pages"):
            pool.resize(wrong)
    pool.close()
    assert driver.reserved == driver.handles == driver.mapped == {}
