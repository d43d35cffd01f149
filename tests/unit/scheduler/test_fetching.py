"""Fetch or compute: by what was seen, and whichever is sooner."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from simulated_engine import FakeStore, SimulatedEngine, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.scheduler.fetching import SeenRate, _Coming
from holdfast.scheduler.prefill_cost import PromptWork, pairs

BLOCKS = 40


def world(
    *, store: FakeStore | None = None, failing: float = 0.0, host_pages: int = 200, most_writing: int = 64
) -> SimulatedEngine:
    groups, places = form_groups([None, None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=120)
    below = TierLimits(host_pages=host_pages, spare_pages=BLOCKS, most_writing=most_writing)
    kv = KVCache(layout, BLOCKS, True, below, store)
    tiers = SimulatedTiers(random.Random(3), store, failing)
    return SimulatedEngine(Scheduler(limits, kv), vocabulary=50, tiers=tiers)


def ask(engine: SimulatedEngine, name: str, prompt: list[int]) -> int:
    """The tokens that were found cached."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
    engine.finish()
    return engine.outputs[name][-1].cached_tokens


def push_out(engine: SimulatedEngine) -> None:
    """Other prompts take the whole pool."""
    for number in range(4):
        ask(engine, f"other {number}{len(engine.outputs)}", [10 + number] * 90)


PROMPT = [1, 2, 3, 4] * 20


def test_what_left_the_pool_is_fetched_from_ram() -> None:
    engine = world()
    assert ask(engine, "first", PROMPT) == 0
    push_out(engine)
    assert ask(engine, "again", PROMPT) == 76
    assert engine.scheduler.kv.below_hits_total[Tier.HOST] > 0


def test_of_copies_that_all_fail_nothing_comes_and_nobody_waits() -> None:
    engine = world(failing=1.0)
    ask(engine, "first", PROMPT)
    push_out(engine)
    assert ask(engine, "again", PROMPT) == 0
    assert engine.scheduler.stats().failed_copies_total > 0


def test_two_who_want_the_same_pages_wait_for_one_load() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    before = engine.runner.tiers.copied[Tier.HOST]
    for name in ("one", "two"):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params))
    engine.finish()
    assert [engine.outputs[name][-1].cached_tokens for name in ("one", "two")] == [76, 76]
    assert engine.runner.tiers.copied[Tier.HOST] - before <= 19


def test_what_is_computed_sooner_is_not_fetched() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    fetching, page = engine.scheduler._fetching, engine.scheduler.kv.layout.page_bytes
    fetching.prefill.note(PromptWork(0, 1_000_000, 0), 1.0)
    fetching.loads[Tier.HOST].note(page, 1.0)  # A page a second.
    loaded = engine.runner.tiers.copied[Tier.HOST]
    ask(engine, "again", PROMPT)
    assert engine.runner.tiers.copied[Tier.HOST] == loaded
    assert engine.scheduler.stats().fetches_not_worth_total > 0
    for _ in range(60):  # The link has become fast.
        fetching.loads[Tier.HOST].note(page * 1_000_000, 1.0)
    push_out(engine)
    assert ask(engine, "once more", PROMPT) > 0
    assert engine.runner.tiers.copied[Tier.HOST] > loaded


def test_a_prefix_goes_to_disk_on_its_second_use_and_not_before() -> None:
    store = FakeStore(random.Random(1), most=1000)
    engine = world(store=store)
    ask(engine, "first", PROMPT)
    assert not store.pages
    ask(engine, "second", PROMPT)
    assert len(store.pages) >= 18
    ask(engine, "third", PROMPT)
    assert store.used > 0


def test_a_second_use_counts_whichever_process_made_the_first() -> None:
    store = FakeStore(random.Random(1), most=1000)
    assert ask(world(store=store), "first", PROMPT) == 0
    assert not store.pages
    restarted = world(store=store)
    longer = [*PROMPT, *[7] * 16]
    assert ask(restarted, "second", longer) == 0
    assert 18 <= len(store.pages) < 24, "what was asked twice is written, what was not is not"
    assert ask(world(store=store), "third", PROMPT) > 0


def test_what_is_used_while_it_goes_to_disk_goes_there_once() -> None:
    """Its copy is on its way, or the disk's queue has it: once more it would be copied to be dropped."""
    store = FakeStore(random.Random(1), most=1000, late=0.95)
    engine = world(store=store)
    for number in range(12):  # FakeStore.write looks at it.
        ask(engine, f"{number}", [*PROMPT, number])
    assert engine.scheduler.stats().failed_copies_total == 0
    assert len(store.pages) + len(store.waiting) >= 18


