"""32 conversations of 16k tokens that come back at once over a pool that holds 8, in simulated time: all are fetched
from RAM, whatever the link and the host do meanwhile, in the order in which they came, beside who decodes; and what
would make the choice between fetching and computing flip is found by the same look at it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from timed_world import BLOCK, PAGE_S, World, open_world, stall_at

from holdfast.kvcache import Tier
from holdfast.records import StepPlan
from holdfast.scheduler.fetching import PASSED, Fetching

SMALLER = 8
PAGES = 1024 // SMALLER
CONVERSATIONS, IN_POOL = 32, 8
BETWEEN_S = 0.15
"""Two tokens of who decodes: a step in which eight start, and one behind it; to compute 8,192 tokens takes 0.24 s."""


def busy_host(plan: StepPlan) -> float:
    """Books in Python: a millisecond, and so much for each page."""
    return 0.001 + 40e-6 * SMALLER * len(plan.copies)


def first_steps_compile(plan: StepPlan) -> float:
    return 20.0 if plan.step_id == 1 else 2.0 if plan.step_id < 6 else 0.002


def uneven() -> Callable[[], float]:
    draw = random.Random(5)
    return lambda: PAGE_S * draw.choice((0.5, 0.8, 1.0, 1.0, 1.8))


def halting() -> Callable[[], float]:
    """Now and then the link brings nothing for 10 ms."""
    draw = random.Random(6)
    return lambda: PAGE_S + (0.01 / SMALLER if draw.random() < 1 / 256 else 0.0)


def asked_once(
    host_s: Callable[[StepPlan], float] = lambda plan: 0.0,
    page_s: Callable[[], float] = lambda: PAGE_S,
    streams: int = 0,
    pinned_s: float = 0.0,
) -> World:
    """All have been computed, each by itself, and what the pool cannot hold lies in RAM. `pinned_s`: how long each tiny
    step took before, while that was pinned."""
    world = open_world(int((IN_POOL + 0.3) * PAGES), SMALLER, 18_432 // SMALLER, host_pages=0)
    steps = 6 if pinned_s else 0
    for number in range(1, steps + 1):
        world.host_s = lambda plan: pinned_s
        world.host_pages = number * (36_000 // SMALLER // 6)
        world.add(f"tiny {900 + number}", 3, 1)
        world.run(lambda number=number: f"tiny {900 + number}" in world.first_s)  # type: ignore[misc]
    world.host_pages = 36_000 // SMALLER
    world.host_s, world.page_s = host_s, page_s
    for number in range(CONVERSATIONS):
        world.add(f"first {number}", PAGES * BLOCK, 1)
        world.run(lambda number=number: f"first {number}" in world.first_s)  # type: ignore[misc]
    world.run(lambda: not world.scheduler.has_copies)
    for number in range(streams):
        world.add(f"stream {100 + number}", 4, 100_000)
    world.run(lambda: all(f"stream {100 + number}" in world.first_s for number in range(streams)))
    return world


def come_back(world: World, within_s: float) -> None:
    """All at once. Raises AssertionError where any is computed, or the last comes later."""
    asked_s, computed, tiers = world.now_s, world.computed, world.scheduler.kv.tiers
    assert tiers is not None
    answered, loaded = sum(world.answered.values()), tiers.loaded_pages[Tier.HOST]
    names = [f"again {number}" for number in range(CONVERSATIONS)]
    for name in names:
        world.add(name, PAGES * BLOCK, 1)
    world.run(lambda: all(name in world.first_s for name in names) or world.now_s > asked_s + 60)
    assert world.scheduler.stats().fetches_not_worth_total == 0
    decoded = sum(world.answered.values()) - answered
    assert world.computed - computed - decoded < 2 * CONVERSATIONS * BLOCK, "no more than the last block of each"
    assert tiers.loaded_pages[Tier.HOST] - loaded >= (CONVERSATIONS - IN_POOL) * (PAGES - 1)
    assert max(world.first_s[name] for name in names) - asked_s < within_s
    world.scheduler.check_invariants()


HOSTS = {
    "at once": lambda plan: 0.0,
    "busy": busy_host,
    "compiling": first_steps_compile,
    "stalled": stall_at(3, 12, 40, 41, 63, 66),
}


@pytest.mark.parametrize("link", ["even", "uneven", "halting"])
@pytest.mark.parametrize("host", list(HOSTS))
def test_all_are_fetched_whatever_host_and_link_do(host: str, link: str) -> None:
    pages = {"even": lambda: PAGE_S, "uneven": uneven(), "halting": halting()}
    come_back(asked_once(HOSTS[host], pages[link]), 1.8)


@pytest.mark.parametrize(("pages", "times"), [(32, 10), (64, 5), (256, 3)])
def test_first_pages_that_come_slowly_decide_nothing(pages: int, times: int) -> None:
    left = iter(range(pages // SMALLER))
    world = asked_once()
    world.page_s = lambda: PAGE_S * (times if next(left, None) is not None else 1)
    come_back(world, 1.8)


def test_steps_that_waited_while_ram_was_pinned_say_nothing_of_steps() -> None:
    """A launch of three tokens took a second then, and nothing as small was computed since."""
    slow = asked_once(pinned_s=0.85)
    assert slow.scheduler._fetching.prefill._most_step_s is None
    come_back(slow, 1.8)


def test_they_start_in_the_order_in_which_they_came_but_for_those_in_the_pool() -> None:
    world = asked_once()
    come_back(world, 1.8)
    order = sorted(range(CONVERSATIONS), key=lambda number: (world.first_s[f"again {number}"], number))
    whole = [number for number in order if number >= CONVERSATIONS - IN_POOL]
    assert set(order[: len(whole)]) == set(whole), "who is in the pool starts before it is evicted for others"
    fetched = [number for number in order if number not in whole]
    assert fetched == sorted(fetched)
    between_s = [
        world.first_s[f"again {late}"] - world.first_s[f"again {early}"] for early, late in itertools.pairwise(fetched)
    ]
    assert max(between_s) < 4 * PAGE_S * 1024, "and each as soon as its own pages have come"


@pytest.mark.parametrize("host", ["at once", "busy"])
def test_who_decodes_goes_on_beside_them(host: str) -> None:
    """16 streams, of which none waits for the host or for pages of others longer than for a step or two."""
    world = asked_once(HOSTS[host], streams=16)
    asked_s = world.now_s
    come_back(world, 2.4)
    until_s = world.now_s
    for name in (f"stream {100 + number}" for number in range(16)):
        told_s = [one for one in world.told_s[name] if asked_s <= one <= until_s]
        between_s = [late - early for early, late in zip([asked_s, *told_s], [*told_s, until_s], strict=True)]
        assert max(between_s) < BETWEEN_S, name


def test_a_short_prompt_behind_them_does_not_wait_for_the_last_of_them() -> None:
    """Its pages are those that another gives back, like everybody's, in line."""
    world = asked_once()
    asked_s = world.now_s
    for number in range(CONVERSATIONS):
        world.add(f"again {number}", PAGES * BLOCK, 1)
    world.add("short 500", 3 * BLOCK, 1)
    world.run(lambda: "short 500" in world.first_s)
    assert world.first_s["short 500"] - asked_s < 1.0
    assert sum(name.startswith("again") for name in world.first_s) < CONVERSATIONS
    world.run(lambda: all(f"again {number}" in world.first_s for number in range(CONVERSATIONS)))


