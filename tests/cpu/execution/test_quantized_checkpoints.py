"""Whole models from quantized checkpoints against transformers with the numbers that the stored bits mean, as a reader
of their definitions has them (tests/support/quantized_files.py); bytes in memory against bytes counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
import transformers
from quantized_files import Format, write_quantized
from quantized_formats import FORMATS, gptq_config
from quantized_models import log_chances, round_inputs
from safetensors.torch import load_file, save_file

from holdfast.checkpoints import (
    Checkpoint,
    StoredTensor,
    extra_tensors,
    match,
    packing_of,
    require_agreement,
    stored_parts,
)
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.validation.packed_parts import find_packed
from holdfast.errors import CheckpointError
from holdfast.execution import native
from holdfast.execution.layers.experts import BlockStack, DenseStack, QuantizedStack
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.memory import PeakMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.dummy import fill_dummy_codes
from holdfast.execution.weights.load import Loader, load_weights
from holdfast.execution.weights.packed import PackedSource
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.cpu import STAGING_BYTES, weights_bytes
from holdfast.footprint.layouts import scaled_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ModelSpec, TensorSpec, describe_config, from_config

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(7)).tolist()
LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MOE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 5, "head_dim": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


def opened(folder: Path) -> tuple[ModelSpec, Checkpoint]:
    spec = from_config(json.loads((folder / "config.json").read_text()))
    return spec, Checkpoint(safetensors.read_headers(sorted(folder.glob("*.safetensors"))), "safetensors")


def loaded(folder: Path, **more: Any) -> tuple[ModelSpec, Weights]:
    """And the bytes counted, held against those in memory."""
    spec, checkpoint = opened(folder)
    settings = {"expand": False, "compiled": False, **more}
    with checkpoint:
        assert extra_tensors(spec, checkpoint) == ()
        assert require_agreement(spec, checkpoint) == ()
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


@torch.inference_mode()
def expected_chances(model: Any, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert float(found.std()) > 0.1, "answers that say nothing would all be alike"
    return found


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Kullback and Leibler, from the expected chances; both are logarithms."""
    return float((expected.double().exp() * (expected.double() - found.double())).sum())


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
    compiled = loaded(tmp_path / "quantized", compiled=True)[1] if native.available() else None
    for prompt in (PROMPT[:1], PROMPT):
        expected = expected_chances(model, prompt)
        if compiled is not None:
            assert divergence(log_chances(spec, compiled, prompt), expected) < (
                1e-6 if made.inputs == "plain" else 1e-3
            )
        for way in ways:
            found = log_chances(spec, way, prompt)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
            assert int(found.argmax()) == int(expected.argmax())


