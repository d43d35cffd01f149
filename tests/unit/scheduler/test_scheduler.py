"""Every rule of the scheduler, one at a time."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigurationError, EngineError, RequestError
from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.records import EngineOutput, FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenLogprobs
from holdfast.scheduler import Scheduler, SchedulerLimits, Status

EOS = 2


def make(
    blocks: int = 100,
    windows: tuple[int | None, ...] = (None,),
    block_tokens: int = 4,
    *,
    prefix_caching: bool = True,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    policy: str = "fcfs",
    max_steps_in_flight: int = 1,
    prompt_tokens_beside: int | None = None,
) -> Scheduler:
    groups, places = form_groups(windows)
    layout = KVLayout(
        groups=groups, block_tokens=block_tokens, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
    )
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy,  # type: ignore[arg-type]
        max_steps_in_flight=max_steps_in_flight,
        prompt_tokens_beside=prompt_tokens_beside,
    )
    return Scheduler(limits, KVCache(layout, blocks + 1, prefix_caching))


def ask(name: str, prompt: int | list[int] = 5, max_tokens: int = 10, **more: object) -> Request:
    """Prompts of different names share no prefix."""
    tokens = [1000 + ord(name[0])] + [1] * (prompt - 1) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, **more.pop("params", {}))  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tokens, params=params, **more)  # type: ignore[arg-type]


def plan_of(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
    plan = scheduler.schedule(now_s)
    assert plan is not None
    scheduler.check_invariants()
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 77, now_s: float = 0.0) -> list[EngineOutput]:
    tokens = [token] * sum(row.samples for row in plan.rows)
    outputs = scheduler.apply(StepResult(step_id=plan.step_id, token_ids=tokens), now_s)
    scheduler.check_invariants()
    return outputs


def step(scheduler: Scheduler, token: int = 77) -> list[EngineOutput]:
    return answer(scheduler, plan_of(scheduler), token)


def slots(scheduler: Scheduler) -> dict[str, int]:
    return {sequence.request.request_id: sequence.slot for sequence in scheduler._running}


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(row.slot, row.start, row.count, row.samples) for row in plan.rows]


class TestSteps:
    def test_who_asks_is_told_after_each_chunk_how_much_is_computed(self) -> None:
        scheduler = make(max_num_batched_tokens=16)
        scheduler.add(ask("told", 40, progress=True), 0.0)
        told = [output.prompt_computed for _ in range(3) for output in step(scheduler)]
        assert told == [16, 32, 0]
        scheduler.add(ask("silent", 40), 0.0)
        assert all(not output.prompt_computed for _ in range(3) for output in step(scheduler))

    def test_a_prompt_is_computed_in_chunks_and_then_decoded(self) -> None:
        scheduler = make(max_num_batched_tokens=8)
        assert scheduler.add(ask("a", 20, max_tokens=3), 0.0) is None
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 0, 8, False)]
        assert [start.request_id for start in plan.starts] == ["a"]
        assert answer(scheduler, plan) == []
        plan = plan_of(scheduler)
        assert plan.starts == []
        assert (rows(plan), plan.table_writes[0].first) == ([(0, 8, 8, False)], 2)
        answer(scheduler, plan)
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 16, 4, True)]
        assert answer(scheduler, plan)[0].token_ids == [77]
        assert rows(plan_of(scheduler)) == [(0, 20, 1, True)]

    def test_decodes_come_first_then_running_prefills_then_admissions(self) -> None:
        scheduler = make(max_num_batched_tokens=10)
        scheduler.add(ask("a", 4), 0.0)
        step(scheduler)
        scheduler.add(ask("b", 14), 0.0)
        scheduler.add(ask("c", 5), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 4, 1, True), (1, 0, 9, False)]
        answer(scheduler, plan)
        assert rows(plan_of(scheduler)) == [(0, 5, 1, True), (1, 9, 5, True), (2, 0, 4, False)]

    def test_prompts_beside_answers_are_short_in_a_step_and_alone_they_are_not(self) -> None:
        scheduler = make(max_num_batched_tokens=32, prompt_tokens_beside=6)
        scheduler.add(ask("a", 40, max_tokens=4), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 0, 32, False)]
        answer(scheduler, plan)
        step(scheduler)
        scheduler.add(ask("b", 20), 0.0)
        scheduler.add(ask("c", 5), 0.0)
        seen = []
        for _ in range(3):
            plan = plan_of(scheduler)
            seen.append(rows(plan))
            assert scheduler.stats().step_tokens == sum(row.count for row in plan.rows)
            answer(scheduler, plan)
        assert seen[0] == [(0, 40, 1, True), (1, 0, 6, False)]
        assert seen[1] == [(0, 41, 1, True), (1, 6, 6, False)]
        # The last token of the answer: from the next step on prompts are alone.
        assert seen[2] == [(0, 42, 1, True), (1, 12, 6, False)]
        assert rows(plan_of(scheduler)) == [(1, 18, 2, True), (0, 0, 5, True)]

    def test_nothing_to_do_is_none(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        assert scheduler.schedule(0.0) is None
        scheduler.add(ask("a", 4, max_tokens=1), 0.0)
        plan_of(scheduler)
        assert scheduler.schedule(0.0) is None
        assert scheduler.has_unfinished

    def test_slots_limit_who_runs_and_are_reused(self) -> None:
        scheduler = make(max_num_seqs=2)
        for name in "abc":
            scheduler.add(ask(name, 4, max_tokens=2 if name == "a" else 9), 0.0)
        step(scheduler)
        assert slots(scheduler) == {"a": 0, "b": 1}
        step(scheduler)
        plan = plan_of(scheduler)
        assert slots(scheduler) == {"b": 1, "c": 0}
        assert plan.starts[0].slot == 0

    def test_one_step_more_can_be_planned_before_the_token_is_known(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a", 4, max_tokens=3), 0.0)
        first = plan_of(scheduler)
        second = plan_of(scheduler)
        assert rows(second) == [(0, 4, 1, True)]
        with pytest.raises(AssertionError, match="apply the oldest"):
            scheduler.schedule(0.0)
        answer(scheduler, first)
        third = plan_of(scheduler)
        assert rows(third) == [(0, 5, 1, True)]
        answer(scheduler, second)
        # The third token is in flight, and it is the last one allowed.
        assert scheduler.schedule(0.0) is None
        outputs = answer(scheduler, third)
        assert outputs[0].finish_reason is FinishReason.LENGTH

    def test_results_are_taken_in_order_and_complete(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a"), 0.0)
        plan_of(scheduler)
        second = plan_of(scheduler)
        with pytest.raises(EngineError, match="not the one due"):
            scheduler.apply(StepResult(step_id=second.step_id, token_ids=[1]), 0.0)
        with pytest.raises(EngineError, match="does not belong"):
            scheduler.apply(StepResult(step_id=second.step_id, token_ids=[1, 2]), 0.0)

    def test_limits_that_could_starve_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="token for every running sequence"):
            SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=10)
        with pytest.raises(ConfigurationError, match="max_num_seqs"):
            SchedulerLimits(max_num_seqs=0, max_num_batched_tokens=7, max_model_len=10)
        with pytest.raises(ConfigurationError, match="policy"):
            SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=7, max_model_len=10, policy="x")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="max_steps_in_flight"):
            SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=7, max_model_len=10, max_steps_in_flight=3)


class TestEndings:
    def test_an_eos_token_is_part_of_the_output_and_names_no_stop_id(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", eos_token_ids=(EOS,)), 0.0)
        (output,) = step(scheduler, EOS)
        assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([EOS], FinishReason.STOP, None)
        assert not scheduler.has_unfinished
        assert scheduler.stats().blocks_used == 0

    def test_a_stop_id_is_named(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", params={"stop_token_ids": [9]}), 0.0)
        (output,) = step(scheduler, 9)
        assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, 9)

    def test_an_end_at_the_last_token_allowed_is_a_stop(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", max_tokens=1, eos_token_ids=(EOS,)), 0.0)
        assert step(scheduler, EOS)[0].finish_reason is FinishReason.STOP

    def test_min_tokens_bans_the_ends_until_then(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", eos_token_ids=(EOS,), params={"min_tokens": 2, "stop_token_ids": [9]}), 0.0)
        plan = plan_of(scheduler)
        assert plan.starts[0].banned_until_min_tokens == (EOS, 9)
        # A runner that honours the ban cannot sample it; if it came all the same, it is a token like any other.
        assert answer(scheduler, plan, EOS)[0].finish_reason is None
        assert step(scheduler, 9)[0].finish_reason is None
        assert step(scheduler, 9)[0].finish_reason is FinishReason.STOP

    def test_the_context_ends_an_answer_too(self) -> None:
        scheduler = make(max_model_len=7)
        scheduler.add(ask("a", 5, max_tokens=50), 0.0)
        assert step(scheduler)[0].finish_reason is None
        assert step(scheduler)[0].finish_reason is FinishReason.LENGTH

    def test_tokens_past_a_stop_are_dropped(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a", eos_token_ids=(EOS,)), 0.0)
        first, second = plan_of(scheduler), plan_of(scheduler)
        assert answer(scheduler, first, EOS)[0].finish_reason is FinishReason.STOP
        assert scheduler.stats().blocks_used == 0
        assert answer(scheduler, second, 5) == []

    def test_times_and_cached_tokens_come_with_the_last_output(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", 12, max_tokens=1), 0.0)
        step(scheduler)
        scheduler.add(ask("a", 12, max_tokens=2, arrival_s=1.0), 2.0)
        answer(scheduler, plan_of(scheduler, 3.0), now_s=4.0)
        (output,) = answer(scheduler, plan_of(scheduler, 5.0), now_s=6.0)
        assert output.cached_tokens == 8
        timing = output.timing
        assert timing is not None
        assert (timing.arrival_s, timing.scheduled_s, timing.first_token_s, timing.finished_s) == (1.0, 3.0, 4.0, 6.0)

    def test_logprobs_go_to_whom_they_belong(self) -> None:
        scheduler = make()
        scheduler.add(ask("a"), 0.0)
        scheduler.add(ask("b", params={"logprobs": 1}), 0.0)
        told = TokenLogprobs([4, 5], [-0.1, -2.0], 1)
        plan = plan_of(scheduler)
        outputs = scheduler.apply(StepResult(step_id=plan.step_id, token_ids=[3, 4], logprobs=[None, told]), 0.0)
        assert [output.logprobs for output in outputs] == [None, [told]]


class TestResumed:
    def test_what_was_generated_before_counts_as_output(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", 4, max_tokens=4, output_token_ids=[7, 8]), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 0, 6, True)]
        assert (plan.starts[0].token_ids[-2:], plan.starts[0].prompt_length) == ([7, 8], 4)
        assert answer(scheduler, plan)[0].token_ids == [77]
        assert step(scheduler)[0].finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(
        ("already", "reason", "stop_id"),
        [([7, 8], FinishReason.LENGTH, None), ([EOS], FinishReason.STOP, None), ([9], FinishReason.STOP, 9)],
    )
    def test_at_its_end_it_is_finished_at_once(
        self, already: list[int], reason: FinishReason, stop_id: int | None
    ) -> None:
        scheduler = make()
        request = ask(
            "a", 4, max_tokens=2, output_token_ids=already, eos_token_ids=(EOS,), params={"stop_token_ids": [9]}
        )
        output = scheduler.add(request, 3.0)
        assert output is not None
        assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([], reason, stop_id)
        assert output.timing is not None
        assert not scheduler.has_unfinished
        scheduler.check_invariants()


class TestRefusals:
    def refusal(self, scheduler: Scheduler, request: Request) -> str:
        output = scheduler.add(request, 1.0)
        assert output is not None
        assert output.finish_reason is FinishReason.ERROR
        assert output.failure is not None
        assert not scheduler.has_unfinished
        return f"{output.failure.kind}: {output.failure.message}"

    def test_a_prompt_beyond_the_context(self) -> None:
        assert self.refusal(make(max_model_len=5), ask("a", 5)) == (
            "ContextLengthError: the prompt has 5 tokens; the context length is 5, one of them for the output"
        )

    def test_an_empty_prompt(self) -> None:
        assert self.refusal(make(), ask("a", [])) == "RequestError: the prompt is empty"

    def test_a_request_that_could_not_run_even_alone(self) -> None:
        scheduler = make(blocks=4)
        assert self.refusal(scheduler, ask("a", 10, max_tokens=8)) == (
            "ContextLengthError: 18 tokens (prompt and output) need 5 KV blocks; the KV cache has 4"
        )
        assert scheduler.add(ask("a", 10, max_tokens=7), 0.0) is None

    def test_an_id_in_use(self) -> None:
        scheduler = make()
        scheduler.add(ask("a"), 0.0)
        with pytest.raises(RequestError, match="in use"):
            scheduler.add(ask("a"), 0.0)


class TestAbort:
    def test_pages_are_free_at_once_and_the_result_in_flight_is_dropped(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a"), 0.0)
        scheduler.add(ask("b"), 0.0)
        plan = plan_of(scheduler)
        assert scheduler.abort("a")
        assert not scheduler.abort("a")
        scheduler.check_invariants()
        assert slots(scheduler) == {"b": 1}
        outputs = answer(scheduler, plan)
        assert [output.request_id for output in outputs] == ["b"]

    def test_a_new_request_with_the_id_of_an_aborted_one_gets_none_of_its_tokens(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a", max_tokens=1), 0.0)
        plan = plan_of(scheduler)
        scheduler.abort("a")
        scheduler.add(ask("a", max_tokens=5), 0.0)
        assert answer(scheduler, plan) == []
        assert scheduler.has_unfinished

    def test_one_that_waits(self) -> None:
        scheduler = make(max_num_seqs=1)
        for name in "abc":
            scheduler.add(ask(name, max_tokens=1), 0.0)
        assert scheduler.abort("b")
        assert [output.request_id for output in step(scheduler) + step(scheduler)] == ["a", "c"]


class TestPrefixes:
    def test_sixteen_at_once_compute_a_common_prefix_once(self) -> None:
        scheduler = make(blocks=400, block_tokens=16, max_num_seqs=16, max_num_batched_tokens=1200, max_model_len=1100)
        common = [5] * 1000
        for number in range(16):
            scheduler.add(ask(f"{number:02}", [*common, number], max_tokens=2), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan)[0] == (0, 0, 1001, True)
        computed = plan.token_count
        answer(scheduler, plan)
        while scheduler.has_unfinished:
            plan = plan_of(scheduler)
            computed += plan.token_count
            answer(scheduler, plan)
        # 62 blocks of 16 are shared; the other fifteen compute the last 9 tokens of their prompt, and all one more.
        assert computed == 1001 + 15 * 9 + 16

    def test_a_chunk_of_a_running_prefill_is_hit_in_the_step_that_computes_it(self) -> None:
        scheduler = make(max_num_batched_tokens=12)
        prompt = [5] * 17
        scheduler.add(ask("a", prompt), 0.0)
        scheduler.add(ask("b", prompt), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan) == [(0, 0, 12, False)]
        answer(scheduler, plan)
        assert rows(plan_of(scheduler)) == [(0, 12, 5, True), (1, 16, 1, True)]

    def test_an_answer_is_a_prefix_too(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", [1, 2, 3], max_tokens=6), 0.0)
        while scheduler.has_unfinished:
            step(scheduler, 7)
        # Of 3 + 6 tokens the last was never computed: two full blocks.
        scheduler.add(ask("b", [1, 2, 3, 7, 7, 7, 7, 7, 7, 7]), 0.0)
        assert rows(plan_of(scheduler)) == [(0, 8, 2, True)]

    def test_after_a_reset_nothing_is_found(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", 9, max_tokens=1), 0.0)
        step(scheduler)
        scheduler.reset_prefix_cache()
        scheduler.add(ask("a", 9, max_tokens=1), 0.0)
        assert rows(plan_of(scheduler)) == [(0, 0, 9, True)]
        assert scheduler.stats().prefix_hits_total == 0


class TestPreemption:
    def crowded(self, **more: object) -> Scheduler:
        """a, b and c decode; c, the youngest, is the first to go when pages run out."""
        scheduler = make(blocks=9, prefix_caching=False, **more)  # type: ignore[arg-type]
        for name in "abc":
            assert scheduler.add(ask(name, 3, max_tokens=30), 0.0) is None
        return scheduler

    def run_until_preempted(self, scheduler: Scheduler) -> StepPlan:
        while True:
            plan = plan_of(scheduler)
            if scheduler.stats().preemptions_total:
                return plan
            answer(scheduler, plan)

    def test_the_youngest_gives_way_and_waits_in_front(self) -> None:
        scheduler = self.crowded(max_num_seqs=3)
        scheduler.add(ask("d", 3), 0.0)
        plan = self.run_until_preempted(scheduler)
        assert set(slots(scheduler)) == {"a", "b"}
        assert [sequence.request.request_id for sequence in scheduler._waiting] == ["c", "d"]
        assert len(plan.rows) == 2

    def test_everybody_finishes_in_order_of_arrival(self) -> None:
        scheduler = self.crowded()
        ended: list[str] = []
        while scheduler.has_unfinished:
            ended += [output.request_id for output in step(scheduler) if output.finish_reason]
        assert ended == ["a", "b", "c"]
        assert scheduler.stats().blocks_used == 0

    def test_a_readmitted_sequence_starts_with_all_its_tokens(self) -> None:
        scheduler = self.crowded()
        answer(scheduler, self.run_until_preempted(scheduler))
        while True:
            plan = plan_of(scheduler)
            if plan.starts:
                break
            answer(scheduler, plan)
        (start,) = plan.starts
        # By now b had to give way too, and it goes before c.
        assert (start.request_id, start.prompt_length) == ("b", 3)
        assert len(start.token_ids) > 3
        assert start.token_ids[3:] == [77] * (len(start.token_ids) - 3)

    def test_a_token_in_flight_at_preemption_is_kept(self) -> None:
        scheduler = self.crowded(max_steps_in_flight=2)
        earlier = plan_of(scheduler)
        while True:
            later = plan_of(scheduler)
            if scheduler.stats().preemptions_total:
                break
            answer(scheduler, earlier)
            earlier = later
        (preempted,) = scheduler._waiting
        known = len(preempted.tokens)
        assert (preempted.request.request_id, preempted.sampling_in_flight) == ("c", 1)
        assert (len(earlier.rows), len(later.rows)) == (3, 2)
        outputs = answer(scheduler, earlier, 55)
        assert [output.request_id for output in outputs] == ["a", "b", "c"]
        assert preempted.tokens[known:] == [55]
        assert preempted.rows_in_flight == 0

    def test_a_preempted_sequence_can_end_with_the_token_in_flight(self) -> None:
        scheduler = make(blocks=9, prefix_caching=False, max_steps_in_flight=2)
        for name in "abc":
            scheduler.add(ask(name, 3, max_tokens=30, eos_token_ids=(EOS,)), 0.0)
        earlier = plan_of(scheduler)
        while True:
            later = plan_of(scheduler)
            if scheduler.stats().preemptions_total:
                break
            answer(scheduler, earlier)
            earlier = later
        tokens = [EOS if row.slot == 2 else 77 for row in earlier.rows]
        outputs = scheduler.apply(StepResult(step_id=earlier.step_id, token_ids=tokens), 0.0)
        assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]
        scheduler.check_invariants()
        assert scheduler.stats().waiting == 0

    def test_nobody_is_admitted_again_before_its_tokens_are_known(self) -> None:
        scheduler = make(blocks=4, prefix_caching=False, max_steps_in_flight=2)
        scheduler.add(ask("a", 3, max_tokens=5), 0.0)
        scheduler.add(ask("b", 4, max_tokens=10), 0.0)
        earlier = plan_of(scheduler)
        while (later := scheduler.schedule(0.0)) is not None:
            answer(scheduler, earlier)
            earlier = later
        # a only waits for its last token, b found no page and gave its own back. Then a's client leaves.
        assert scheduler.stats().preemptions_total == 1
        scheduler.abort("a")
        assert scheduler.schedule(0.0) is None
        answer(scheduler, earlier, 55)
        (start,) = plan_of(scheduler).starts
        assert start.token_ids[4:] == [77, 77, 77, 77, 55]

    def test_the_oldest_is_never_preempted(self) -> None:
        scheduler = self.crowded()
        while scheduler.has_unfinished:
            plan = plan_of(scheduler)
            oldest = min(scheduler._sequences.values(), key=lambda sequence: sequence.order)
            assert oldest in scheduler._running
            assert plan.rows[0].slot == oldest.slot
            answer(scheduler, plan)

    def test_a_row_already_planned_is_taken_back_when_its_sequence_has_to_give_way(self) -> None:
        # An old request comes back (its front remembers when it arrived) while a younger one decodes with a block of
        # one token: the young one's row is planned first, then the old prefill finds no page.
        scheduler = make(blocks=41, block_tokens=1, prefix_caching=False, max_num_seqs=2, max_num_batched_tokens=2)
        scheduler.add(ask("y", 2, max_tokens=30, arrival_s=5.0), 0.0)
        step(scheduler)
        scheduler.add(ask("o", 30, max_tokens=10, arrival_s=1.0), 0.0)
        taken_back = False
        while scheduler.has_unfinished:
            plan = plan_of(scheduler)
            preempted = [sequence for sequence in scheduler._waiting if sequence.status is Status.PREEMPTED]
            if preempted:
                assert preempted[0].request.request_id == "y"
                taken_back = True
                assert len(plan.rows) == 1
            answer(scheduler, plan)
        assert taken_back
        assert scheduler.stats().preemptions_total == 1

    def test_admission_leaves_room_for_those_who_run(self) -> None:
        scheduler = make(blocks=6, prefix_caching=False)
        scheduler.add(ask("a", 8, max_tokens=9), 0.0)
        step(scheduler)
        # a has 2 of 6 pages and takes a third now. b would take 2, and a page each is left: that is one too many.
        scheduler.add(ask("b", 8, max_tokens=9), 0.0)
        step(scheduler)
        assert set(slots(scheduler)) == {"a"}
        while scheduler.has_unfinished:
            step(scheduler)
        assert scheduler.stats().preemptions_total == 0

    def test_a_long_prompt_in_a_windowed_cache_is_cut_into_chunks_that_fit(self) -> None:
        scheduler = make(blocks=5, windows=(6,), max_num_batched_tokens=64)
        scheduler.add(ask("a", 60, max_tokens=4), 0.0)
        largest = 0
        while scheduler.has_unfinished:
            plan = plan_of(scheduler)
            largest = max(largest, plan.token_count)
            answer(scheduler, plan)
        assert 4 < largest <= 20


class TestPriority:
    def test_the_smaller_number_goes_first_then_arrival(self) -> None:
        scheduler = make(policy="priority", max_num_seqs=1)
        for name, priority in (("a", 5), ("b", 1), ("c", 1), ("d", 0)):
            scheduler.add(ask(name, max_tokens=1, priority=priority), 0.0)
        order = [step(scheduler)[0].request_id for _ in range(4)]
        assert order == ["d", "b", "c", "a"]

    def test_priorities_mean_nothing_under_fcfs(self) -> None:
        scheduler = make(max_num_seqs=1)
        scheduler.add(ask("a", max_tokens=1, priority=5), 0.0)
        scheduler.add(ask("b", max_tokens=1, priority=0), 0.0)
        assert step(scheduler)[0].request_id == "a"

    def test_an_urgent_request_takes_the_slot_of_a_lesser_one(self) -> None:
        scheduler = make(policy="priority", max_num_seqs=2)
        scheduler.add(ask("a", priority=2), 0.0)
        scheduler.add(ask("b", priority=1), 0.0)
        step(scheduler)
        scheduler.add(ask("u", priority=0), 0.0)
        plan = plan_of(scheduler)
        assert set(slots(scheduler)) == {"b", "u"}
        assert len(plan.rows) == 2
        assert scheduler.stats().preemptions_total == 1

    def test_an_equal_one_waits(self) -> None:
        scheduler = make(policy="priority", max_num_seqs=1)
        scheduler.add(ask("a", priority=1), 0.0)
        step(scheduler)
        scheduler.add(ask("b", priority=1), 0.0)
        step(scheduler)
        assert set(slots(scheduler)) == {"a"}

    def test_an_urgent_request_takes_pages_only_if_that_is_enough(self) -> None:
        scheduler = make(policy="priority", blocks=10, prefix_caching=False)
        scheduler.add(ask("a", 20, max_tokens=4, priority=0), 0.0)
        scheduler.add(ask("b", 4, max_tokens=4, priority=2), 0.0)
        step(scheduler)
        assert set(slots(scheduler)) == {"a", "b"}
        # 9 pages would not be free even without b.
        scheduler.add(ask("u", 32, max_tokens=4, priority=1), 0.0)
        step(scheduler)
        assert scheduler.stats().preemptions_total == 0
        assert set(slots(scheduler)) == {"a", "b"}

    def test_an_urgent_prefill_goes_before_a_running_lesser_one(self) -> None:
        scheduler = make(policy="priority", max_num_batched_tokens=8)
        scheduler.add(ask("a", 40, priority=3), 0.0)
        step(scheduler)
        scheduler.add(ask("u", 6, priority=0), 0.0)
        plan = plan_of(scheduler)
        assert rows(plan) == [(1, 0, 6, True), (0, 8, 2, False)]


def test_stats_tell_what_is_there() -> None:
    scheduler = make(blocks=20, max_num_seqs=1)
    scheduler.add(ask("a", 9), 0.0)
    scheduler.add(ask("b", 9), 0.0)
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_total, stats.blocks_used) == (1, 1, 20, 3)
    assert (stats.step_tokens, stats.steps_total, stats.prefix_queries_total) == (9, 1, 9)


def test_a_blocked_head_is_looked_up_again_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(blocks=12, prefix_caching=False)
    scheduler.add(ask("a", 4, max_tokens=20), 0.0)
    step(scheduler)
    scheduler.add(ask("b", 40, max_tokens=4), 0.0)
    lookups = 0
    find_prefix = scheduler.kv.find_prefix

    def counted(*arguments: object) -> object:
        nonlocal lookups
        lookups += 1
        return find_prefix(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler.kv, "find_prefix", counted)
    for _ in range(10):
        step(scheduler)
    assert lookups == 1
    while scheduler.has_unfinished:
        step(scheduler)
    assert lookups == 2


class TestUpkeep:
    def test_pages_that_leave_a_window_are_worth_an_admission(self) -> None:
        """Nobody ends, nobody is preempted: the long one alone gives back what the other waits for."""
        scheduler = make(blocks=8, windows=(4,), max_num_batched_tokens=32, prefix_caching=False)
        scheduler.add(ask("a", 16, max_tokens=100), 0.0)
        scheduler.add(ask("b", 12, max_tokens=4), 0.0)
        step(scheduler)
        assert slots(scheduler) == {"a": 0}
        step(scheduler)
        assert slots(scheduler) == {"a": 0, "b": 1}

    def test_no_step_has_no_tokens(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", 6), 0.0)
        step(scheduler)
        assert scheduler.stats().step_tokens == 6
        scheduler.abort("a")
        assert scheduler.schedule(0.0) is None
        assert scheduler.stats().step_tokens == 0

    def test_times_go_out_with_the_first_token_and_the_last(self) -> None:
        scheduler = make()
        scheduler.add(ask("a", 6, max_tokens=3, arrival_s=1.0), 1.0)
        times = [answer(scheduler, plan_of(scheduler, now), now_s=now + 1)[0].timing for now in (2.0, 4.0, 6.0)]
        assert times[1] is None
        assert times[0] is not None
        assert times[2] is not None
        assert (times[0].arrival_s, times[0].scheduled_s, times[0].first_token_s) == (1.0, 2.0, 3.0)
        assert (times[2].arrival_s, times[2].scheduled_s, times[2].first_token_s) == (1.0, 2.0, 3.0)
        assert times[2].finished_s == 7.0

    def test_emptied_keeps_limits_and_counters_only(self) -> None:
        scheduler = make(max_steps_in_flight=2)
        scheduler.add(ask("a", 20), 0.0)
        step(scheduler)
        scheduler.add(ask("b", 20), 0.0)
        plan_of(scheduler)
        fresh = scheduler.emptied()
        fresh.check_invariants()
        assert not fresh.has_unfinished
        assert fresh.steps_in_flight == fresh.kv.blocks_used == fresh.kv.blocks_indexed == 0
        assert fresh.kv.blocks_total == scheduler.kv.blocks_total
        assert fresh.stats().steps_total == 2
        assert fresh.stats().prefix_queries_total == 40
        fresh.add(ask("a", 20), 0.0)
        assert rows(plan_of(fresh)) == [(0, 0, 20, True)]


def test_pages_that_are_wanted_let_all_who_may_run_go_on_for_a_while() -> None:
    scheduler = make(blocks=60, max_num_seqs=2)
    assert scheduler.blocks_wanted(8) == 2
    scheduler.add(ask("a", 13, 100), 0.0)
    scheduler.add(ask("b", 5, 3), 0.0)
    scheduler.add(ask("c", 90, 3), 0.0)  # Has no slot as long as these have theirs.
    wanted = 1 + 3 + 6 + 2  # Null, a block each and one more, 13 + 8 tokens, and 5 + 3: it grows no longer.
    assert scheduler.blocks_wanted(8) == wanted
    step(scheduler)
    assert scheduler.blocks_wanted(8) == wanted, "14 + 8 tokens are in the same page"
    scheduler.abort("a")
    scheduler.abort("b")
    assert scheduler.blocks_wanted(8) == 1 + 2 + 24
