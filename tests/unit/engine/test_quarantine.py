"""Which requests are handed to the engine, and which is found out when it keeps crashing."""

from __future__ import annotations

import random

import pytest

from holdfast.engine.process.quarantine import CRASHES_IN_ALL, CrashQuarantine


def test_all_are_handed_over_once() -> None:
    quarantine = CrashQuarantine()
    quarantine.enter(["a", "b"])
    assert quarantine.dispatch() == ["a", "b"]
    assert quarantine.dispatch() == []
    quarantine.enter(["c"])
    assert quarantine.dispatch() == ["c"]


def test_deaths_with_signs_of_life_between_them_suspect_nobody() -> None:
    quarantine = CrashQuarantine()
    quarantine.enter(["a", "b"])
    for _ in range(CRASHES_IN_ALL - 1):
        assert quarantine.dispatch() == ["a", "b"]
        for name in "ab":
            quarantine.clear(name)
        assert quarantine.on_crash() == []


def test_suspects_are_tried_one_at_a_time_and_others_wait() -> None:
    quarantine = CrashQuarantine()
    quarantine.enter(["a", "b", "c"])
    for _ in range(2):
        quarantine.dispatch()
        quarantine.clear("c")
        assert quarantine.on_crash() == []
    quarantine.enter(["new"])
    assert quarantine.suspects == ["a", "b"]
    assert quarantine.dispatch() == ["a"]
    assert quarantine.dispatch() == []
    quarantine.clear("a")
    assert quarantine.dispatch() == ["b"]
    assert quarantine.on_crash() == ["b"]
    assert quarantine.dispatch() == ["a", "c", "new"]


def test_a_suspect_that_leaves_makes_room_for_the_next() -> None:
    quarantine = CrashQuarantine()
    quarantine.enter(["a", "b"])
    for _ in range(2):
        quarantine.dispatch()
        quarantine.on_crash()
    assert quarantine.dispatch() == ["a"]
    quarantine.leave(["a"])
    assert quarantine.dispatch() == ["b"]


@pytest.mark.parametrize("seed", range(50))
def test_poison_is_found_among_any_crowd_and_nobody_else_is_blamed(seed: int) -> None:
    """A model of the engine: it dies when poison is computed, and computes at most `batch` of those aboard at once."""
    draw = random.Random(seed)
    names = [f"r{index}" for index in range(draw.randint(1, 12))]
    poison = set(draw.sample(names, draw.randint(0, min(3, len(names)))))
    left = {name: draw.randint(1, 4) for name in names}
    batch = draw.randint(1, 5)
    quarantine, blamed, aboard = CrashQuarantine(), set(), []
    quarantine.enter(names)
    for _ in range(1000):
        aboard += quarantine.dispatch()
        if not aboard:
            break
        computed = aboard[:batch]
        if poison & set(computed):
            guilty = quarantine.on_crash()
            blamed |= set(guilty)
            aboard = []
            continue
        for name in computed:
            quarantine.clear(name)
            left[name] -= 1
            if left[name] == 0:
                aboard.remove(name)
                quarantine.leave([name])
    assert blamed == poison
    assert all(left[name] == 0 for name in set(names) - poison)


def test_who_was_aboard_at_six_deaths_is_ended_tokens_or_not() -> None:
    quarantine = CrashQuarantine()
    quarantine.enter(["deadly"])
    for _ in range(5):
        assert quarantine.dispatch() == ["deadly"]
        quarantine.clear("deadly")
        assert quarantine.on_crash() == []
        quarantine.clear("deadly")
    assert quarantine.dispatch() == ["deadly"]
    assert quarantine.on_crash() == ["deadly"]
    assert quarantine.dispatch() == []
