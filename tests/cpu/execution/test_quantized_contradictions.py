"""Quantized checkpoints whose parts say more, or other, than quantization_config: followed where they agree, refused by
their names where they do not. No number is dropped without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import quantized_files as written
import torch
from quantized_files import Format, compressed, write_quantized
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from holdfast.checkpoints import Checkpoint, extra_tensors, match, packing_of, require_agreement
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.validation.packed_parts import find_packed
from holdfast.errors import CheckpointError
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.packed import PackedSource
from holdfast.footprint.cpu import weights_bytes
from holdfast.footprint.layouts import scaled_layout
from holdfast.models import TensorSpec, describe_config, from_config

CPU = torch.device("cpu")
MOE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 3, "head_dim": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 1, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GPTQ = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}
EXPERTS = [f"model.layers.0.mlp.experts.{expert}.{part}_proj" for expert in range(3) for part in ("gate", "up", "down")]


def loaded(folder: Path) -> Weights:
    """With the bytes counted before held against those in memory."""
    spec = from_config(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint(safetensors.read_headers(sorted(folder.glob("*.safetensors"))), "safetensors")
    with checkpoint:
        assert require_agreement(spec, checkpoint) == ()
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=False, compiled=False)
        counted = weights_bytes(spec, match(spec, checkpoint), dtype="float32", expand=False, compiled=False)
        assert weights.nbytes == counted
    return weights


def two_groups(targets: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {
            "attention": {"targets": ["re:.*self_attn.*"], "weights": FLOAT, "format": "naive-quantized"},
            "experts": {"targets": targets, "weights": INT, "format": "pack-quantized"},
        },
    }


ATTENTION_IN_FP8 = {"self_attn": written.fp8("channel")}
EIGHT_BITS = {"experts": written.gptq(32, 8)}
RULES: dict[str, Format] = {
    "a pattern with digits": Format(
        two_groups([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]),
        written.pack_quantized(),
        modules=ATTENTION_IN_FP8,
    ),
    "every expert by name": Format(two_groups(EXPERTS), written.pack_quantized(), modules=ATTENTION_IN_FP8),
    "GPTQ's dynamic": Format(
        {"quant_method": "gptq", **GPTQ, "dynamic": {r"+:.*\.mlp\.experts\.\d+\..*": {"bits": 8}}},
        written.gptq(),
        modules=EIGHT_BITS,
    ),
    "AutoRound's extra_config": Format(
        {"quant_method": "auto-round", **GPTQ, "extra_config": {name: {"bits": 8} for name in EXPERTS}},
        written.gptq(),
        modules=EIGHT_BITS,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_name_experts_are_followed(rule: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    write_quantized(oracles("Qwen3Moe", **MOE).folder, tmp_path, RULES[rule])
    others = "fp8" if rule in ("a pattern with digits", "every expert by name") else "int8 g32"
    assert loaded(tmp_path).layouts == ("float32", *sorted((others, "int4 g32")))


def test_experts_left_alone_by_their_numbers_are_counted_so(oracles: Callable[..., Any]) -> None:
    """From the config alone, as `plan` does."""
    config = json.loads((oracles("Qwen3Moe", **MOE).folder / "config.json").read_text())
    counted = []
    for pattern in (r"re:.*experts\..*", r"re:.*experts\.\d+\..*"):
        quantization = {**compressed(INT), "ignore": ["lm_head", pattern]}
        spec = from_config({**config, "quantization_config": quantization})
        counted.append(weights_bytes(spec, None, dtype="float32", expand=False))
    assert counted[0] == counted[1]


def test_an_expert_that_the_config_sets_apart_is_named(oracles: Callable[..., Any]) -> None:
    config = json.loads((oracles("Qwen3Moe", **MOE).folder / "config.json").read_text())
    quantization = {**compressed(INT), "ignore": ["lm_head", r"re:.*experts\.2\..*"]}
    spec = from_config({**config, "quantization_config": quantization})
    with pytest.raises(CheckpointError, match="experts of one layer are quantized in different ways") as caught:
        weights_bytes(spec, None, dtype="float32", expand=False)
    assert "mlp.experts.2.gate_proj" in str(caught.value.needed)
    assert "unquantized" in str(caught.value.found)


@pytest.mark.parametrize("left_alone", ["q_proj", "v_proj", "up_proj"])
def test_matrices_beside_one_that_is_left_alone_have_scales_of_their_own(
    left_alone: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """Static scales of inputs: shared where q, k and v are one matrix, and counted apart where they are not."""
    config = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": [left_alone]}
    made = Format(config, written.fp8(static=0.03), modules={left_alone: None})
    oracle = oracles("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    write_quantized(oracle.folder, tmp_path, made)
    loaded(tmp_path)


@pytest.mark.parametrize("quantized", ["gptq", "fp8", "experts"])
def test_a_bias_of_a_model_without_one_must_be_zero(
    quantized: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """AutoGPTQ writes zeros to every matrix. Other numbers, passed over, would be missing in every answer."""
    config: dict[str, Any] = {"quant_method": "gptq", **GPTQ} if quantized != "fp8" else {"quant_method": "fp8"}
    made = Format(config, written.fp8() if quantized == "fp8" else written.gptq())
    llama = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    oracle = oracles("Qwen3Moe", **MOE) if quantized == "experts" else oracles("Llama", **llama)
    write_quantized(oracle.folder, tmp_path, made)
    module = f"model.layers.0.{'mlp.experts.2.up' if quantized == 'experts' else 'self_attn.o'}_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{module}.bias"] = torch.zeros(64, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded(tmp_path)
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))
    with Checkpoint(safetensors.read_headers((tmp_path / "model.safetensors",)), "safetensors") as checkpoint:
        assert extra_tensors(spec, checkpoint) == ()
    tensors[f"{module}.bias"][7] = 0.25
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{module}\.bias"):
        loaded(tmp_path)


def test_a_bias_of_the_model_stays_one(oracles: Callable[..., Any], tmp_path: Path) -> None:
    oracle = oracles("Qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    write_quantized(oracle.folder, tmp_path, Format({"quant_method": "gptq", **GPTQ}, written.gptq()))
    qkv = loaded(tmp_path).layers[0].qkv
    assert bool(qkv.bias.any())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.act.scales", "model.layers.0.mlp.down_proj.pre_quant_scale"])
def test_scales_that_inputs_are_divided_by_are_refused(name: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """AWQ of an MLP without a gate divides behind the activation function; no product here does."""
    oracle = oracles("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    write_quantized(oracle.folder, tmp_path, Format(config, written.awq()))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, name: torch.ones(128, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        loaded(tmp_path)
    assert "GGUF" in str(caught.value.fix)


@pytest.mark.parametrize("quantized", ["awq", "fp8"])
def test_plain_weights_beside_scales_are_refused(quantized: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """They may be there twice, or be codes in a wider type, which mean nothing alone."""
    made = {
        "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, written.awq()),
        "fp8": Format({"quant_method": "fp8"}, written.fp8()),
    }[quantized]
    oracle = oracles("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    write_quantized(oracle.folder, tmp_path, made)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors.get(name, torch.zeros(64, 64)).to(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.weight' is stored in BF16, beside"):
        loaded(tmp_path)


# One matrix


def numbers(folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """What a matrix [64, 64] of these parts is read as, by way of a file."""
    file = folder / "one.safetensors"
    save_file({f"m.{name}": part.contiguous() for name, part in parts.items()}, file)
    tiny = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    tiny |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    quantization = describe_config({**tiny, "quantization_config": config}).quantization
    assert quantization is not None
    tensor = TensorSpec(name="layers.0.q", shape=(64, 64), hf_name="m.weight", gguf_name="", linear=True)
    packing = packing_of(quantization, tensor, "bfloat16")
    assert packing is not None
    headers = safetensors.read_headers((file,))
    stored, _ = find_packed(tensor, packing, headers)
    assert stored is not None
    assert stored.packed is not None
    layout = scaled_layout(stored.packed.packing, tensor, stored)
    with safe_open(file, "pt") as opened:
        source = PackedSource(
            stored.packed.packing, stored.packed.parts, layout, 64, 64, lambda part: opened.get_tensor(part.name)
        )
        source.expand(found := torch.full((64, 64), torch.nan))
    return found


def encoded(encode: written.Encoder) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    random = numpy.random.default_rng(2)
    parts, means = encode(random.normal(size=(64, 64)), random)
    return parts, torch.from_numpy(means).float()


EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
BYTES = compressed(EIGHT, {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, "int-quantized")
FLOATS = compressed(FLOAT, None, "naive-quantized")
MIDDLE = torch.full((8, 2), -2004318072, dtype=torch.int32)
"""Eight in every four bits."""
IN_ORDER = torch.arange(64, dtype=torch.int32) // 32


@pytest.mark.parametrize(
    ("encode", "config", "parts"),
    [
        (written.pack_quantized(), compressed(INT), {"weight_zero_point": MIDDLE}),
        (written.pack_quantized(), compressed(INT), {"weight_g_idx": IN_ORDER}),
        (written.int8(), BYTES, {"weight_zero_point": torch.zeros(64, 1, dtype=torch.int8)}),
        (written.int8(), BYTES, {"input_zero_point": torch.zeros(1, dtype=torch.int8)}),
        (written.fp8("channel"), FLOATS, {"weight_zero_point": torch.zeros(64, 1).to(torch.float8_e4m3fn)}),
    ],
)
def test_parts_that_the_config_does_not_announce_must_say_the_same(
    encode: written.Encoder, config: dict[str, Any], parts: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Zero points beside "symmetric", an order beside none: taken while they change nothing, never dropped."""
    stored, means = encoded(encode)
    torch.testing.assert_close(numbers(tmp_path, {**stored, **parts}, config), means)
    for name, part in parts.items():
        changed = part.float() + 1 if part.dtype == torch.float8_e4m3fn else part.clone()
        changed.view(-1)[5 % len(changed.view(-1))] = 1
        with pytest.raises(CheckpointError, match=rf"m\.{name}"):
            numbers(tmp_path, {**stored, name: changed.to(part.dtype)}, config)


