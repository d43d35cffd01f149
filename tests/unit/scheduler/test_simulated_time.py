"""Hundreds of requests on simulated time: all finish, nobody starves, answers do not depend on the company."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest
from simulated_engine import SimulatedEngine

from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.records import Request, SamplingParams, StepPlan
from holdfast.scheduler import Scheduler, SchedulerLimits

REQUESTS = 800
VOCABULARY = 1000
EOS = 5


def step_cost_s(plan: StepPlan) -> float:
    """A machine that takes 10 ms a step and 0.1 ms a token."""
    return 0.010 + 0.0001 * plan.token_count


def traffic(seed: int, rate_per_s: float) -> list[Request]:
    """Poisson arrivals; short questions, long documents, and a common system prompt for half of them."""
    choice, now_s = random.Random(seed), 0.0
    system = [choice.randrange(VOCABULARY) for _ in range(48)]
    requests = []
    for number in range(REQUESTS):
        now_s += choice.expovariate(rate_per_s)
        length = choice.choice([4, 12, 30, 30, 120])
        own = [choice.randrange(VOCABULARY) for _ in range(length)]
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=system + own if choice.random() < 0.5 else own,
                params=SamplingParams(max_tokens=choice.choice([1, 8, 20, 60])),
                arrival_s=now_s,
                eos_token_ids=(EOS,),
                priority=choice.randint(0, 2),
            )
        )
    return requests


@dataclass
class Outcome:
    answers: dict[str, list[int]]
    waits_s: list[float]
    ended_s: float
    preemptions: int
    hits: int


def simulate(requests: list[Request], scheduler: Scheduler) -> Outcome:
    """One machine executes plans back to back; with two in flight, the next is planned before the last is applied."""
    engine = SimulatedEngine(scheduler, vocabulary=VOCABULARY)
    arriving = [(request.arrival_s, number, request) for number, request in enumerate(requests)]
    heapq.heapify(arriving)
    now_s, steps = 0.0, 0
    costs_s: list[float] = []
    while arriving or engine.unfinished or engine.plans_in_flight:
        while arriving and arriving[0][0] <= now_s:
            engine.add(heapq.heappop(arriving)[2], now_s)
        while engine.can_plan and (plan := engine.plan(now_s)) is not None:
            costs_s.append(step_cost_s(plan))
        if not engine.plans_in_flight:
            now_s = max(now_s, arriving[0][0])
            continue
        now_s += costs_s.pop(0)
        engine.execute(now_s)
        steps += 1
        if steps % 50 == 0:
            scheduler.check_invariants()
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
    last = [engine.outputs[request.request_id][-1] for request in requests]
    assert all(output.failure is None and output.timing is not None for output in last)
    waits_s = [output.timing.scheduled_s - output.timing.arrival_s for output in last if output.timing]
    answers = {request.request_id: engine.answer(request.request_id) for request in requests}
    return Outcome(answers, waits_s, now_s, stats.preemptions_total, stats.prefix_hits_total)


def make_scheduler(windows: list[int | None], blocks: int, steps_in_flight: int, policy: str = "fcfs") -> Scheduler:
    groups, places = form_groups(windows)
    layout = KVLayout(groups=groups, block_tokens=8, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(
        max_num_seqs=24,
        max_num_batched_tokens=96,
        max_model_len=256,
        policy=policy,  # type: ignore[arg-type]
        max_steps_in_flight=steps_in_flight,
    )
    return Scheduler(limits, KVCache(layout, blocks))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_machine_that_keeps_up_lets_nobody_wait_long(steps_in_flight: int) -> None:
    outcome = simulate(traffic(seed=1, rate_per_s=12.0), make_scheduler([None, 40], 400, steps_in_flight))
    assert outcome.hits > 0
    # The longest service takes 60 steps; nobody waits for more than a few of those.
    assert max(outcome.waits_s) < 5 * 60 * 0.02


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_flood_in_a_small_cache_is_served_in_order(steps_in_flight: int) -> None:
    requests = traffic(seed=2, rate_per_s=1e6)
    outcome = simulate(requests, make_scheduler([None], 60, steps_in_flight))
    assert outcome.preemptions > 0
    # First come, first served: nobody is first scheduled after somebody who arrived later.
    begun_s = [request.arrival_s + wait_s for request, wait_s in zip(requests, outcome.waits_s, strict=True)]
    assert begun_s == sorted(begun_s)


def test_answers_do_not_depend_on_company_cache_or_steps_in_flight() -> None:
    requests = traffic(seed=3, rate_per_s=40.0)[:400]
    outcomes = [
        simulate(requests, make_scheduler([None], 60, 1)),
        simulate(requests, make_scheduler([None, 24, 24], 250, 2)),
        simulate(requests, make_scheduler([16], 70, 2, "priority")),
    ]
    assert outcomes[0].answers == outcomes[1].answers == outcomes[2].answers


def test_urgent_requests_wait_less_than_others() -> None:
    requests = traffic(seed=4, rate_per_s=60.0)[:600]
    outcome = simulate(requests, make_scheduler([None], 120, 2, "priority"))
    waits_s: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for request, wait_s in zip(requests, outcome.waits_s, strict=True):
        waits_s[request.priority].append(wait_s)
    mean_s = [sum(waits) / len(waits) for waits in waits_s.values()]
    assert mean_s[0] < mean_s[1] < mean_s[2]
