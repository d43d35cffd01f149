"""The planner against what other engines printed and published: weights within 1%, KV bytes a token exact, vLLM's KV
tokens within 3% of its own count, its refusals in its own words.

The figures and their sources are in worked_cases.toml. Shapes come from the catalogue where it knows the model, so that
the catalogue is held against the same facts; the few others are written out as their config.json has them.
"""

from __future__ import annotations

import math
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.hardware import gpus
from holdfast.models import ModelSpec, catalogue, describe_config
from holdfast.planner.compat import vllm_release
from holdfast.planner.compat.vllm_weights import rounding_bytes
from holdfast.planner.engines.vllm_command import vllm_kv_bytes, vllm_terms, vllm_utilization
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.sizing.kv_cost import KVCost, kv_cost
from holdfast.planner.sizing.sharded_weights import stage_layers

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
CASES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "worked_cases.toml").read_text())
SHAPES: dict[str, dict[str, Any]] = CASES["shapes"]
KV_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1}
Q8_0_BLOCK_BYTES, Q8_0_BLOCK_ELEMENTS = 34, 32
PRINT_GIB = 0.0051
"""Half of the last digit of a figure that is printed as 0.95 GiB, and a little for binary fractions."""

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mllama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""Of the shapes that the catalogue does not have. The text model of mllama is a llama of 40 layers."""
FIRST_UPLOAD_FP8 = {
    "quant_method": "fbgemm_fp8",
    "modules_to_not_convert": ["lm_head", "self_attn", "model.layers.0.mlp", "model.layers.125.mlp"],
}
NESTED_NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


def each(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES[kind]]


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    known = catalogue.lookup(shape["hub_id"])
    if known is not None:
        return dict(known.config)
    architecture, model_type = ARCHITECTURES[shape["family"]]
    config = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"], "intermediate_size": shape.get("intermediate", shape["hidden"]),
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"],
        "max_position_embeddings": shape["max_position"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": shape.get("tied", False), "torch_dtype": "bfloat16", "hidden_act": "silu",
        "sliding_window": None,
    }  # fmt: skip
    if "experts" in shape:
        config |= {
            "num_experts": shape["experts"],
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": shape["expert_intermediate"],
        }
    return config


@cache
def spec_of(name: str) -> ModelSpec:
    return describe_config(config_of(SHAPES[name]))


def model_of(case: dict[str, Any]) -> PlannedModel:
    """As the case has it stored."""
    name = case["shape"]
    method = case.get("quantization", "none").partition(",")[0]
    config = config_of(SHAPES[name])
    if method == "fbgemm_fp8":
        config["quantization_config"] = FIRST_UPLOAD_FP8
    elif method.startswith("bitsandbytes"):
        config["quantization_config"] = NESTED_NF4
    plain = PlannedModel(name=name, spec=describe_config(config), origin="catalogue")
    if method.startswith("compressed-tensors w8a8 int8"):
        return quantized_as(plain, "int8")
    return quantized_as(plain, method) if case["engine"] in ("llama.cpp", "llamafile") else plain


@pytest.mark.parametrize("name", [name for name in SHAPES if catalogue.lookup(SHAPES[name]["hub_id"]) is not None])
def test_the_catalogue_has_the_shape_that_the_config_states(name: str) -> None:
    shape, spec = SHAPES[name], spec_of(name)
    assert len(spec.layers) == shape["layers"]
    assert spec.hidden_size == shape["hidden"]
    assert spec.heads == shape["heads"]
    assert spec.vocab_size == shape["vocab"]
    assert spec.max_position == shape["max_position"]
    assert spec.tied_embeddings == shape.get("tied", False)
    if "kv_heads" in shape:
        assert (spec.kv_heads, spec.head_dim) == (shape["kv_heads"], shape["head_dim"])
    else:
        latent = spec.layers[0].latent
        assert latent is not None
        assert (latent.rank, latent.rope_dim) == (shape["kv_lora_rank"], shape["rope_dim"])
    assert sum(layer.window is not None for layer in spec.layers) == shape.get("window_layers", 0)


# Weights


@pytest.mark.parametrize("case", [case for case in each("weights") if "parameters_billions" in case.values[0]])
def test_parameters_are_those_that_were_published(case: dict[str, Any]) -> None:
    spec = spec_of(case["shape"])
    counted = sum(tensor.elements for tensor in spec.tensors if tensor.part == "text")
    counted += case.get("copied_parameters", 0)
    assert counted == pytest.approx(case["parameters_billions"] * 1e9, rel=case["tolerance"])


@pytest.mark.parametrize("case", [case for case in each("weights") if "parameters_billions" not in case.values[0]])
def test_weights_are_within_one_percent_of_what_was_printed(case: dict[str, Any]) -> None:
    printed = case["printed_gib"] * GIB if "printed_gib" in case else case["printed_gb"] * 1e9
    assert weights_in_the_plan(case) == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize("case", [case for case in each("weights") if "rounded_mib" in case.values[0]])
def test_what_torch_adds_to_large_tensors_is_counted(case: dict[str, Any]) -> None:
    rounding = rounding_bytes(model_of(case), dtype=case["dtype"], tensor_parallel=case["tensor_parallel"])
    assert rounding == case["rounded_mib"] * MIB
    assert weights_in_the_plan(case) == pytest.approx(case["printed_gib"] * GIB, rel=case["tolerance"])


def test_what_torch_adds_is_of_each_stage_its_own() -> None:
    """Layers in two stages, the embedding in the first and the head in the last; of FP8 its own, of NF4 none."""
    model = model_of(next(case for case in CASES["weights"] if case["id"] == "qwen2.5-32b-bf16-tp2"))
    whole = rounding_bytes(model, dtype="bfloat16", tensor_parallel=2)
    halves = stage_layers(len(model.spec.layers), 2)
    stages = [rounding_bytes(model, dtype="bfloat16", tensor_parallel=2, layers=half) for half in halves]
    assert stages == [whole // 2, whole // 2]
    assert 0 < rounding_bytes(quantized_as(model, "fp8"), dtype="bfloat16", tensor_parallel=2) < whole
    assert rounding_bytes(quantized_as(model, "nf4"), dtype="bfloat16", tensor_parallel=2) == 0


@pytest.mark.parametrize("case", [case for case in each("weights") if "expert_padded" in case.values[0]])
def test_what_the_checkpoint_has_is_not_what_vllm_printed(case: dict[str, Any]) -> None:
    """A plan that left the padding out would promise KV that is not there."""
    found = planned(case)
    vllm = vllm_release.parse_vllm(case["version"])
    printed = case["printed_gib"] * GIB
    assert found.weights_bytes < 0.96 * printed
    terms = vllm_terms(found, vllm)
    requested = vllm_release.requested_bytes(found.ranks[0].device.total_bytes, vllm_utilization(found))
    assert vllm_kv_bytes(found, vllm) == vllm_release.kv_bytes(requested, terms, vllm)
    assert requested - vllm_kv_bytes(found, vllm) > 0.99 * printed + terms.peak_activation


def weights_in_the_plan(case: dict[str, Any]) -> int:
    """As the engine of the case would print it."""
    found = planned(case)
    if case["engine"] not in ("vllm", "aphrodite"):
        return found.weights_bytes
    return vllm_terms(found, vllm_release.parse_vllm(case.get("version", ""))).weights


def planned(case: dict[str, Any]) -> Plan:
    """On GPUs of that kind that are large enough for anything: weights do not depend on what is left."""
    ranks, gpu = case.get("tensor_parallel", 1), gpus.find(case.get("gpu", "h100-80"))
    devices = tuple(
        Device(index=index, name=gpu.name, kind="gpu", total_bytes=4096 * GIB, free_bytes=4096 * GIB, gpu=gpu)
        for index in range(ranks)
    )
    settings = Settings(dtype=case.get("dtype", "float16"), tensor_parallel=ranks)
    return fit(Question(model=model_of(case), machine=Machine(devices=devices), settings=settings))


# KV


def cost_of(case: dict[str, Any]) -> KVCost:
    """`layers` of the case as llama.cpp prints them apart; vLLM's logs count every layer as growing."""
    spec = spec_of(case["shape"])
    kind = case.get("layers", "all")
    layers = [layer.index for layer in spec.layers if kind == "all" or (kind == "window") == (layer.window is not None)]
    return kv_cost(
        spec,
        element_bytes=KV_ELEMENT_BYTES[case["kv_dtype"]],
        state_bytes=2,
        tensor_parallel=case.get("tensor_parallel", 1),
        layers=layers,
        block_tokens=case.get("block_tokens", 16),
    )


