"""Whose adapter runs when places are fewer than adapters: batches stay large, and nobody waits for ever."""

from __future__ import annotations

from holdfast.errors import AdapterError
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.records import (
    AdapterArrival,
    AdapterFetch,
    AdapterRef,
    EngineOutput,
    Failure,
    FinishReason,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
)
from holdfast.scheduler import Scheduler, SchedulerLimits

ONE, TWO, THREE = (
    AdapterRef(name, number, f"/{name}", "stamp") for number, name in enumerate(("one", "two", "three"), 1)
)


def make(places: int, policy: str = "fcfs") -> Scheduler:
    groups, layers = form_groups([None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=layers, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        max_loras=places,
        policy="priority" if policy == "priority" else "fcfs",
    )
    return Scheduler(limits, KVCache(layout, 200))


def add(scheduler: Scheduler, name: str, adapter: AdapterRef | None, *, tokens: int = 2, priority: int = 0) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0)
    request = Request(
        request_id=name, prompt_token_ids=list(range(1, 10)), params=params, adapter=adapter, priority=priority
    )
    assert scheduler.add(request, 0.0) is None


def answer(scheduler: Scheduler, plan: StepPlan, *arrived: AdapterArrival) -> list[EngineOutput]:
    tokens = [7] * sum(row.samples for row in plan.rows)
    result = StepResult(step_id=plan.step_id, token_ids=tokens, adapters=list(arrived))
    outputs = scheduler.apply(result, 0.0)
    scheduler.check_invariants()
    return outputs


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def step(scheduler: Scheduler) -> StepPlan:
    """The next with rows. Adapters that are asked for are there at once."""
    while True:
        plan = planned(scheduler)
        answer(scheduler, plan, *(AdapterArrival(fetch.place) for fetch in plan.fetches))
        if plan.rows:
            return plan


def started(plan: StepPlan) -> list[str]:
    return [start.request_id for start in plan.starts]


def test_alike_run_together_though_they_come_in_turns() -> None:
    scheduler = make(1)
    for number in range(3):
        add(scheduler, f"a{number}", ONE)
        add(scheduler, f"b{number}", TWO)
    assert scheduler.stats().waiting_adapters == ["one", "two"]
    assert started(step(scheduler)) == ["a0", "a1", "a2"]
    assert scheduler.stats().running_adapters == ["one"]
    step(scheduler)
    plan = step(scheduler)
    assert started(plan) == ["b0", "b1", "b2"]
    assert {start.adapter_place for start in plan.starts} == {0}


def test_one_that_is_on_its_way_is_told_from_one_that_has_no_place() -> None:
    scheduler = make(1)
    add(scheduler, "first", ONE)
    add(scheduler, "other", TWO)
    plan = planned(scheduler)
    stats = scheduler.stats()
    assert (stats.waiting_adapters, stats.arriving_adapters) == (["one", "two"], [ONE.number])
    answer(scheduler, plan, *(AdapterArrival(fetch.place) for fetch in plan.fetches))
    assert scheduler.stats().arriving_adapters == []


def test_nobody_waits_for_ever() -> None:
    """Requests of the adapter that runs come all the time; those who came later do not go before."""
    scheduler = make(1)
    add(scheduler, "first", ONE, tokens=3)
    step(scheduler)
    add(scheduler, "other", TWO)
    seen = []
    for number in range(12):
        add(scheduler, f"more{number}", ONE, tokens=3)
        seen += started(step(scheduler))
        if "other" in seen:
            break
    assert seen == ["more0", "other"]  # The first of them was in line when it began to wait.


def test_those_without_an_adapter_pass() -> None:
    scheduler = make(1)
    add(scheduler, "long", ONE, tokens=9)
    add(scheduler, "waits", TWO)
    step(scheduler)
    add(scheduler, "plain", None)
    assert started(step(scheduler)) == ["plain"]


def test_nobody_waits_for_an_adapter_that_somebody_else_asked_for() -> None:
    """One comes slowly; those without one and those whose own is there start meanwhile, also who came later."""
    scheduler = make(2)
    add(scheduler, "here", ONE, tokens=9)
    step(scheduler)
    add(scheduler, "slow", TWO)
    plan = planned(scheduler)
    assert plan.fetches == [AdapterFetch(1, TWO)]
    assert len(plan.rows) == 1
    answer(scheduler, plan)
    add(scheduler, "plain", None)
    add(scheduler, "later", ONE)
    plan = planned(scheduler)
    assert (started(plan), plan.fetches) == (["plain", "later"], [])
    answer(scheduler, plan, AdapterArrival(1))
    assert started(step(scheduler)) == ["slow"]


