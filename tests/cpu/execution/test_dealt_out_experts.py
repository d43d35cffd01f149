"""Whole experts dealt out among ranks, held against transformers and against one rank: however many each has, in
whatever format they are stored, also where an expert could not be divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
from expert_gguf import write_expert_gguf
from greedy_runs import assert_model_s_answers, make_core, tight_blocks
from quantized_files import Format, compressed, write_quantized
from thread_ranks import ThreadRanks, assert_same_of_ranks
from tiny_experts import CONFIG

from holdfast.checkpoints import match
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.formats.gguf import read_header
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.execution import native
from holdfast.execution.layers.linear import DenseLinear
from holdfast.execution.parallel.layers.routing import Crowding, FirstRanksRouter
from holdfast.execution.runner import RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec, from_config, from_gguf
from holdfast.models.shards import shard_spec
from holdfast.planner.serve.ranks import NOT_WITH_RANKS, refuse_with_ranks
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import rank_shares
from holdfast.planner.sizing.shards import divide

pytestmark = pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code")

QWEN3: dict[str, Any] = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN3, "shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
}
CASES = [
    ("qwen3-moe", 2, "linear", [4, 3], False),
    ("qwen3-moe", 3, "round_robin", [3, 2, 2], True),
    ("qwen3-moe", 4, "linear", [2, 2, 2, 1], True),
    ("qwen2-moe", 2, "linear", [4, 3], True),
    ("mixtral", 2, "round_robin", [3, 2], False),
]
MORE = [(*case, not compiled) for *case, compiled in CASES]


def dear(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(("name", "size", "placement", "counts", "compiled"), [*CASES, *dear(*MORE)])
def test_ranks_with_whole_experts_say_what_the_model_says(
    name: str, size: int, placement: Any, counts: list[int], compiled: bool, oracles: Callable[..., Any]
) -> None:
    """Of four ranks with three experts a token some have fewer than that."""
    oracle = oracles(FAMILIES[name][0], **FAMILIES[name][1])
    spec, loading = oracle.spec, {"expand": not compiled, "compiled": compiled}
    blocks, limits = tight_blocks(spec), RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=100)
    ranks = ThreadRanks(spec, oracle.checkpoint, limits, blocks, size=size, placement=placement, **loading)
    assert [shard.expert_count for shard in ranks.shards] == counts
    assert_model_s_answers(make_core(ranks.runner, ranks.layout, blocks, sequences=4, length=100), oracle)
    streams = [runner._decoder._stream for runner in ranks.runners]
    assert all(torch.equal(stream, streams[0]) for stream in streams), "all ranks have the bits of one sum"
    whole = EngineWeights(spec, match(spec, oracle.checkpoint()))
    planned = rank_shares(Same(whole), size, 1, placement, dtype="float32", **loading)
    assert ranks.weights_bytes == [one.nbytes(dtype="float32", **loading) for one in planned.weights]
    ranks.close()


def test_stages_deal_their_experts_out(oracles: Callable[..., Any]) -> None:
    oracle = oracles("Qwen3Moe", **{**QWEN3, "num_hidden_layers": 4})
    assert_same_of_ranks(
        oracle.spec, oracle.checkpoint, size=2, stages=2, placement="linear", expand=True, compiled=False
    )


def not_divided(spec: ModelSpec, opened: Callable[[], Checkpoint], size: int) -> None:
    """The same size is refused where each expert would be divided, with the way out."""
    with pytest.raises(ConfigurationError, match="columns of an expert in blocks of 32, fewer than one") as refused:
        divide(spec, match(spec, opened()), size)
    assert refused.value.code == "HF131"
    assert "--enable-expert-parallel" in (refused.value.fix or "")


@pytest.mark.parametrize(("expand", "compiled"), [(False, True), *dear((False, False), (True, False))])
def test_blocks_of_gguf_that_could_not_be_divided(
    expand: bool, compiled: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """An expert is one block wide, and stacked with the others in one tensor."""
    oracle = oracles("Qwen3Moe", **QWEN3)
    kinds = {"gate": "Q4_0", "up": "Q8_0", "down": "Q8_0"}
    write_expert_gguf(
        oracle.spec,
        oracle.checkpoint(),
        tmp_path / "model.gguf",
        "qwen3moe",
        lambda name: kinds.get(name.rpartition(".")[2], "F32"),
    )
    header = read_header(tmp_path / "model.gguf")
    spec = from_gguf(header.metadata, header.tensors)

    def opened() -> Checkpoint:
        return Checkpoint(header.tensors, "gguf")

    not_divided(spec, opened, 2)
    assert_same_of_ranks(spec, opened, size=2, placement="linear", expand=expand, compiled=compiled)


FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, written.awq()),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, written.gptq()
    ),
}


@pytest.mark.parametrize(("name", "compiled"), [("awq", True), ("gptq", False), *dear(("awq", False), ("gptq", True))])
def test_codes_that_could_not_be_divided(
    name: str, compiled: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = oracles("Qwen3Moe", seed=1, **QWEN3)
    write_quantized(oracle.folder, tmp_path, FORMATS[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    not_divided(spec, opened, 2)
    assert_same_of_ranks(spec, opened, size=2, placement="linear", expand=False, compiled=compiled)


EXPERTS_ALONE = {"ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": "group"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
ROUNDED = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
UNDIVIDED = {
    "act-order": Format(
        compressed(INT4, **EXPERTS_ALONE), written.pack_quantized(ordered=True), modules={"self_attn": None}
    ),
    "fp8": Format(
        compressed(FLOAT8, ROUNDED, "float-quantized", **EXPERTS_ALONE),
        written.fp8("channel"),
        "fp8",
        modules={"self_attn": None},
    ),
}


@pytest.mark.parametrize("name", ["act-order", pytest.param("fp8", marks=pytest.mark.long)])
def test_experts_in_formats_that_are_not_divided(name: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Columns in an order of their own, and inputs that are rounded, beside attention in plain numbers."""
    oracle = oracles("Qwen3Moe", seed=1, **{**QWEN3, "moe_intermediate_size": 64})
    write_quantized(oracle.folder, tmp_path, UNDIVIDED[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    config, stored = EngineConfig(model="m", device="cpu", tensor_parallel_size=2), match(spec, opened())
    with pytest.raises(ConfigurationError) as refused:
        refuse_with_ranks(config, spec, stored, compiled_kernels=True)
    assert refused.value.code == NOT_WITH_RANKS
    refuse_with_ranks(replace(config, enable_expert_parallel=True), spec, stored, compiled_kernels=True)
    assert_same_of_ranks(spec, opened, size=2, placement="linear", expand=False, compiled=name == "act-order")


@pytest.mark.parametrize("made", ["fp8", pytest.param("int4", marks=pytest.mark.long)])
def test_experts_are_quantized_by_their_rank_as_by_one(made: str, oracles: Callable[..., Any]) -> None:
    """While they are loaded. What comes into them is rounded by whole rows, which each rank has."""
    oracle = oracles("Qwen3Moe", seed=1, **{**QWEN3, "moe_intermediate_size": 64, "head_dim": 64})
    loading = {"quantize": made, "expand": False, "compiled": True}
    asks = made == "fp8"
    assert_same_of_ranks(
        oracle.spec, oracle.checkpoint, size=2, placement="round_robin", rounded=asks, in_python=asks, **loading
    )


def test_dummies_of_codes_are_the_same_expert_s_wherever_it_is() -> None:
    settings = {**CONFIG, "vocab_size": 300, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    spec = from_config({**settings, "quantization_config": said})

    def numbers(own: ModelSpec) -> torch.Tensor:
        weights = load_weights(own, None, dtype=torch.float32, device=torch.device("cpu"), expand=False, whole=spec)
        matrix = weights.layers[0].mlp.down.matrix
        found = torch.empty((matrix.rows, matrix.columns))
        matrix.dequantize(0, matrix.rows, found)
        return found.view(-1, 128, 64)

    whole = numbers(spec)
    for shard in divide(spec, None, 2, "round_robin"):
        assert torch.equal(numbers(shard_spec(spec, shard)), whole[shard.rank :: 2])


class _Alone:
    rank, size = 0, 1

    def broadcast(self, x: torch.Tensor) -> None:
        """There is nobody else."""


def test_a_profile_run_sends_all_tokens_to_the_experts_that_are_here() -> None:
    """Whatever tokens choose later, this rank has no more to compute at once."""
    crowding = Crowding()
    router = FirstRanksRouter(DenseLinear(torch.eye(6)), _Alone(), here=[1, 4], crowding=crowding)  # type: ignore[arg-type]
    x, out = torch.randn(3, 6), torch.empty(3, 6)
    router.write(x, out)
    assert torch.equal(out, x)
    crowding.on = True
    router.write(x, out)
    assert out.topk(2, dim=-1).indices.sort(-1).values.tolist() == [[1, 4]] * 3
