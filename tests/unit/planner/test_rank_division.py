"""How a model is divided among ranks: at heads, blocks and groups, unevenly where it must be, and what is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from holdfast import plan
from holdfast.checkpoints import LAYOUTS, Packing, StoredTensor
from holdfast.checkpoints.files import PackedMatrix
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import STAGING_BYTES, Limits, sums_apart
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec, from_config
from holdfast.models.shards import Shard, shard_spec
from holdfast.planner.serve.ranks import NOT_WITH_RANKS, refuse_with_ranks
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import gpu_rank_shares, rank_shares
from holdfast.planner.sizing.shards import divide

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def spec_of(**settings: Any) -> ModelSpec:
    return from_config(LLAMA | settings)


def stored_as(spec: ModelSpec, layout: str) -> dict[str, StoredTensor]:
    """Every matrix in blocks of one kind."""
    found = {}
    for tensor in spec.tensors:
        kind = layout if len(tensor.shape) > 1 else "F32"
        nbytes = LAYOUTS[kind].bytes_for(tensor.shape)
        assert nbytes is not None
        found[tensor.name] = StoredTensor(tensor.name, tensor.shape, kind, Path(), 0, nbytes)
    return found


def heads(shards: tuple[Shard, ...]) -> list[tuple[int, int]]:
    return [(shard.head_count, shard.kv_head_count) for shard in shards]


def test_nine_heads_over_three_are_divided_unevenly() -> None:
    assert heads(divide(spec_of(), None, 2)) == [(6, 2), (3, 1)]
    assert heads(divide(spec_of(), None, 3)) == [(3, 1)] * 3


def test_kv_heads_are_on_several_ranks_where_there_are_fewer() -> None:
    spec = spec_of(num_attention_heads=14, num_key_value_heads=2, hidden_size=896)
    assert heads(divide(spec, None, 2)) == [(7, 1), (7, 1)]
    shards = divide(spec, None, 4)
    assert [shard.heads for shard in shards] == [(0, 4), (4, 7), (7, 11), (11, 14)]
    assert [shard.kv_heads for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("layout", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_part_is_somebody_s_once(layout: str, size: int) -> None:
    spec = spec_of(num_attention_heads=16, num_key_value_heads=8, hidden_size=2048, intermediate_size=5632)
    shards = divide(spec, stored_as(spec, layout), size)
    for part in ("heads", "kv_heads", "inner", "vocab"):
        ranges = [getattr(shard, part) for shard in shards]
        assert ranges[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
    block = LAYOUTS[layout].block_elements
    assert all(shard.inner[0] % block == 0 and shard.heads[0] * spec.head_dim % block == 0 for shard in shards)
    own = [{tensor.name: tensor for tensor in shard_spec(spec, shard).tensors} for shard in shards]
    for tensor in spec.tensors:
        shapes = [one[tensor.name].shape for one in own]
        total = sum(map(prod, shapes))
        assert total == (tensor.elements if tensor.shard_axis is not None else size * tensor.elements)


def test_a_bias_of_what_is_summed_is_the_first_rank_s() -> None:
    spec = spec_of(attention_bias=True, mlp_bias=True)
    first, second = ({tensor.name for tensor in shard_spec(spec, shard).tensors} for shard in divide(spec, None, 2))
    assert first - second == {f"layers.{layer}.{part}_bias" for layer in (0, 1) for part in ("o", "down")}


def test_a_size_that_cuts_blocks_is_refused_with_those_that_do_not() -> None:
    """Eight heads of 64 over two: blocks of 256 columns end with a KV head, and two are all there are of an MLP."""
    spec = spec_of(num_attention_heads=8, num_key_value_heads=2, hidden_size=512, intermediate_size=512)
    stored = stored_as(spec, "Q4_K")
    assert heads(divide(spec, stored, 2)) == [(4, 1), (4, 1)]
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is 4") as refused:
        divide(spec, stored, 4)
    assert refused.value.code == "HF131"
    assert refused.value.needed == "one of 1, 2"
    assert refused.value.fix == "--tensor-parallel-size 2"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_store": "/tmp/pages"}, "kv_store"),
        ({"nvme_path": "/tmp"}, "nvme_path"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"idle_release": 60.0}, "idle_release"),
        ({"yield_to_neighbours": True}, "yield_to_neighbours"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, **{"device": "cpu", **settings})
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is 2, and ") as refused:
        refuse_with_ranks(config, spec_of(), None, compiled_kernels=True)
    assert (refused.value.code, refused.value.field) == (NOT_WITH_RANKS, field)
    refuse_with_ranks(replace(config, tensor_parallel_size=1), spec_of(), None, compiled_kernels=True)


def test_models_and_machines_that_ranks_lack_are_refused() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, device="cpu")
    with pytest.raises(ConfigurationError, match="compiled code, which this installation has not got"):
        refuse_with_ranks(config, spec_of(), None, compiled_kernels=False)
    refuse_with_ranks(config, spec_of(), None, compiled_kernels=True)


def packed_as(spec: ModelSpec, **said: Any) -> dict[str, StoredTensor]:
    """Every matrix of a layer in a quantized format."""
    packing = PackedMatrix(Packing(**said), {})
    return {
        name: replace(one, packed=packing) if name.startswith("layers.") and len(one.shape) > 1 else one
        for name, one in stored_as(spec, "F32").items()
    }


def test_columns_that_share_a_scale_are_not_cut() -> None:
    """Of weights or of inputs; what is stored for a whole row is cut anywhere."""
    spec = spec_of(num_attention_heads=8, num_key_value_heads=4, hidden_size=512, intermediate_size=640)
    inner = {
        name: [shard.inner for shard in divide(spec, packed_as(spec, **said), 2)]
        for name, said in {
            "channel": {"method": "fp8", "inputs": "fp8", "granularity": "channel"},
            "blocks": {"method": "fp8", "inputs": "fp8", "granularity": "block", "input_group": 128},
            "groups of inputs": {"method": "int8", "inputs": "int8", "granularity": "channel", "input_group": 128},
            "nf4": {"method": "nf4"},
        }.items()
    }
    assert inner["channel"] == [(0, 320), (320, 640)]
    assert inner["blocks"] == inner["groups of inputs"] == [(0, 384), (384, 640)]
    assert inner["nf4"] == [(0, 320), (320, 640)]


IN_ORDER = {"method": "gptq", "bits": 4, "group_size": 64}


def test_rows_that_ranks_gather_for_columns_in_act_order_are_counted() -> None:
    """The whole row that comes into down, of 512 tokens at a time, and once more the rank's part of it in its order."""
    spec = spec_of(num_attention_heads=8, num_key_value_heads=4, hidden_size=512, intermediate_size=640)
    limits = Limits(max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=1024)

    def counted(ordered: bool) -> list[int]:
        weights = Same(EngineWeights(spec, packed_as(spec, **IN_ORDER, act_order=ordered)))
        shares = rank_shares(weights, 2, dtype="float32", expand=False, compiled=True)
        return [shares.step_bytes(rank, limits, dtype="float32") for rank in range(2)]

    more = [ordered - plain for ordered, plain in zip(counted(True), counted(False), strict=True)]
    assert more == [512 * (640 + 320) * 4] * 2

    def on_gpus(ordered: bool) -> int:
        weights = Same(EngineWeights(spec, packed_as(spec, **IN_ORDER, act_order=ordered)))
        [exchange] = gpu_rank_shares(weights, 2, dtype="float16").gpu_terms(limits, dtype="float16")
        return exchange.nbytes

    assert on_gpus(True) - on_gpus(False) == 512 * (640 + 320) * 2