def test_ram_that_is_pinned_late_may_hold_what_the_pool_has_by_then() -> None:
    """After a server woke up. Else it would count as unsaved, and be saved for ever."""
    engine = world()
    ask(engine, "first", PROMPT)
    assert engine.scheduler.kv.tiers is not None
    kept = engine.scheduler.kv.tiers.host.entries()
    assert len(kept) >= 19
    engine = world(host_pages=0)
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    tiers.limits = TierLimits(host_pages=0, spare_pages=BLOCKS, saves_ahead=8)
    tiers.host.expect(kept)
    ask(engine, "before it is pinned", PROMPT)
    engine.scheduler.kv.end_copies([], [], max(page for _, _, page in kept) + 20)
    engine.scheduler.check_invariants()
    while engine.plan() is not None:
        engine.execute()
    assert not engine.scheduler.has_copies


def test_what_came_to_nan_is_not_found_in_ram_that_is_pinned_later() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    assert engine.scheduler.kv.tiers is not None
    kept = engine.scheduler.kv.tiers.host.entries()
    kv = world(host_pages=0).scheduler.kv
    assert kv.tiers is not None
    kv.tiers.host.expect(kept)
    book = kv.open()
    kv.find_prefix(book, PROMPT)
    kv.forget(book, 0, below=True)
    kv.end_copies([], [], max(page for _, _, page in kept) + 1)
    found = kv.find_below(book, PROMPT, disk=False)
    assert found is not None
    assert found.blocks == 0
    kv.check_invariants()


def test_being_preempted_is_no_second_use() -> None:
    store = FakeStore(random.Random(1), most=1000)
    engine = world(store=store, host_pages=0)  # What is preempted is computed again.
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for number in range(3):
        prompt = [10 + number] * 60
        engine.add(Request(request_id=f"{number}", prompt_token_ids=prompt, params=params))
    engine.finish()
    assert engine.scheduler.stats().preemptions_total > 0
    assert not store.pages


def test_a_store_that_takes_nothing_is_brought_nothing() -> None:
    """Else pages would be copied, and held meanwhile, to be dropped."""
    store = FakeStore(random.Random(1), most=1000)
    engine = world(store=store)
    store.well = False
    for name in ("first", "second"):
        ask(engine, name, PROMPT)
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    assert not store.pages
    assert tiers.dropped_writes >= 18
    assert not engine.scheduler.has_copies
    store.well = True
    ask(engine, "third", PROMPT)
    assert len(store.pages) >= 18


def test_what_leaves_the_pool_before_the_disk_has_room_counts_as_dropped() -> None:
    store = FakeStore(random.Random(1), most=1000, most_room=0)
    engine = world(store=store, host_pages=0)
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params))
        while engine.unfinished:
            engine.plan()
            engine.execute()
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    for number in range(3):
        engine.add(Request(request_id=f"{number}", prompt_token_ids=[10 + number] * 50, params=params))
        while engine.unfinished:
            engine.plan()
            engine.execute()
    waiting = len(tiers._to_write)
    store._most_room = 1000
    engine.finish()
    assert (len(store.pages) + tiers.dropped_writes, tiers.dropped_writes > 0) == (waiting, True)


@pytest.mark.parametrize(("most_room", "most_writing"), [(3, 64), (1000, 3)], ids=["queue", "places"])
def test_a_long_prefix_goes_to_disk_as_it_has_room_and_nothing_is_dropped(most_room: int, most_writing: int) -> None:
    """However little of it waits at once: a queue of 64 MiB is 30 pages of a large model, a prompt a thousand."""
    store = FakeStore(random.Random(1), most=1000, most_room=most_room)
    engine = world(store=store, most_writing=most_writing)
    ask(engine, "first", PROMPT)
    on_their_way = list[int]()
    tiers, execute = engine.scheduler.kv.tiers, engine.execute
    assert tiers is not None

    def counted(*given: Any, **more: Any) -> Any:
        tiers.check()  # It counts them.
        on_their_way.append(len(tiers._writing))
        return execute(*given, **more)

    engine.execute = counted  # type: ignore[method-assign]
    ask(engine, "second", PROMPT)
    assert len(store.pages) == len(PROMPT) // 4 - 1
    assert max(on_their_way) == 3
    assert not tiers.dropped_writes


def test_an_abort_while_pages_come_gives_them_back() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    engine.add(Request(request_id="gone", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=3)))
    engine.plan()
    assert engine.scheduler._fetching.sequences
    engine.abort("gone")
    engine.finish()
    engine.scheduler.check_invariants()
    assert engine.scheduler.kv.blocks_used == 0


