"""Quantized formats by name, as checkpoints say them: what tests hold loading, products and ranks against."""

from __future__ import annotations

from typing import Any

import quantized_files as written
import torch
from quantized_files import Format, compressed

STATIC = 0.03


def gptq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **more}


INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BYTE = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
DYNAMIC, FIXED = {"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}
FORMATS: dict[str, Format] = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, written.awq()),
    "awq-symmetric": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, written.awq(64, symmetric=True)
    ),
    "awq-modules": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["v_proj", "layers.1.mlp"]},
        written.awq(),
        modules={"v_proj": None, "layers.1.mlp": None},
    ),
    "gptq": Format(gptq_config(), written.gptq()),
    "gptq-no-index": Format(gptq_config(), written.gptq(index=False)),
    "gptq-asymmetric": Format(gptq_config(sym=False), written.gptq(symmetric=False)),
    "gptq-v2": Format(
        gptq_config(sym=False, checkpoint_format="gptq_v2"), written.gptq(symmetric=False, version=2)
    ),
    "gptq-ordered": Format(gptq_config(desc_act=True), written.gptq(ordered=True)),
    "gptq-channel": Format(gptq_config(group_size=-1, desc_act=True), written.gptq(-1)),
    "gptq-8": Format(gptq_config(bits=8), written.gptq(bits=8)),
    "gptq-8-asymmetric-ordered": Format(
        gptq_config(bits=8, sym=False, desc_act=True), written.gptq(bits=8, symmetric=False, ordered=True)
    ),
    "gptq-dynamic": Format(
        gptq_config(dynamic={r"-:.*\.k_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}),
        written.gptq(),
        modules={"k_proj": None, "down_proj": written.gptq(64, 8)},
    ),
    "w4a16": Format(compressed(INT), written.pack_quantized()),
    "w4a16-asymmetric": Format(
        compressed({**INT, "symmetric": False}), written.pack_quantized(symmetric=False)
    ),
    "w4a16-ordered": Format(compressed({**INT, "actorder": "group"}), written.pack_quantized(ordered=True)),
    "w4a16-channel": Format(
        compressed({**INT, "strategy": "channel", "group_size": None}), written.pack_quantized(-1)
    ),
    "w8a16": Format(
        compressed({**INT, "num_bits": 8, "symmetric": False}), written.pack_quantized(bits=8, symmetric=False)
    ),
    "w8a8-dynamic": Format(
        compressed(BYTE, {**DYNAMIC, "num_bits": 8, "type": "int"}, "int-quantized"), written.int8(), "int8"
    ),
    "w8a8-static": Format(
        compressed(BYTE, {**FIXED, "num_bits": 8, "type": "int"}, "int-quantized"),
        written.int8(static=STATIC),
        "int8",
        STATIC,
    ),
    "w8a8-tensor-zeros": Format(
        compressed(
            {**BYTE, "strategy": "tensor", "symmetric": False},
            {**DYNAMIC, "num_bits": 8, "type": "int"},
            "int-quantized",
        ),
        written.int8("tensor", symmetric=False),
        "int8",
    ),
    "fp8-channel": Format(
        compressed(FLOAT, {**DYNAMIC, "num_bits": 8, "type": "float"}, "float-quantized"),
        written.fp8("channel", scales=torch.bfloat16),
        "fp8",
    ),
    "fp8-weights-only": Format(compressed(FLOAT, None, "naive-quantized"), written.fp8("channel")),
    "fp8-tensor-static": Format(
        compressed({**FLOAT, "strategy": "tensor"}, {**FIXED, "num_bits": 8, "type": "float"}, "float-quantized"),
        written.fp8("tensor", static=STATIC),
        "fp8",
        STATIC,
    ),
    "fp8-block": Format(
        compressed(
            {**FLOAT, "strategy": "block", "block_structure": [32, 32]},
            {"dynamic": True, "strategy": "group", "group_size": 32, "num_bits": 8, "type": "float"},
            "float-quantized",
        ),
        written.fp8("block"),
        "fp8",
        input_group=32,
    ),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, written.fp8(), "fp8"),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, written.fp8(static=STATIC), "fp8", STATIC
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        written.fp8("block", name="weight_scale_inv"),
        "fp8",
        input_group=32,
    ),
    "fp8-uneven-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]},
        written.fp8("block", block=(48, 32), name="weight_scale_inv"),
        "fp8",
        input_group=32,
    ),
    "fp8-powers": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        written.fp8("block", name="weight_scale_inv"),
        "fp8",
        input_group=32,
        powers=True,
    ),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": None}, written.fp8("channel"), "fp8"),
    "fbgemm-bounded": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5}, written.fp8("channel"), "fp8", bound=1.5
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True,
         "bnb_4bit_quant_type": "nf4"},
        written.nf4(),
    ),
    "nf4-single": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, written.nf4(nested=False)
    ),
    "llm-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, written.bnb_int8()),
    "mixed": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head", "model.layers.1.self_attn.o_proj"],
            "config_groups": {
                "fine": {"targets": [r"re:.*down_proj$"], "weights": FLOAT, "format": "naive-quantized"},
                "coarse": {"targets": ["Linear"], "weights": INT, "format": "pack-quantized"},
            },
        },
        written.pack_quantized(),
        modules={"layers.1.self_attn.o_proj": None, "down_proj": written.fp8("channel")},
    ),
}  # fmt: skip
