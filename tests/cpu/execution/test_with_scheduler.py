"""Scheduler, KV books and runner together: whatever the company, pressure and reuse, tokens are transformers' own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.kvcache import KVCache
from holdfast.records import FinishReason, Request, SamplingParams
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])
@pytest.mark.parametrize("ahead", [1, 2], ids=["in step", "one step ahead"])
def test_random_mixes_under_pressure(
    window: int | None, ahead: int, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles("Mistral", sliding_window=window)
    source = random.Random(ahead * 100 + (window or 0))
    blocks = 40 if window is None else 16
    runner = driver_for(oracle, blocks=blocks, slots=6, budget=32).runner
    kv = KVCache(runner.layout, blocks, prefix_caching=True)
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100, max_steps_in_flight=ahead)
    scheduler = Scheduler(limits, kv)
    shared = [source.randrange(300) for _ in range(24)]
    prompts: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    for index in range(24):
        prompt = shared[: source.choice((0, 8, 24))] + [source.randrange(300) for _ in range(source.randint(1, 30))]
        prompts[f"r{index}"], answers[f"r{index}"] = prompt, []
    waiting = deque(prompts)
    in_flight: deque[Any] = deque()
    while waiting or scheduler.has_unfinished:
        for _ in range(source.randint(0, 3)):
            if waiting:
                name = waiting.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=source.randint(1, 20))
                scheduler.add(Request(request_id=name, prompt_token_ids=prompts[name], params=params), 0.0)
        plan = scheduler.schedule(0.0) if len(in_flight) < ahead else None
        if plan is not None:
            in_flight.append(runner.submit(plan))
        if in_flight and (plan is None or len(in_flight) >= ahead):
            for output in scheduler.apply(in_flight.popleft().result(), 0.0):
                answers[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = output.finish_reason
        scheduler.check_invariants()
    assert set(ended.values()) == {FinishReason.LENGTH}
    assert len(ended) == len(prompts)
    for name, prompt in prompts.items():
        oracle.assert_greedy(prompt + answers[name], len(prompt))
    stats = scheduler.stats()
    # A window bounds what a sequence holds, so admission alone keeps those from running out of pages.
    assert window is not None or stats.preemptions_total > 0
    assert stats.prefix_hits_total > 0
    assert kv.blocks_used == 0
