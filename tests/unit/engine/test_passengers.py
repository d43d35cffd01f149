"""Who is handed to the engine, and who is found out when it keeps dying."""

from __future__ import annotations

import random

import pytest

from holdfast.engine.process.quarantine import DEATHS_IN_ALL, CrashQuarantine


def test_all_are_handed_over_once() -> None:
    passengers = CrashQuarantine()
    passengers.enter(["a", "b"])
    assert passengers.board() == ["a", "b"]
    assert passengers.board() == []
    passengers.enter(["c"])
    assert passengers.board() == ["c"]


def test_deaths_with_signs_of_life_between_them_suspect_nobody() -> None:
    passengers = CrashQuarantine()
    passengers.enter(["a", "b"])
    for _ in range(DEATHS_IN_ALL - 1):
        assert passengers.board() == ["a", "b"]
        for name in "ab":
            passengers.clear(name)
        assert passengers.disembark() == []


def test_suspects_are_tried_one_at_a_time_and_others_wait() -> None:
    passengers = CrashQuarantine()
    passengers.enter(["a", "b", "c"])
    for _ in range(2):
        passengers.board()
        passengers.clear("c")
        assert passengers.disembark() == []
    passengers.enter(["new"])
    assert passengers.suspects == ["a", "b"]
    assert passengers.board() == ["a"]
    assert passengers.board() == []
    passengers.clear("a")
    assert passengers.board() == ["b"]
    assert passengers.disembark() == ["b"]
    assert passengers.board() == ["a", "c", "new"]


def test_a_suspect_that_leaves_makes_room_for_the_next() -> None:
    passengers = CrashQuarantine()
    passengers.enter(["a", "b"])
    for _ in range(2):
        passengers.board()
        passengers.disembark()
    assert passengers.board() == ["a"]
    passengers.leave(["a"])
    assert passengers.board() == ["b"]


@pytest.mark.parametrize("seed", range(50))
def test_poison_is_found_among_any_crowd_and_nobody_else_is_blamed(seed: int) -> None:
    """A model of the engine: it dies when poison is computed, and computes at most `batch` of those aboard at once."""
    draw = random.Random(seed)
    names = [f"r{index}" for index in range(draw.randint(1, 12))]
    poison = set(draw.sample(names, draw.randint(0, min(3, len(names)))))
    left = {name: draw.randint(1, 4) for name in names}
    batch = draw.randint(1, 5)
    passengers, blamed, aboard = CrashQuarantine(), set(), []
    passengers.enter(names)
    for _ in range(1000):
        aboard += passengers.board()
        if not aboard:
            break
        computed = aboard[:batch]
        if poison & set(computed):
            guilty = passengers.disembark()
            blamed |= set(guilty)
            aboard = []
            continue
        for name in computed:
            passengers.clear(name)
            left[name] -= 1
            if left[name] == 0:
                aboard.remove(name)
                passengers.leave([name])
    assert blamed == poison
    assert all(left[name] == 0 for name in set(names) - poison)


def test_who_was_aboard_at_six_deaths_is_ended_tokens_or_not() -> None:
    passengers = CrashQuarantine()
    passengers.enter(["deadly"])
    for _ in range(5):
        assert passengers.board() == ["deadly"]
        passengers.clear("deadly")
        assert passengers.disembark() == []
        passengers.clear("deadly")
    assert passengers.board() == ["deadly"]
    assert passengers.disembark() == ["deadly"]
    assert passengers.board() == []
