"""Stages with the runners of GPUs: the same tokens as one rank, with chunks, prefixes, drawn tokens, scored prompts and
embeddings, whatever a stage has of layers and windows, and with several steps under way. In Triton's interpreter, with
lines between ranks that are fakes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_prompts import assert_same_vectors, embedded
from gpu_thread_ranks import CPU, checkpoint_of
from gpu_thread_stages import GpuThreadStages
from held_answers import PARAMS as HELD
from held_answers import raw_of, text_of, with_forms
from tiny_gpu import Tiny, prompt, run, tokens_of, told_of

from holdfast.engine.core import masks
from holdfast.engine.core.loop import EngineCore
from holdfast.execution import kv_scales
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.parallel.gpu.stage import rank_before, rank_behind
from holdfast.kvcache import KVCache
from holdfast.records import SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.text.structured.client import GrammarService

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have lines in the host's memory")

SLOTS, STEP, BLOCKS = 4, 16, 64
LLAMA: dict[str, Any] = {"architecture": "Llama", "num_hidden_layers": 2}
MOE = {"architecture": "Qwen3Moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
       "num_hidden_layers": 2}  # fmt: skip
GEMMA = {"architecture": "Gemma3", "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def staged(
    tiny: Tiny, ends: list[int], each: int = 1, blocks: int = BLOCKS, **more: Any
) -> tuple[EngineCore, GpuThreadStages]:
    limits = RunnerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=STEP, max_model_len=96)
    ranks = GpuThreadStages(tiny, checkpoint_of(tiny), ends, each, limits, blocks, **more)
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=SLOTS, max_num_batched_tokens=STEP, max_model_len=96, policy="fcfs",
            max_steps_in_flight=len(ends), apart=True,
        ),
        KVCache(ranks.layout, blocks, True),
    )  # fmt: skip
    return EngineCore(scheduler, ranks.ranked, steps_ahead=len(ends) - 1), ranks


@pytest.mark.parametrize(
    ("settings", "ends", "each"),
    [
        pytest.param(LLAMA, [1, 2], 1, id="llama"),
        pytest.param(MOE, [1, 2], 1, id="moe", marks=pytest.mark.long),
        pytest.param(GEMMA, [1, 2, 3], 1, id="windows in three stages", marks=pytest.mark.long),
        pytest.param(LLAMA, [1, 2], 2, id="two ranks in each", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_tokens_are_those_of_one_rank(settings: dict[str, Any], ends: list[int], each: int, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **settings)
    core, ranks = staged(tiny, ends, each)
    try:
        prompts = [prompt(1, 18), prompt(2, 3)]
        found = [tokens_of(outputs) for outputs in run(core, prompts, [GREEDY, GREEDY])]
        for one, tokens in zip(prompts, found, strict=True):
            tiny.assert_greedy(one, tokens)
        assert [tokens_of(one) for one in run(core, prompts[:1], [GREEDY])] == found[:1], "with the cached prefix"
        assert ranks.most_under_way == 2, "a step is begun before the one before it is over"
        assert not any(line.lying for line in ranks.lines.values()), "nothing is left on the way"
        assert bool(ranks.told) == (each > 1), "tokens go to other ranks of the first stage alone"
    finally:
        ranks.close()


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("few_programs")
def test_each_stage_finds_the_scales_of_its_layers(each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys and values in FP8: those that one rank finds for these layers, in steps that no rank samples in."""
    monkeypatch.setattr(kv_scales, "SEQUENCES", 1)
    monkeypatch.setattr(kv_scales, "TOKENS", 6)
    tiny, stored = Tiny(tmp_path, **LLAMA), torch.float8_e4m3fn
    one = tiny.core(CPU, gpu=True, kv_dtype=stored)
    wanted: Any = one.runner
    core, ranks = staged(tiny, [1, 2], each, kv_dtype=stored)
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)]
    try:
        found = [tokens_of(outputs) for outputs in run(core, [prompt(1, 6)], params)]
        assert not any(line.lying for line in ranks.lines.values()), "nothing is left on the way"
    finally:
        ranks.close()
    for place, runner in enumerate(ranks.runners):
        layer = place // each
        assert runner.kv_scales.keys == wanted.kv_scales.keys[layer : layer + 1]
        assert runner.kv_scales.values == wanted.kv_scales.values[layer : layer + 1]
    assert found == [tokens_of(outputs) for outputs in run(one, [prompt(1, 6)], params)]


