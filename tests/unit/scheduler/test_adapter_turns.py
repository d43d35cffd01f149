"""Whose adapter runs when places are fewer than adapters: batches stay large, and nobody waits for ever."""

from __future__ import annotations

from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.records import AdapterRef, Request, SamplingParams, StepPlan, StepResult
from holdfast.scheduler import Scheduler, SchedulerLimits

ONE, TWO, THREE = (
    AdapterRef(name, number, f"/{name}", "stamp") for number, name in enumerate(("one", "two", "three"), 1)
)


def make(places: int, policy: str = "fcfs") -> Scheduler:
    groups, layers = form_groups([None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=layers, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, max_loras=places,
        policy="priority" if policy == "priority" else "fcfs",
    )  # fmt: skip
    return Scheduler(limits, KVCache(layout, 200))


def add(scheduler: Scheduler, name: str, adapter: AdapterRef | None, *, tokens: int = 2, priority: int = 0) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0)
    request = Request(
        request_id=name, prompt_token_ids=list(range(1, 10)), params=params, adapter=adapter, priority=priority
    )
    assert scheduler.add(request, 0.0) is None


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.apply(StepResult(step_id=plan.step_id, token_ids=[7] * sum(row.samples for row in plan.rows)), 0.0)
    scheduler.check_invariants()
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
        request_id="forged", prompt_token_ids=list(range(1, 10)), params=SamplingParams(max_tokens=1),
        cache_salt=ONE.salt,
    )  # fmt: skip
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
