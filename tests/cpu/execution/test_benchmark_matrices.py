"""Matrices of the GPU's benchmarks, which would otherwise quietly measure other numbers than they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_kernels_power, gpu_worker, random_checkpoints

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", [10, 9, 8])
def test_expanded_codes_are_rounded_to_the_bits_that_are_named(bits: int) -> None:
    torch.manual_seed(0)
    whole = gpu_kernels_power.awq(torch.float16)(64, 256, CPU)
    rounded = gpu_kernels_power.significant(whole.clone(), bits)
    fraction = torch.frexp(rounded.float()).mantissa * 2**bits
    assert torch.equal(fraction, fraction.round())
    apart = (rounded.float() - whole.float()).abs()
    assert (apart <= whole.float().abs() * 2.0**-bits).all()
    assert apart.max() > 0


def test_an_unquantized_file_has_the_matrices_of_a_quantized_one(tmp_path: Path) -> None:
    tiny = gpu_worker.LLAMA | {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    random_checkpoints.write_bf16(tiny, tmp_path / "bf16")
    random_checkpoints.write_fp8(tiny, tmp_path / "fp8")
    places, theirs = (
        json.loads((tmp_path / kind / "model.safetensors.index.json").read_text())["weight_map"]
        for kind in ("bf16", "fp8")
    )
    assert places == {name: place for name, place in theirs.items() if not name.endswith("_scale")}
    layers = []
    for layer in range(2):
        with safe_open(tmp_path / "bf16" / f"model-{layer:05}.safetensors", "pt") as file:
            layers.append(file.get_tensor(f"model.layers.{layer}.mlp.down_proj.weight"))
    assert layers[0].dtype == torch.bfloat16
    assert layers[0].float().std() == pytest.approx(random_checkpoints.SPREAD, rel=0.03)
    assert not torch.equal(*layers)
