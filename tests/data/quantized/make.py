"""Writes by_their_tools.safetensors: small matrices as the formats' own tools store them, and what the same tools read
back. Not run by tests. In an environment of its own, with torch and transformers:

    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2
    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1      unpacked to DIR/autoawq and DIR/auto_gptq
    python make.py DIR
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, COLUMNS = 32, 64
found: dict[str, torch.Tensor] = {}
configs: dict[str, Any] = {}


def keep(name: str, parts: dict[str, torch.Tensor], read: torch.Tensor, config: dict[str, Any]) -> None:
    assert read.shape == (ROWS, COLUMNS), read.shape
    found.update({f"{name}/{part}": tensor.contiguous() for part, tensor in parts.items()})
    found[f"{name}/read"] = read.contiguous()
    configs[name] = config


def weight(seed: int) -> torch.Tensor:
    return torch.randn((ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed)) * 0.3


def module(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def min_max(numbers: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros), both [rows, groups]."""
    groups = numbers.view(ROWS, -1, group)
    if symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round().clamp(1, 2**bits - 1)


def awq(folder: Path) -> None:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules[name] = types.ModuleType(name)
    packing = module(folder / "awq/utils/packing_utils.py", "awq.utils.packing_utils")
    for name, values in (
        ("module", {"try_import": lambda _: (None, "")}),
        ("utils", {"get_best_device": lambda: "cpu"}),
    ):
        sys.modules[f"awq.utils.{name}"] = types.SimpleNamespace(**values)  # type: ignore[assignment]
    gemm = module(folder / "awq/modules/linear/gemm.py", "awq.modules.linear.gemm")
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight(1)
    scales, zeros = min_max(linear.weight.data, 32, 4, False)
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    read = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, 32).t()
    keep("awq", parts, read, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})


def gptq(folder: Path) -> None:
    qlinear = module(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")
    for bits, symmetric, ordered in ((4, True, False), (4, False, True), (8, True, True), (8, False, False)):
        name = f"gptq-{bits}{'' if symmetric else '-asymmetric'}{'-ordered' if ordered else ''}"
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False).half()
        numbers, index = weight(bits), torch.arange(COLUMNS) // 32
        if ordered:
            index = index[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3))]
        linear.weight.data = numbers.half()
        sorted_numbers = numbers[:, index.argsort(stable=True)]
        scales, zeros = min_max(sorted_numbers, 32, bits, symmetric)
        made = qlinear.QuantLinear(bits, 32, COLUMNS, ROWS, False)
        made.pack(linear, scales.half(), zeros.half(), index.int())
        parts = {
            "qweight": made.qweight,
            "qzeros": made.qzeros,
            "scales": made.scales.half(),
            "g_idx": made.g_idx.int(),
        }
        made.scales = made.scales.float()
        read = made(torch.eye(COLUMNS)).t()
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "desc_act": ordered}
        keep(name, parts, read, config)


def compressed() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    bytes_of_rows = {"num_bits": 8, "type": "int", "strategy": "channel"}
    integers: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "w4a16": ("pack-quantized", integers, None),
        "w4a16-asymmetric": ("pack-quantized", {**integers, "symmetric": False}, None),
        "w4a16-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, None),
        "w8a16": ("pack-quantized", {**integers, "num_bits": 8, "symmetric": False}, None),
        "w8a8": ("int-quantized", bytes_of_rows, {"num_bits": 8, "dynamic": True}),
        "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
        "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
        "fp8-block": (
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}, None
        ),
    }  # fmt: skip
    for seed, (name, (form, weights, inputs)) in enumerate(cases.items()):
        numbers, args = weight(seed), QuantizationArgs(**weights)
        strategy = weights["strategy"]
        groups = {
            "group": lambda x: x.view(ROWS, -1, 32),
            "channel": lambda x: x.view(ROWS, 1, -1),
            "tensor": lambda x: x.view(1, 1, -1),
            "block": lambda x: x.view(ROWS // 16, 16, -1, 32).transpose(1, 2).flatten(2),
        }[strategy](numbers)
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        if strategy == "tensor":
            scales, zeros = scales.view(1), zeros.view(1)
        given = args if inputs is None else QuantizationArgs(**inputs)
        scheme = QuantizationScheme(
            targets=["Linear"], weights=args, input_activations=None if inputs is None else given
        )
        state = {
            "weight": numbers,
            "weight_scale": scales.to(torch.bfloat16 if strategy in ("group", "channel") else torch.float32),
        }
        if not args.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8)
        tool = BaseCompressor.get_value_from_registry(form)
        parts = tool.compress(dict(state), scheme)
        wide = {part: value.float() if part == "weight_scale" else value for part, value in parts.items()}
        read = tool.decompress(wide, scheme)["weight"].float()
        shape = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        keep(
            name,
            parts,
            read,
            {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": shape}},
        )


def bitsandbytes() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for nested in (True, False):
        name = "nf4-nested" if nested else "nf4"
        packed, state = quantize_4bit(weight(9), quant_type="nf4", compress_statistics=nested)
        parts = {f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        keep(
            name,
            {"weight": packed, **parts},
            dequantize_4bit(packed, state),
            {**config, "bnb_4bit_use_double_quant": nested},
        )


if __name__ == "__main__":
    tools = Path(sys.argv[1])
    with torch.inference_mode():
        awq(tools / "autoawq")
        gptq(tools / "auto_gptq")
        compressed()
        bitsandbytes()
    save_file(found, Path(__file__).with_name("by_their_tools.safetensors"), metadata={"configs": json.dumps(configs)})
