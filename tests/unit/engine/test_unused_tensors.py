"""Tensors of a GGUF file that no family claims: refused by name before anything is planned, on either device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model
from holdfast.errors import CheckpointError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        "blk.1.attn_q_norm.weight",
        "blk.1.ffn_down.bias",
        "blk.0.attn_output.scale",
        "output_norm.bias",
        "output.bias",
        "rope_factors_long.weight",
        "dense_2.weight",
    ],
)
def test_what_nobody_claims_is_refused_by_name(tmp_path: Path, device: str, name: str) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", also=(name,))
    with pytest.raises(CheckpointError) as caught:
        find_model(EngineConfig(model=str(tmp_path / "model.gguf"), device=device))
    assert caught.value.code == "HF230"
    assert caught.value.found == name
    assert "1 tensor" in caught.value.message


def test_many_are_counted(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", also=tuple(f"blk.1.other_{number}.weight" for number in range(9)))
    with pytest.raises(CheckpointError, match="9 tensors"):
        find_model(EngineConfig(model=str(tmp_path / "model.gguf")))


def test_encoders_beside_a_decoder_and_biases_in_all_layers_are_no_reason(tmp_path: Path) -> None:
    biases = tuple(f"blk.{layer}.{name}.bias" for layer in range(2) for name in ("attn_q", "attn_output"))
    write_tiny_gguf(tmp_path / "model.gguf", also=(*biases, "v.patch_embd.weight", "mm.0.bias", "a.conv1d.1.weight"))
    names = {tensor.name for tensor in find_model(EngineConfig(model=str(tmp_path / "model.gguf"))).spec.tensors}
    assert {"layers.0.q_bias", "layers.1.o_bias"} <= names


def test_random_weights_ask_for_no_tensors(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", also=("output.bias",))
    assert find_model(EngineConfig(model=str(tmp_path / "model.gguf"), load_format="dummy")).spec.runnable
