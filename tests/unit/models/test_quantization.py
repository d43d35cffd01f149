"""quantization_config in the spellings that published checkpoints use."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import msgspec
import pytest

from holdfast.errors import CheckpointError
from holdfast.footprint.identity_key import Same
from holdfast.models import QuantSpec, describe_config, from_config
from holdfast.models.quantization.unquantized_modules import Exceptions
from holdfast.planner.sizing.engine_weights import published_tensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def quantized(**config: Any) -> QuantSpec:
    found = describe_config({**LLAMA, "quantization_config": config}).quantization
    assert found is not None
    return found


CASES: list[tuple[dict[str, Any], QuantSpec]] = [
    (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        QuantSpec(method="awq", bits=4, group_size=128, symmetric=False),
    ),
    (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["visual"]},
        QuantSpec(method="awq", bits=4, group_size=64, symmetric=False, not_converted=("visual",)),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
        QuantSpec(method="gptq", bits=4, group_size=128, zeros_less_one=True, activation_order=True),
    ),
    (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        QuantSpec(method="gptq", bits=8, granularity="channel", symmetric=False, zeros_less_one=True),
    ),
    (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        QuantSpec(method="fp8", bits=8, granularity="block", block=(128, 128), inputs="fp8", input_group=128),
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        QuantSpec(
            method="fp8",
            bits=8,
            granularity="tensor",
            inputs="fp8",
            static_activations=True,
            not_converted=("lm_head",),
        ),
    ),
    (
        {"quant_method": "fbgemm_fp8"},
        QuantSpec(method="fp8", bits=8, granularity="channel", inputs="fp8", input_bound=1200.0),
    ),
    (
        compressed(num_bits=8, type="float", strategy="channel", symmetric=True),
        QuantSpec(
            method="fp8",
            bits=8,
            granularity="channel",
            not_converted=("lm_head", "re:.*mlp.gate$"),
            head_converted=True,
        ),
    ),
    (
        compressed(num_bits=8, type="int", strategy="channel"),
        QuantSpec(
            method="int8",
            bits=8,
            granularity="channel",
            packed=True,
            not_converted=("lm_head", "re:.*mlp.gate$"),
            head_converted=True,
        ),
    ),
    (
        compressed(num_bits=4, type="int", strategy="group", group_size=128, symmetric=False),
        QuantSpec(
            method="int4",
            bits=4,
            group_size=128,
            symmetric=False,
            not_converted=("lm_head", "re:.*mlp.gate$"),
            head_converted=True,
        ),
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        QuantSpec(method="bitsandbytes", bits=4, group_size=64, double_quantization=True),
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        QuantSpec(method="bitsandbytes", bits=8, granularity="channel"),
    ),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        QuantSpec(method="mxfp4", bits=4, group_size=32, not_converted=("model.layers.*.self_attn", "lm_head")),
    ),
]


WILD = [f"re:a.*{number}.*b" for number in range(1000)]


@pytest.mark.parametrize(("config", "expected"), CASES)
def test_methods(config: dict[str, Any], expected: QuantSpec) -> None:
    assert quantized(**config) == expected


def test_plain_weights_have_none() -> None:
    assert describe_config(LLAMA).quantization is None
    assert describe_config({**LLAMA, "quantization_config": None}).quantization is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quant_method": "magic"}, "magic"),
        ({}, "quant_method"),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "awq", "bits": 3}, "bits"),
        ({"quant_method": "gptq", "bits": True}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 10**12]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        (compressed(num_bits=4, type="float"), "type"),
        (compressed(num_bits=4, strategy="spiral"), "strategy"),
        (compressed(num_bits=4, strategy="tensor"), "strategy"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "mx_fp"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "activation_scale_ub"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "much"}, "activation_scale_ub"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e5m2"}, "scale_fmt"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:(("]}, "modules_to_not_convert"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": WILD}, "modules_to_not_convert"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["a"] * 100_000}, "modules_to_not_convert"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:(a+)+$"]}, "modules_to_not_convert"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], word: str) -> None:
    if not config:  # an empty table is none at all
        assert describe_config({**LLAMA, "quantization_config": config}).quantization is None
        return
    with pytest.raises(CheckpointError) as caught:
        quantized(**config)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv layout (the gemm layout is read)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "experts in FP4"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits (4 and 8 bits are read)"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.v_proj": {"bits": 2}}},
            "GPTQ of 2 bits (4 and 8 bits are read)",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4 of bitsandbytes"),
        ({**compressed(num_bits=4, group_size=32), "format": "marlin-24"}, "marlin-24"),
        ({**compressed(num_bits=4, group_size=32), "transform_config": {"a": 1}}, "transform_config"),
        ({**compressed(num_bits=8), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16), "NVFP4"),
        *(({"quant_method": name}, name) for name in ("modelopt", "aqlm", "hqq", "exl2", "quip", "quark", "torchao")),
    ],
)
def test_the_engine_refuses_what_it_cannot_read_and_says_what_it_can(config: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(word)) as caught:
        from_config({**LLAMA, "quantization_config": config})
    assert "GGUF" in str(caught.value.fix)


def test_scales_of_inputs_that_are_bounded_or_powers_of_two() -> None:
    """transformers writes a bound of 1,200 unless it is told otherwise, and `float` for scales that are none."""
    assert quantized(quant_method="fbgemm_fp8").input_bound == 1200
    assert quantized(quant_method="fbgemm_fp8", activation_scale_ub=300).input_bound == 300
    assert quantized(quant_method="fbgemm_fp8", activation_scale_ub=None).input_bound == 0
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantized(**blocks, scale_fmt="ue8m0").input_powers
    assert not quantized(**blocks, scale_fmt="float").input_powers
    assert not quantized(**blocks).input_powers
    assert not quantized(**blocks, scale_fmt="ue8m0").lacking
    assert "scale_fmt" in quantized(quant_method="fp8", scale_fmt="ue8m0").lacking[0], "of blocks alone"
    assert not quantized(quant_method="fp8", scale_fmt="ue8m0", activation_scheme="static").lacking


def test_nvfp4_is_planned_for_engines_that_read_it() -> None:
    """Half a byte an element, a byte for every sixteen, and one scale of the matrix."""
    config = compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    spec = describe_config({**LLAMA, "quantization_config": config})
    assert not spec.runnable
    stored = published_tensors(Same(spec))
    assert stored["layers.0.q"].nbytes == 64 * 64 // 2 + 64 * 64 // 16 + 4
    assert stored["head"].packed is None


@pytest.mark.parametrize(("algorithm", "matrix"), [("NVFP4", 64 * 64 // 2 + 64 * 64 // 16 + 8), ("FP8", 64 * 64 + 8)])
def test_modelopt_is_planned_for_engines_that_read_it(algorithm: str, matrix: int) -> None:
    """With a scale of the inputs and one of the matrix; modules are left alone by a * too."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers.0.mlp*"]}
    spec = describe_config({**LLAMA, "quantization_config": config})
    stored = published_tensors(Same(spec))
    assert stored["layers.0.q"].nbytes == matrix
    assert stored["layers.0.up"].packed is None
    assert stored["head"].packed is None
    with pytest.raises(CheckpointError, match=f"weights in {algorithm}, of ModelOpt") as caught:
        from_config({**LLAMA, "quantization_config": config})
    assert "GGUF" in str(caught.value.fix)


