"""Quantized checkpoints whose parts say more, or other, than quantization_config: followed where they agree, refused by
their names where they do not. No number is dropped without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
from quantized_files import Format, compressed, write_quantized

from holdfast.checkpoints import Checkpoint, match, require_agreement
from holdfast.checkpoints.formats import safetensors
from holdfast.errors import CheckpointError
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import weights_bytes
from holdfast.models import from_config

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