def test_with_nothing_else_to_do_plans_without_rows_ask_for_it() -> None:
    scheduler = make(1)
    add(scheduler, "slow", ONE)
    for fetches, arrived in (([AdapterFetch(0, ONE)], []), ([], []), ([], [AdapterArrival(0)])):
        plan = planned(scheduler)
        assert (plan.rows, plan.fetches) == ([], fetches)
        answer(scheduler, plan, *arrived)
    assert started(step(scheduler)) == ["slow"]


def test_one_that_cannot_be_had_ends_those_who_wait_for_it() -> None:
    """And its place is another's; whoever comes for it later makes it be asked for once more."""
    scheduler = make(1)
    for name, adapter in (("a", ONE), ("b", TWO), ("c", ONE), ("d", None)):
        add(scheduler, name, adapter)
    plan = planned(scheduler)
    assert (started(plan), plan.fetches) == (["d"], [AdapterFetch(0, ONE)])
    failure = Failure.of(AdapterError("its files are gone", code="HF376"))
    outputs = answer(scheduler, plan, AdapterArrival(0, failure))
    ended = {output.request_id: output.failure for output in outputs if output.finish_reason is FinishReason.ERROR}
    assert ended == {"a": failure, "c": failure}
    add(scheduler, "e", ONE)
    fresh = scheduler.emptied()
    add(fresh, "plain", None)
    assert not answer(fresh, planned(fresh), AdapterArrival(0, failure))[0].failure  # It was another's.
    assert started(step(scheduler)) == []
    assert started(step(scheduler)) == ["b"]
    step(scheduler)
    assert started(step(scheduler)) == ["e"]


def test_one_that_has_come_stays_for_who_asked_first() -> None:
    """All slots are taken: nobody later in line takes its place meanwhile."""
    scheduler = make(1)
    for number in range(4):
        add(scheduler, f"long{number}", None, tokens=4)
    step(scheduler)
    add(scheduler, "first", ONE)
    add(scheduler, "second", TWO)
    plan = planned(scheduler)
    assert plan.fetches == [AdapterFetch(0, ONE)]
    answer(scheduler, plan, AdapterArrival(0))
    assert step(scheduler).fetches == []
    assert step(scheduler).fetches == []
    assert started(step(scheduler)) == ["first"]


def test_a_place_is_kept_until_another_needs_it() -> None:
    """The least recently used goes; what is back is where it was."""
    scheduler = make(2)

    def place(name: str, adapter: AdapterRef) -> int:
        add(scheduler, name, adapter, tokens=1)
        (start,) = step(scheduler).starts
        assert start.adapter == adapter
        return start.adapter_place

    first, second = place("a", ONE), place("b", TWO)
    assert {first, second} == {0, 1}
    assert place("c", ONE) == first
    assert place("d", THREE) == second
    assert place("e", ONE) == first
    assert place("f", TWO) == second


def test_no_prefix_is_shared_between_adapters_or_with_any_salt() -> None:
    scheduler = make(2)
    for name, adapter in (("a", ONE), ("b", None), ("c", TWO)):
        add(scheduler, name, adapter, tokens=1)
        assert [row.start for row in step(scheduler).rows] == [0]
    forged = Request(
        request_id="forged",
        prompt_token_ids=list(range(1, 10)),
        params=SamplingParams(max_tokens=1),
        cache_salt=ONE.salt,
    )
    scheduler.add(forged, 0.0)
    assert [row.start for row in step(scheduler).rows] == [0]
    add(scheduler, "again", ONE, tokens=1)
    assert [row.start for row in step(scheduler).rows] == [8]


def test_a_lesser_priority_is_not_preempted_for_a_place() -> None:
    scheduler = make(1, "priority")
    add(scheduler, "runs", ONE, tokens=4, priority=5)
    step(scheduler)
    add(scheduler, "urgent", TWO, priority=0)
    for _ in range(3):
        assert started(step(scheduler)) == []
    assert started(step(scheduler)) == ["urgent"]
