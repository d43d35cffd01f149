"""Many who come back at once, in simulated time: tests/support/timed_world."""

from __future__ import annotations

import pytest
from timed_world import BLOCK, PAIR_S, STEP_S, TOKEN_S, World, open_world, stall_at

from holdfast.kvcache import Tier
from holdfast.records import StepPlan
from holdfast.scheduler.fetching import PASSED
from holdfast.scheduler.prefill_cost import PromptWork, pairs


@pytest.mark.parametrize(
    "stalls",
    [(), (1,), (2,), (3,), (1, 2, 3, 4), tuple(range(2, 64, 9)), (60, 61, 62, 63, 64, 65)],
    ids=["none", "first", "second", "third", "at the start", "now and then", "late"],
)
def test_conversations_that_come_back_at_once_all_come_from_ram(stalls: tuple[int, ...]) -> None:
    """32 of 16k tokens over a pool that holds 8: the link alone takes 1.4 s, and to compute them all takes 15."""
    smaller, pages = 8, 1024 // 8
    world = open_world(int(8.3 * pages), smaller, 18_432 // smaller, host_pages=36_000 // smaller)
    world.host_s = stall_at(*stalls)
    for number in range(32):
        world.add(f"first {number}", pages * BLOCK, 1)
        world.run(lambda number=number: f"first {number}" in world.first_s)  # type: ignore[misc]
    world.run(lambda: not world.scheduler.has_copies)
    asked_s, computed, tiers = world.now_s, world.computed, world.scheduler.kv.tiers
    seen = pairs(world.scheduler.kv.layout, 0, pages * BLOCK)
    by_fit_s = world.scheduler._fetching.prefill.seconds(PromptWork(2, pages * BLOCK, seen))
    exact_s = 2 * STEP_S + (pages * BLOCK * TOKEN_S + seen * PAIR_S * smaller) * smaller
    assert by_fit_s == pytest.approx(exact_s, rel=0.25)
    for number in range(32):
        world.add(f"again {number}", pages * BLOCK, 1)
    world.run(lambda: not world.scheduler.has_unfinished)
    assert max(world.first_s[f"again {number}"] for number in range(32)) - asked_s < 1.8
    assert world.computed - computed < 4 * pages * BLOCK
    assert tiers is not None
    assert tiers.loaded_pages[Tier.HOST] <= 25 * pages, "who lay in the pool was evicted for others first"
    world.scheduler.check_invariants()


@pytest.mark.parametrize("stalls", [(), (1,), (2,), (3,), (2, 4), tuple(range(3, 64, 9)), (29,)], ids=str)
def test_what_prompts_cost_is_found_whenever_the_host_stands_still(stalls: tuple[int, ...]) -> None:
    """One step is launched behind the other. That the host looks late at one makes the next seem to take no time."""
    smaller, pages = 8, 512 // 8
    world = open_world(40 * pages, smaller, 18_432 // smaller)
    world.host_s = stall_at(*stalls)
    for number in range(30):
        world.add(f"first {number}", (pages - number % 5) * BLOCK, 1)
    world.run(lambda: not world.scheduler.has_unfinished)
    tokens = pages * BLOCK
    seen = pairs(world.scheduler.kv.layout, 0, tokens)
    by_fit_s = world.scheduler._fetching.prefill.seconds(PromptWork(1, tokens, seen))
    assert by_fit_s == pytest.approx(STEP_S + (tokens * TOKEN_S + seen * PAIR_S * smaller) * smaller, rel=0.25)


def test_conversations_that_come_back_beside_streams_come_from_ram() -> None:
    """Eight, one after the other, beside 32 that decode."""
    smaller, pages = 8, 1024 // 8
    world = open_world(int(4.3 * pages), smaller, 18_432 // smaller, host_pages=12_000 // smaller)
    tiers = world.scheduler.kv.tiers
    assert tiers is not None
    for number in range(8):
        world.add(f"first {number}", pages * BLOCK, 1)
        world.run(lambda number=number: f"first {number}" in world.first_s)  # type: ignore[misc]
        world.run(lambda: not world.scheduler.has_copies)
    for number in range(32):
        world.add(f"stream {number}", 4, 200)
    for number in range(8):
        computed, asked_s = world.computed, world.now_s
        world.add(f"again {number}", pages * BLOCK, 1)
        world.run(lambda number=number: f"again {number}" in world.first_s)  # type: ignore[misc]
        assert world.computed - computed < pages * BLOCK // 2
        world.run(lambda asked_s=asked_s: world.now_s > asked_s + 0.25)  # type: ignore[misc]
    assert world.scheduler.stats().fetches_not_worth_total == 0
    assert tiers.loaded_pages[Tier.HOST] >= 8 * (pages - 1)


def put_below(world: World, names: dict[str, int]) -> None:
    """Prompts of so many blocks and a token are asked in turn, and all that is left of them is saved."""
    for name, blocks in names.items():
        world.add(f"first {name}", blocks * BLOCK + 1, 1)
        world.run(lambda name=name: f"first {name}" in world.first_s)  # type: ignore[misc]
        world.run(lambda: not (world.scheduler.has_unfinished or world.scheduler.has_copies))


def plan_once(world: World) -> StepPlan:
    plan = world.scheduler.schedule(world.now_s)
    assert plan is not None
    world.launch(plan)
    world.scheduler.check_invariants()
    return plan


def test_a_plan_begins_what_it_can_bring_and_takes_pages_for_no_more() -> None:
    """Each of those that wait makes work for the books, during which nothing is planned for those that decode."""
    world = open_world(1500, 1, 8000, host_pages=4000)
    put_below(world, dict.fromkeys(map(str, range(4)), 300) | {"long": 450, "other": 450, "last": 450})
    waiting = world.scheduler._fetching.sequences
    for number in range(4):
        world.add(f"again {number}", 300 * BLOCK + 1, 1)
    for begun in (1, 2):
        plan = plan_once(world)
        assert (len(waiting), len(plan.copies)) == (begun, 256)
        assert world.scheduler.kv.blocks_used == 256 * begun
    world.run(lambda: not world.scheduler.has_unfinished)
    assert world.scheduler.kv.tiers is not None
    assert world.scheduler.kv.tiers.loaded_pages[Tier.HOST] == 4 * 300


def test_who_is_in_the_pool_starts_first_and_nobody_is_passed_by_more_than_some() -> None:
    world = open_world(130, 1, 4500, host_pages=1000)
    put_below(world, {"gone": 70} | dict.fromkeys(map(str, range(30)), 4))
    world.add("again gone", 70 * BLOCK + 1, 1)
    for number in range(30):
        world.add(f"again {number}", 4 * BLOCK + 1, 1)
    plan = plan_once(world)
    assert [row.count for row in plan.rows] == [1] * PASSED
    assert not plan.copies, "there are no pages for the first in line yet"
    while not world.scheduler._fetching.sequences:
        world.apply()
        assert len(world.first_s) <= 31 + PASSED
        world.scheduler.check_invariants()
        if (next_plan := world.scheduler.schedule(world.now_s)) is not None:
            world.launch(next_plan)
    world.run(lambda: not world.scheduler.has_unfinished)
    assert "again gone" in world.first_s


def test_nothing_is_computed_again_of_those_for_whom_a_pool_became_too_small() -> None:
    """54 streams, each of 2,048 tokens, in a pool of 20 GiB that becomes one of 10."""
    world = open_world(10_240, 1, 4500, host_pages=10_240)
    scheduler = world.scheduler
    assert scheduler.kv.tiers is not None
    for number in range(54):
        world.add(f"stream {number}", 2048, 200)
    world.run(lambda: len(world.answered) == 54)
    computed, answered, asked_s = world.computed, sum(world.answered.values()), world.now_s
    scheduler.kv.tiers.begin_sparing(5120)
    world.run(lambda: world.now_s > asked_s + 0.5 or (scheduler.kv.tiers is not None and scheduler.kv.tiers.spared))
    scheduler.kv.tiers.spare_wanted = 0
    world.settle()
    if (moving := scheduler.resize(5120)) is not None:
        world.launch(moving)
        world.apply()
    world.run(lambda: not scheduler.has_unfinished)
    sent_back = scheduler.stats().preemptions_total
    again = world.computed - computed - (sum(world.answered.values()) - answered)
    assert sent_back > 12
    # Of a block that was not full the tokens are computed again, and those that steps in flight had computed.
    assert again < sent_back * 2 * BLOCK, f"{again} tokens were computed again, of {sent_back} that were sent back"
    assert scheduler.kv.tiers.loaded_pages[Tier.HOST] > sent_back * 2048 // BLOCK // 2
    scheduler.check_invariants()


def test_idle_pages_go_to_ram_while_it_has_pages_that_nobody_needs() -> None:
    """And not in place of what the pool has not: the second of two prompts has gone from neither."""
    for host_pages, saved in ((200, 60), (40, 40)):
        world = open_world(1000, 1, 4500, host_pages=host_pages, spare_pages=0, spare_share=0.0)
        tiers = world.scheduler.kv.tiers
        assert tiers is not None
        world.add("prompt", 60 * BLOCK + 1, 1)
        world.run(lambda world=world: not (world.scheduler.has_unfinished or world.scheduler.has_copies))  # type: ignore[misc]
        assert tiers.stored_pages[Tier.HOST] == saved
        world.add("other", 30 * BLOCK + 1, 1)
        world.run(lambda world=world: not (world.scheduler.has_unfinished or world.scheduler.has_copies))  # type: ignore[misc]
        assert tiers.stored_pages[Tier.HOST] == (90 if saved == 60 else 40)
        world.scheduler.check_invariants()


def test_a_smaller_pool_does_not_wait_for_pages_that_are_saved_ahead() -> None:
    """Nobody computes while it is resized."""
    world = open_world(400, 1, 4500, host_pages=1000, spare_pages=0, spare_share=0.0, saves_ahead=2)
    world.add("prompt", 260 * BLOCK + 1, 1)
    world.run(lambda: not world.scheduler.has_unfinished)
    world.settle()
    assert world.scheduler.has_copies, "not all is saved"
    assert world.scheduler.save_before(390) is None


def plan_while_nothing_comes(world: World, plans: int) -> None:
    """As on a disk that hangs."""
    for _ in range(plans):
        plan_once(world)
        world._due.clear()
        world.apply()


def test_loads_that_many_wait_for_are_promised_their_pages_once() -> None:
    """After a restart all who share a system prompt wait for its pages; others have all other pages of the pool."""
    world = open_world(300, 8, 4500, host_pages=1000, most_loading=4, loads_a_plan=4)
    put_below(world, dict.fromkeys(("shared", "a", "b", "c"), 100))
    for number in range(6):
        world.add(f"{number} shared", 100 * BLOCK + 1, 1)
    world.add("stranger", 40, 20)
    plan_while_nothing_comes(world, 3)
    assert "stranger" in world.first_s
    assert len(world.scheduler._fetching.sequences) == 6
    world.add("beside stranger", 40, 1)
    plan_while_nothing_comes(world, 2)
    assert "beside stranger" in world.first_s, "who comes while somebody runs waits for pages that are there"


@pytest.mark.parametrize("most_loading", [4, 1024], ids=["few at once", "all at once"])
def test_where_nobody_runs_nobody_waits_for_who_waits_for_pages(most_loading: int) -> None:
    """However few pages are left beside those that the fetch will take, and were it to hang for ever."""
    world = open_world(100, 1, 4500, host_pages=400, most_loading=most_loading, loads_a_plan=min(50, most_loading))
    put_below(world, {"gone": 84, "other": 96})
    world.add("again gone", 84 * BLOCK + 1, 1)
    plan_while_nothing_comes(world, 1)
    world.add("stranger", 30 * BLOCK, 1)
    plan_while_nothing_comes(world, 2)
    assert "stranger" in world.first_s
    assert world.scheduler._fetching.sequences, "it needed no page that had been taken for the fetch"


def test_pages_that_a_fetch_gives_back_are_seen_by_who_waits_behind_it() -> None:
    """Who runs takes one of them, and another request, whose prompt is in the pool, has room by now."""
    world = open_world(100, 1, 4500, host_pages=400, most_loading=30, loads_a_plan=30)
    put_below(world, {"gone": 60, "other": 96})
    world.add("first stream", 35 * BLOCK, 900)
    world.run(lambda: "first stream" in world.first_s)
    world.settle()
    world.add("again gone", 60 * BLOCK + 1, 1)
    plan_once(world)
    world.now_s += 1
    world.apply()  # Half of it has come, and of the rest nothing does.
    world.add("second stream", 35 * BLOCK, 1)
    plan_while_nothing_comes(world, 4)
    assert world.scheduler._fetching.sequences
    assert "second stream" not in world.first_s
    for _ in range(6 * BLOCK):
        plan_while_nothing_comes(world, 1)
        if not world.scheduler._fetching.sequences:
            break
    plan_while_nothing_comes(world, 3)
    assert "second stream" in world.first_s
