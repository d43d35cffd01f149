"""The decoder against transformers in float32: tokens equal, logits near, whatever the company and the chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.execution import native, transformer
from holdfast.records import SamplingParams

from .conftest import Oracle, make_driver

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


@pytest.mark.parametrize("name", ["plain", "tied", "yarn", "window"])
def test_logits_are_near_those_of_transformers(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """Seen through log-probabilities: after a prompt in three chunks, beside a neighbour."""
    architecture, settings = MODELS[name]
    oracle = oracles(architecture, **settings)
    driver = driver_for(oracle)
    prompt = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    driver.start(0, prompt, SamplingParams(temperature=0.0, logprobs=20))
    driver.start(1, prompt[::-1])
    driver.step({0: 7, 1: 50})
    driver.step({0: 20, 1: 1})
    result = driver.step({1: 1, 0: 23})
    neighbour, found = result.logprobs
    assert neighbour is None
    assert found is not None
    expected = oracle.logits(prompt)[-1].log_softmax(-1)
    assert found.rank == 1
    assert len(found.token_ids) == 21
    for token, logprob in zip(found.token_ids, found.logprobs, strict=True):
        assert abs(logprob - float(expected[token])) < 1e-4


def test_nothing_depends_on_what_buffers_and_pages_held_before(
    oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """Pages come back from others full of NaN, and the workspace too: neither may be seen."""
    oracle = oracles("Mistral", sliding_window=10)
    driver = driver_for(oracle, blocks=16)
    source = random.Random(5)
    for _ in range(4):
        prompt = [source.randrange(300) for _ in range(source.randint(5, 40))]
        driver.start(0, prompt)
        driver.generate(0, 5)
        oracle.assert_greedy(driver.tokens[0], len(prompt))
        driver.end(0)
        driver.runner.kv.pages[1:].fill_(float("nan"))
        transformer = driver.runner._decoder
        for name in ("_stream", "_normed", "_qkv", "_attended", "_gate_up", "_inner"):
            getattr(transformer, name).fill_(float("nan"))


def test_one_poisoned_request_leaves_its_neighbours_alone(
    oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """A row whose own keys are NaN samples nonsense; the row beside it and whoever gets its pages next do not."""
    oracle = oracles("Llama")
    driver = driver_for(oracle)
    prompts = {slot: [(slot * 31 + index * 7) % 300 for index in range(20)] for slot in (0, 1)}
    for slot, prompt in prompts.items():
        driver.start(slot, prompt)
    driver.step({0: 20, 1: 20})
    driver.runner.kv.pages[driver.pages[0, 0]] = float("nan")
    for _ in range(4):
        driver.step({0: 1, 1: 1})
    oracle.assert_greedy(driver.tokens[1], 20)
    driver.free = []
    driver.end(0)
    driver.start(0, prompts[1])
    driver.generate(0, 4)
    oracle.assert_greedy(driver.tokens[0], 20)


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
def test_layers_run_in_one_call_only_where_that_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    oracle = Oracle(tmp_path, "Llama")
    oracle.model.half().save_pretrained(tmp_path)  # What compiled products read as it is stored.
    oracle.model.float()
    driver = make_driver(oracle, compiled=True, beat=lambda: beats.append(len(beats)))
    fused = driver.runner._decoder._fused
    assert fused is not None
    monkeypatch.setattr(transformer, "BYTES_AT_ONCE", 8 * fused.layer_bytes)
    driver.start(0, list(range(3, 12)))
    found = []
    for tokens in (9, 1, 1):
        beats.clear()
        driver.step({0: tokens})
        found.append(len(beats))
    # One at the end of a step; of the last layer of a prompt only one token is computed, apart.
    assert found == [3, 2, 2]
    oracle.assert_greedy(driver.tokens[0], 9)
