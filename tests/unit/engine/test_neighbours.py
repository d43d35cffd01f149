"""When the KV pool gives way to other processes of its device, and when it takes back what they left."""

from __future__ import annotations

import threading

import pytest
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.core import pool_memory
from holdfast.engine.core.neighbours import GONE_S, DeviceSample, Neighbours, NeighbourWatch
from holdfast.engine.core.pool_memory import RamPool
from holdfast.units import GIB, MIB

TOTAL, MARGIN = 100 * GIB, 5 * GIB
WEIGHTS, FULL = 20 * GIB, 70 * GIB


def sample(pool: int, others: int) -> DeviceSample:
    own = WEIGHTS + pool
    return DeviceSample(TOTAL, max(0, TOTAL - own - others), own)


def test_a_neighbour_that_takes_what_is_free_is_given_more_than_it_took() -> None:
    policy = Neighbours(GIB)
    assert policy.margin_bytes(TOTAL) == MARGIN
    assert policy.margin_bytes(10 * GIB) == GIB
    assert policy.judge(sample(FULL, 0), FULL, FULL, 0.0) is None
    assert policy.judge(sample(FULL, 4 * GIB), FULL, FULL, 1.0) is None, "there is still a margin"
    wish = policy.judge(sample(FULL, 6 * GIB), FULL, FULL, 2.0)
    assert wish is not None
    assert wish.nbytes == FULL - (2 * MARGIN + 2 * GIB - 4 * GIB), "twice the margin free, and as much as it took"
    assert "2.00 GiB more than before" in wish.reason
    after = wish.nbytes
    assert policy.judge(sample(after, 6 * GIB), after, FULL, 3.0) is None
    # One that goes on taking gets on.
    again = policy.judge(sample(after, 15 * GIB), after, FULL, 4.0)
    assert again is not None
    assert sample(again.nbytes, 15 * GIB).free_bytes >= 2 * MARGIN


def test_a_full_device_alone_is_no_neighbour() -> None:
    """Who set a budget up to the brim keeps it until somebody comes; a count that wavers is nobody."""
    policy, pool = Neighbours(GIB), FULL + 9 * GIB
    for number in range(5):
        assert policy.judge(sample(pool, number % 2 * 16 * MIB), pool, pool, float(number)) is None
    assert policy.judge(sample(pool, 600 * MIB), pool, pool, 9.0) is not None


def test_who_comes_again_at_once_is_waited_for_longer_and_who_stays_away_is_not() -> None:
    policy, now_s = Neighbours(GIB), 0.0

    def waited(gone_s: float) -> float:
        """Until it was taken back, and so much later the neighbour comes again."""
        nonlocal now_s
        began_s, found = now_s, None
        while found is None:
            now_s += 1.0
            found = policy.judge(sample(30 * GIB, 0), 30 * GIB, FULL, now_s)
        policy.took_back(now_s)
        taken_s, now_s = now_s, now_s + gone_s
        assert policy.judge(sample(FULL, 9 * GIB), FULL, FULL, now_s) is not None
        return taken_s - began_s - 1.0

    assert [waited(30.0) for _ in range(6)] == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0]
    assert waited(5000.0) == 160.0
    assert waited(0.0) == GONE_S


def test_what_is_wished_and_not_taken_makes_nobody_wait_longer() -> None:
    """Memory comes in pieces, and the last one is not whole: so much is wished for ever."""
    policy, now_s, full, nearly = Neighbours(GIB), 0.0, 50 * GIB, 50 * GIB - 3 * MIB
    for _ in range(4):
        for later_s in (0.0, 3600.0):
            now_s += later_s
            assert policy.judge(sample(nearly, 0), nearly, full, now_s) is None
            now_s += GONE_S
            assert policy.judge(sample(nearly, 0), nearly, full, now_s) is not None
            now_s += 1.0
        assert policy.judge(sample(nearly, 29 * GIB), nearly, full, now_s) is not None
        began_s = now_s = now_s + 1.0
        while policy.judge(sample(30 * GIB, 0), 30 * GIB, full, now_s) is None:
            now_s += 1.0
        assert now_s - began_s == GONE_S
        policy.took_back(now_s)


