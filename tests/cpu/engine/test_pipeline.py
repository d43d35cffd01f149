"""Stages of a pipeline in processes of their own: the tokens of one rank, with grammars, scores and embeddings; and
ranks that end, stop or are left in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from deadlines import PATIENCE_S
from rank_engines import CROWD, PROMPTS, make, tokens, tokens_while_resized

from holdfast import LLM, SamplingParams
from holdfast.errors import EngineDiedError, EngineHungError
from holdfast.records.structured import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("forked_starts")

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
ASKED = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[a-f]{4}")),
    SamplingParams(temperature=0.7, seed=5, max_tokens=10, frequency_penalty=0.5, ignore_eos=True),
]


def said(llm: LLM) -> list[tuple[object, ...]]:
    outputs = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    return [(one.outputs[0].text, one.outputs[0].token_ids, one.prompt_logprobs is not None) for one in outputs]


def vectors(llm: LLM) -> list[list[float]]:
    return [one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def of_one(tiny_model) -> dict[str, Any]:
    with make(tiny_model, 1) as llm:
        return {"tokens": tokens(llm), "said": said(llm), "vectors": vectors(llm), "crowd": tokens(llm, CROWD)}


TWO, FOUR = (1, 2), (2, 2)
"""Ranks of a stage, and stages."""


# What happens to two stages and to the two ranks of test_rank_faults is quick; that four agree is in test_ranks.
@pytest.fixture(scope="module", params=[TWO, pytest.param(FOUR, marks=pytest.mark.long)], ids=["pp2", "tp2-pp2"])
def pipeline(tiny_model, request) -> Iterator[LLM]:
    size, stages = request.param
    with make(tiny_model, size, pipeline_parallel_size=stages, engine_hang_timeout=30) as llm:
        yield llm


def test_stages_say_what_one_rank_says(pipeline: LLM, of_one: dict[str, Any]) -> None:
    assert tokens(pipeline) == of_one["tokens"]
    assert said(pipeline) == of_one["said"]
    for own, other in zip(vectors(pipeline), of_one["vectors"], strict=True):
        assert own == pytest.approx(other, abs=1e-5)
    rows = pipeline.info.memory.ranks
    assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
    assert sum(row.kv_pool_bytes for row in rows) == pipeline.info.kv_pool_bytes
    assert [(row.first_layer, row.layers) for row in rows[:: len(rows) // 2]] == [(0, 1), (1, 1)]


def test_the_pool_changes_on_all_stages(pipeline: LLM, of_one: dict[str, Any]) -> None:
    pipeline._core.resize_kv(pipeline.info.blocks // 2)
    assert tokens(pipeline) == of_one["tokens"]
    pipeline._core.resize_kv(pipeline.info.blocks)
    assert tokens(pipeline) == of_one["tokens"]
    assert tokens_while_resized(pipeline) == of_one["crowd"]


@pytest.mark.parametrize("where", ["submit", "result"])
def test_a_step_that_is_left_in_the_middle_is_left_by_all_stages(
    pipeline: LLM, of_one: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the first stage computes, or while what the last one shows is awaited."""
    runner, count = pipeline._core.runner._runner, 0  # type: ignore[attr-defined]
    name = "_begin" if where == "submit" else "_end"
    real = getattr(runner, name)

    def left(*given: object) -> object:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return real(*given)

    before = list(pipeline._core.runner.pids)  # type: ignore[attr-defined]
    for _ in range(2):
        count = 0
        with monkeypatch.context() as patched:
            patched.setattr(runner, name, left)
            with pytest.raises(KeyboardInterrupt):
                pipeline.generate(PROMPTS, LONG, use_tqdm=False)
        assert tokens(pipeline) == of_one["tokens"]
    assert list(pipeline._core.runner.pids) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("shown", [True, False])
def test_a_plan_that_is_left_while_it_is_sent_is_left_by_all_stages(
    pipeline: LLM, of_one: dict[str, Any], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the others have the plan already and the first rank has not begun, or when it is not shown yet."""
    word, count = pipeline._core.runner._group._segment.mail, 0  # type: ignore[attr-defined]
    post = word.post

    def interrupted(value: int) -> None:
        nonlocal count
        count += 1
        if shown or count != 6:
            post(value)
        if count == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(word, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(PROMPTS, LONG, use_tqdm=False)
    assert tokens(pipeline) == of_one["tokens"]


def test_requests_that_are_dropped_between_steps_leave_nothing(pipeline: LLM, of_one: dict[str, Any]) -> None:
    """Steps under way that nobody asks for any more are finished in their turn."""
    core, count, schedule = pipeline._core, 0, pipeline._core.scheduler.schedule

    def dropped(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return schedule(*given)

    core.scheduler.schedule = dropped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pipeline.generate(PROMPTS, LONG, use_tqdm=False)
    assert tokens(pipeline) == of_one["tokens"]


def strike_at(llm: LLM, step: int, pid: int, what: signal.Signals) -> None:
    runner, count, submit = llm._core.runner._runner, 0, llm._core.runner._runner.submit  # type: ignore[attr-defined]

    def counted(plan: Any, masks: Any = None) -> Any:
        nonlocal count
        count += 1
        if count == step:
            os.kill(pid, what)
        return submit(plan, masks)

    runner.submit = counted


STREAMS = [f"Story number {place % 8}: " + "once upon a time " * (1 + place % 5) for place in range(32)]


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, 1), (2, 2), (2, 3)])
def test_a_rank_of_a_stage_that_is_killed_is_named(tiny_model, size: int, rank: int) -> None:
    """Whichever, in the middle of 32 answers. That streams of a server go on is in test_rank_death."""
    with make(tiny_model, size, pipeline_parallel_size=2, max_num_seqs=len(STREAMS)) as llm:
        pids = list(llm._core.runner.pids)
        strike_at(llm, 5, pids[rank - 1], signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(EngineDiedError, match=rf"rank {rank} \(pid {pids[rank - 1]}\) has ended: signal SIGKILL"):
            llm.generate(STREAMS, LONG, use_tqdm=False)
        assert time.monotonic() - began_s < PATIENCE_S / 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("rank", [2, 1, 3])
def test_a_rank_of_a_stage_that_is_stopped_is_named(tiny_model, rank: int) -> None:
    """Of the last stage, and beside the first rank in its own, in the middle of 32 answers."""
    settings = {"pipeline_parallel_size": 2, "engine_hang_timeout": 5, "max_num_seqs": len(STREAMS)}
    with make(tiny_model, 2, **settings) as llm:
        pids = list(llm._core.runner.pids)
        strike_at(llm, 5, pids[rank - 1], signal.SIGSTOP)
        with pytest.raises(EngineHungError, match=rf"^rank {rank} \(pid {pids[rank - 1]}\) has not come"):
            llm.generate(STREAMS, LONG, use_tqdm=False)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.long
def test_sums_within_stages_may_go_over_sockets(tiny_model, of_one: dict[str, Any]) -> None:
    with make(tiny_model, 2, pipeline_parallel_size=2, disable_custom_all_reduce=True) as llm:
        assert tokens(llm) == of_one["tokens"]


@pytest.mark.long
def test_smollm2_in_gguf_says_the_same() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def answered(size: int, stages: int) -> list[list[int]]:
        settings = {"load_format": "auto", "tokenizer": None, "kv_cache_memory_bytes": "32MiB"}
        with make("smollm2", size, pipeline_parallel_size=stages, **settings) as llm:
            return tokens(llm, ["The capital of France is", "Once upon a time " * 12], params)

    assert answered(1, 3) == answered(2, 2) == answered(1, 1)
