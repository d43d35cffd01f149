"""One model computed by stages of a pipeline with several steps under way, held against transformers and against one
rank: with chunks, windows, prefixes that are found again, preemptions, and requests that end in the middle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
from greedy_runs import assert_model_s_answers, few_answers, make_core, tight_blocks
from quantized_files import Format, write_quantized
from thread_ranks import ThreadRanks, assert_same_of_ranks
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.formats.gguf import read_header
from holdfast.execution import native
from holdfast.execution.runner import RunnerLimits
from holdfast.models import from_config, from_gguf
from holdfast.records import EngineOutput, Request, SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code")

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA3: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 5, "mlp_bias": True}),
    "tied": ("Llama", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"num_hidden_layers": 3}),
    "gemma3": ("Gemma3", GEMMA3),
    "qwen3-moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 24, "norm_topk_prob": True, "num_hidden_layers": 4, "mlp_only_layers": [0]},
    ),
}
SPLITS = {"llama": ((1, 2), (2, 2), (1, 4)), "gemma3": ((1, 2), (2, 2)), "qwen3-moe": ((1, 2), (2, 2))}


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [(name, *split) for name in FAMILIES for split in SPLITS.get(name, ((1, 2),))],
)
def test_stages_say_what_the_model_says(name: str, size: int, stages: int, oracles: Callable[..., Any]) -> None:
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    blocks = tight_blocks(oracle.spec)
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=100)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, limits, blocks, size=size, stages=stages)
    core, most_under_way = make_core(ranks.runner, ranks.layout, blocks, stages=stages, sequences=4, length=100), 0
    step = core.step

    def watched() -> list[EngineOutput]:
        nonlocal most_under_way
        outputs = step()
        most_under_way = max(most_under_way, len(core._in_flight))
        return outputs

    core.step = watched  # type: ignore[method-assign]
    assert_model_s_answers(core, oracle)
    assert most_under_way == stages - 1, "a step in every stage"
    assert [stage.first for stage in ranks.stages[1:]] == [stage.last for stage in ranks.stages[:-1]]
    ranks.close()


@pytest.mark.parametrize(
    ("name", "size", "ends"),
    [("llama", 1, (0, 4, 5)), ("gemma3", 1, (0, 1, 6)), ("gemma3", 1, (0, 1, 5, 6)), ("qwen3-moe", 2, (0, 3, 4))],
)
def test_stages_may_be_as_uneven_as_their_gpus(
    name: str, size: int, ends: tuple[int, ...], oracles: Callable[..., Any]
) -> None:
    """Pages of each stage are of its own layers; those of a stage may have none of a kind."""
    architecture, settings = FAMILIES[name]
    oracle, stages = oracles(architecture, **settings), len(ends) - 1
    blocks, limits = 60, RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64)
    alone = ThreadRanks(oracle.spec, oracle.checkpoint, limits, blocks)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, limits, blocks, size=size, stages=stages, ends=ends)
    assert [stage.layers for stage in ranks.stages] == [last - first for first, last in pairwise(ends)]
    one = make_core(alone.runner, alone.layout, blocks)
    assert few_answers(make_core(ranks.runner, ranks.layout, blocks, stages=stages)) == few_answers(one)
    for several in (ranks, alone):
        several.close()


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_gguf_go_to_stages(size: int, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(tmp_path / "tiny.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    assert_same_of_ranks(
        spec, lambda: Checkpoint(header.tensors, "gguf"), size=size, stages=2, expand=False, compiled=True
    )


FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, written.awq()),
    "act-order": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        written.gptq(ordered=True),
    ),
}


@pytest.mark.parametrize(("name", "size"), [("awq", 2), ("act-order", 1)])
def test_codes_and_their_scales_go_to_stages(name: str, size: int, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """An order of columns that ranks cannot divide is no matter to whole layers."""
    oracle = oracles("Llama", intermediate_size=160)
    write_quantized(oracle.folder, tmp_path, FORMATS[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    assert_same_of_ranks(spec, opened, size=size, stages=2, expand=False, compiled=True)


def test_a_slot_that_changes_hands_under_way_samples_for_its_first_owner(oracles: Callable[..., Any]) -> None:
    """An aborted request leaves its slot while a step of it is under way, and another starts there at once."""
    oracle = oracles("Llama", num_hidden_layers=5, mlp_bias=True)
    limits, blocks = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=60), 40
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, limits, blocks, size=2, stages=2)
    core, source = make_core(ranks.runner, ranks.layout, blocks, stages=2, length=60), random.Random(1)
    prompts = {str(number): [source.randrange(300) for _ in range(4 + number)] for number in range(12)}
    answers: dict[str, list[int]] = {number: [] for number in prompts}
    for number, prompt in prompts.items():
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        core.add(Request(request_id=number, prompt_token_ids=prompt, params=greedy))
    aborted = set[str]()
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
        under_way = [row.sequence.request.request_id for step in core.scheduler._in_flight for row in step.rows]
        if under_way and len(aborted) < 4 and len(answers[under_way[0]]) == 2:
            core.abort(under_way[0])
            aborted.add(under_way[0])
    assert len(aborted) == 4
    for number, prompt in prompts.items():
        if number not in aborted:
            assert len(answers[number]) == 8
            oracle.assert_greedy(prompt + answers[number], len(prompt))
    ranks.close()
