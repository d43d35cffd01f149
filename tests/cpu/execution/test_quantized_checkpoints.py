"""Whole models from quantized checkpoints against transformers with the numbers that the stored bits mean, as a reader
of their definitions has them (tests/support/quantized_files.py); bytes in memory against bytes counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
import transformers
from quantized_files import Format, compressed, write_quantized
from safetensors.torch import load_file, save_file

from holdfast.checkpoints import Checkpoint, match
from holdfast.checkpoints.formats import safetensors
from holdfast.execution import native
from holdfast.execution.layers.experts import QuantizedStack
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import Weights, load_weights
from holdfast.footprint.cpu import weights_bytes
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(7)).tolist()
LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MOE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 5, "head_dim": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
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
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, written.fp8("channel"), "fp8"),
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


def opened(folder: Path) -> tuple[ModelSpec, Checkpoint]:
    spec = from_config(json.loads((folder / "config.json").read_text()))
    return spec, Checkpoint(safetensors.read_headers(sorted(folder.glob("*.safetensors"))), "safetensors")


def loaded(folder: Path, **more: Any) -> tuple[ModelSpec, Weights]:
    """And the bytes counted, held against those in memory."""
    spec, checkpoint = opened(folder)
    settings = {"expand": False, "compiled": False, **more}
    with checkpoint:
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, **settings)
        assert weights.nbytes == weights_bytes(spec, match(spec, checkpoint), dtype="float32", **settings)
    return spec, weights


def plain_twin(source: Path, folder: Path, means: dict[str, Any]) -> Any:
    """transformers' model with the numbers that the quantized file means."""
    folder.mkdir()
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors |= {name: torch.from_numpy(value).contiguous() for name, value in means.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def round_inputs(model: Any, made: Format) -> None:
    """Every linear layer that was quantized rounds what it takes, by the formats' own words."""

    def rounded(module: Any, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = arguments
        parts = x.double().reshape(*x.shape[:-1], -1, made.input_group or x.shape[-1])
        largest = 448 if made.inputs == "fp8" else 127
        if made.static is None:
            scale = parts.float().abs().max(-1, keepdim=True).values / largest
        else:
            scale = torch.tensor(made.static)
        steps = (parts.float() / scale).clamp(-largest - (made.inputs == "int8"), largest)
        codes = steps.to(torch.float8_e4m3fn).float() if made.inputs == "fp8" else torch.round(steps)
        return (codes * scale).reshape(x.shape)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


def log_chances(spec: ModelSpec, weights: Weights, prompt: list[int]) -> torch.Tensor:
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    limits = RunnerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    runner = Runner(spec, weights, layout, limits, CPU)
    runner.back_kv(5)
    captured: list[torch.Tensor] = []
    original = runner._sampler.sample

    def capture(logits: torch.Tensor, *rest: Any) -> Any:
        captured.append(logits.clone())
        return original(logits, *rest)

    runner._sampler.sample = capture  # type: ignore[method-assign]
    start = SequenceStart(0, "r", prompt, len(prompt), SamplingParams(temperature=0.0))
    rows = [Row(0, 0, len(prompt), True)]
    runner.execute(StepPlan(step_id=0, starts=[start], table_writes=[TableWrite(0, 0, 0, [1, 2, 3])], rows=rows))
    return captured[0][0].log_softmax(-1)


@torch.inference_mode()
def expected_chances(model: Any, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert float(found.std()) > 0.1, "answers that say nothing would all be alike"
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_dense_models_equal_transformers_with_the_same_numbers(
    name: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    made = FORMATS[name]
    oracle = oracles("Llama", **LLAMA)
    means = write_quantized(oracle.folder, tmp_path / "quantized", made)
    assert len(means) >= 8
    model = plain_twin(oracle.folder, tmp_path / "plain", means)
    if made.inputs != "plain":
        round_inputs(model, made)
    spec, weights = loaded(tmp_path / "quantized")
    # Of rounded inputs, one that lies between two codes may fall to either side.
    tolerance = 2e-4 if made.inputs == "plain" else 2e-2
    ways = [weights, *([] if made.inputs != "plain" else [loaded(tmp_path / "quantized", expand=True)[1]])]
    for prompt in (PROMPT[:1], PROMPT):
        expected = expected_chances(model, prompt)
        for way in ways:
            found = log_chances(spec, way, prompt)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
            assert int(found.argmax()) == int(expected.argmax())


MIXTURES = (
    "awq", "gptq", "gptq-asymmetric", "gptq-8", "w4a16", "w4a16-asymmetric", "w8a16", "fp8-weights-only", "nf4",
    "llm-int8",
)  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_equal_transformers_with_the_same_numbers(
    name: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = oracles("Qwen3Moe", **MOE)
    means = write_quantized(oracle.folder, tmp_path / "quantized", FORMATS[name])
    assert len(means) == 2 * (4 + 3 * 5)
    expected = expected_chances(plain_twin(oracle.folder, tmp_path / "plain", means), PROMPT)
    for more in ({}, {"expand": True}, *([{"compiled": True}] if native.available() else [])):
        spec, weights = loaded(tmp_path / "quantized", **more)
        found = log_chances(spec, weights, PROMPT)
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)
        assert isinstance(weights.layers[0].mlp.gate_up[0], QuantizedStack) != more.get("expand", False)  # type: ignore[attr-defined]