def test_a_link_that_is_timed_by_itself_is_not_slow_beside_long_steps() -> None:
    """Pages that come while a long step computes are seen when it is over."""
    for loading_s, least, most in ((0.0, 1, 40), (0.1, 950, 1050)):
        fetching = world().scheduler._fetching
        tiers, page = fetching._kv.tiers, fetching._kv.layout.page_bytes
        assert tiers is not None
        tiers._loads.in_flight[Tier.HOST] = 110
        fetching.note_planned(0.0)
        tiers.loaded_pages[Tier.HOST] += 100
        tiers._loads.in_flight[Tier.HOST] = 10
        fetching.note_applied([(0, 100)], 0.0, 5.0, loading_s)
        rate = fetching.loads[Tier.HOST].per_s
        assert rate is not None
        assert least < rate / page < most


def test_what_the_link_did_while_no_page_came_from_ram_is_not_held_against_it() -> None:
    fetching = world().scheduler._fetching
    tiers, page = fetching._kv.tiers, fetching._kv.layout.page_bytes
    assert tiers is not None
    for number in range(100):
        fetching.note_applied([(0, 1)], float(number), number + 1.0, 0.01)
    tiers._loads.in_flight[Tier.HOST] = 100
    fetching.note_planned(100.0)
    tiers.loaded_pages[Tier.HOST] += 100
    tiers._loads.in_flight[Tier.HOST] = 0
    fetching.note_applied([(0, 1)], 100.0, 101.0, 0.1)
    rate = fetching.loads[Tier.HOST].per_s
    assert rate is not None
    assert abs(rate / page - 1000) < 1


def test_a_step_that_is_applied_before_it_is_computed_shows_with_the_next_that_tells() -> None:
    """As a GPU's of which nothing is sampled. What began after a pause says nothing of it."""
    fetching = world().scheduler._fetching
    whole = PromptWork(2, 16_384, pairs(fetching._kv.layout, 0, 16_384))
    for turn in range(20):
        fetching.note_applied([(0, 8192)], turn, turn + 0.005, tells=False)
        fetching.note_applied([(8192, 8192)], turn + 0.002, turn + 0.48)
        fetching.note_applied([(0, 8192)], turn + 0.6, turn + 0.605, tells=False)  # Its client leaves.
        fetching.note_applied([(0, 3)], turn + 0.8, turn + 0.806)
    seconds = fetching.prefill.seconds(whole)
    assert seconds is not None
    assert abs(seconds - 0.48) < 0.02


def test_what_a_small_step_takes_is_not_what_capturing_its_graph_took() -> None:
    """Nor what one took that was over when the host looked."""
    fetching = world().scheduler._fetching
    for turn, took_s in enumerate([2.0, 0.006, 0.006, 0.5, 0.006, 0.00001, 0.006, 0.4, 0.006]):
        fetching.note_applied([(turn, 1)], 10 * turn + 10, 10 * turn + 10 + took_s)
    assert abs(fetching._step_s - 0.006) < 1e-6


def test_rates_are_of_what_was_seen_last() -> None:
    rate = SeenRate()
    assert rate.per_s is None
    rate.note(100, 0.0)
    assert rate.per_s is None
    for _ in range(50):
        rate.note(100, 1.0)
    assert rate.per_s is not None
    assert abs(rate.per_s - 100) < 1
    for _ in range(50):
        rate.note(300, 1.0)
    assert abs(rate.per_s - 300) < 5


@pytest.mark.parametrize("piece_s", [0.001, 0.05, 0.25, 1.0])
def test_the_last_quarter_of_a_second_decides_in_however_many_pieces_it_was_seen(piece_s: float) -> None:
    """One second of each rate at least; then half a second of a link that is a thousand times slower."""
    rate = SeenRate()
    for _ in range(max(1, round(1 / piece_s))):
        rate.note(1000 * piece_s, piece_s)
    for _ in range(max(1, round(0.5 / piece_s))):
        rate.note(piece_s, piece_s)
    assert rate.per_s is not None
    assert rate.per_s < 110, "a slow link is believed to be fast"
    for _ in range(max(1, round(0.5 / piece_s))):
        rate.note(1000 * piece_s, piece_s)
    assert rate.per_s > 890, "one bad second counts for many"


def test_what_a_link_does_not_do_for_a_few_milliseconds_says_little() -> None:
    rate = SeenRate()
    for _ in range(1000):
        rate.note(1, 0.001)
    for _ in range(5):
        rate.note(0.001, 0.001)
    assert rate.per_s is not None
    assert rate.per_s > 970


