"""Over how many GPUs a model splits: heads, MLP columns, and what quantizers keep together in every matrix."""

from __future__ import annotations

import pytest

from holdfast.models import ModelSpec, catalogue, describe_config
from holdfast.planner.sizing.sharded_weights import parallel_sizes, why_not_parallel


def spec(name: str, **changes: object) -> ModelSpec:
    return describe_config({**catalogue.find(name).config, **changes})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2.5-0.5b", (1, 2)),
        ("qwen2.5-0.5b-awq", (1,)),
        ("qwen2.5-1.5b-awq", (1, 2)),
        ("qwen2.5-72b-awq", (1, 2, 4, 8)),
        ("qwen2.5-72b-gptq-int4", (1, 2, 4, 8)),
        ("qwen2.5-72b-gptq-int8", (1, 2, 4, 8)),
        # Makers and servers say the same of these: 768 / 4 and 1536 / 8 are no whole blocks of 128.
        ("qwen3-30b-a3b-fp8", (1, 2)),
        ("qwen3-235b-a22b-fp8", (1, 2, 4)),
        ("minimax-m2", (1, 2, 4)),
        ("deepseek-v3", (1, 2, 4, 8, 16)),
        ("gpt-oss-20b", (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_sizes_of_known_models(name: str, sizes: tuple[int, ...]) -> None:
    assert parallel_sizes(spec(name)) == sizes


@pytest.mark.parametrize(
    ("name", "size", "named"),
    [
        ("qwen2.5-0.5b-awq", 2, "o_proj of 896 columns does not divide by 2: quantized in groups of 128"),
        ("qwen2.5-1.5b-awq", 4, "down_proj of 8960 columns"),
        ("qwen3-30b-a3b-fp8", 4, "gate_proj of 768 rows"),
        ("llama-3.1-8b", 3, "32 attention heads do not divide by 3"),
    ],
)
def test_the_reason_names_the_matrix(name: str, size: int, named: str) -> None:
    assert named in (why_not_parallel(spec(name), size) or "")


def test_keys_and_values_are_split_over_their_heads_and_then_repeated() -> None:
    """Two KV heads of 128 rows: blocks of 128 rows are whole on 2 ranks, and on 4 as well, where each is kept twice."""
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    small = {"num_key_value_heads": 2, "quantization_config": block}
    assert {2, 4, 8} <= set(parallel_sizes(spec("llama-3.1-8b", **small)))
    wide = {"num_key_value_heads": 2, "quantization_config": {**block, "weight_block_size": [256, 128]}}
    assert parallel_sizes(spec("llama-3.1-8b", **wide)) == (1,)


def test_what_the_quantizer_left_alone_may_be_cut_anywhere() -> None:
    quantization = dict(catalogue.find("qwen2.5-0.5b-awq").config["quantization_config"])
    left = {**quantization, "modules_to_not_convert": ["o_proj"]}
    assert 2 in parallel_sizes(spec("qwen2.5-0.5b-awq", quantization_config=left))