def bytes_a_token(case: dict[str, Any]) -> float:
    """While no window is full."""
    if case["kv_dtype"] == "q8_0":
        return bytes_a_token({**case, "kv_dtype": "fp8"}) * Q8_0_BLOCK_BYTES / Q8_0_BLOCK_ELEMENTS
    cost = cost_of(case)
    return cost.growing_bytes + sum(size for _, size in cost.windows)


@pytest.mark.parametrize("case", each("kv_per_token"))
def test_kv_of_a_token_is_exact(case: dict[str, Any]) -> None:
    per_token = bytes_a_token(case)
    if "printed_kib_per_token" in case:
        assert per_token == case["printed_kib_per_token"] * KIB
    elif "cpu_blocks" in case:
        assert math.floor(case["swap_gib"] * GIB / (16 * per_token)) == case["cpu_blocks"]
    else:
        step_mib = case.get("printed_step_mib", 0.01)
        total_mib = per_token * case["cells"] * case.get("sequences", 1) / MIB
        assert total_mib == pytest.approx(case["printed_mib"], abs=step_mib / 2 + 1e-6)


@pytest.mark.parametrize("case", each("kv_tokens"))
def test_vllms_kv_tokens_follow_from_its_printed_terms(case: dict[str, Any]) -> None:
    available = round(case["kv_gib"] * GIB)
    if case["terms_complete"]:
        terms = vllm_release.ReleaseTerms(
            weights=round(case.get("weights_gib", 0) * GIB),
            peak_activation=round((case.get("torch_peak_gib", 0) + case.get("activation_gib", 0)) * GIB),
            non_torch=round(case.get("non_torch_gib", 0) * GIB),
        )
        requested = vllm_release.requested_bytes(round(case["total_gib"] * GIB), case["utilization"])
        # All of these logs are older than its subtraction of graphs.
        available = vllm_release.kv_bytes(requested, terms, vllm_release.parse_vllm("==0.8"))
        assert available == pytest.approx(case["kv_gib"] * GIB, abs=0.03 * GIB)
    cost = cost_of(case)
    tokens = cost.tokens(available, case.get("max_model_len", 4096))
    printed = case.get("tokens", case.get("blocks", 0) * case["block_tokens"])
    assert tokens == pytest.approx(printed, rel=0.03)
    assert tokens % case["block_tokens"] == 0


