"""Pipeline stages that are not even: how many layers each has, where embedding and head lie, and which one decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast import plan
from holdfast.models import catalogue, describe_config
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import rank_bytes, stage_layers, weights_of

Ask = Callable[..., Question]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (32, 4, [8, 8, 8, 8]),
        (22, 4, [5, 6, 6, 5]),
        (126, 4, [31, 32, 32, 31]),
        (7, 3, [2, 3, 2]),
        (5, 3, [2, 2, 1]),
        (3, 2, [2, 1]),
        (61, 2, [31, 30]),
        (23, 4, [6, 6, 6, 5]),
        (43, 10, [4, 4, 4, 4, 4, 4, 5, 5, 5, 4]),
        (5, 1, [5]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_layers_are_dealt_out_as_vllm_does(layers: int, stages: int, sizes: list[int]) -> None:
    """What is over goes to the stage before the last first, then to those before it (get_pp_indices)."""
    found = stage_layers(layers, stages)
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(layers))


@pytest.mark.parametrize(("name", "tied"), [("llama-3.1-8b", False), ("llama-3.2-1b", True)])
def test_embedding_and_head_lie_at_the_ends(name: str, tied: bool) -> None:
    spec = describe_config(catalogue.find(name).config)
    assert spec.tied_embeddings is tied
    weights = weights_of(PlannedModel(name=name, spec=spec, origin="catalogue"), dtype="bfloat16")
    held = [rank_bytes(weights, spec, tensor_parallel=1, layers=one) for one in stage_layers(len(spec.layers), 3)]

    def of(*names: str) -> int:
        return sum(2 * tensor.elements for tensor in spec.tensors if tensor.name in names)

    layers = [
        sum(2 * tensor.elements for tensor in spec.tensors if tensor.layer in stage)
        for stage in stage_layers(len(spec.layers), 3)
    ]
    last = of("final_norm", "embed" if tied else "head")
    assert held == [layers[0] + of("embed"), layers[1], layers[2] + last]


def test_the_fullest_stage_decides(ask: Ask) -> None:
    """Llama 3.1 8B in three stages: 11, 11 and 10 layers, the first with the embedding, the last with the head."""
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 512}
    found = fit(ask("llama-3.1-8b", "rtx3060-12", count=3, pipeline_parallel=3, tensor_parallel=1, **limits))
    assert [len(stage) for stage in stage_layers(32, 3)] == [11, 11, 10]
    assert [rank.kv.growing_bytes for rank in found.ranks] == [layers * 4096 for layers in (11, 11, 10)]
    terms = [{term.name: term.nbytes for term in rank.terms} for rank in found.ranks]
    assert terms[0]["weights"] > terms[2]["weights"] > terms[1]["weights"]
    assert ["logits" in one for one in terms] == [False, False, True]
    longest = [rank.kv.longest(rank.room_bytes, 131_072) for rank in found.ranks]
    assert found.kv_tokens == min(rank.room_bytes // (16 * rank.kv.growing_bytes) * 16 for rank in found.ranks)
    assert found.limits.max_model_len == min(longest)
    assert len(set(longest)) == 3

    asked = {"count": 3, "pipeline_parallel": 3, "tensor_parallel": 1, "max_model_len": 131_072}
    short = fit(ask("llama-3.1-8b", "rtx3060-12", **asked))
    lacking = [short.needed_bytes(rank) - rank.room_bytes for rank in short.ranks]
    assert short.short_bytes == max(lacking) > min(lacking)


# Left to the plan


def said(found: object, field: str) -> str:
    return next(decision.reason for decision in found.decisions if decision.field == field)  # type: ignore[attr-defined]


def test_stages_are_taken_where_no_split_of_each_layer_holds_the_model() -> None:
    found = plan("deepseek-v3", gpu="l4x64")
    assert found.fits
    assert found.fit.pipeline_parallel > 1
    assert len(found.fit.ranks) == found.fit.tensor_parallel * found.fit.pipeline_parallel <= 64
    assert "tensor parallelism alone does not fit it on the 64 GPUs" in said(found, "pipeline_parallel_size")
    assert "fewer GPUs" not in said(found, "tensor_parallel_size")
    for stages in (5, 6, 7):
        other = plan("deepseek-v3", gpu="l4x64", tensor_parallel_size=8, pipeline_parallel_size=stages)
        assert other.fit.limits.max_model_len <= found.fit.limits.max_model_len


def test_the_fewest_stages_that_hold_what_was_asked_for() -> None:
    found = plan("deepseek-v3", gpu="l4x64", max_model_len=8192)
    assert found.fits
    assert "the fewest stages that do" in said(found, "pipeline_parallel_size")
    fewer = {"tensor_parallel_size": 8, "pipeline_parallel_size": found.fit.pipeline_parallel - 1}
    assert not plan("deepseek-v3", gpu="l4x64", max_model_len=8192, **fewer).fits


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("deepseek-v3", "l4x64", {"pipeline_parallel_size": 1}),
        ("llama-3.1-70b", "rtx4090x8", {"tensor_parallel_size": 2}),
        ("llama-3.1-405b", "l4x2", {}),
        ("llama-3.1-70b", "l4", {}),
    ],
)
def test_no_stages_where_a_split_was_asked_for_or_none_would_do(model: str, gpu: str, settings: dict[str, int]) -> None:
    found = plan(model, gpu=gpu, **settings)
    assert not found.fits
    assert found.fit.pipeline_parallel == 1


@pytest.mark.parametrize("gpu", ["h100-80x8", "rtx4090"])
def test_one_stage_where_it_holds_the_model(gpu: str) -> None:
    found = plan("llama-3.1-8b", gpu=gpu)
    assert (found.fits, found.fit.pipeline_parallel) == (True, 1)
    assert not any(decision.field == "pipeline_parallel_size" for decision in found.decisions)


def test_what_is_said_of_the_split_within_stages_that_were_asked_for() -> None:
    found = plan("llama-3.1-8b", gpu="rtx4090", pipeline_parallel_size=5)
    assert "in each of 5 stages" in said(found, "tensor_parallel_size")
    assert "needs 5" in said(found, "gpus")
