"""Every family the engine runs, held against transformers in float32 on tiny random models: tokens equal, logits near,
with chunks, company, windows and pages that held something else before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.records import SamplingParams

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_are_those_of_transformers(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """A prompt in three chunks beside a neighbour, then token by token, over pages full of NaN."""
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    driver = driver_for(oracle)
    prompt = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    driver.start(0, prompt, SamplingParams(temperature=0.0, logprobs=20))
    driver.start(1, prompt[::-1])
    driver.step({0: 7, 1: 50})
    driver.step({0: 20, 1: 1})
    found = driver.step({1: 1, 0: 23}).logprobs[1]
    expected = oracle.logits(prompt)[-1].log_softmax(-1)
    assert found is not None
    for token, logprob in zip(found.token_ids, found.logprobs, strict=True):
        assert abs(logprob - float(expected[token])) < 2e-4
    for _ in range(8):
        driver.step({0: 1, 1: 1})
    oracle.assert_greedy(driver.tokens[0], 50)
    oracle.assert_greedy(driver.tokens[1], 50)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_mix_of_chunks_and_company_gives_the_same_tokens(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    source = random.Random(7)
    driver = driver_for(oracle, slots=4, budget=48, blocks=160)
    prompts: dict[int, list[int]] = {}
    finished = 0
    while finished < 5:
        for slot in range(4):
            if slot not in prompts and source.random() < 0.5:
                prompts[slot] = [source.randrange(300) for _ in range(source.randint(1, 40))]
                driver.start(slot, prompts[slot])
        counts, budget = {}, 48
        for slot in source.sample(sorted(prompts), len(prompts)):
            missing = len(driver.tokens[slot]) - driver.computed[slot]
            count = min(missing, budget, source.randint(1, 30))
            if count:
                counts[slot] = count
                budget -= count
        if counts:
            driver.step(counts)
        for slot in list(prompts):
            if len(driver.tokens[slot]) >= len(prompts[slot]) + 5:
                oracle.assert_greedy(driver.tokens[slot], len(prompts[slot]))
                del prompts[slot]
                driver.runner.kv.pages[
                    [page for group in driver.layout.groups for page in driver.pages[slot, group.index]]
                ] = float("nan")
                driver.end(slot)
                finished += 1