@pytest.mark.parametrize(
    ("encode", "config", "part"),
    [
        (
            written.gptq(symmetric=False, version=2),
            {"quant_method": "gptq", **GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
            "qzeros",
        ),
        (written.pack_quantized(symmetric=False), compressed({**INT, "symmetric": False}), "weight_zero_point"),
        (
            written.pack_quantized(bits=8, symmetric=False),
            compressed({**INT, "num_bits": 8, "symmetric": False}),
            "weight_zero_point",
        ),
    ],
)
def test_zero_points_are_words_of_32_bits_and_no_others(
    encode: written.Encoder, config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Of 64 bits, every second word would be read as a zero point of 0."""
    stored, means = encoded(encode)
    torch.testing.assert_close(numbers(tmp_path, stored, config), means)
    with pytest.raises(CheckpointError, match=rf"m\.{part}") as caught:
        numbers(tmp_path, {**stored, part: stored[part].long()}, config)
    assert "I64" in str(caught.value.found)


def test_indices_may_have_64_bits_and_an_axis_more(tmp_path: Path) -> None:
    stored, means = encoded(written.gptq(ordered=True))
    config = {"quant_method": "gptq", **GPTQ, "desc_act": True}
    for index in (stored["g_idx"].long(), stored["g_idx"].view(1, -1)):
        torch.testing.assert_close(numbers(tmp_path, {**stored, "g_idx": index}, config), means)
    nested = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    stored, means = encoded(written.nf4())
    for name in ("weight.nested_quant_map", "weight.quant_map", "weight.nested_absmax"):
        stored[name] = stored[name].view(1, -1)
    torch.testing.assert_close(numbers(tmp_path, stored, nested), means)


def test_a_bound_for_inputs_is_what_the_config_says(tmp_path: Path) -> None:
    """fbgemm's: inputs beyond it are cut off. Weights mean the same with any."""
    stored, means = encoded(written.fp8("channel"))
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 300.0}
    torch.testing.assert_close(numbers(tmp_path, stored, config), means)
    bounded = {**stored, "input_scale_ub": torch.tensor([300.0])}
    torch.testing.assert_close(numbers(tmp_path, bounded, config), means)
    for other in (1200.0, None):
        with pytest.raises(CheckpointError, match=r"m\.input_scale_ub"):
            numbers(tmp_path, bounded, {**config, "activation_scale_ub": other})


def test_scales_that_are_stored_as_exponents(tmp_path: Path) -> None:
    """Where scale_fmt says so, as F8_E8M0 or bytes; 255 is no number."""
    stored, _ = encoded(written.fp8("block", name="weight_scale_inv"))
    exponents = torch.ceil(torch.log2(stored["weight_scale_inv"])) + 127
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    powers = {**config, "scale_fmt": "ue8m0"}
    plain = numbers(tmp_path, {**stored, "weight_scale_inv": torch.exp2(exponents - 127)}, powers)
    as_bytes = {**stored, "weight_scale_inv": exponents.to(torch.uint8)}
    for one in (as_bytes, {**stored, "weight_scale_inv": exponents.to(torch.uint8).view(torch.float8_e8m0fnu)}):
        assert torch.equal(numbers(tmp_path, one, powers), plain)
        with pytest.raises(CheckpointError, match="weight_scale_inv"):
            numbers(tmp_path, one, config)
    as_bytes["weight_scale_inv"][0, 0] = 255
    with pytest.raises(CheckpointError, match="which is no number"):
        numbers(tmp_path, as_bytes, powers)


def test_eight_bits_of_bitsandbytes_in_tiles_are_refused(tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    stored, means = encoded(written.bnb_int8())
    torch.testing.assert_close(numbers(tmp_path, stored, config), means)
    tiled = {**stored, "weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"m\.weight_format"):
        numbers(tmp_path, tiled, config)