def test_inputs_that_are_rounded_to_something_else_are_refused() -> None:
    config = compressed(num_bits=4, group_size=32)
    for inputs in ({"num_bits": 8, "type": "float", "dynamic": True}, {"num_bits": 4, "type": "int"}):
        config["config_groups"]["group_0"]["input_activations"] = inputs
        with pytest.raises(CheckpointError, match="inputs rounded to"):
            from_config({**LLAMA, "quantization_config": config})
    config = compressed(num_bits=8)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "symmetric": False, "dynamic": True}
    with pytest.raises(CheckpointError, match="int8 with zero points"):
        from_config({**LLAMA, "quantization_config": config})
    for strategy in ("channel", "block", "tensor_group"):
        config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": strategy}
        with pytest.raises(CheckpointError, match=f"inputs with scales by {strategy}"):
            from_config({**LLAMA, "quantization_config": config})


def test_orders_of_compressed_tensors_may_be_written_in_capitals() -> None:
    """As its own reader takes them; with "weight" and "static" groups stay runs of inputs."""
    said = {"group": True, "GROUP": True, "dynamic": True, "weight": False, "static": False, "WEIGHT": False}
    for order, ordered in said.items():
        assert quantized(**compressed(num_bits=4, group_size=32, actorder=order)).activation_order is ordered


