"""Ranks with the runners of GPUs that have whole experts: the same tokens as one rank, however unevenly they are dealt
out and whatever format they are in. In Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_rank_gpus
import gpu_thread_ranks
import pytest
import torch
from gpu_thread_ranks import CPU, GpuThreadRanks, checkpoint_of
from quantized_files import Format, compressed, fp8, pack_quantized, write_mxfp4, write_quantized
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints import match, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.config.unsupported import RANK_GPUS
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.startup.build import _build_on_gpu, find_model
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.layers.experts import ExpertWeights, QuantizedStack
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint import experts as expert_sizes
from holdfast.footprint.identity_key import Same
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.kvcache import KVCache
from holdfast.models import from_config
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import gpu_rank_shares
from holdfast.planner.sizing.shards import Placement
from holdfast.records import SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have the CPU's collectives"),
    pytest.mark.usefixtures("few_programs"),
]

QWEN3 = {"architecture": "Qwen3Moe", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "norm_topk_prob": True}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen2": {**QWEN3, "architecture": "Qwen2Moe", "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "mixtral": {"architecture": "Mixtral", "num_local_experts": 3},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def deal_out(monkeypatch: pytest.MonkeyPatch, placement: Placement) -> None:
    monkeypatch.setattr(gpu_thread_ranks, "divide", partial(gpu_thread_ranks.divide, placement=placement))


def ranked(tiny: Tiny, size: int, **loading: Any) -> tuple[EngineCore, GpuThreadRanks]:
    length, step, blocks = 96, 16, 64
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=step, max_model_len=length)
    ranks = GpuThreadRanks(tiny, checkpoint_of(tiny), size, limits, blocks, **loading)
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=step, max_model_len=length, policy="fcfs", max_steps_in_flight=2
        ),
        KVCache(tiny.layout(), blocks, True),
    )
    runner: Any = ranks
    return EngineCore(scheduler, runner, steps_ahead=1), ranks


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens_of(outputs) for outputs in run(core, prompts, [GREEDY] * len(prompts))]


@pytest.mark.parametrize(
    ("name", "size", "placement", "counts"),
    [
        ("qwen3", 2, "linear", [3, 2]),
        pytest.param("qwen3", 3, "round_robin", [2, 2, 1], marks=pytest.mark.long),
        pytest.param("qwen2", 2, "round_robin", [3, 2], marks=pytest.mark.long),
        ("mixtral", 2, "linear", [2, 1]),
    ],
)
def test_tokens_are_those_of_one_rank(
    name: str, size: int, placement: Placement, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have fewer experts than a token goes to. What each holds is what was planned, to the byte."""
    tiny = Tiny(tmp_path, **MODELS[name])
    deal_out(monkeypatch, placement)
    core, ranks = ranked(tiny, size)
    assert [shard.expert_count for shard in ranks.shards] == counts
    whole = Same(EngineWeights(tiny.spec, match(tiny.spec, checkpoint_of(tiny)())))
    planned = gpu_rank_shares(whole, size, 1, placement, dtype="float32")
    assert tuple(one.weights_bytes for one in ranks.runners) == planned.rank_weights(dtype="float32")
    prompts = [prompt(1, 18), prompt(2, 3)]
    for one, tokens in zip(prompts, answers(core, prompts), strict=True):
        tiny.assert_greedy(one, tokens)
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1, "all ranks do the same in the same order"
    streams = [one._decoder._stream[:1] for one in ranks.runners]
    assert all(torch.equal(stream, streams[0]) for stream in streams), "all have the bits of one sum"
    ranks.close()


EXPERTS_ALONE = {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": "group"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
ROUNDED = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
FORMATS = {
    "act-order": Format(
        compressed(INT4, **EXPERTS_ALONE), pack_quantized(ordered=True), modules={"self_attn": None}
    ),
    "fp8": Format(
        compressed(FLOAT8, ROUNDED, "float-quantized", **EXPERTS_ALONE),
        fp8("channel"),
        "fp8",
        modules={"self_attn": None},
    ),
}  # fmt: skip


class TinyCodes(Tiny):
    """Its experts are quantized, in files as their formats have them, and attention is not."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder / "plain", **QWEN3 | {"moe_intermediate_size": 64})
        if kind == "mxfp4":
            write_mxfp4(self.folder, folder / kind)
        else:
            write_quantized(self.folder, folder / kind, FORMATS[kind])
        self.folder = folder / kind
        self.spec = from_config(json.loads((self.folder / "config.json").read_text()))

    def weights(self, device: torch.device) -> Weights:
        checkpoint = checkpoint_of(self)()
        return load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=False)


@pytest.mark.parametrize("kind", ["act-order", "fp8", pytest.param("mxfp4", marks=pytest.mark.long)])
def test_formats_that_are_not_divided(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are rounded by whole rows, and columns in an order of their own: as one rank multiplies them."""
    tiny = TinyCodes(tmp_path, kind)
    prompts = [prompt(0, 14), prompt(1, 2)]
    alone = answers(tiny.core(CPU, gpu=True), prompts)
    deal_out(monkeypatch, "linear")
    core, ranks = ranked(tiny, 2, expand=False)
    experts = [one._decoder._layers[-1].weights.mlp for one in ranks.runners]
    assert [isinstance(one, ExpertWeights) and isinstance(one.down, QuantizedStack) for one in experts] == [True] * 2
    assert answers(core, prompts) == alone
    ranks.close()


def test_how_tokens_are_spread_changes_no_memory(tmp_path: Path) -> None:
    """There is room for all pairs on every rank: of a rank's buffers its lines alone are fewer."""
    spec = Tiny(tmp_path, **QWEN3).spec
    own = replace(spec, layers=tuple(replace(one, experts=replace(one.experts, here=((0, 2),))) for one in spec.layers))
    whole, some = (expert_sizes.gpu_bytes(one, 16, 4) for one in (spec, own))
    assert whole - some == 3 * (16 + 1) * 4 - 5 * 4


@pytest.mark.long
def test_processes_start_with_whole_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine starts them: rows of memory say what each has, and what was planned is there."""
    (tmp_path / "model").mkdir()
    tiny = Tiny(tmp_path / "model", **QWEN3)
    monkeypatch.setenv(RANK_GPUS, "0,0")
    fake_rank_gpus.install(monkeypatch)
    fake_rank_gpus.start_ranks_here(monkeypatch, tmp_path)
    config = EngineConfig(
        model=str(tiny.folder), device="cuda", dtype="float32", max_model_len=96, max_num_seqs=4,
        max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True, tensor_parallel_size=2,
        enable_expert_parallel=True, expert_placement_strategy="round_robin",
    )  # fmt: skip
    model = find_model(config, progress=False, text=False)
    gpu = NvidiaGpu(
        index=0, uuid="GPU-0", name="fake", total_bytes=fake_rank_gpus.TOTAL_BYTES,
        free_bytes=fake_rank_gpus.FREE_BYTES, capability=(9, 0),
    )  # fmt: skip
    plan = make_gpu_plan(model.spec, match(model.spec, open_checkpoint(model.files)), config, [gpu], name="tiny")
    core, info = _build_on_gpu(config, model, lambda *_: None, plan, None, None)
    rows = info.memory.ranks
    assert [row.experts for row in rows] == [3, 2]
    assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
    [said] = [line for line in info.decisions if line.startswith("enable_expert_parallel")]
    assert "3, 2 (set): round_robin: ranks have 3, 2 whole experts of each layer" in said
    [tokens] = answers(core, [prompt(1, 18)])
    tiny.assert_greedy(prompt(1, 18), tokens)
    core.runner.close()
