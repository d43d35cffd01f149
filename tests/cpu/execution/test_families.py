"""Every family the engine runs, held against transformers in float32 on tiny random models: tokens equal, logits near,
with chunks, company, windows and pages that held something else before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from greedy_runs import assert_model_s_answers, layout_of, make_core, tight_blocks

from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

GEMMA: dict[str, Any] = {"head_dim": 24, "sliding_window": 9, "num_hidden_layers": 4, "query_pre_attn_scalar": 30}
GEMMA3: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TWO_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}
PHI: dict[str, Any] = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}


def long_rope(dim: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * place for place in range(dim // 2)],
        "long_factor": [1.5 + 0.7 * place for place in range(dim // 2)],
    }


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


def within(original: int) -> dict[str, Any]:
    """transformers takes the long factors for any longer sequence."""
    return {"original_max_position_embeddings": original}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-no-caps": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-untied": (
        "Gemma3",
        {**GEMMA3, "rope_parameters": TWO_ROPES, "tie_word_embeddings": False, "query_pre_attn_scalar": 40},
    ),
    "phi3": ("Phi3", {}),
    "phi3-short": ("Phi3", {**PHI, "rope_parameters": long_rope(12), "max_position_embeddings": 16384, **within(8192)}),
    "phi3-long": (
        "Phi3",
        {**PHI, "rope_parameters": long_rope(16), "partial_rotary_factor": 1.0, "sliding_window": 21, **within(5)},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "granite": ("Granite", GRANITE),
    "granite-bias": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "smollm3-still": ("SmolLM3", {"num_hidden_layers": 2, "no_rope_layers": [0, 0]}),
    "smollm3-window": (
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 10, "tie_word_embeddings": False},
    ),
    "stablelm": ("StableLm", {"layer_norm_eps": 1e-4}),
    "stablelm-bias": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-4}),
    "starcoder2-plain": (
        "Starcoder2",
        {"use_bias": False, "sliding_window": 11, "hidden_act": "gelu", "tie_word_embeddings": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-shares": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
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


VARIANTS = frozenset(
    {
        "qwen2-tied", "qwen3-bias", "gemma2-no-caps", "gemma3-untied", "phi3-short", "olmo2-bias", "granite-bias",
        "smollm3-still", "stablelm-bias", "qwen3-moe-shares", "llama-mlp-bias", "seed-oss",
    }
)  # fmt: skip
"""They differ from others in their weights, not in what the scheduler and the pages see of them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in VARIANTS else name for name in FAMILIES]
)
def test_prefixes_chunks_windows_and_preemptions_leave_tokens_as_they_are(
    name: str, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    blocks = tight_blocks(oracle.spec)
    runner = driver_for(oracle, slots=4, budget=24, blocks=blocks).runner
    assert_model_s_answers(make_core(runner, runner.layout, blocks, sequences=4, length=100), oracle)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite", "starcoder2"])
def test_half_precision_stays_near(name: str, oracles: Callable[..., Any]) -> None:
    """Norms kept in float32 among weights that are not, scales that are rounded, sums that are apart."""
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    weights = load_weights(
        oracle.spec, oracle.checkpoint(), dtype=torch.bfloat16, device=torch.device("cpu"), expand=True
    )
    layout = layout_of(oracle.spec, element_bytes=2)
    groups = layout.groups
    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100)
    runner = Runner(oracle.spec, weights, layout, limits, torch.device("cpu"))
    runner.back_kv(64)
    prompt = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    blocks = [list(range(1 + 8 * group.index, 9 + 8 * group.index)) for group in groups]
    start = SequenceStart(0, "one", prompt, 30, SamplingParams(temperature=0.0, logprobs=20))
    writes = [TableWrite(0, group.index, 0, blocks[group.index]) for group in groups]
    plan = StepPlan(step_id=0, starts=[start], table_writes=writes, rows=[Row(0, 0, 30, True)])
    (found,) = runner.execute(plan).logprobs
    assert found is not None
    expected = oracle.logits(prompt)[-1].log_softmax(-1)
    spread = float(expected.max() - expected.min())
    for token, logprob in zip(found.token_ids, found.logprobs, strict=True):
        assert abs(logprob - float(expected[token])) < 0.06 * spread
