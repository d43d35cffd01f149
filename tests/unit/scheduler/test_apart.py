"""Steps of a pipeline: several in flight, each with other answers, and nobody left out."""

from __future__ import annotations

from collections import deque

from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.records import Request, SamplingParams, StepPlan, StepResult
from holdfast.scheduler import Scheduler, SchedulerLimits


def make(stages: int, blocks: int = 200, **limits: int) -> Scheduler:
    groups, places = form_groups((None,))
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200} | limits
    return Scheduler(
        SchedulerLimits(**given, max_steps_in_flight=stages, apart=True),
        KVCache(layout, blocks + 1, prefix_caching=True),
    )


def ask(scheduler: Scheduler, name: str, prompt: int = 4, max_tokens: int = 30) -> None:
    tokens = [ord(name[0])] + [1] * (prompt - 1)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    scheduler.add(Request(request_id=name, prompt_token_ids=tokens, params=params), 0.0)


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    tokens = [77] * sum(row.samples for row in plan.rows)
    scheduler.apply(StepResult(step_id=plan.step_id, token_ids=tokens), 0.0)
    scheduler.check_invariants()


def run(scheduler: Scheduler, stages: int, steps: int) -> list[list[int]]:
    """The slots of each step, with as many in flight as there are stages."""
    in_flight, seen = deque[StepPlan](), list[list[int]]()
    for _ in range(steps):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            in_flight.append(plan)
            seen.append([row.slot for row in plan.rows])
        if in_flight and (plan is None or len(in_flight) >= stages):
            answer(scheduler, in_flight.popleft())
    return seen


def test_no_answer_is_in_two_steps_at_once() -> None:
    scheduler = make(2)
    ask(scheduler, "a")
    first = scheduler.schedule(0.0)
    assert first is not None
    assert scheduler.schedule(0.0) is None, "its token is not known before the last stage is done"
    answer(scheduler, first)
    second = scheduler.schedule(0.0)
    assert second is not None
    assert [(row.start, row.count) for row in second.rows] == [(4, 1)]


def test_chunks_of_one_prompt_follow_one_another_through_the_stages() -> None:
    scheduler = make(3)
    ask(scheduler, "a", prompt=80)
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [[(row.start, row.count, row.samples) for row in plan.rows] for plan in plans if plan is not None] == [
        [(0, 32, False)],
        [(32, 32, False)],
        [(64, 16, True)],
    ]


def test_answers_are_divided_among_the_steps_in_flight() -> None:
    for stages, sequences in ((2, 4), (2, 5), (3, 7), (4, 8), (4, 3)):
        scheduler = make(stages)
        for number in range(sequences):
            ask(scheduler, "abcdefgh"[number])
        seen = run(scheduler, stages, 40)[8:]
        most = -(-sequences // stages)
        assert {len(slots) for slots in seen} <= {most, most - 1, sequences % most or most}
        at_once = min(stages, sequences)
        for at in range(len(seen) - at_once):
            window = seen[at : at + at_once]
            assert sum(map(len, window)) == len({slot for slots in window for slot in slots}), "nobody twice at once"
        # Everybody goes on as often as anybody else, one turn more or less.
        turns = [sum(slot in slots for slots in seen) for slot in range(sequences)]
        assert max(turns) - min(turns) <= 1


def test_who_is_preempted_under_way_keeps_what_was_sampled() -> None:
    scheduler = make(2, blocks=6, max_num_seqs=3, max_model_len=24)
    for name in "abc":
        ask(scheduler, name, prompt=5, max_tokens=15)
    finished = 0
    in_flight = deque[StepPlan]()
    for _ in range(400):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) >= 2):
            oldest = in_flight.popleft()
            tokens = [77] * sum(row.samples for row in oldest.rows)
            outputs = scheduler.apply(StepResult(step_id=oldest.step_id, token_ids=tokens), 0.0)
            finished += sum(output.finish_reason is not None for output in outputs)
            scheduler.check_invariants()
    assert finished == 3
    assert scheduler.stats().preemptions_total > 0
