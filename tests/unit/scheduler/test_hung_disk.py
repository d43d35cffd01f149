"""A disk that hangs holds pages of the pool that it was to fill, for seconds. Who computes does not wait for them."""

from __future__ import annotations

import random

from simulated_engine import FakeStore, SimulatedEngine, SimulatedRunner, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams, StepPlan
from holdfast.scheduler import Scheduler, SchedulerLimits

BLOCKS = 40


class HangingTiers(SimulatedTiers):
    """From the disk nothing comes while it hangs."""

    hangs = False

    def follow(self, plan: StepPlan, runner: SimulatedRunner) -> tuple[list[int], list[int]]:
        if not self.hangs:
            return super().follow(plan, runner)
        for copy in plan.copies:
            assert copy.source_tier == Tier.DISK, "there is no other tier"
            runner.poison([copy.target])
        self._under_way += plan.copies
        return [], []


PROMPT, LONGER = [1, 2, 3, 4] * 18, [5, 6, 7, 8] * 26


def world(store: FakeStore) -> tuple[SimulatedEngine, HangingTiers]:
    groups, places = form_groups([None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=120)
    tiers = HangingTiers(random.Random(3), store, 0.0)
    kv = KVCache(layout, BLOCKS, True, TierLimits(), store)
    return SimulatedEngine(Scheduler(limits, kv), vocabulary=50, tiers=tiers), tiers


def restarted() -> tuple[SimulatedEngine, HangingTiers]:
    """With both prompts on a disk that hangs by now."""
    store = FakeStore(random.Random(5), most=1000)
    engine, _ = world(store)
    for number, prompt in enumerate((PROMPT, PROMPT, LONGER, LONGER)):
        add(engine, f"{number}", prompt, 1)
        engine.finish()
    store.lost.clear()
    engine, tiers = world(store)
    tiers.hangs = True
    return engine, tiers


def add(engine: SimulatedEngine, name: str, prompt: list[int], answer: int) -> None:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))


def steps(engine: SimulatedEngine, most: int) -> list[int]:
    """Rows of each."""
    rows = list[int]()
    for _ in range(most):
        plan = engine.plan()
        assert plan is not None
        rows.append(len(plan.rows))
        engine.execute()
        engine.scheduler.check_invariants()
    return rows


def test_streams_go_on_while_a_fetch_from_disk_hangs() -> None:
    """They need the pages that its loads hold: the younger gives way, and who runs alone ends."""
    engine, tiers = restarted()
    add(engine, "older", [7] * 10, 60)
    add(engine, "younger", [8] * 10, 60)
    steps(engine, 5)
    add(engine, "hangs", [*PROMPT, 9, 9, 9], 1)
    steps(engine, 1)
    assert engine.scheduler.kv.tiers is not None
    assert engine.scheduler.kv.tiers.in_flight(Tier.DISK) == 17
    while "older" in engine.unfinished:
        assert steps(engine, 1) != [0], "nobody computes"
    assert engine.scheduler.stats().preemptions_total > 0
    tiers.hangs = False
    engine.finish()


def test_who_runs_alone_keeps_what_it_computed_while_a_fetch_from_disk_hangs() -> None:
    """To give way to itself would gain it no page."""
    engine, tiers = restarted()
    add(engine, "alone", [7] * 10, 100)
    steps(engine, 2)
    add(engine, "hangs", [*PROMPT, 9, 9, 9], 1)
    rows = steps(engine, 100)
    assert rows[-1] == 0
    assert engine.scheduler.stats().preemptions_total == 0
    tiers.hangs = False
    engine.finish()


def test_nobody_waits_for_pages_of_a_fetch_that_was_given_up() -> None:
    """There are too few to fetch what another asks for, and enough to compute it."""
    engine, tiers = restarted()
    add(engine, "hangs", [*PROMPT, 9, 9, 9], 1)
    steps(engine, 1)
    engine.abort("hangs")
    add(engine, "other", LONGER, 1)
    assert sum(steps(engine, 3)) > 0
    assert engine.scheduler.kv.tiers is not None
    assert engine.scheduler.kv.tiers.in_flight(Tier.DISK) == 17
    tiers.hangs = False
    engine.finish()
