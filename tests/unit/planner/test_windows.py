"""Sequences with windows side by side: the step in flight is counted once, and the scheduler runs what was planned."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine

from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.sizing.kv_cost import KVCost, layout_cost
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

Ask = Callable[..., Question]

windows = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=5)


def layout_of(kinds: list[int | None], block_tokens: int) -> KVLayout:
    groups, places = form_groups(kinds)
    return KVLayout(
        groups=groups, block_tokens=block_tokens, layers_per_page=places, kv_heads=1, head_dim=8, element_bytes=2
    )


def test_a_step_is_there_once_for_all_sequences(ask: Ask) -> None:
    """Gemma 3 27B: 10 layers of 8,192 bytes a token that grow, 52 with a window of 1,024, steps of 8,192 tokens."""
    found = fit(ask("gemma-3-27b", "h200", traffic=(16, 3500, 596)))
    by_hand = 16 * (4096 * 81_920 + 1024 * 425_984) + 8192 * 425_984
    assert found.fits
    assert found.limits.max_num_batched_tokens == 8192
    needed = found.needed_bytes(found.ranks[0])
    assert by_hand <= needed <= by_hand * 1.03
    assert found.concurrency(4096) >= 16
    assert found.kv_tokens > 0


def test_vllm_counts_a_step_in_every_sequence(ask: Ask) -> None:
    cost = fit(ask("gemma-3-27b", "h100-80", max_model_len=32_768)).ranks[0].kv
    one = cost.sequence_bytes(32_768)
    assert cost.tokens(4 * one, 32_768) == 4 * 32_768
    assert cost.held_tokens(4 * one, 32_768) > 4 * 32_768


@settings(max_examples=examples(200), deadline=None)
@given(windows, st.integers(1, 20), st.integers(1, 300), st.integers(1, 64), st.sampled_from([1, 4, 16]))
def test_pages_and_bytes_are_one_count(
    kinds: list[int | None], sequences: int, tokens: int, step: int, block: int
) -> None:
    layout = layout_of(kinds, block)
    cost = layout_cost(layout, step)
    needed = layout.blocks_side_by_side(sequences, tokens, step)
    assert cost.needed_bytes(sequences, tokens) == needed * layout.page_bytes
    # A block of each group to grow into may come to every one of them, and one is cut.
    assert layout.peak_blocks(tokens, step) <= needed
    assert needed <= sequences * (layout.peak_blocks(tokens, step) + 2 * len(layout.groups))


@settings(max_examples=examples(200), deadline=None)
@given(windows, st.integers(1, 300), st.integers(1, 64), st.integers(0, 10**6), st.integers(0, 10**5))
def test_as_many_fit_as_are_said_to(kinds: list[int | None], tokens: int, step: int, pool: int, more: int) -> None:
    cost: KVCost = layout_cost(layout_of(kinds, 4), step)
    held = cost.concurrency(pool, tokens)
    assert cost.needed_bytes(int(held), tokens) <= pool
    assert cost.needed_bytes(int(held) + 1, tokens) > pool
    assert cost.concurrency(pool + more, tokens) >= held
    assert cost.longest(pool, 300, sequences=2) <= cost.longest(pool, 300)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_is_planned_side_by_side_runs_side_by_side(seed: int, steps_in_flight: int) -> None:
    """In a pool of just so many pages all run at once, and nobody is preempted."""
    choice = random.Random(seed)
    layout = layout_of(choice.choice([[9], [None, 9, 9], [3, 30, None], [17] * 5 + [None]]), choice.choice([1, 4, 8]))
    sequences, step = choice.randint(2, 9), choice.choice([16, 33, 64])
    prompt = choice.randint(20, 120)
    # So long that the first still runs when the last begins.
    output = 4 * layout.block_tokens + 2 * sequences * -(-prompt // (step - sequences))
    blocks = 1 + layout.blocks_side_by_side(sequences, prompt + output, step)
    limits = SchedulerLimits(
        max_num_seqs=sequences,
        max_num_batched_tokens=step,
        max_model_len=prompt + output,
        max_steps_in_flight=steps_in_flight,
    )
    scheduler = Scheduler(limits, KVCache(layout, blocks, prefix_caching=False))
    engine = SimulatedEngine(scheduler, vocabulary=1000)
    for number in range(3 * sequences):
        ids = [choice.randrange(1000) for _ in range(prompt)]
        engine.add(Request(request_id=str(number), prompt_token_ids=ids, params=SamplingParams(max_tokens=output)))
    running = 0
    while engine.unfinished or engine.plans_in_flight:
        while engine.can_plan and engine.plan() is not None:
            running = max(running, scheduler.stats().running)
        engine.execute()
    assert scheduler.stats().preemptions_total == 0
    assert running == sequences