MIXTURES = (
    "awq", "gptq", "gptq-asymmetric", "gptq-8", "gptq-ordered", "gptq-8-asymmetric-ordered", "w4a16", "w4a16-ordered",
    "w4a16-asymmetric", "w8a16", "fp8-weights-only", "nf4", "llm-int8",
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
        assert divergence(found, expected) < 1e-6
        torch.testing.assert_close(found, expected, atol=2e-3 if "compiled" in more else 5e-4, rtol=0)
        kind = BlockStack if "compiled" in more else DenseStack if "expand" in more else QuantizedStack
        assert isinstance(weights.layers[0].mlp.gate_up[0], kind)  # type: ignore[attr-defined]


def test_what_is_kept_in_which_way(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Parts with equal layouts are one matrix; what was left alone, or has an order of its own, is multiplied apart."""
    oracle = oracles("Llama", **LLAMA)
    kinds = {}
    for name in ("awq", "awq-modules", "gptq-ordered", "fp8-static", "fp8-uneven-blocks", "mixed"):
        write_quantized(oracle.folder, tmp_path / name, FORMATS[name])
        _, weights = loaded(tmp_path / name)
        kinds[name] = [type(layer.qkv).__name__ for layer in weights.layers], weights.layouts
    one, apart = ["QuantizedLinear"] * 2, ["StackedLinear"] * 2
    assert kinds["awq"] == (one, ("float32", "int4 g32"))
    assert kinds["fp8-static"] == (one, ("float32", "fp8"))
    assert kinds["awq-modules"] == (apart, ("float32", "int4 g32"))
    assert kinds["gptq-ordered"] == (apart, ("float32", "int4 g32"))
    assert kinds["fp8-uneven-blocks"] == (apart, ("float32", "fp8 48x32"))
    assert kinds["mixed"] == (one, ("float32", "fp8", "int4 g32"))


def test_matrices_that_the_checkpoint_keeps_fused(oracles: Callable[..., Any], tmp_path: Path) -> None:
    oracle = oracles("Phi3", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    for name in ("awq", "gptq-asymmetric", "fp8-weights-only"):
        means = write_quantized(oracle.folder, tmp_path / name, FORMATS[name])
        assert "model.layers.0.self_attn.qkv_proj.weight" in means
        expected = expected_chances(plain_twin(oracle.folder, tmp_path / f"plain-{name}", means), PROMPT)
        spec, weights = loaded(tmp_path / name)
        torch.testing.assert_close(log_chances(spec, weights, PROMPT), expected, atol=2e-4, rtol=0)


def test_heads_and_biases(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """A quantized head, biases beside codes, and a head that is the embedding, which stays plain."""
    oracle = oracles("Qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=False)
    made = Format(gptq_config(lm_head=True), written.gptq())
    tied = oracles("Qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=True)
    for source, head in ((oracle, True), (tied, False)):
        folder = tmp_path / str(head)
        # Rows of 300 do not fill words of eight codes.
        means = write_quantized(source.folder, folder, made if not head else FORMATS["fp8-weights-only"], head=head)
        if head:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"]["ignore"] = []
            (folder / "config.json").write_text(json.dumps(config))
        assert ("lm_head.weight" in means) == head
        expected = expected_chances(plain_twin(source.folder, tmp_path / f"plain-{head}", means), PROMPT)
        spec, weights = loaded(folder)
        assert isinstance(weights.head, QuantizedLinear) == head
        torch.testing.assert_close(log_chances(spec, weights, PROMPT), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["awq", "fp8-static", "gptq-8-asymmetric-ordered", "nf4", "fp8-blocks"])
def test_dummies_lie_as_the_checkpoint_would(name: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    for architecture, settings in (("Llama", LLAMA), ("Qwen3Moe", MOE)):
        oracle = oracles(architecture, **settings)
        config = json.loads((oracle.folder / "config.json").read_text())
        spec = from_config({**config, "quantization_config": dict(FORMATS[name].config)})
        weights = load_weights(spec, None, dtype=torch.float32, device=CPU, expand=False)
        assert weights.nbytes == weights_bytes(spec, None, dtype="float32", expand=False)
        found = log_chances(spec, weights, PROMPT)
        assert bool(found.isfinite().all())
        assert float(found.std()) > 0.3


@pytest.mark.parametrize("zeros", [False, True])
def test_dummies_of_four_bits_are_zero_on_the_average(zeros: bool) -> None:
    """Or every product would add the same to all tokens, until experts are chosen by all of them alike."""
    layout = ScaledLayout(codes="int4", scales="float16", group=128, zeros=zeros)
    matrix = ScaledMatrix(layout, 512, 512, CPU)
    tensor = TensorSpec(name="layers.0.up", shape=(512, 512), hf_name="up", gguf_name="")
    fill_dummy_codes(matrix, 0, tensor)
    matrix.dequantize(0, 512, found := torch.full((512, 512), torch.nan))
    assert abs(float(found.mean())) < 5 * float(found.std()) / 512
    assert float(found.std()) == pytest.approx(512**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.scales"), r"experts\.3\.up_proj\.scales"),
        (
            lambda tensors: tensors.update({
                "model.layers.0.mlp.experts.2.down_proj.scales":
                    tensors["model.layers.0.mlp.experts.2.down_proj.scales"].float()
            }),
            r"experts of one layer",
        ),
        (
            lambda tensors: tensors.update({
                "model.layers.0.mlp.experts.4.down_proj.weight": torch.zeros(64, 64),
                "unused": tensors.pop("model.layers.0.mlp.experts.4.down_proj.qweight"),
            }),
            r"experts\.4\.down_proj\.qweight",
        ),
        (
            lambda tensors: tensors.update({
                "model.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(64, 64),
                **{f"unused.{part}": tensors.pop(f"model.layers.0.mlp.experts.0.down_proj.{part}")
                   for part in ("qweight", "qzeros", "scales")},
            }),
            r"experts\.1\.down_proj\.weight",
        ),
    ],
)  # fmt: skip
def test_an_expert_unlike_the_others_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], word: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = oracles("Qwen3Moe", **MOE)
    write_quantized(oracle.folder, tmp_path / "quantized", FORMATS["awq"])
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    spec, checkpoint = opened(tmp_path / "quantized")
    with pytest.raises(CheckpointError, match=word):
        match(spec, checkpoint)


def test_another_group_size_in_the_config_is_named_beside_the_shape(
    oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = oracles("Llama", **LLAMA)
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
    write_quantized(oracle.folder, tmp_path / "quantized", Format(config, written.awq(32)))
    spec, checkpoint = opened(tmp_path / "quantized")
    with checkpoint, pytest.raises(CheckpointError, match="qzeros") as caught:
        match(spec, checkpoint)
    assert "awq of 4 bits, group_size 16" in str(caught.value.needed)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ["awq", "fp8-static", ""])
def test_experts_that_are_read_ahead(name: str, expand: bool, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """As for a GPU: the same matrices as one by one, no more bytes waiting than there is room for, and what is wrong
    with a file said by whoever asks for it."""
    folder = oracles("Qwen3Moe", **MOE).folder
    if name:
        write_quantized(folder, tmp_path / "quantized", FORMATS[name])
        folder = tmp_path / "quantized"
    spec, expected = loaded(folder, expand=expand)
    for room in (1, 6000, 1 << 20):
        _, checkpoint = opened(folder)
        loader = Loader(spec, checkpoint, torch.float32, CPU, expand, False, False, None, None)
        loader.ahead.ahead_bytes, most = room, 0
        with torch.inference_mode(), loader.ahead.readers, checkpoint:
            for turn in loader.experts_in_turn("layers.0.experts.gate"):
                stored = loader.stored["layers.0.experts.gate"]
                parts = loader.ahead.parts(stored, turn)
                size = sum(checkpoint.tensors[part].nbytes for part in parts)
                assert set(parts) <= set(loader.ahead.coming)
                most = max(most, len(loader.ahead.coming) // len(parts))
                for part in parts:
                    loader.read_whole(part)
            assert most == max(1, min(MOE["num_experts"], room // size))
            found = loader.load()
        assert not loader.ahead.coming
        torch.testing.assert_close(
            log_chances(spec, found, PROMPT), log_chances(spec, expected, PROMPT), atol=0, rtol=0
        )

    _, checkpoint = opened(folder)
    checkpoint.tensors = {
        tensor: replace(stored, offset=1 << 40) if ".experts.4.down_proj" in tensor else stored
        for tensor, stored in checkpoint.tensors.items()
    }
    loader = Loader(spec, checkpoint, torch.float32, CPU, expand, False, False, None, None)
    loader.ahead.ahead_bytes = 1 << 20
    with pytest.raises(CheckpointError, match=r"experts\.4\.down_proj"), loader.ahead.readers, checkpoint:
        loader.load()


@pytest.mark.parametrize("quantized", ["awq", "fp8", "gptq-ordered"])
def test_loading_holds_the_stored_bytes_of_one_matrix_and_a_tile(quantized: str, tmp_path: Path) -> None:
    """Of a matrix of 24 million weights, which in bfloat16 alone would take 48 MB."""
    rows, columns = 2048, 12288
    tensor = TensorSpec(name="layers.0.down", shape=(rows, columns), hf_name="m.weight", gguf_name="", linear=True)
    made = FORMATS[quantized]
    quantization = describe_config({**TINY, "quantization_config": dict(made.config)}).quantization
    assert quantization is not None
    packing = packing_of(quantization, tensor, "bfloat16")
    assert packing is not None
    types = {"I32": torch.int32, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    parts: dict[str, torch.Tensor] = {}
    for part in stored_parts(packing, rows, columns):
        parts[f"m.{part.name}"] = torch.zeros(part.shape, dtype=types[part.layout])
    if "m.qzeros" in parts:
        parts["m.qzeros"].fill_(0x77777777)
    if "m.g_idx" in parts:
        parts["m.g_idx"] = torch.randperm(columns, dtype=torch.int32) // 32
    file = tmp_path / "one.safetensors"
    save_file(parts, file)
    raw = sum(part.nbytes for part in parts.values())
    del parts
    headers = safetensors.read_headers((file,))
    stored, _ = find_packed(tensor, packing, headers)
    assert stored is not None
    assert stored.packed is not None
    layout = scaled_layout(stored.packed.packing, tensor, stored)
    matrix = ScaledMatrix(layout, rows, columns, CPU)
    for plane in (matrix.codes, matrix.scales, matrix.zeros):
        if plane is not None:
            plane.view(torch.uint8).zero_()
    held, checkpoint = stored.packed, Checkpoint(headers, "safetensors")

    def read(part: StoredTensor) -> torch.Tensor:
        numbers = torch.from_numpy(checkpoint.read(part.name))
        return numbers.view(types[part.layout]).view(part.shape)

    with PeakMemory() as peak, checkpoint:
        PackedSource(held.packing, held.parts, layout, rows, columns, read).fill(matrix, 0)
    assert peak.grown_bytes < raw + STAGING_BYTES
