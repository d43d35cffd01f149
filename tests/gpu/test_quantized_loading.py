"""Quantized matrices unpacked on a GPU: the same bytes as on a CPU, format by format; dummies of the same layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import quantized_files as written
import torch
from safetensors.torch import save_file

from holdfast.checkpoints import Checkpoint, StoredTensor, packing_of
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.validation.packed_parts import find_packed
from holdfast.execution.weights.dummy import fill_dummy_codes
from holdfast.execution.weights.packed import PackedSource
from holdfast.execution.weights.quantize import fill_quantized
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.layouts import quantized_layout, scaled_layout
from holdfast.models import TensorSpec, describe_config

ROWS, COLUMNS = 1336, 1152
"""More than one tile of rows, and a last one that is short."""
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
FORMATS: dict[str, tuple[dict[str, Any], written.Encoder]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, written.awq(128)),
    "gptq": (GPTQ, written.gptq(symmetric=False, ordered=True)),
    "gptq-8": ({**GPTQ, "bits": 8}, written.gptq(bits=8, symmetric=False, ordered=True)),
    "w4a16": (
        written.compressed({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        written.pack_quantized(64, symmetric=False),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, written.fp8(static=0.5)),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        written.fp8("block", block=(128, 128), name="weight_scale_inv"),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, written.nf4()),
}
TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
TENSOR = TensorSpec(name="layers.0.q", shape=(ROWS, COLUMNS), hf_name="m.weight", gguf_name="", linear=True)
DEVICES = (torch.device("cpu"), torch.device("cuda"))


def planes(matrix: ScaledMatrix) -> list[torch.Tensor]:
    parts = (matrix.codes, matrix.scales, matrix.zeros, matrix.order, matrix.inputs)
    return [part.view(torch.uint8).cpu() for part in parts if part is not None]


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_unpacked_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    config, encode = FORMATS[name]
    random = numpy.random.default_rng(4)
    parts, means = encode(random.normal(size=(ROWS, COLUMNS)), random)
    save_file({f"m.{part}": value.contiguous() for part, value in parts.items()}, tmp_path / "one.safetensors")
    headers = safetensors.read_headers((tmp_path / "one.safetensors",))
    quantization = describe_config({**LLAMA, "quantization_config": config}).quantization
    assert quantization is not None
    packing = packing_of(quantization, TENSOR, "bfloat16")
    assert packing is not None
    stored, _ = find_packed(TENSOR, packing, headers)
    assert stored is not None
    assert stored.packed is not None
    held, layout = stored.packed, scaled_layout(stored.packed.packing, TENSOR, stored)
    made = []
    for device in DEVICES:
        with Checkpoint(headers, "safetensors") as checkpoint:

            def read(part: StoredTensor, device: torch.device = device, checkpoint: Checkpoint = checkpoint) -> Any:
                return torch.from_numpy(checkpoint.read(part.name)).view(TYPES[part.layout]).view(part.shape).to(device)

            matrix = ScaledMatrix(layout, ROWS, COLUMNS, device)
            PackedSource(held.packing, held.parts, layout, ROWS, COLUMNS, read).fill(matrix, 0)
        made.append(matrix)
    for one, other in zip(*(planes(matrix) for matrix in made), strict=True):
        assert torch.equal(one, other)
    found = torch.full((ROWS, COLUMNS), float("nan"), device="cuda")
    made[1].dequantize(0, ROWS, found)
    torch.testing.assert_close(found.cpu(), torch.from_numpy(means), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_weights_are_quantized_and_made_up_on_the_gpu(kind: Any) -> None:
    layout = quantized_layout(TENSOR, kind)
    assert layout is not None
    weights = torch.randn((ROWS, COLUMNS), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    made = []
    for device in DEVICES:
        matrix = ScaledMatrix(layout, ROWS, COLUMNS, device)
        fill_quantized(matrix, 0, weights.to(device), "m")
        made.append(torch.empty((ROWS, COLUMNS), device=device))
        matrix.dequantize(0, ROWS, made[-1])
    # A GPU divides by a number through its inverse, and adds squares in another order: scales differ in the last bit,
    # and of two nearly as good either may be taken.
    alike = torch.isclose(made[0], made[1].cpu(), rtol=1e-5, atol=0).float().mean()
    assert float(alike) > 0.999
    matrix = ScaledMatrix(layout, ROWS, COLUMNS, DEVICES[1])
    fill_dummy_codes(matrix, 0, TENSOR)
    numbers = torch.full((ROWS, COLUMNS), float("nan"), device="cuda")
    matrix.dequantize(0, ROWS, numbers)
    assert float(numbers.std()) == pytest.approx(COLUMNS**-0.5, rel=0.1)
