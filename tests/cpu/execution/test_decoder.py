"""The decoder against transformers in float32: tokens equal, logits near, whatever the company and the chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "bias": ("Llama", {"attention_bias": True}),
    "multi-head": ("Llama", {"num_key_value_heads": 4}),
    "wide-heads": ("Llama", {"head_dim": 32}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
    "yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "window": ("Mistral", {"sliding_window": 10}),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    architecture, settings = MODELS[name]
    oracle = oracles(architecture, **settings)
    driver = driver_for(oracle)
    prompt = torch.randint(0, 300, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    driver.start(0, prompt)
    driver.generate(0, 12)
    oracle.assert_greedy(driver.tokens[0], 37)


@pytest.mark.parametrize("name", ["plain", "bias", "window"])
@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
def test_any_mix_of_chunks_and_company_gives_the_same_tokens(
    name: str, reference: bool, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    architecture, settings = MODELS[name]
    oracle = oracles(architecture, **settings)
    random_source = random.Random(7)
    driver = driver_for(oracle, slots=6, budget=64, blocks=2000, reference=reference)
    prompts: dict[int, list[int]] = {}
    finished = 0
    while finished < 12:
        for slot in range(6):
            if slot not in prompts and random_source.random() < 0.5:
                prompts[slot] = [random_source.randrange(300) for _ in range(random_source.randint(1, 60))]
                driver.start(slot, prompts[slot])
        counts, budget = {}, 64
        for slot in random_source.sample(sorted(prompts), len(prompts)):
            missing = len(driver.tokens[slot]) - driver.computed[slot]
            count = min(missing, budget, random_source.randint(1, 40))
            if count:
                counts[slot] = count
                budget -= count
        if counts:
            driver.step(counts)
        for slot in list(prompts):
            if len(driver.tokens[slot]) >= len(prompts[slot]) + 8:
                oracle.assert_greedy(driver.tokens[slot], len(prompts[slot]))
                del prompts[slot]
                driver.end(slot)
                finished += 1