def test_pages_of_ram_do_not_stand_behind_those_of_a_disk_that_hangs() -> None:
    store = FakeStore(random.Random(1), most=1000)
    kv = KVCache(world().scheduler.kv.layout, BLOCKS, True, TierLimits(host_pages=8, most_loading_disk=2), store)
    assert kv.tiers is not None
    tiers, on_disk, in_ram = kv.tiers, [bytes([number] * 16) for number in range(6)], b"r" * 16
    place = tiers.host.reserve(0, in_ram)
    assert place is not None
    tiers.host.arrived(place)
    for keys in (on_disk, [in_ram]):
        tiers.begin(keys, tiers.count(keys, len(keys), (0,)), 0)
    assert sorted(copy.source_tier for copy in tiers.plan([], 0)) == [Tier.HOST, Tier.DISK, Tier.DISK]
    tiers.check()


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    fetching, page = engine.scheduler._fetching, engine.scheduler.kv.layout.page_bytes
    # A billion blocks a second: nothing that comes later changes it.
    fetching.prefill.note(PromptWork(0, 4_000_000_000, 0), 1.0)
    fetching.loads[Tier.HOST].note(page * 500_000_000, 1.0)
    loaded = engine.runner.tiers.copied[Tier.HOST]
    for number in range(100):
        ask(engine, f"again {number}", PROMPT)
        if engine.runner.tiers.copied[Tier.HOST] > loaded:
            break
        push_out(engine)
    assert 3 < number < 30  # As are the others that took the pool, of which nothing is fetched either.


def test_what_came_between_two_looks_is_not_taken_for_slow() -> None:
    """A page that came in a microsecond, beside a step of a second, does not show that pages take a second."""
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    fetching, tiers = engine.scheduler._fetching, engine.scheduler.kv.tiers
    assert tiers is not None
    fetching.loads[Tier.HOST].note(1_000_000, 1.0)
    known = fetching.loads[Tier.HOST].per_s
    fetching._coming[Tier.HOST] = _Coming(1.0)
    tiers.loaded_pages[Tier.HOST] += 1
    fetching.note_applied([(0, 1)], 1.0, 2.0)
    assert fetching.loads[Tier.HOST].per_s == known
    fetching._coming[Tier.HOST] = _Coming(2.0)
    tiers._loads.in_flight[Tier.HOST] = 1
    fetching.note_applied([(0, 1)], 2.0, 2.9)  # Still on its way.
    tiers.loaded_pages[Tier.HOST] += 1
    fetching.note_applied([(0, 1)], 2.9, 3.0)
    slower = fetching.loads[Tier.HOST].per_s
    assert slower is not None
    assert known is not None
    assert slower < known


def test_what_came_in_part_beside_a_step_shows_no_rate_of_a_disk_that_layers_come_from() -> None:
    fetching = world().scheduler._fetching
    tiers = fetching._kv.tiers
    assert tiers is not None
    tiers.limits = replace(tiers.limits, disk_share=1 / 9)
    tiers._loads.in_flight[Tier.DISK] = 3
    fetching.note_planned(0.0)
    fetching.note_applied([(0, 1)], 0.0, 1.0)
    tiers.loaded_pages[Tier.DISK] += 1
    fetching.note_applied([], 1.0, 2.0)
    assert fetching.disk_beside_steps.per_s is fetching.loads[Tier.DISK].per_s is None
    tiers.loaded_pages[Tier.DISK] += 1
    fetching.note_applied([], 2.0, 3.0)
    assert fetching.loads[Tier.DISK].per_s is not None


def test_pages_of_an_engine_that_started_over_do_not_count_twice() -> None:
    engine = world()
    ask(engine, "first", PROMPT)
    push_out(engine)
    assert ask(engine, "again", PROMPT) == 76
    fresh = engine.scheduler.emptied()
    fresh._fetching.loads[Tier.HOST].note(1.0, 1.0)
    fresh._fetching._coming[Tier.HOST] = _Coming(1.0)
    fresh._fetching.note_applied([(0, 1)], 1.0, 2.0)
    assert fresh._fetching.loads[Tier.HOST].per_s == 1.0


def test_limits_of_stores_follow_the_pool() -> None:
    """What is spare, and what is on its way to RAM, are shares of the pool as it is after a resize."""
    layout = world().scheduler.kv.layout
    below = TierLimits(host_pages=200, most_storing=50, storing_share=1 / 8, spare_pages=100, spare_share=1 / 4)
    kv = KVCache(layout, 401, True, below)
    assert kv.tiers is not None
    assert (kv.tiers.most_storing, kv.tiers.spare_pages) == (50, 100)
    kv.resize(81)
    assert (kv.tiers.most_storing, kv.tiers.spare_pages) == (10, 20)
    kv.resize(5)
    assert (kv.tiers.most_storing, kv.tiers.spare_pages) == (1, 1)
    kv.resize(801)
    assert (kv.tiers.most_storing, kv.tiers.spare_pages) == (50, 100)
