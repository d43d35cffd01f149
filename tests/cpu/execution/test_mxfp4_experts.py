"""Experts in MXFP4, in stacks as gpt-oss stores them: against transformers' own dequantization of the same tensors, in
memory as they are stored, and refused by name where a file is not what its config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_files import write_mxfp4
from quantized_models import log_chances
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from holdfast.checkpoints import Checkpoint, extra_tensors, match, packing_of, require_agreement
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.validation.packed_parts import find_packed
from holdfast.errors import CheckpointError
from holdfast.execution import native
from holdfast.execution.layers.experts import BlockStack, DenseStack, ExpertWeights, QuantizedStack
from holdfast.execution.memory import PeakMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import Loader, load_weights
from holdfast.execution.weights.packed import fill_mxfp4
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.cpu import STAGING_BYTES, weights_bytes
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ModelSpec, from_config

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(7)).tolist()
MOE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 5, "head_dim": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
WAYS = [{}, {"expand": True}, *([{"compiled": True}] if native.available() else [])]


def opened(folder: Path) -> tuple[ModelSpec, Checkpoint]:
    spec = from_config(json.loads((folder / "config.json").read_text()))
    return spec, Checkpoint(safetensors.read_headers([folder / "model.safetensors"]), "safetensors")


def loaded(spec: ModelSpec, checkpoint: Checkpoint, **more: Any) -> Weights:
    """And the bytes counted, held against those in memory."""
    settings = {"expand": False, "compiled": False, **more}
    with checkpoint:
        assert extra_tensors(spec, checkpoint) == ()
        assert require_agreement(spec, checkpoint) == ()
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, **settings)
        assert weights.nbytes == weights_bytes(spec, match(spec, checkpoint), dtype="float32", **settings)
    return weights


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory, oracles: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "quantized"
    write_mxfp4(oracles("Qwen3Moe", **MOE).folder, folder)
    return folder


def expected_chances(folder: Path, plain: Path) -> torch.Tensor:
    """Of transformers' model, with experts as transformers dequantizes the stored tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    stored = load_file(folder / "model.safetensors")
    with torch.inference_mode():
        for index, layer in enumerate(model.model.layers):
            for part in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{index}.mlp.experts.{part}"
                parts = (stored[f"{name}_blocks"], stored[f"{name}_scales"])
                numbers = convert_moe_packed_tensors(*parts, dtype=torch.float32).transpose(1, 2)
                target = getattr(layer.mlp.experts, part)
                assert target.shape == numbers.shape
                target.copy_(numbers)
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    return found


def test_answers_are_those_of_transformers(moe: Path, oracles: Callable[..., Any]) -> None:
    expected = expected_chances(moe, oracles("Qwen3Moe", **MOE).folder)
    assert float(expected.std()) > 0.1
    for more in WAYS:
        spec, checkpoint = opened(moe)
        weights = loaded(spec, checkpoint, **more)
        found = log_chances(spec, weights, PROMPT)
        torch.testing.assert_close(found, expected, atol=2e-3 if "compiled" in more else 5e-4, rtol=0)
        assert int(found.argmax()) == int(expected.argmax())
        kind = BlockStack if "compiled" in more else DenseStack if "expand" in more else QuantizedStack
        experts = weights.layers[0].mlp
        assert isinstance(experts, ExpertWeights)
        assert isinstance(experts.gate_up[0], kind)
        if not more:
            assert weights.layouts == ("float32", "mxfp4 g32")
            # 17 bytes for 32 weights.
            assert experts.gate_up[0].nbytes == 5 * 192 * 64 // 32 * 17


