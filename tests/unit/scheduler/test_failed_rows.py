"""Rows that could not be done: one request ends, whoever may have read its pages starts anew, nobody else notices."""

from __future__ import annotations

import random

from simulated_engine import NOT_FINITE, FakeStore, SimulatedEngine, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, TierLimits, form_groups
from holdfast.records import Failure, Request, SamplingParams, StepFailure, StepResult
from holdfast.scheduler import Scheduler, SchedulerLimits

FAILURE = Failure(kind="StepMemoryError", message="none", code="HF441")


def make() -> Scheduler:
    groups, places = form_groups((None,))
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, policy="fcfs", max_steps_in_flight=2
    )
    return Scheduler(limits, KVCache(layout, 100))


def ask(name: str, prompt: list[int], max_tokens: int = 10) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def slot_of(scheduler: Scheduler, name: str) -> int:
    return scheduler._sequences[name].slot


def test_only_those_with_the_same_beginning_start_anew() -> None:
    scheduler = make()
    shared = list(range(50, 62))
    scheduler.add(ask("other", [1, 2, 3]), 0)
    scheduler.add(ask("failing", [*shared, 7]), 0)
    scheduler.add(ask("reader", [*shared, 8]), 0)
    first = scheduler.schedule(0)
    second = scheduler.schedule(0)
    assert first is not None
    assert second is not None
    failed = StepFailure(slot=slot_of(scheduler, "failing"), failure=FAILURE)
    samples = sum(row.samples for row in first.rows)
    outputs = scheduler.apply(StepResult(step_id=1, token_ids=[9] * samples, failures=[failed]), 1)
    scheduler.check_invariants()
    assert {output.request_id: output.token_ids for output in outputs} == {"failing": [], "other": [9]}
    assert [output.failure for output in outputs if output.failure] == [FAILURE]
    samples = sum(row.samples for row in second.rows)
    outputs = scheduler.apply(StepResult(step_id=2, token_ids=[9] * samples), 2)
    scheduler.check_invariants()
    assert [output.request_id for output in outputs] == ["other"]
    again = scheduler.schedule(3)
    assert again is not None
    assert [(start.request_id, start.token_ids) for start in again.starts] == [("reader", [*shared, 8])]
    assert [row.start for row in again.rows if row.slot == slot_of(scheduler, "reader")] == [0]  # Nothing was cached.
    assert scheduler.stats().preemptions_total == 1


def test_who_always_fails_and_comes_again_stops_nobody() -> None:
    scheduler, victim = make(), ask("victim", [1, 2, 3, 4, 5], max_tokens=6)
    scheduler.add(victim, 0)
    tokens, ended, steps = 0, 0, 0
    while "victim" in scheduler._sequences:
        name = f"poor {steps}"
        scheduler.add(ask(name, [1, 2, 3, 4, 5, steps]), 0)
        plan = scheduler.schedule(0)
        assert plan is not None
        failures = [
            StepFailure(slot=sequence.slot, failure=FAILURE)
            for sequence in scheduler._running
            if sequence is not scheduler._sequences["victim"] and any(row.slot == sequence.slot for row in plan.rows)
        ]
        samples = sum(row.samples for row in plan.rows)
        for output in scheduler.apply(StepResult(step_id=plan.step_id, token_ids=[9] * samples, failures=failures), 0):
            tokens += len(output.token_ids) if output.request_id == "victim" else 0
            ended += output.failure is not None
        scheduler.check_invariants()
        steps += 1
        assert steps < 30
    assert tokens == 6
    assert ended >= 5


def test_of_a_prompt_that_came_to_no_numbers_no_chunk_stays_cached_in_any_tier() -> None:
    """NaN is found where a token is sampled: behind the last chunk. The first may have been where it came from."""
    choice = random.Random(4)
    store = FakeStore(choice, most=1000)
    groups, places = form_groups((None, 24))
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    kv = KVCache(layout, 200, True, TierLimits(host_pages=400, spare_pages=200, most_storing=200), store)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200, max_steps_in_flight=2)
    tiers = SimulatedTiers(choice, store, failing=0.0)
    engine, prompt = SimulatedEngine(Scheduler(limits, kv), vocabulary=40, tiers=tiers), list(range(50, 90))
    for name in ("first", "second", "third"):  # Used again, it goes to RAM and to disk.
        engine.add(ask(name, prompt, max_tokens=2))
        engine.finish()
    assert kv.tiers is not None
    held = [len(engine.scheduler.kv._index), len(kv.tiers.host), len(store.pages)]
    assert min(held) > 0
    engine.add(ask("other", list(range(10, 30)), max_tokens=2))
    engine.finish()
    others = [len(kv._index) - held[0], len(kv.tiers.host) - held[1], len(store.pages) - held[2]]
    engine.add(ask("failing", [*prompt, 1, 2, 3], max_tokens=4))
    while "failing" in engine.unfinished:
        engine.plan()
        sampling = [row.slot for row in engine._plans[0][0].rows if row.samples]
        engine.execute(failing_row=0 if sampling else None, failure=NOT_FINITE)
        engine.scheduler.check_invariants()
    assert engine.outputs["failing"][-1].failure == NOT_FINITE
    engine.finish()
    assert [len(kv._index), len(kv.tiers.host), len(store.pages)] == others
    assert not any(key in kv.tiers.anywhere(group, disk=True) for group in (0, 1) for key in engine_hashes(kv, prompt))


def engine_hashes(kv: KVCache, prompt: list[int]) -> list[bytes]:
    book = kv.open()
    kv.find_prefix(book, prompt)
    kv.close(book)
    return book.hashes
