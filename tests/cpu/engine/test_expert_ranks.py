"""Whole experts on ranks in processes of their own: the tokens of one rank, each rank's experts told and counted to the
byte, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_engines import make, tokens

from holdfast.errors import ConfigurationError

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "norm_topk_prob": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-experts")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def of_one(model: Path) -> list[list[int]]:
    with make(model, 1) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    ("size", "stages", "counts"),
    [(2, 1, [3, 2]), pytest.param(2, 2, [3, 2, 3, 2], marks=pytest.mark.long)],
    ids=["ep2", "ep2-pp2"],
)
def test_ranks_with_whole_experts_say_what_one_says(
    model: Path, of_one: list[list[int]], size: int, stages: int, counts: list[int]
) -> None:
    with make(model, size, pipeline_parallel_size=stages, enable_expert_parallel=True) as llm:
        assert tokens(llm) == of_one
        report = llm.info.memory
        assert [row.experts for row in report.ranks] == counts
        assert [row.weights_bytes for row in report.ranks] == [row.planned_weights_bytes for row in report.ranks]
        measured = {term.term: term.measured_bytes for term in report.terms}
        planned = {term.term: term.planned_bytes for term in report.terms}
        assert measured["weights"] == planned["weights"]
        said = [one for one in llm.info.decisions if "enable_expert_parallel" in str(one)]
        assert said
        assert "3, 2" in str(said[0])


def test_more_ranks_than_experts_are_refused_with_those_that_can_be(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="5 experts, fewer than one for each rank") as refused:
        make(model, 6, enable_expert_parallel=True, hf_overrides={"num_attention_heads": 8, "num_key_value_heads": 8})
    assert (refused.value.code, refused.value.needed) == ("HF131", "one of 1, 2, 3, 4, 5")


def test_a_model_without_experts_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="this model has no experts") as refused:
        make(tiny_model, 2, enable_expert_parallel=True)
    assert refused.value.field == "enable_expert_parallel"
