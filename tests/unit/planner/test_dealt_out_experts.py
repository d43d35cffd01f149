"""Whole experts dealt out among ranks: who has how many, what is counted for each, and what is refused or said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import plan
from holdfast.checkpoints import LAYOUTS, Packing, StoredTensor
from holdfast.checkpoints.files import PackedMatrix
from holdfast.config import EngineConfig
from holdfast.config.unsupported import RANK_GPUS
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import STAGING_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import ModelSpec, from_config
from holdfast.models.shards import shard_spec
from holdfast.planner.report.ranks import rank_lines, rank_rows
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.ranks import NOT_WITH_RANKS, expert_parallel_said, refuse_with_ranks
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import rank_shares
from holdfast.planner.sizing.shards import Placement, divide
from holdfast.units import GIB

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 10, "num_experts_per_tok": 4,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip


def spec_of(**settings: Any) -> ModelSpec:
    return from_config(QWEN3 | settings)


def stored_in_blocks(spec: ModelSpec) -> dict[str, StoredTensor]:
    """Experts in blocks of 256, all else as numbers."""
    found = {}
    for tensor in spec.tensors:
        kind = "Q4_K" if tensor.experts else "F32"
        nbytes = LAYOUTS[kind].bytes_for(tensor.shape)
        assert nbytes is not None
        found[tensor.name] = StoredTensor(tensor.name, tensor.shape, kind, Path(), 0, nbytes)
    return found


@pytest.mark.parametrize(
    ("placement", "size", "numbers"),
    [
        ("linear", 3, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ("round_robin", 3, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ("linear", 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
    ],
)
def test_every_expert_is_somebody_s_once(placement: Placement, size: int, numbers: list[list[int]]) -> None:
    spec = spec_of()
    shards = divide(spec, None, size, placement)
    own = [shard_spec(spec, shard) for shard in shards]
    assert [list(one.layers[0].experts.numbers) for one in own if one.layers[0].experts] == numbers
    for one, held in zip(own, numbers, strict=True):
        found = {tensor.name: tensor for tensor in one.tensors}
        assert found["layers.1.experts.down"].shape == (len(held), 512, 256)
        assert found["layers.1.experts.down"].expert_numbers == tuple(held)
        assert found["layers.0.router"].shape == (10, 512)
        assert one.layers[0].experts is not None
        assert one.layers[0].experts.count == 10
    assert sum(one.heads for one in own) == spec.heads


def test_an_expert_that_is_one_block_wide_is_dealt_out_and_not_divided() -> None:
    spec = spec_of()
    stored = stored_in_blocks(spec)
    with pytest.raises(ConfigurationError, match="256 columns of an expert in blocks of 256") as refused:
        divide(spec, stored, 2)
    assert refused.value.fix == "--enable-expert-parallel, which divides no expert, or --tensor-parallel-size 1"
    assert [shard.expert_count for shard in divide(spec, stored, 2, "linear")] == [5, 5]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_fewer_experts_than_ranks_are_refused(placement: Placement) -> None:
    with pytest.raises(ConfigurationError, match="3 experts, fewer than one for each rank") as refused:
        divide(spec_of(num_experts=3, num_experts_per_tok=2), None, 4, placement)
    assert (refused.value.code, refused.value.needed) == ("HF131", "one of 1, 2, 3")
    assert refused.value.fix == "--tensor-parallel-size 3"


def packed(spec: ModelSpec, part: str, packing: Packing) -> dict[str, StoredTensor]:
    """One kind of matrices in codes, the rest as numbers."""
    found = stored_in_blocks(spec)
    return {
        name: replace(one, packed=PackedMatrix(packing, {})) if part in name else one for name, one in found.items()
    }


ORDERED = Packing("gptq", 4, 32, act_order=True)
ROUNDED = Packing("fp8", 8, inputs="fp8", granularity="channel")


@pytest.mark.parametrize("packing", [ORDERED, ROUNDED])
def test_formats_that_ranks_cannot_divide_are_taken_of_whole_experts(packing: Packing) -> None:
    spec, config = spec_of(), EngineConfig(model="m", tensor_parallel_size=2, device="cpu")
    whole = replace(config, enable_expert_parallel=True)
    experts = packed(spec, ".experts.", packing)
    with pytest.raises(ConfigurationError) as refused:
        refuse_with_ranks(config, spec, experts, compiled_kernels=True)
    assert refused.value.code == NOT_WITH_RANKS
    refuse_with_ranks(whole, spec, experts, compiled_kernels=True)
    assert "--enable-expert-parallel" in (refused.value.fix or "")
    # Attention is divided as ever.
    refuse_with_ranks(whole, spec, packed(spec, ".q", packing), compiled_kernels=True)


def test_columns_in_act_order_whose_inputs_are_rounded_are_refused() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, device="cpu", enable_expert_parallel=True)
    stored = packed(spec_of(), ".o", replace(ORDERED, inputs="int8"))
    with pytest.raises(ConfigurationError, match="act-order") as refused:
        refuse_with_ranks(config, spec_of(), stored, compiled_kernels=True)
    assert refused.value.code == NOT_WITH_RANKS


def test_a_scale_of_inputs_that_all_experts_share_is_refused() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, device="cpu", enable_expert_parallel=True)
    stored = packed(spec_of(), ".experts.", replace(ROUNDED, static_inputs=True))
    with pytest.raises(ConfigurationError, match="one stored scale") as refused:
        refuse_with_ranks(config, spec_of(), stored, compiled_kernels=True)
    assert (refused.value.code, refused.value.field) == (NOT_WITH_RANKS, "enable_expert_parallel")
    divided = replace(config, enable_expert_parallel=False)
    refuse_with_ranks(divided, spec_of(), stored, compiled_kernels=True)


def test_weights_that_are_quantized_while_they_are_loaded_are_taken_of_whole_experts() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, device="cpu", quantization="fp8")
    stored = stored_in_blocks(spec_of())
    with pytest.raises(ConfigurationError, match="rounded by rows") as refused:
        refuse_with_ranks(config, spec_of(), stored, compiled_kernels=True)
    assert "--enable-expert-parallel" in (refused.value.fix or "")
    refuse_with_ranks(replace(config, enable_expert_parallel=True), spec_of(), stored, compiled_kernels=True)


def test_of_whole_experts_one_is_read_at_a_time() -> None:
    """Whatever becomes of it in memory; of a part the whole is there beside it."""
    spec = spec_of()
    layers = replace(spec, tensors=tuple(one for one in spec.tensors if ".experts." in one.name))
    stored, how = packed(spec, ".experts.", ROUNDED), {"dtype": "float32", "expand": False, "compiled": True}
    weights = Same(EngineWeights(layers, stored))
    expert = stored["layers.0.experts.gate"].nbytes // 10
    dealt = rank_shares(weights, 2, 1, "linear", **how).staging_bytes(**how)
    assert dealt == (STAGING_BYTES + expert,) * 2
    assert min(rank_shares(weights, 2, 1, **how).staging_bytes(**how)) > max(dealt)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, "without effect"),
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "in each engine"),
        ({"data_parallel_size": 2}, "without effect"),
    ],
)
def test_where_it_does_less_than_its_words_it_is_said(settings: dict[str, Any], value: str | None) -> None:
    config = EngineConfig(model="m", device="cpu", enable_expert_parallel=True, **settings)
    said = [decision.value for decision in expert_parallel_said(config)]
    assert said == ([] if value is None else [value])
    assert not list(expert_parallel_said(replace(config, enable_expert_parallel=False)))


def test_a_plan_for_a_cpu_counts_the_experts_of_each_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    asked: dict[str, Any] = {"ram": "8GiB", "device": "cpu", "dtype": "float32", "tensor_parallel_size": 3}
    divided = plan(str(tmp_path), **asked)
    dealt = plan(str(tmp_path), **asked, enable_expert_parallel=True)
    rows, before = rank_rows(dealt.fit), rank_rows(divided.fit)
    assert [row["experts"] for row in rows] == [4, 3, 3]
    assert [row["experts"] for row in before] == [0, 0, 0]
    expert = 2 * 3 * 512 * 256 * 4  # Of both layers, gate, up and down, in float32.
    columns = [96, 96, 64]  # Of the 256 of each of the ten experts.
    for row, other, width in zip(rows, before, columns, strict=True):
        assert row["weights_bytes"] - other["weights_bytes"] == row["experts"] * expert - 10 * expert * width // 256
    assert "experts" in next(rank_lines(dealt.fit))
    assert "experts" not in next(rank_lines(divided.fit))
    [said] = [decision for decision in dealt.decisions if decision.field == "enable_expert_parallel"]
    assert said.value == "4, 3, 3"
    assert "--enable-expert-parallel" in dealt.commands["holdfast"].text
    assert "--enable-expert-parallel" not in divided.commands["holdfast"].text
    engines = plan(str(tmp_path), **asked, enable_expert_parallel=True, data_parallel_size=2)
    assert [row["experts"] for row in rank_rows(engines.fit)] == [4, 3, 3], "each engine has all of them"
    assert "-dp" not in str(engines.commands["holdfast"].lacks)


def card(index: int) -> NvidiaGpu:
    return NvidiaGpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", total_bytes=140 * GIB,
                     free_bytes=138 * GIB, capability=(9, 0))  # fmt: skip


def test_ranks_on_gpus_have_whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with one more decides what is planned for each; buffers are for all pairs on every one of them."""
    monkeypatch.delenv(RANK_GPUS, raising=False)
    spec, gpus = spec_of(), [card(index) for index in range(4)]
    asked = EngineConfig(device="cuda", tensor_parallel_size=3, dtype="float32")
    dealt = make_gpu_plan(spec, None, replace(asked, enable_expert_parallel=True), gpus, name="qwen3")
    divided = make_gpu_plan(spec, None, asked, gpus, name="qwen3")
    assert [shard.expert_count for shard in dealt.engine.shards] == [4, 3, 3]
    expert = 2 * 3 * 512 * 256 * 4  # Of both layers, gate, up and down, in float32.
    assert dealt.engine.rank_weights[1] - dealt.engine.rank_weights[2] == pytest.approx(0, abs=expert // 4)
    assert dealt.engine.rank_weights[0] - dealt.engine.rank_weights[1] >= expert
    assert dealt.terms["weights"] == dealt.engine.rank_weights[0]
    assert dealt.limits.max_model_len == divided.limits.max_model_len == 2048
    tokens = dealt.limits.max_num_batched_tokens
    wider = 4 * tokens * 4 * (256 - 96)  # Inner numbers of all pairs in float32: of whole experts, not of 96 columns.
    fewer = (10 - 4) * (tokens + 1) * 4 - 10 * 4  # Lines, and which experts are here.
    assert dealt.terms["activations"] - divided.terms["activations"] == wider - fewer
    (said,) = [one for one in dealt.decisions if one.field == "enable_expert_parallel"]
    assert said.value == "4, 3, 3"
    turns = replace(asked, enable_expert_parallel=True, expert_placement_strategy="round_robin")
    engine = make_gpu_plan(spec, None, turns, gpus, name="qwen3").engine
    assert engine.shards[2].experts == ((2, 3), (5, 6), (8, 9))


def on_gpus(**settings: Any) -> EngineConfig:
    """Whatever this machine's GPUs and environment allow."""
    config = EngineConfig(model="m", device="cpu", **settings)
    object.__setattr__(config, "device", "cuda")
    return config


@pytest.mark.parametrize("packing", [ORDERED, ROUNDED])
def test_ranks_on_gpus_take_formats_of_whole_experts_that_they_could_not_divide(packing: Packing) -> None:
    stored = packed(spec_of(), ".experts.", packing)
    with pytest.raises(ConfigurationError) as refused:
        refuse_with_ranks(on_gpus(tensor_parallel_size=2), spec_of(), stored, compiled_kernels=True)
    assert refused.value.code == NOT_WITH_RANKS
    whole = on_gpus(tensor_parallel_size=2, enable_expert_parallel=True)
    refuse_with_ranks(whole, spec_of(), stored, compiled_kernels=True)


def test_stages_on_gpus_deal_their_experts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_GPUS, raising=False)
    asked = EngineConfig(
        device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True, dtype="float32"
    )
    engine = make_gpu_plan(spec_of(), None, asked, [card(index) for index in range(4)], name="qwen3").engine
    assert [shard.expert_count for shard in engine.shards] == [5, 5]
    assert engine.rank_count == 4


def test_a_plan_for_gpus_prints_the_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    asked: dict[str, Any] = {"gpu": "h100-80x2", "tensor_parallel_size": 2, "engine": "holdfast"}
    found = plan(str(tmp_path), **asked, enable_expert_parallel=True).commands["holdfast"]
    assert "--enable-expert-parallel" in found.text
    assert "expert" not in str(found.lacks)
    assert "--enable-expert-parallel" not in plan(str(tmp_path), **asked).commands["holdfast"].text