def test_schemes_of_modules_are_found_by_name_before_all_linear_layers() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}},
        "some": {"targets": [r"re:.*mlp\.down_proj$"], "weights": {"num_bits": 8, "type": "float"}},
        "one": {"targets": ["model.layers.1.self_attn.q_proj"], "weights": {"num_bits": 8, "type": "int"}},
    }
    found = quantized(quant_method="compressed-tensors", config_groups=groups, ignore=["lm_head"])
    methods = {
        "model.layers.0.self_attn.q_proj.weight": "int4",
        "model.layers.1.self_attn.q_proj.weight": "int8",
        "model.layers.1.mlp.down_proj.weight": "fp8",
    }
    for name, method in methods.items():
        scheme = found.scheme_of(name)
        assert scheme is not None
        assert scheme.method == method
    assert found.scheme_of("lm_head.weight") is None
    named = quantized(quant_method="compressed-tensors", config_groups={"some": groups["some"]})
    assert named.converts("model.layers.0.mlp.down_proj.weight")
    assert not named.converts("model.layers.0.mlp.up_proj.weight")


def test_dynamic_rules_of_gptq_are_followed() -> None:
    rules = {r"-:.*\.k_proj$": {}, r"+:.*\.down_proj$": {"bits": 8, "group_size": 64, "sym": False}}
    found = quantized(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=True, dynamic=rules)
    down, up = (
        found.scheme_of("model.layers.0.mlp.down_proj.weight"),
        found.scheme_of("model.layers.0.mlp.up_proj.weight"),
    )
    assert down is not None
    assert up is not None
    assert (down.bits, down.group_size, down.symmetric, down.activation_order) == (8, 64, False, True)
    assert (up.bits, up.group_size, up.symmetric, up.activation_order) == (4, 32, True, True)
    assert not found.converts("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(CheckpointError, match="dynamic"):
        quantized(quant_method="gptq", bits=4, dynamic={"-:(a+)+$": {}})


def test_auto_round_is_gptq_or_awq_by_its_packing() -> None:
    told = {"bits": 4, "group_size": 64, "sym": True}
    as_gptq = quantized(quant_method="gptq", desc_act=False, **told)
    assert quantized(quant_method="auto-round", packing_format="auto_round:auto_gptq", **told) == as_gptq
    assert quantized(quant_method="auto-round", **told) == as_gptq
    as_awq = quantized(quant_method="awq", bits=4, group_size=64, zero_point=False)
    assert quantized(quant_method="auto-round", packing_format="auto_round:auto_awq", **told) == as_awq
    assert from_config({**LLAMA, "quantization_config": {"quant_method": "auto-round", **told}}).runnable


def test_modules_of_auto_round_that_have_other_bits() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r"model\.layers\.1\..*k_proj": {"bits": 16},
        "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32},
        "lm_head": {"bits": 4},
    }
    found = quantized(quant_method="auto-round", bits=4, group_size=64, sym=True, extra_config=extra)
    for name, bits in (("0.mlp.up", None), ("1.mlp.up", 4), ("1.self_attn.k", None), ("1.mlp.down", 8)):
        scheme = found.scheme_of(f"model.layers.{name}_proj.weight")
        assert (None if scheme is None else scheme.bits) == bits
    assert found.converts("lm_head.weight")
    eight = quantized(
        quant_method="auto-round", bits=4, group_size=64, packing_format="auto_round:auto_awq", extra_config=extra
    )
    assert eight.lacking == ("AWQ of other than 4 bits",)


