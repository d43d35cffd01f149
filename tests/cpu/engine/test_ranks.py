"""Several ranks compute one model: the tokens of one rank, whatever the division, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rank_engines import CROWD, PROMPTS, make, tokens, tokens_while_resized

from holdfast import LLM, SamplingParams
from holdfast.records.structured import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("forked_starts")

ASKED = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[a-f]{4}")),
]


def said(llm: LLM) -> list[tuple[object, ...]]:
    outputs = llm.generate(PROMPTS[:2], ASKED, use_tqdm=False)
    return [(one.outputs[0].text, one.outputs[0].token_ids, one.prompt_logprobs is not None) for one in outputs]


@pytest.fixture(scope="module")
def by_one(tiny_model) -> dict[str, Any]:
    with make(tiny_model, 1) as llm:
        return {"tokens": tokens(llm), "said": said(llm), "crowd": tokens(llm, CROWD)}


@pytest.fixture(scope="module")
def of_one(by_one) -> list[list[int]]:
    return by_one["tokens"]


# Four are long: threads of test_divided_models prove their division, processes in two stages, below, that four meet.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def several(tiny_model, request) -> Iterator[LLM]:
    with make(tiny_model, request.param) as llm:
        yield llm


def test_ranks_say_what_one_says(several: LLM, of_one) -> None:
    """With four ranks, two KV heads are on two of them each."""
    assert tokens(several) == of_one
    rows = several.info.memory.ranks
    assert [row.rank for row in rows] == list(range(len(rows)))
    assert len(rows) > 1
    assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
    assert sum(row.kv_pool_bytes for row in rows) == several.info.kv_pool_bytes
    several._core.resize_kv(several.info.blocks // 2)
    assert tokens(several) == of_one


def test_answers_go_on_while_the_pool_of_all_ranks_changes(several: LLM, by_one) -> None:
    assert tokens_while_resized(several) == by_one["crowd"]


def test_grammars_scores_and_seeds_are_those_of_one(several: LLM, by_one) -> None:
    """The first rank samples; the others learn what it drew, and which tokens came to nothing."""
    assert said(several) == by_one["said"]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_keys_and_values_in_fp8_have_the_scales_of_one(tiny_model, stages: int) -> None:
    """A layer's scale is that of its largest key on any rank, and a stage has those of its layers."""

    def said(ranks: int, stages: int = 1) -> tuple[object, ...]:
        with make(tiny_model, ranks, kv_cache_dtype="fp8", pipeline_parallel_size=stages) as llm:
            (found,) = [one for one in llm.info.decisions if one.startswith("kv_cache_scales")]
            scales = llm._core.runner._runner.kv_scales if ranks * stages > 1 else llm._core.runner.kv_scales
            return tokens(llm), found, (scales.keys[:1], scales.values[:1])

    assert said(2, stages) == said(1)


def test_sums_may_go_over_sockets(tiny_model, of_one) -> None:
    with make(tiny_model, 2, disable_custom_all_reduce=True) as llm:
        assert tokens(llm) == of_one


@pytest.mark.long  # Threads of test_divided_models prove the division of blocks and of nine heads.
def test_smollm2_in_gguf_says_the_same() -> None:
    """Nine heads over three: six of them are the first rank's."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def said(ranks: int) -> list[list[int]]:
        settings = {"load_format": "auto", "tokenizer": None, "kv_cache_memory_bytes": "32MiB"}
        with make("smollm2", ranks, **settings) as llm:
            return tokens(llm, ["The capital of France is", "Once upon a time " * 12], params)

    assert said(2) == said(1)
