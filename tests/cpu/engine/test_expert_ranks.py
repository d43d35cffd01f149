"""Whole experts on ranks in processes of their own: the tokens of one rank, each rank's experts told and counted to the
byte, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_engines import make, tokens
from tiny_experts import write_tiny_experts

from holdfast.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("tiny-experts"))


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