def test_exceptions_are_names_parts_of_names_and_patterns() -> None:
    skipped = ("visual", "mlp.gate", "model.layers.*.self_attn", r"re:.*experts\.\d+\.down_proj$", "model.layers.7.")
    spec = QuantSpec(method="awq", bits=4, not_converted=skipped)
    converted = {
        "model.layers.0.mlp.gate_proj.weight": True,
        "model.layers.0.mlp.gate.weight": False,
        "model.layers.0.self_attn.q_proj.weight": False,
        "model.layers.0.mlp.experts.3.down_proj.weight": False,
        "model.layers.0.mlp.experts.3.up_proj.weight": True,
        "model.layers.7.mlp.up_proj.weight": False,
        "model.layers.77.mlp.up_proj.weight": True,
        "visual.blocks.0.attn.qkv.weight": False,
        "lm_head.weight": False,
    }
    assert {name: spec.converts(name) for name in converted} == converted


def test_the_head_is_converted_only_where_the_method_says_so() -> None:
    assert quantized(quant_method="gptq", bits=4, lm_head=True).converts("lm_head.weight")
    assert not quantized(quant_method="gptq", bits=4).converts("lm_head.weight")
    assert not quantized(**compressed(num_bits=8, strategy="channel")).converts("lm_head.weight")


HOSTILE = {
    "anything, again and again": [f"re:.*.*.*.*Zn{number}" for number in range(512)],
    "repeats with a letter between": [f"re:.*[a-z].*[a-z].*[a-z].*Z{number}" for number in range(512)],
    "optional ones": ["re:" + ".?" * 40 + "Z"],
    "choices": ["re:" + "(?:.|.)" * 30 + "Z"],
    "choices of a letter or any": ["re:" + "(?:.|[a-z])(?:m|.)" * 15 + "Z"],
    "choices of a name and its beginning": ["re:" + "(?:m|mo|mod|model|)" * 30 + "Z"],
    "optional groups": ["re:" + "(.)?" * 40 + "Z"],
    "choices of patterns": ["re:" + "|".join(f".*.a.*b.*c.*{number}Z" for number in range(60))] * 50,
    "repeats in optional groups": ["re:" + "(.*.)?" * 12 + "Z"],
    "a repeat of a group": ["re:(?:a|a)*Z"],
    "counted ones": ["re:" + ".{0,40}" * 8 + "Z"],
    "stars": ["*".join("abcdefgh") + str(number) for number in range(512)],
    "one letter each": [f"re:{letter}" for letter in "abcdefgh"] * 5000,
}
LIMIT_CPU_S = 10.0
"""For milliseconds of work; without bounds each of them takes minutes or years."""


@pytest.mark.parametrize("patterns", HOSTILE.values(), ids=HOSTILE.keys())
def test_patterns_of_a_stranger_take_a_bounded_time(patterns: list[str]) -> None:
    began = time.process_time()
    with contextlib.suppress(CheckpointError):
        spec = quantized(quant_method="awq", bits=4, modules_to_not_convert=patterns)
        for layer in range(100):
            for module in ("self_attn.q_proj", "mlp.experts.17.down_proj", "mlp.gate_proj"):
                spec.converts(f"model.layers.{layer}.{module}.weight")
    assert time.process_time() - began < LIMIT_CPU_S


@pytest.mark.parametrize(
    ("pattern", "left_alone"),
    [
        ("re:.*gate$", ["model.layers.0.mlp.gate"]),
        ("re:.*mlp.*", ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]),
        (r"re:model\.layers\.\d+\.self_attn\..*", ["model.layers.0.self_attn.q_proj"]),
        ("re:.*(q|k|v)_proj", ["model.layers.0.self_attn.q_proj"]),
        ("re:.*.*.*visual.*.*", ["visual.blocks.0.qkv"]),
        ("re:visual", ["visual.blocks.0.qkv"]),
        ("re:layers", []),
        ("re:^.*?gate_proj$", ["model.layers.0.mlp.gate_proj"]),
        ("re:(?!model).*", ["visual.blocks.0.qkv"]),
        ("*.mlp.*", ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]),
        ("**gate**proj*", ["model.layers.0.mlp.gate_proj"]),
        ("re:.*", ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj",
                   "visual.blocks.0.qkv"]),
        (r"re:.*\.*gate_proj", ["model.layers.0.mlp.gate_proj"]),
        (r"re:.*\.\*", []),
        (r"re:.*layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14)\.mlp.*",
         ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]),
        (r"re:(model\.)?layers", ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj",
                                  "model.layers.0.self_attn.q_proj"]),
        (r"re:.*(gate|q)_proj(\.weight)?$", ["model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj"]),
        ("re:.*gate$|.*attn.*q.*", ["model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"]),
        (r"re:visual|.*\.mlp\.(?:gate|[a-z]+)$", ["model.layers.0.mlp.gate", "visual.blocks.0.qkv"]),
        (r"re:.*(.*\.mlp\.)?gate$", ["model.layers.0.mlp.gate"]),
        (r"re:.*[|(]a|visual", ["visual.blocks.0.qkv"]),
    ],
)  # fmt: skip
def test_a_pattern_made_plainer_means_the_same(pattern: str, left_alone: list[str]) -> None:
    modules = [
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.self_attn.q_proj",
        "visual.blocks.0.qkv",
    ]
    spec = QuantSpec(method="awq", bits=4, not_converted=(pattern,))
    assert [module for module in modules if not spec.converts(module + ".weight")] == left_alone
    if pattern.startswith("re:"):
        assert left_alone == [module for module in modules if re.match(pattern[3:], module)]


