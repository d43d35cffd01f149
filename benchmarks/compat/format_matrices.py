"""Single matrices that the formats' own tools pack, read by those tools and by Holdfast: the same numbers, bit for bit?

    PYTHONPATH=src:SOURCE python -m benchmarks.compat.format_matrices [RESULTS.json]

Runs in an environment with what is installed of compressed-tensors, bitsandbytes, AutoAWQ and GPTQModel (whose source
may be in SOURCE, unbuilt: its torch layers need no kernels); what is missing is said. Each tool packs and unpacks with
its own code; Holdfast reads the packed tensors from a file, as it loads a model. Rows of zeros, single large
weights, rows a thousand times as large as others, and shapes that no tile divides are among them. No model is run:
`format_tools.py` does that.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROWS, COLUMNS = 96, 192
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip

Made = tuple[str, dict[str, torch.Tensor], dict[str, Any], torch.Tensor]
"""What it is called, the packed parts, the quantization_config, and what the tool itself unpacks."""


def weights(dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))
    drawn *= torch.logspace(-3, 1, ROWS)[:, None]
    drawn[0], drawn[1, 0] = 0, 50
    return drawn.to(dtype)


def read(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """By Holdfast, in float32."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from holdfast.checkpoints import packing_of
    from holdfast.checkpoints.formats import safetensors
    from holdfast.checkpoints.validation.packed_parts import find_packed
    from holdfast.execution.weights.packed import PackedSource
    from holdfast.footprint.layouts import scaled_layout
    from holdfast.models import TensorSpec, describe_config

    quantization = describe_config({**MODEL, "quantization_config": config}).quantization
    tensor = TensorSpec(name="layers.0.q", shape=(ROWS, COLUMNS), hf_name="m.weight", gguf_name="", linear=True)
    assert quantization is not None
    packing = packing_of(quantization, tensor, "bfloat16")
    assert packing is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.safetensors"
        save_file({f"m.{name}": part.contiguous() for name, part in parts.items()}, file)
        stored, missing = find_packed(tensor, packing, safetensors.read_headers((file,)))
        if stored is None or stored.packed is None:
            raise SystemExit(f"{missing} is missing")
        layout = scaled_layout(stored.packed.packing, tensor, stored)
        with safe_open(file, "pt") as opened:
            source = PackedSource(
                stored.packed.packing,
                stored.packed.parts,
                layout,
                ROWS,
                COLUMNS,
                lambda one: opened.get_tensor(one.name),
            )
            source.expand(found := torch.full((ROWS, COLUMNS), torch.nan))
    return found


def compressed_tensors() -> Iterator[Made]:
    from compressed_tensors.compressors.naive_quantized.base import (  # type: ignore[import-not-found]
        NaiveQuantizationCompressor,
    )
    from compressed_tensors.compressors.pack_quantized.base import (  # type: ignore[import-not-found]
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-not-found]
    from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found]

    group: dict[str, Any] = {"strategy": "group", "group_size": 32}
    channel: dict[str, Any] = {"strategy": "channel"}
    tensor: dict[str, Any] = {"strategy": "tensor"}
    block: dict[str, Any] = {"strategy": "block", "block_structure": [64, 64]}
    schemes = [
        *((PackedQuantizationCompressor, "pack-quantized",
           {"num_bits": bits, "type": "int", "symmetric": even, **reach})
          for bits, even, reach in itertools.product((4, 8), (True, False), (group, channel))),
        *((NaiveQuantizationCompressor, "int-quantized", {"num_bits": 8, "type": "int", "symmetric": even, **reach})
          for even, reach in itertools.product((True, False), (group, channel, tensor))),
        *((NaiveQuantizationCompressor, "float-quantized", {"num_bits": 8, "type": "float", **reach})
          for reach in (group, channel, tensor, block)),
    ]  # fmt: skip
    for (compressor, form, told), dtype in itertools.product(schemes, DTYPES):
        args = QuantizationArgs(**told)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = weights(dtype)
        groups = _in_groups(weight, told)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        if told["strategy"] in ("channel", "tensor"):
            scale, zero = (one.view(-1, 1) if told["strategy"] == "channel" else one.view(1) for one in (scale, zero))
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        parts = compressor.compress(given, scheme)
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        even = "" if told.get("symmetric", True) else ", with zero points"
        name = f"{form} of {told['num_bits']} bits, {told['strategy']}{even}, {str(dtype).removeprefix('torch.')}"
        yield name, parts, config, compressor.decompress(dict(parts), scheme)["weight"]


