"""Log-probabilities of prompts: those of transformers, whatever chunks, cache and preemptions make of a prompt."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prompt_scores import assert_scores

from holdfast.errors import EngineError
from holdfast.kvcache import KVCache
from holdfast.records import Request, Row, SamplingParams, StepPlan, TokenLogprobs
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])
@pytest.mark.parametrize("ahead", [1, 2], ids=["in step", "one step ahead"])
def test_random_mixes_tell_what_transformers_tell(
    window: int | None, ahead: int, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles("Mistral", sliding_window=window)
    source = random.Random(ahead * 100 + (window or 0))
    blocks = 30 if window is None else 16
    runner = driver_for(oracle, blocks=blocks, slots=6, budget=32).runner
    runner._logits, runner._turn_rows = runner._logits[:5].clone(), 2  # Turns of a few rows.
    kv = KVCache(runner.layout, blocks, prefix_caching=True)
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100, max_steps_in_flight=ahead)
    scheduler = Scheduler(limits, kv)
    shared = [source.randrange(300) for _ in range(24)]
    requests: dict[str, Request] = {}
    for index in range(16):
        prompt = shared[: source.choice((0, 8, 24))] + [source.randrange(300) for _ in range(source.randint(1, 30))]
        asked = source.choice((None, 0, 3, 20))
        params = SamplingParams(temperature=0.0, max_tokens=source.randint(1, 24), prompt_logprobs=asked)
        requests[f"r{index}"] = Request(request_id=f"r{index}", prompt_token_ids=prompt, params=params)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    told: dict[str, list[TokenLogprobs]] = {name: [] for name in requests}
    waiting, in_flight = deque(requests.values()), deque[Any]()
    while waiting or scheduler.has_unfinished:
        for _ in range(min(len(waiting), source.randint(0, 3))):
            scheduler.add(waiting.popleft(), 0.0)
        plan = scheduler.schedule(0.0) if len(in_flight) < ahead else None
        if plan is not None:
            in_flight.append(runner.submit(plan))
        if in_flight and (plan is None or len(in_flight) >= ahead):
            for output in scheduler.apply(in_flight.popleft().result(), 0.0):
                tokens[output.request_id] += output.token_ids
                told[output.request_id] += output.prompt_logprobs or []
        scheduler.check_invariants()
    for name, request in requests.items():
        prompt, asked = request.prompt_token_ids, request.params.prompt_logprobs
        oracle.assert_greedy(prompt + tokens[name], len(prompt))
        if asked is None:
            assert told[name] == []
        else:
            assert_scores(oracle.logits(prompt), prompt, told[name], asked)
    assert window is not None or scheduler.stats().preemptions_total > 0
    assert scheduler.stats().prefix_hits_total > 0


def test_a_prompt_that_is_cached_is_computed_again_only_as_far_as_it_is_told(
    oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """One that a dead engine has told the half of may find that half in the cache."""
    oracle = oracles()
    runner = driver_for(oracle, blocks=64, slots=2, budget=64).runner
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100),
        KVCache(runner.layout, 64, prefix_caching=True),
    )
    prompt = [(37 * place + 11) % 300 for place in range(41)]
    told = {}
    for name, asked, already in (("first", None, 0), ("told", 2, 0), ("half", 2, 21), ("plain", None, 0)):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=asked)
        request = Request(request_id=name, prompt_token_ids=prompt, params=params, prompt_logprobs_sent=already)
        scheduler.add(request, 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        (output,) = scheduler.apply(runner.execute(plan), 0.0)
        assert plan.rows[0].start == {"first": 0, "told": 0, "half": 20, "plain": 40}[name]
        assert output.cached_tokens == plan.rows[0].start
        told[name] = output.prompt_logprobs
    assert told["first"] is None
    assert told["plain"] is None
    assert_scores(oracle.logits(prompt), prompt, told["told"] or [], 2)
    assert len(told["half"] or []) == 40 - 21
    for one, other in zip(told["half"] or [], (told["told"] or [])[21:], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(("first", "end"), [(0, 4), (7, 9), (5, 10)])
def test_a_plan_that_scores_what_it_does_not_compute_is_refused(
    first: int, end: int, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    driver = driver_for(oracles())
    driver.start(0, list(range(1, 10)), SamplingParams(prompt_logprobs=1))
    driver.step({0: 4})
    plan = driver.plan({0: 5})
    wrong = StepPlan(step_id=9, table_writes=plan.table_writes, rows=[Row(0, 4, 5, True, first, end)])
    with pytest.raises(EngineError, match="scores positions"):
        driver.runner.execute(wrong)


def test_scoring_needs_no_more_than_the_rows_of_its_logits(
    oracles: Callable[..., Any], driver_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 tokens are scored through as many rows as may sample, and through no more."""
    driver = driver_for(oracles(), slots=3)
    seen: list[int] = []
    head = driver.runner._decoder.logits

    def watch(hidden: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(len(hidden))
        assert out.data_ptr() == driver.runner._logits.data_ptr()
        head(hidden, out)

    monkeypatch.setattr(driver.runner._decoder, "logits", watch)
    prompt = [(7 * place) % 300 for place in range(200)]
    driver.start(0, prompt, SamplingParams(prompt_logprobs=20))
    plan = driver.plan({0: 200})
    plan = StepPlan(
        step_id=plan.step_id, starts=plan.starts, table_writes=plan.table_writes, rows=[Row(0, 0, 200, True, 0, 199)]
    )
    (told,) = driver.runner.execute(plan).prompt_logprobs
    assert_scores(oracles().logits(prompt), prompt, told, 20)
    assert max(seen) <= 3
    assert sum(seen) == 200