def test_prompts_that_keep_coming_pass_each_of_them_a_few_times_only() -> None:
    """A new one, whose whole prompt is in the pool, with every token that somebody is told."""
    world = asked_once()
    world.add("chat 700", 2 * BLOCK + 1, 1)
    world.run(lambda: "chat 700" in world.first_s)
    asked_s = world.now_s
    for number in range(CONVERSATIONS):
        world.add(f"again {number}", PAGES * BLOCK, 1)
    passed = 0
    while not all(f"again {number}" in world.first_s for number in range(CONVERSATIONS)):
        assert world.now_s < asked_s + 4, "they starve"
        world.add(f"chat {passed} 700", 2 * BLOCK + 1, 1)
        passed += 1
        told = len(world.first_s)
        world.run(lambda told=told: len(world.first_s) > told)  # type: ignore[misc]
        assert all(one.passed <= PASSED for one in world.scheduler._waiting)
    assert passed > CONVERSATIONS - IN_POOL


def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fetches."""
    monkeypatch.setattr(Fetching, "choose", lambda self, sequence, prefix, running: None)


def believed_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that tells nothing is taken for one that is over: prompts seem to cost a fraction of what they do."""
    note_applied = Fetching.note_applied

    def told(self: Fetching, *given: Any, tells: bool = True, **more: Any) -> None:
        note_applied(self, *given, **more)

    monkeypatch.setattr(Fetching, "note_applied", told)


def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages seem to take five times as long as they do."""
    fetched_s = Fetching._fetched_s

    def slower(self: Fetching, *given: Any) -> float | None:
        seconds = fetched_s(self, *given)
        return None if seconds is None else 5 * seconds

    monkeypatch.setattr(Fetching, "_fetched_s", slower)


@pytest.mark.parametrize("flip", [no_choice, believed_launch, slow_link])
def test_a_choice_that_flips_is_seen(
    flip: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = asked_once()
    flip(monkeypatch)
    if flip is believed_launch:
        world = asked_once()
    with pytest.raises(AssertionError):
        come_back(world, 1.8)
