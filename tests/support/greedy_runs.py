"""What tests ask of runners through the engine loop, whoever computes: one rank, several, or stages of a pipeline."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.engine.core.loop import EngineCore
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.records import AdapterRef, Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits


def layout_of(spec: ModelSpec, block_tokens: int = 4, element_bytes: int = 4) -> KVLayout:
    groups, places = form_groups([layer.window for layer in spec.layers])
    return KVLayout(
        groups=groups,
        block_tokens=block_tokens,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=element_bytes,
    )


def make_core(
    runner: Any, layout: KVLayout, blocks: int, *, stages: int = 1, sequences: int = 2, length: int = 64, loras: int = 0
) -> EngineCore:
    limits = SchedulerLimits(
        max_num_seqs=sequences,
        max_num_batched_tokens=24,
        max_model_len=length,
        max_loras=loras,
        **({"max_steps_in_flight": stages, "apart": True} if stages > 1 else {}),
    )
    scheduler = Scheduler(limits, KVCache(layout, blocks, prefix_caching=True))
    return EngineCore(scheduler, runner, steps_ahead=stages - 1)


def greedy_answers(
    core: EngineCore,
    prompts: Mapping[str, list[int]],
    *,
    lengths: Mapping[str, int],
    adapters: Mapping[str, AdapterRef] | None = None,
) -> dict[str, list[int]]:
    """By name, all side by side. `adapters`: of those that have one."""
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0.0, max_tokens=lengths[name], ignore_eos=True)
        adapter = (adapters or {}).get(name)
        core.add(Request(request_id=name, prompt_token_ids=prompt, params=params, adapter=adapter))
    while core.has_work:
        for output in core.step():
            assert output.failure is None, output.failure
            answers[output.request_id] += output.token_ids
    return answers


def chances_of_next(core: EngineCore, prompts: Sequence[list[int]]) -> list[dict[int, float]]:
    """Of each prompt, the log-probabilities of the likeliest 20 tokens after it."""
    found = dict[str, dict[int, float]]()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while core.has_work:
        for output in core.step():
            (told,) = output.logprobs
            found[output.request_id] = dict(zip(told.token_ids, told.logprobs, strict=True))
    return [found[str(number)] for number in range(len(prompts))]


def assert_near_in_most(core: EngineCore, other: EngineCore) -> None:
    """Of products that round their inputs: a sum's last bit may decide a code, which is then seen, but rarely is it so.
    What is rounded otherwise differs after every prompt."""
    source = random.Random(5)
    prompts = [[source.randrange(224) for _ in range(4 + number)] for number in range(15)]
    gaps = [
        max(abs(chance - theirs[token]) for token, chance in ours.items() if token in theirs)
        for ours, theirs in zip(chances_of_next(core, prompts), chances_of_next(other, prompts), strict=True)
    ]
    assert statistics.median(gaps) < 1e-4, gaps


def few_answers(core: EngineCore) -> list[list[int]]:
    """Three prompts, the longest in two chunks."""
    source = random.Random(3)
    prompts = {str(number): [source.randrange(224) for _ in range(5 + 9 * number)] for number in range(3)}
    return list(greedy_answers(core, prompts, lengths=dict.fromkeys(prompts, 8)).values())


def tight_blocks(spec: ModelSpec) -> int:
    """So few that those of `assert_model_s_answers` preempt one another."""
    windowed = any(layer.window is not None for layer in spec.layers)
    return (10 if windowed else 18) * len(form_groups([layer.window for layer in spec.layers])[0]) + 1


def assert_model_s_answers(core: EngineCore, oracle: Any) -> None:
    """Tokens are those of transformers, with chunks, company, prefixes that are found again, and preemptions."""
    source = random.Random(7)
    shared = [source.randrange(300) for _ in range(16)]
    prompts = {str(number): shared + [source.randrange(300) for _ in range(2 + 3 * number)] for number in range(6)}
    lengths = dict.fromkeys(prompts, 9)
    if any(layer.window is not None for layer in oracle.spec.layers):
        # A window bounds what a sequence holds: those that have not filled theirs yet outgrow the pool together.
        growing = {f"growing {number}": [source.randrange(300) for _ in range(3)] for number in range(4)}
        prompts, lengths = growing | prompts, dict.fromkeys(growing, 30) | lengths
    answers = greedy_answers(core, prompts, lengths=lengths)
    for number, prompt in prompts.items():
        assert len(answers[number]) == lengths[number]
        oracle.assert_greedy(prompt + answers[number], len(prompt))
    stats = core.scheduler.stats()
    assert stats.prefix_hits_total > 0
    assert stats.preemptions_total > 0