def test_rows_of_gate_and_up_that_take_turns(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """As gpt-oss has them: the same matrices as with gates above ups."""
    folder = oracles("Qwen3Moe", **MOE).folder
    write_mxfp4(folder, tmp_path / "halves")
    write_mxfp4(folder, tmp_path / "turns", alternating=True)
    spec, checkpoint = opened(tmp_path / "halves")
    turned = replace(
        spec, tensors=tuple(replace(one, alternating=one.name.endswith("experts.gate_up")) for one in spec.tensors)
    )
    for more in WAYS:
        halves, turns = loaded(spec, checkpoint, **more), loaded(turned, opened(tmp_path / "turns")[1], **more)
        assert torch.equal(log_chances(spec, halves, PROMPT), log_chances(spec, turns, PROMPT))


def test_experts_are_read_ahead_within_their_room(moe: Path) -> None:
    spec, checkpoint = opened(moe)
    expected = log_chances(spec, loaded(spec, checkpoint), PROMPT)
    loader = Loader(spec, opened(moe)[1], torch.float32, CPU, False, False, False, None, None)
    one = 192 * 64 // 32 * 17
    loader.ahead.ahead_bytes, most = 3 * one, 0
    with torch.inference_mode(), loader.ahead.readers:
        for turn in loader.experts_in_turn("layers.0.experts.gate_up"):
            most = max(most, len(loader.ahead.coming) // 2)
            for part in loader.stored["layers.0.experts.gate_up"].packed.parts.values():  # type: ignore[union-attr]
                loader.read_of_stack(turn, part)
        weights = loader.load()
    assert most == 3
    assert not loader.ahead.coming
    assert torch.equal(log_chances(spec, weights, PROMPT), expected)


GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop(f"{GATE_UP}_scales"), f"{GATE_UP}_scales"),
        (lambda tensors: tensors.pop(f"{DOWN}_blocks"), f"{DOWN}_blocks"),
        (lambda tensors: tensors.update({f"{DOWN}_scales": torch.zeros(5, 64, 2, dtype=torch.uint8)}), DOWN),
        (lambda tensors: tensors.update({f"{DOWN}_scales": torch.zeros(5, 64, 3)}), f"{DOWN}_scales"),
        (lambda tensors: tensors.update({f"{GATE_UP}_blocks": tensors[f"{GATE_UP}_blocks"][:4].clone()}), GATE_UP),
        (lambda tensors: tensors[f"{DOWN}_scales"].fill_(255), f"{DOWN}_scales"),
    ],
    ids=["no scales", "no blocks", "scales of other groups", "scales as floats", "an expert less", "no numbers"],
)
def test_broken_files_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], Any], word: str, moe: Path, tmp_path: Path
) -> None:
    tensors = load_file(moe / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((moe / "config.json").read_text())
    spec, checkpoint = opened(tmp_path)
    with checkpoint, pytest.raises(CheckpointError) as caught:
        load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=False)
    assert word in str(caught.value)


def test_columns_that_blocks_do_not_divide_are_refused(moe: Path) -> None:
    config = json.loads((moe / "config.json").read_text())
    spec = from_config({**config, "moe_intermediate_size": 80})
    down = next(one for one in spec.tensors if one.name.endswith("experts.down"))
    assert spec.quantization is not None
    packing = packing_of(spec.quantization, down, "bfloat16")
    assert packing is not None
    with pytest.raises(CheckpointError) as caught:
        find_packed(down, packing, opened(moe)[1].tensors)
    assert "multiples of 32" in str(caught.value)
    assert down.hf_name in str(caught.value)


def test_loading_holds_the_stored_bytes_of_one_expert_and_a_tile(tmp_path: Path) -> None:
    """Of 12 experts with 4 million weights each: all of them as they are stored take 27 MB, one 2.2."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "moe_intermediate_size": 2048, "num_experts": 12, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (12, 4096, 32, 16), dtype=torch.uint8)
    save_file({f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0] // 2}, tmp_path / "model.safetensors")
    raw = blocks[0].nbytes * 17 // 16
    del blocks
    spec = from_config(config)
    tensor = next(one for one in spec.tensors if one.name.endswith("experts.gate_up"))
    spec = replace(spec, tensors=(tensor,), quantization=spec.quantization)
    checkpoint = Checkpoint(safetensors.read_headers([tmp_path / "model.safetensors"]), "safetensors")
    loader = Loader(spec, checkpoint, torch.float32, CPU, False, False, False, None, None)
    layout = loader.kept_layout(tensor.name)
    assert not isinstance(layout, str)
    assert layout is not None
    matrix = ScaledMatrix(layout, 12 * 4096, 1024, CPU, experts=12)
    for plane in (matrix.codes, matrix.scales):
        plane.zero_()
    with PeakMemory() as peak, checkpoint, loader.ahead.readers:
        for expert in range(12):
            loader.fill_scaled(matrix, expert * 4096, tensor.name, expert)
    assert peak.grown_bytes < raw + STAGING_BYTES


def test_a_scale_of_a_gguf_file_that_is_no_number_is_refused() -> None:
    stored = torch.zeros((2, 34), dtype=torch.uint8)
    stored[1, 17] = 255
    matrix = ScaledMatrix(ScaledLayout(codes="mxfp4", scales="uint8", group=32), 2, 64, CPU)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps"):
        fill_mxfp4(matrix, 0, stored, "blk.0.ffn_up_exps")