# Refusals


@pytest.mark.parametrize("case", each("refusals"))
def test_vllms_refusals_come_out_with_its_numbers(case: dict[str, Any]) -> None:
    cost, length = cost_of(case), case["max_model_len"]
    if "needed_gib" in case:
        assert cost.sequence_bytes(length) == pytest.approx(case["needed_gib"] * GIB, abs=PRINT_GIB * GIB)
    stored = case.get("stored_tokens")
    if "available_gib" in case:
        available = round(case["available_gib"] * GIB)
    else:
        available = round(stored * bytes_a_token(case))
    refused = vllm_release.refusal(available, cost, length)
    assert refused is not None
    assert cost.sequence_bytes(length) > available
    assert f"max seq len ({length}), ({cost.sequence_bytes(length) / GIB:.2f} GiB KV cache is needed" in refused
    estimated = re.search(r"maximum model length is (\d+)", refused)
    known = case.get("estimated_max", stored)
    if known is not None:
        rounding = PRINT_GIB * GIB / bytes_a_token(case) if "available_gib" in case else 0
        longest = 0 if estimated is None else int(estimated[1])
        assert longest == pytest.approx(known, abs=rounding + case["block_tokens"])
    if available < 0:
        assert estimated is None


def test_a_stage_is_held_against_its_own_layers_only() -> None:
    """A fault of vLLM 0.15: the smaller stage has 16 of 48 layers, and KV for three times as many tokens."""
    case = next(case for case in CASES["refusals"] if case["id"] == "qwen3-coder-30b-pp2-uneven")
    spec = spec_of(case["shape"])
    own = kv_cost(spec, element_bytes=2, state_bytes=2, layers=range(16))
    available = round(case["available_gib"] * GIB)
    assert own.longest(available, spec.max_position) == pytest.approx(3 * case["estimated_max"], rel=0.003)
    assert [len(stage) for stage in stage_layers(len(spec.layers), 2)] == [24, 24]
