"""What ranks of one model say, held against the model and against one rank: with chunks, windows, prefixes that are
found again, and preemptions."""

from __future__ import annotations

import random
from typing import Any

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.runner import RunnerLimits
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 100}
FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "max_model_len": 64}
FEW_BLOCKS = 60


def layout_of(spec: ModelSpec) -> KVLayout:
    groups, places = form_groups([layer.window for layer in spec.layers])
    return KVLayout(
        groups=groups,
        block_tokens=4,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )


def windowed(spec: ModelSpec) -> bool:
    return any(layer.window is not None for layer in spec.layers)


def scarce_blocks(spec: ModelSpec) -> int:
    """Of a pool that is too small for all of `assert_model_says`'s answers at once."""
    return (10 if windowed(spec) else 18) * len(layout_of(spec).groups) + 1


def assert_model_says(oracle: Any, ranks: Any) -> None:
    """`ranks`: of the limits above and of a scarce pool."""
    kv = KVCache(ranks.layout, scarce_blocks(oracle.spec), prefix_caching=True)
    scheduler = Scheduler(SchedulerLimits(**LIMITS), kv)
    core, source = EngineCore(scheduler, ranks), random.Random(7)
    shared = [source.randrange(300) for _ in range(16)]
    prompts = {str(number): shared + [source.randrange(300) for _ in range(2 + 3 * number)] for number in range(6)}
    if windowed(oracle.spec):
        prompts |= {f"growing {number}": [source.randrange(300) for _ in range(3)] for number in range(4)}
    lengths = {number: 30 if number.startswith("growing") else 9 for number in prompts}
    answers: dict[str, list[int]] = {number: [] for number in prompts}
    for number, prompt in sorted(prompts.items(), reverse=True):
        greedy = SamplingParams(temperature=0.0, max_tokens=lengths[number], ignore_eos=True)
        core.add(Request(request_id=number, prompt_token_ids=prompt, params=greedy))
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    for number, prompt in prompts.items():
        assert len(answers[number]) == lengths[number]
        oracle.assert_greedy(prompt + answers[number], len(prompt))
    stats = scheduler.stats()
    assert stats.prefix_hits_total > 0
    assert stats.preemptions_total > 0


def few_limits() -> RunnerLimits:
    return RunnerLimits(**FEW)


def greedy_tokens(runner: Any, layout: KVLayout, blocks: int = FEW_BLOCKS) -> list[list[int]]:
    core = EngineCore(Scheduler(SchedulerLimits(**FEW), KVCache(layout, blocks, prefix_caching=True)), runner)
    source, answers = random.Random(3), dict[str, list[int]]()
    for number in range(3):
        prompt = [source.randrange(224) for _ in range(5 + 9 * number)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        answers[str(number)] = []
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())
