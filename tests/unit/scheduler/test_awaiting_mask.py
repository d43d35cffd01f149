"""Rows of answers that must have a form: left out of a step, late for it, and never parted into halves."""

from __future__ import annotations

import msgspec

from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.no_structured_output import NoStructuredOutput
from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.records import EngineOutput, FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenLogprobs
from holdfast.records.steps import Verdict
from holdfast.records.structured import StructuredOutputsParams
from holdfast.scheduler import Scheduler, SchedulerLimits

FORM = StructuredOutputsParams(regex="a*")


def make() -> Scheduler:
    groups, places = form_groups((None,))
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, max_steps_in_flight=2)
    return Scheduler(limits, KVCache(layout, 400))


def ask(name: str, *, free: bool = False, max_tokens: int = 12, prompt: int = 9) -> Request:
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=None if free else FORM)
    return Request(request_id=name, prompt_token_ids=list(range(1, 1 + prompt)), params=params)


def judge(request_id: str, token: int) -> Verdict:
    return Verdict.GOES_ON


def done(plan: StepPlan, late: list[int] | None = None) -> StepResult:
    return StepResult(step_id=plan.step_id, token_ids=[7] * sum(row.samples for row in plan.rows), late=late or [])


def test_a_row_that_was_late_computes_its_last_token_once_more() -> None:
    scheduler = make()
    scheduler.add(ask("held"), 0)
    scheduler.add(ask("free", free=True), 0)
    first = scheduler.schedule(0)
    assert first is not None
    slots = {start.request_id: start.slot for start in first.starts}
    outputs = scheduler.apply(done(first, late=[slots["held"]]), 1, judge)
    scheduler.check_invariants()
    assert [output.request_id for output in outputs] == ["free"]
    for _ in range(3):  # It is left out for as long as it is held, and nobody else is.
        beside = scheduler.schedule(2, {"held"})
        assert beside is not None
        assert [row.slot for row in beside.rows] == [slots["free"]]
        scheduler.apply(done(beside), 2, judge)
    again = scheduler.schedule(3)
    assert again is not None
    (row,) = [row for row in again.rows if row.slot == slots["held"]]
    assert (row.start, row.count, row.samples) == (8, 1, True)
    outputs = scheduler.apply(done(again), 3, judge)
    scheduler.check_invariants()
    assert sorted(output.request_id for output in outputs) == ["free", "held"]


def test_an_answer_that_was_over_before_its_first_token_has_its_prompts_scores() -> None:
    scheduler, params = make(), SamplingParams(max_tokens=12, prompt_logprobs=0, structured_outputs=FORM)
    scheduler.add(Request(request_id="held", prompt_token_ids=list(range(9)), params=params), 0)
    plan = scheduler.schedule(0)
    assert plan is not None
    scores = [TokenLogprobs([1], [-1.0], 1) for _ in range(8)]
    result = msgspec.structs.replace(done(plan), prompt_logprobs=[scores])
    (output,) = scheduler.apply(result, 1, lambda request_id, token: Verdict.OVER)
    assert (output.token_ids, output.finish_reason, output.prompt_logprobs) == ([], FinishReason.STOP, scores)


def test_a_full_page_that_others_may_have_found_is_not_written_again() -> None:
    scheduler = make()
    scheduler.add(ask("held", prompt=8), 0)
    scheduler.add(ask("alike", prompt=11), 0)
    first = scheduler.schedule(0)
    assert first is not None
    slots = {start.request_id: start.slot for start in first.starts}
    old = next(write.blocks for write in first.table_writes if write.slot == slots["held"])
    scheduler.apply(done(first, late=[slots["held"]]), 1, judge)
    scheduler.check_invariants()
    again = scheduler.schedule(1)
    assert again is not None
    (start,) = again.starts
    (row,) = [row for row in again.rows if row.slot == start.slot]
    assert (start.request_id, row.start, row.count, row.samples) == ("held", 4, 4, True)
    (write,) = [write for write in again.table_writes if write.slot == start.slot]
    assert (write.blocks[0], write.blocks[1] != old[1]) == (old[0], True)
    scheduler.apply(done(again), 1, judge)
    scheduler.check_invariants()


def test_nothing_but_held_ones_is_no_step() -> None:
    scheduler = make()
    scheduler.add(ask("held"), 0)
    first = scheduler.schedule(0)
    assert first is not None
    scheduler.apply(done(first), 1, judge)
    assert scheduler.schedule(1, {"held"}) is None
    assert scheduler.schedule(1) is not None


class _Runner:
    """Does nothing, and says how many rows each step had."""

    late = ()

    def __init__(self) -> None:
        self.rows: list[int] = []

    def submit(self, plan: StepPlan, masks: object = None) -> _Runner:
        self.rows.append(len(plan.rows))
        self._plans = [*getattr(self, "_plans", []), plan]
        return self

    def result(self) -> StepResult:
        return done(self._plans.pop(0))

    def close(self) -> None:
        pass


class _Following(NoStructuredOutput):
    """Every token has the form."""

    def advance_grammar(self, request_id: str, token: int) -> Verdict:
        return Verdict.GOES_ON


def test_those_who_must_have_a_form_stay_together() -> None:
    """One comes with each step, and a step is planned ahead: they must not take turns for good."""
    runner = _Runner()
    core = EngineCore(make(), runner, steps_ahead=1, structured_output=_Following())  # type: ignore[arg-type]
    outputs: list[EngineOutput] = []
    for number in range(30):
        if number < 6:
            core.scheduler.add(ask(f"held-{number}", max_tokens=100), 0)
        outputs += core.step()
    assert runner.rows[-10:] == [6] * 10