def test_squares_of_heads_that_are_normed_together_are_counted_on_gpus() -> None:
    limits, exchanges = Limits(max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=1024), []
    for architecture, kind in (("LlamaForCausalLM", "llama"), ("Olmo2ForCausalLM", "olmo2")):
        spec = spec_of(architectures=[architecture], model_type=kind, num_attention_heads=8, num_key_value_heads=4)
        apart = 0 if sums_apart(spec) else 1024 * spec.hidden_size * 2
        [exchange] = gpu_rank_shares(Same(EngineWeights(spec, None)), 2, dtype="float16").gpu_terms(
            limits, dtype="float16"
        )
        exchanges.append(exchange.nbytes - apart)
    assert exchanges[1] - exchanges[0] == 2 * 1024 * 4


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("said", "settings", "refused"),
    [
        ({"activation_scheme": "dynamic"}, {}, True),
        ({"activation_scheme": "static"}, {}, False),
        ({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {}, False),
        (None, {"quantization": "fp8"}, True),
        (None, {"quantization": "int4"}, False),
    ],
)
def test_experts_that_round_whole_rows_are_refused(
    said: dict[str, Any] | None, settings: dict[str, Any], refused: bool, device: str
) -> None:
    more = {} if said is None else {"quantization_config": {"quant_method": "fp8", **said}}
    config = EngineConfig(model="m", tensor_parallel_size=2, device=device, **settings)
    spec = spec_of(**EXPERTS, **more)
    with pytest.raises(ConfigurationError, match="rounded by rows") if refused else contextlib.nullcontext():
        refuse_with_ranks(config, spec, None, compiled_kernels=True)


def test_what_ranks_read_at_a_time_is_counted_for_each() -> None:
    """Rows and columns as they are cut; a quantized matrix whole, beside what it becomes."""
    spec = spec_of(vocab_size=32000, num_attention_heads=8, num_key_value_heads=4, hidden_size=512)

    def staging(stored: dict[str, StoredTensor], size: int, stages: int = 1) -> list[int]:
        how = {"dtype": "float32", "expand": False, "compiled": True}
        return [*rank_shares(Same(EngineWeights(spec, stored)), size, stages, **how).staging_bytes(**how)]

    plain = stored_as(spec, "F32")
    largest = plain["embed"].nbytes
    for size in (1, 2, 4):
        assert staging(plain, size) == [STAGING_BYTES + largest // size] * size
    packed = packed_as(spec, method="fp8", inputs="fp8", granularity="channel")
    gate, small = packed["layers.0.gate"], replace(spec, tensors=tuple(one for one in spec.tensors if one.layer == 0))
    codes = 1536 * 512 + 1536 * 4  # With a scale for each row.
    how = {"dtype": "float32", "expand": False, "compiled": True}
    ranks = rank_shares(Same(EngineWeights(small, packed)), 2, **how)
    assert ranks.staging_bytes(**how) == (STAGING_BYTES + gate.nbytes + codes,) * 2


def test_a_plan_for_a_cpu_has_the_ranks_of_a_server(tmp_path: Path) -> None:
    """All of them on one device, each with its row; what is whole on every rank is counted for each."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    one, two = (plan(str(tmp_path), ram="8GiB", device="cpu", tensor_parallel_size=size) for size in (1, 2))
    assert two.fits
    rows = [decision for decision in two.decisions if decision.field == "tensor_parallel_size"]
    assert [row.value for row in rows] == ["2"]
    assert "rank 0 has" in rows[0].reason
    assert "6 heads over 2 KV heads; rank 1 has" in rows[0].reason
    assert not [decision for decision in one.decisions if decision.field == "tensor_parallel_size"]