@pytest.mark.usefixtures("few_programs")
def test_drawn_tokens_scores_and_biases_are_those_of_one_rank(tmp_path: Path) -> None:
    """Scores are shown in several turns: more tokens of a prompt than rows of logits."""
    tiny = Tiny(tmp_path, **LLAMA)
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias={7: 50.0}, logprobs=2),
        SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    ]
    prompts = [prompt(3, 4), prompt(4, 11)]
    core, ranks = staged(tiny, [1, 2])
    try:
        found = run(core, prompts, params)
    finally:
        ranks.close()
    alone = run(tiny.core(CPU, gpu=True), prompts, params)
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in alone]
    assert tokens_of(found[0]) == [7, 7, 7]
    told, wanted = told_of(found[1]), told_of(alone[1])
    assert len(told) == len(wanted) == 10
    for ours, theirs in zip(told, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.usefixtures("few_programs")
def test_answers_that_are_held_to_a_form_are_those_of_one_rank(
    tmp_path: Path, services: list[GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank knows masks. One step's are late: its rows are computed once more, on all ranks."""
    tiny = Tiny(tmp_path, **LLAMA)
    prompts = [prompt(number, 3 + number) for number in range(len(HELD))]
    alone = run(with_forms(tiny.core(CPU, gpu=False), tiny.spec.vocab_size, services), prompts, HELD)
    calls, real = itertools.count(), masks.StepMasks.rows
    monkeypatch.setattr(masks.StepMasks, "rows", lambda step, busy: {} if next(calls) == 1 else real(step, busy))
    core, ranks = staged(tiny, [1, 2])
    try:
        found = run(with_forms(core, tiny.spec.vocab_size, services), prompts, HELD)
    finally:
        ranks.close()
    assert next(calls) > 2
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in alone]
    assert re.fullmatch("[a-c]{3,5}", text_of(tokens_of(found[0])))
    assert re.fullmatch("([a-m][0-9]?)*", text_of(tokens_of(found[2])))
    assert raw_of(found[2]) == raw_of(alone[2]), "raw, whatever the form forbids"
    assert not any(line.lying for line in ranks.lines.values())


@pytest.mark.usefixtures("few_programs")
def test_vectors_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    """In chunks, from cached prefixes, and beside an answer."""
    tiny = Tiny(tmp_path, **LLAMA)
    prompts = [prompt(0, 21), prompt(1, 1)]
    core, ranks = staged(tiny, [1, 2])
    try:
        here = embedded(core, prompts)
    finally:
        ranks.close()
    there = embedded(tiny.core(CPU, gpu=False), prompts)
    assert_same_vectors(here, there, tiny.spec.hidden_size)
    assert here["again-0"].cached_tokens == there["again-0"].cached_tokens == 20
    assert not any(line.lying for line in ranks.lines.values())


@pytest.mark.long  # Quick is that of ranks.
@pytest.mark.usefixtures("few_programs")
def test_answers_survive_a_pool_that_is_too_small(tmp_path: Path) -> None:
    """One of two sequences is preempted and computed again, on all ranks alike."""
    tiny = Tiny(tmp_path, **LLAMA)
    prompts, params = [prompt(number, 12) for number in range(2)], GREEDY.replace(max_tokens=10)
    core, ranks = staged(tiny, [1, 2], blocks=9)
    try:
        found = run(core, prompts, [params, params])
    finally:
        ranks.close()
    assert core.stats().preemptions_total > 0
    for one, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(one, tokens_of(outputs))


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_the_heaviest_step_leaves_nothing_on_the_way(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **LLAMA)
    _, ranks = staged(tiny, [1, 2])
    try:
        ranks.together(lambda runner: runner.profile_run())
        for _ in range(2):  # What is launched of a device alone.
            ranks.together(lambda runner: runner._load_kernels())
    finally:
        ranks.close()
    assert not any(line.lying for line in ranks.lines.values())


@pytest.mark.parametrize(("count", "each"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_lines_go_round_once(count: int, each: int) -> None:
    """From place to place, and from the first rank of the last stage to rank 0; each end knows the other."""
    ranks = range(count * each)
    behind = {rank: rank_behind(rank, count, each) for rank in ranks}
    before = {rank: rank_before(rank, count, each) for rank in ranks}
    assert {(rank, other) for rank, other in behind.items() if other is not None} == {
        (other, rank) for rank, other in before.items() if other is not None
    }
    assert behind[(count - 1) * each] == 0
    assert all(behind[rank] == rank + each for rank in range((count - 1) * each))
    assert [rank for rank, other in behind.items() if other is None] == list(
        range((count - 1) * each + 1, count * each)
    )