def test_what_is_left_is_taken_back_late_and_not_to_the_brim() -> None:
    policy, pool = Neighbours(GIB), 30 * GIB
    now_s = 0.0
    assert policy.judge(sample(pool, 45 * GIB), pool, FULL, now_s) is None
    for now_s in (1.0, 5.0, 10.0):
        assert policy.judge(sample(pool, 10 * GIB), pool, FULL, now_s) is None, "it may come back"
    wish = policy.judge(sample(pool, 10 * GIB), pool, FULL, 1.0 + GONE_S)
    assert wish is not None
    assert wish.nbytes == pool + 40 * GIB - 2 * MARGIN
    # No further than full, and not at all where less is free than would be given again soon.
    assert policy.judge(sample(FULL, 0), FULL, FULL, 99.0) is None
    short = 64 * GIB
    for now_s in (100.0, 200.0, 300.0):
        assert policy.judge(sample(short, 3 * GIB), short, FULL, now_s) is None


def test_pools_of_one_server_do_not_take_the_same_memory_twice() -> None:
    """Two engines on a CPU: each sees the same free memory, and the other as its own."""
    others, pools = 10 * GIB, [15 * GIB, 15 * GIB]
    policies = [Neighbours(GIB, 2), Neighbours(GIB, 2)]
    for second in range(120):
        seen = sample(sum(pools), others)
        wishes = [
            policy.judge(seen, pool, FULL // 2, float(second)) for policy, pool in zip(policies, pools, strict=True)
        ]
        pools = [pool if wish is None else wish.nbytes for pool, wish in zip(pools, wishes, strict=True)]
        assert sum(pools) + WEIGHTS + others <= TOTAL - MARGIN
    assert sum(pools) >= 50 * GIB, "what is free is used all the same"


def test_engines_on_a_cpu_share_what_neighbours_left() -> None:
    for device, pools in (("cpu", 2), ("cuda", 1)):
        config = EngineConfig(device=device, data_parallel_size=2, yield_to_neighbours=True)
        breathing = pool_memory._breathing(config, RamPool(1, lambda: 1), lambda: None)
        assert breathing is not None
        assert breathing._neighbours is not None
        assert breathing._neighbours._pools == pools
        breathing.close()


def test_one_that_comes_and_goes_does_not_make_it_swing() -> None:
    policy, pool, changes = Neighbours(GIB), FULL, 0
    for second in range(120):
        others = 8 * GIB if second % 8 < 4 else 0
        wish = policy.judge(sample(pool, others), pool, FULL, float(second))
        if wish is not None:
            pool, changes = wish.nbytes, changes + 1
    assert changes <= 2, "a first guess, and what was too much of it"


def test_samples_are_taken_in_a_thread_and_each_is_seen_once(caplog: pytest.LogCaptureFixture) -> None:
    taken, told = threading.Event(), [DeviceSample(3, 2, 1), None, None]

    def look() -> DeviceSample | None:
        if len(told) == 1:
            taken.set()
            return None
        return told.pop(0)

    watch = NeighbourWatch(look, every_s=0.001)
    assert taken.wait(PATIENCE_S)
    assert watch.take() == DeviceSample(3, 2, 1)
    assert watch.take() is None
    watch.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"


def test_a_device_that_raises_is_asked_again_and_one_that_hangs_holds_nobody_up(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.engine.core.neighbours.CLOSE_S", 0.01)
    hangs, told, over = threading.Event(), [OSError("a driver"), DeviceSample(3, 2, 1)], threading.Event()

    def look() -> DeviceSample | None:
        if not told:
            hangs.set()
            over.wait(PATIENCE_S)
            return None
        found = told.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    watch = NeighbourWatch(look, every_s=0.001)
    assert hangs.wait(PATIENCE_S)
    assert watch.take() == DeviceSample(3, 2, 1)
    watch.close()
    assert not over.is_set()
    over.set()
