"""How matrices of quantized checkpoints lie in memory, by what their config says; loading is compared elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import CheckpointError
from holdfast.footprint.cpu import weights_bytes
from holdfast.footprint.layouts import Quantize, memory_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ModelSpec, catalogue, describe_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}


def spec_of(quantization: dict[str, Any] | None, **changed: Any) -> ModelSpec:
    more = {} if quantization is None else {"quantization_config": quantization}
    return describe_config({**LLAMA, **changed, **more})


def layout_of(spec: ModelSpec, name: str, *, expand: bool = False, quantize: Quantize | None = None) -> Any:
    tensor = next(tensor for tensor in spec.tensors if tensor.name == name)
    return memory_layout(
        tensor,
        None,
        dtype="bfloat16",
        expand=expand,
        compiled=False,
        quantization=spec.quantization,
        quantize=quantize,
    )


def compressed(inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (AWQ, ScaledLayout(codes="int4", scales="float16", group=128, zeros=True)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True},
            ScaledLayout(codes="int4", scales="float16", group=64, ordered=True),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "desc_act": True},
            ScaledLayout(codes="int8", scales="float16", zeros=True),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8", input_group=128),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
        ),
        (
            compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
            ScaledLayout(codes="int4", scales="bfloat16", group=32),
        ),
        (
            compressed({"num_bits": 8, "dynamic": True}, num_bits=8, type="int", strategy="channel"),
            ScaledLayout(codes="int8", inputs="int8"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            ScaledLayout(codes="nf4", group=64),
        ),
    ],
)
def test_what_a_config_says_is_how_it_lies(quantization: dict[str, Any], expected: ScaledLayout) -> None:
    spec = spec_of(quantization)
    assert layout_of(spec, "layers.0.down") == expected
    assert layout_of(spec, "embed") == layout_of(spec, "head") == layout_of(spec, "layers.0.attn_norm") == "bfloat16"
    # Rounding of inputs belongs to a product: expanding the matrix would lose it.
    assert layout_of(spec, "layers.0.q", expand=True) == ("bfloat16" if expected.inputs == "plain" else expected)


def test_bytes_of_a_large_model_are_codes_scales_and_zero_points() -> None:
    spec = describe_config(catalogue.find("llama-3.1-8b-awq").config)
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    plain = 2 * (2 * 128256 * 4096 + 65 * 4096)
    expected = linear // 2 + linear // 128 * 3 + plain
    assert weights_bytes(spec, None, dtype="bfloat16", expand=False) == expected
    assert weights_bytes(spec, None, dtype="bfloat16", expand=True) == 2 * linear + plain


def test_fused_matrices_have_one_scale_of_their_inputs() -> None:
    spec = spec_of({"quant_method": "fp8", "activation_scheme": "static"})
    rows = 256 + 128 + 128 + 256 + 512 + 512 + 256
    elements = 256 * (256 + 128 + 128 + 256 + 512 + 512 + 512)
    inputs = 4  # qkv, o, gate and up, down
    plain = 2 * (2 * 512 * 256 + 3 * 256)
    assert weights_bytes(spec, None, dtype="bfloat16", expand=False) == elements + 4 * rows + 4 * inputs + plain


def test_quantizing_while_loading_takes_linear_layers_alone() -> None:
    spec = spec_of(None, intermediate_size=96 * 2)
    assert layout_of(spec, "layers.0.q", quantize="fp8") == ScaledLayout(codes="fp8", inputs="fp8")
    assert layout_of(spec, "layers.0.q", quantize="int4") == ScaledLayout(codes="int4", scales="float16", group=128)
    assert layout_of(spec, "layers.0.down", quantize="int4").group == 64
    assert layout_of(spec, "head", quantize="int4") == layout_of(spec, "embed", quantize="fp8") == "bfloat16"


def test_matrices_that_cannot_lie_so_are_refused_by_name() -> None:
    spec = spec_of({**AWQ, "group_size": 8}, hidden_size=264, num_attention_heads=4, head_dim=64)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight") as caught:
        weights_bytes(spec, None, dtype="bfloat16", expand=False)
    assert "multiple of 32" in str(caught.value.needed)