@pytest.mark.parametrize("wrong", [{"quant_method": "aqlm"}, {"quant_method": "AWQ", "bits": 8}])
def test_what_is_read_is_said_of_what_is_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantized(**wrong)
    assert "unquantized with --quantization int4 or fp8" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"bits": 4}, "write quant_method there"),
        ({"quant_method": "awq"}, "write bits there"),
        ({"quant_method": "awq", "bits": "4"}, "correct bits there"),
    ],
)
def test_a_config_that_was_edited_wrong_is_to_be_corrected(wrong: dict[str, Any], fix: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantized(**wrong)
    assert (caught.value.fix or "").startswith(fix)


def test_a_method_may_be_written_in_capitals() -> None:
    """As vLLM takes it."""
    assert quantized(quant_method="AWQ", bits=4) == quantized(quant_method="awq", bits=4)


def test_what_a_quantizer_left_alone_travels_to_the_engine_process() -> None:
    """The plan holds it, patterns too: ignore lists of llm-compressor mostly have one."""
    sent = quantized(**compressed(num_bits=4, type="int", strategy="group", group_size=32))
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=QuantSpec)
    assert heard == sent
    assert heard.converts("model.layers.0.mlp.down_proj")
    assert not heard.converts("model.layers.0.mlp.gate")


def test_what_was_found_of_experts_travels_too() -> None:
    name = "model.layers.0.mlp.experts.{expert}.up_proj.weight"
    sent = quantized(**compressed(num_bits=4, type="int", strategy="group", group_size=32))
    assert sent.scheme_of(name, 8) is sent
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=QuantSpec)
    assert heard == sent
    assert heard.scheme_of(name, 8) is heard


def test_a_cache_that_is_quantized_alone_has_weights_as_they_are() -> None:
    """But for weights that are rotated or sparse: read as they are, they would be wrong ones."""
    alone = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    dense = {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    assert from_config({**LLAMA, "quantization_config": alone | dense}).quantization is None
    for more, what in (
        ({"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, "rotated weights"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ):
        with pytest.raises(CheckpointError, match="config_groups") as caught:
            from_config({**LLAMA, "quantization_config": alone | more})
        assert what in str(caught.value)


def test_an_empty_transform_is_none() -> None:
    config = compressed(num_bits=4, group_size=32) | {"transform_config": {}, "sparsity_config": {}}
    assert not quantized(**config).lacking


def test_rules_that_say_the_same_of_all_experts_are_alike() -> None:
    """Whichever number they name: that of a layer sets no expert apart."""
    name = "model.layers.{}.mlp.experts.{{expert}}.up_proj"
    layer = Exceptions.read(["model.layers.3", "lm_head"])
    assert layer.hold(name.format(3).replace("{expert}", "5"))
    assert layer.alike(name.format(3), 8)
    assert layer.alike(name.format(4), 8)
    one = Exceptions.read(["model.layers.3.mlp.experts.5"])
    assert not one.alike(name.format(3), 8)
    assert one.alike(name.format(3), 5), "there is no sixth"
    assert one.alike(name.format(4), 8)
    assert not Exceptions.read([r"re:.*experts\.2\..*"]).alike(name.format(0), 4)
