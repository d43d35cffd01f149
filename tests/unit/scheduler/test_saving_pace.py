"""How fast idle pages go to RAM beside steps: a few beside who decodes, as fast as they are filled beside prompts, and
all at once where nobody waits or the pool shall shrink."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from simulated_engine import SimulatedEngine, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

BLOCKS, PACE = 200, 3


def world(pace: int = PACE, *, steps_in_flight: int = 1) -> SimulatedEngine:
    groups, places = form_groups([None, None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400, max_steps_in_flight=steps_in_flight
    )
    below = TierLimits(host_pages=1000, most_storing=60, spare_pages=BLOCKS, stores_a_plan=pace)
    kv = KVCache(layout, BLOCKS, True, below)
    return SimulatedEngine(Scheduler(limits, kv), vocabulary=50, tiers=SimulatedTiers(random.Random(3), None, 0.0))


def ask(engine: SimulatedEngine, name: str, tokens: int, answer: int) -> None:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    prompt = [len(engine.outputs) + 1] * tokens
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))


def stores(engine: SimulatedEngine) -> tuple[int, int]:
    """Tokens of the next step, and pages that it begins to save."""
    plan = engine.plan()
    assert plan is not None
    engine.execute()
    engine.scheduler.check_invariants()
    return plan.token_count, sum(copy.target_tier == Tier.HOST for copy in plan.copies)


def leave_idle(engine: SimulatedEngine, tokens: int) -> None:
    """A prompt has ended, and none of its pages is saved."""
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    tiers.limits, limits = TierLimits(spare_pages=0), tiers.limits
    ask(engine, f"idle {tokens}", tokens, 1)
    engine.finish()
    tiers.limits = limits


def test_who_decodes_waits_for_the_books_of_few_pages() -> None:
    engine = world()
    leave_idle(engine, 200)
    ask(engine, "decodes", 3, 40)
    begun = [stores(engine) for _ in range(20)]
    assert all(count <= PACE + -(-tokens // 4) for tokens, count in begun)
    assert sum(count for _, count in begun) >= 40, "all of them are saved all the same"


def test_pages_are_saved_as_fast_as_prompts_fill_them() -> None:
    engine = world()
    leave_idle(engine, 300)
    ask(engine, "prompt", 190, 1)
    tokens, count = stores(engine)
    assert tokens == 64
    assert count == 64 // 4 + PACE


def test_what_the_device_waits_for_is_planned_without_saves() -> None:
    """While enough are spare for the steps that come: the plan behind it is made while it is computed."""
    for idle, first in (((300,), 0), ((300, 360), 64 // 4 + PACE)):
        engine = world(steps_in_flight=2)
        for tokens in idle:
            leave_idle(engine, tokens)
        ask(engine, "prompt", 190, 1)
        begun = list[int]()
        for _ in range(2):
            plan = engine.plan()
            assert plan is not None
            begun.append(sum(copy.target_tier == Tier.HOST for copy in plan.copies))
            if not begun[1:]:
                assert plan.token_count == 64
        assert begun == [first, 64 // 4 + PACE]


@pytest.mark.parametrize("why", ["nobody waits", "the pool shall shrink"])
def test_all_go_at_once_where(why: str) -> None:
    engine = world()
    leave_idle(engine, 200)
    tiers = engine.scheduler.kv.tiers
    assert tiers is not None
    if why == "the pool shall shrink":
        tiers.begin_sparing(BLOCKS)
        ask(engine, "decodes", 3, 4)
    _, count = stores(engine)
    assert count == 50


def test_pages_beside_each_other_go_to_places_beside_each_other() -> None:
    """However few a plan begins, and in whatever order they were given back: more than may be on their way at once."""
    engine = world()
    leave_idle(engine, 380)
    ask(engine, "decodes", 3, 60)
    found = list[tuple[int, int]]()
    for _ in range(40):
        plan = engine.plan()
        assert plan is not None
        found += [(copy.source, copy.target) for copy in plan.copies if copy.target_tier == Tier.HOST]
        engine.execute()
    beside = sum(b[0] == a[0] + 1 and b[1] == a[1] + 1 for a, b in pairwise(found))
    assert len(found) >= 95
    assert beside >= 0.9 * len(found)