def _in_groups(weight: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
    """What shares a scale, side by side."""
    if told["strategy"] == "tensor":
        return weight.reshape(1, -1)
    if told["strategy"] == "channel":
        return weight
    if told["strategy"] == "group":
        return weight.reshape(ROWS, -1, told["group_size"])
    high, wide = told["block_structure"]
    rows, columns = -(-ROWS // high) * high, -(-COLUMNS // wide) * wide
    padded = torch.zeros(rows, columns, dtype=weight.dtype)
    padded[:ROWS, :COLUMNS] = weight
    return padded.reshape(rows // high, high, columns // wide, wide).permute(0, 2, 1, 3).flatten(2)


def bitsandbytes() -> Iterator[Made]:
    from bitsandbytes import functional  # type: ignore[import-not-found]

    for double, dtype in itertools.product((False, True), DTYPES):
        packed, state = functional.quantize_4bit(weights(dtype), quant_type="nf4", compress_statistics=double)
        parts = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
        }
        name = f"NF4{' with double quantization' if double else ''}, {str(dtype).removeprefix('torch.')}"
        yield name, parts, config, functional.dequantize_4bit(packed, state)


def _by_group(size: int, bits: int, *, even: bool, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in float16 and zero points [rows, groups], rounded to nearest."""
    weight, most = weights(torch.float32), 2**bits - 1
    parts = [weight[:, index == number] for number in range(COLUMNS // size)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if even:
        scale = torch.maximum(-low, high) * 2 / most
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        scale = (high - low) / most
        zero = (-low / scale.clamp(min=1e-6)).round().clamp(1, most)
    return scale.clamp(min=1e-6).half(), zero


def autoawq() -> Iterator[Made]:
    from awq.modules.linear.gemm import WQLinear_GEMM  # type: ignore[import-not-found]
    from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]

    for size in (32, 64, 192):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
        scale, zero = _by_group(size, 4, even=False, index=torch.arange(COLUMNS) // size)
        wide, points = scale.float().repeat_interleave(size, 1), zero.repeat_interleave(size, 1)
        codes = (weights(torch.float32) / wide + points).round().clamp(0, 15)
        # It rounds by itself, without a bound: it is given what lies on its codes.
        linear.weight.data = (codes - points) * wide
        made = WQLinear_GEMM.from_linear(linear, 4, size, scales=scale.t().contiguous(), zeros=zero.t().contiguous())
        parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
        config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        unpacked = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size).t()
        yield f"gemm, groups of {size}", parts, config, unpacked


def gptqmodel() -> Iterator[Made]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module  # type: ignore[import-not-found]

    for bits, even, ordered, version in itertools.product((4, 8), (True, False), (False, True), (1, 2)):
        index = torch.arange(COLUMNS) // 32
        if ordered:
            index = index[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(bits))]
        scale, zero = _by_group(32, bits, even=even, index=index)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
        wide, points = scale.float()[:, index], zero[:, index]
        codes = (weights(torch.float32) / wide + points).round().clamp(0, 2**bits - 1)
        linear.weight.data = (codes - points) * wide
        settings: dict[str, Any] = {"bits": bits, "group_size": 32, "sym": even, "desc_act": ordered}
        made = TorchLinear(**settings, in_features=COLUMNS, out_features=ROWS, bias=False, register_buffers=True).eval()
        made.pack_original(linear, scale, zero, index.int())
        unpacked = made.dequantize_weight().t().clone()
        if version == 1:
            convert_gptq_v2_to_v1_format_module(made, SimpleNamespace(bits=bits, pack_dtype=torch.int32, sym=even))
        parts = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        config = {"quant_method": "gptq", "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **settings}
        said = f"{bits} bits, {'sym' if even else 'with zero points'}{', act-order' if ordered else ''}, v{version}"
        yield said, parts, config, unpacked


TOOLS: dict[str, Callable[[], Iterator[Made]]] = {
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "autoawq": autoawq,
    "gptqmodel": gptqmodel,
}


def main(results: str | None = None) -> None:
    rows: list[dict[str, Any]] = []
    for tool, made in TOOLS.items():
        try:
            for name, parts, config, unpacked in made():
                found = read(parts, config).to(unpacked.dtype)
                worst = float((found.float() - unpacked.float()).abs().max())
                off = float((found.float() - weights(torch.float32)).abs().mean() / weights(torch.float32).abs().mean())
                same = bool(torch.equal(found, unpacked))
                rows.append({"tool": tool, "matrix": name, "equal": same, "largest": worst, "from_the_weights": off})
                print(f"{tool:<20}{name:<72}{'equal' if same else f'{worst:.2e}':>10}  {off:.3f} from the weights")
        except ImportError as error:
            print(f"{tool:<20}not installed: {error}")
    if results is not None:
        from benchmarks.compat.format_tools import versions
        from benchmarks.machine import commit, today

        said = {"date": today(), "commit": commit(), "tools": versions(), "matrices": rows}
        Path(results).write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
