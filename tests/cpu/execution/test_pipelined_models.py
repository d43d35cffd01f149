"""One model computed by stages of a pipeline with several steps under way, held against transformers and against one
rank: with chunks, windows, prefixes that are found again, preemptions, and requests that end in the middle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
from quantized_files import Format, write_quantized
from thread_pipeline import ThreadPipeline
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.formats.gguf import read_header
from holdfast.engine.core.loop import EngineCore
from holdfast.execution import native
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache import KVCache
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config, from_gguf
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

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


def make_core(ranks: ThreadPipeline, limits: RunnerLimits, blocks: int) -> EngineCore:
    asked = SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_steps_in_flight=len(ranks.stages),
        apart=True,
    )
    scheduler = Scheduler(asked, KVCache(ranks.layout, blocks, prefix_caching=True))
    return EngineCore(scheduler, ranks.runner, steps_ahead=len(ranks.stages) - 1)


@pytest.mark.parametrize(
    ("name", "size", "stages"), [(name, *split) for name in FAMILIES for split in SPLITS.get(name, ((1, 2),))]
)
def test_stages_say_what_the_model_says(name: str, size: int, stages: int, oracles: Callable[..., Any]) -> None:
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    windowed = any(layer.window is not None for layer in oracle.spec.layers)
    groups, _ = form_groups([layer.window for layer in oracle.spec.layers])
    blocks = (10 if windowed else 18) * len(groups) + 1
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=100)
    ranks = ThreadPipeline(oracle.spec, oracle.checkpoint, size, stages, limits, blocks)
    core, most_under_way = make_core(ranks, limits, blocks), 0
    source = random.Random(7)
    shared = [source.randrange(300) for _ in range(16)]
    prompts = {str(number): shared + [source.randrange(300) for _ in range(2 + 3 * number)] for number in range(6)}
    if windowed:
        prompts |= {f"growing {number}": [source.randrange(300) for _ in range(3)] for number in range(4)}
    lengths = {number: 30 if number.startswith("growing") else 9 for number in prompts}
    answers: dict[str, list[int]] = {number: [] for number in prompts}
    for number, prompt in sorted(prompts.items(), reverse=True):
        greedy = SamplingParams(temperature=0.0, max_tokens=lengths[number], ignore_eos=True)
        core.add(Request(request_id=number, prompt_token_ids=prompt, params=greedy))
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
        most_under_way = max(most_under_way, len(core._in_flight))
    for number, prompt in prompts.items():
        assert len(answers[number]) == lengths[number]
        oracle.assert_greedy(prompt + answers[number], len(prompt))
    stats = core.scheduler.stats()
    assert stats.prefix_hits_total > 0
    assert stats.preemptions_total > 0
    assert most_under_way == stages - 1, "a step in every stage"
    assert [stage.first for stage in ranks.stages[1:]] == [stage.last for stage in ranks.stages[:-1]]
    ranks.close()


def greedy_tokens(core: EngineCore) -> list[list[int]]:
    source, answers = random.Random(3), dict[str, list[int]]()
    for number in range(3):
        prompt = [source.randrange(224) for _ in range(5 + 9 * number)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        answers[str(number)] = []
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def assert_same_of_stages(spec: ModelSpec, opened: Callable[[], Checkpoint], size: int, **loading: Any) -> None:
    limits, blocks = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64), 60
    weights = load_weights(spec, opened(), dtype=torch.float32, device=torch.device("cpu"), **loading)
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=4,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    one = Runner(spec, weights, layout, limits, torch.device("cpu"), compiled=loading["compiled"])
    one.back_kv(blocks)
    alone = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64)
    expected = greedy_tokens(EngineCore(Scheduler(alone, KVCache(layout, blocks, prefix_caching=True)), one))
    ranks = ThreadPipeline(spec, opened, size, 2, limits, blocks, **loading)
    if one._decoder._fused is not None:
        assert all(member._decoder._fused is not None for member in ranks.runners), "stages are as compiled as one rank"
    assert greedy_tokens(make_core(ranks, limits, blocks)) == expected
    held = [runner.weights_bytes for runner in ranks.runners]
    assert sum(held) < weights.nbytes * 1.1 + (weights.embed.nbytes if spec.tied_embeddings else 0)
    ranks.close()


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_gguf_go_to_stages(size: int, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(tmp_path / "tiny.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    assert_same_of_stages(spec, lambda: Checkpoint(header.tensors, "gguf"), size, expand=False, compiled=True)


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

    assert_same_of_stages(spec, opened, size, expand=False, compiled=True)


def test_a_slot_that_changes_hands_under_way_samples_for_its_first_owner(oracles: Callable[..., Any]) -> None:
    """An aborted request leaves its slot while a step of it is under way, and another starts there at once."""
    oracle = oracles("Llama", num_hidden_layers=5, mlp_bias=True)
    limits, blocks = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=60), 40
    ranks = ThreadPipeline(oracle.spec, oracle.checkpoint, 2, 2, limits, blocks)
    core, source = make_core(ranks, limits, blocks), random.Random(1)
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
