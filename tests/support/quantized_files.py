"""Quantized checkpoints written and read back from the definitions of their formats, with numpy and no code of the
project: a folder's plain weights are put into a format, and what the stored bits mean is told as float32.

Slow and plain on purpose: words are taken apart bit group by bit group. Rounds to nearest, which no quantizer of note
does; what matters here is that the stored tensors mean one thing only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file

Array = Any
Parts = dict[str, torch.Tensor]
Encoder = Callable[[Array, numpy.random.Generator], tuple[Parts, Array]]
"""A matrix [out, in] to its stored parts, and the matrix that they mean."""

NF4 = numpy.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=numpy.float32,
)  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    config: Mapping[str, Any]
    encode: Encoder
    inputs: str = "plain"
    """fp8, int8: inputs of the linear layers are rounded."""
    static: float | None = None
    input_group: int = 0
    bound: float | None = None
    """No input counts for more when a scale is chosen."""
    powers: bool = False
    """Scales of inputs are powers of two."""
    modules: Mapping[str, Encoder | None] = field(default_factory=dict)
    """Of module names that contain the key: another encoder, or none."""


def quantize_integers(
    weight: Array, group: int, bits: int, *, symmetric: bool, index: Array | None = None
) -> tuple[Array, Array, Array]:
    """(codes [out, in], scales float16 [out, groups], zeros [out, groups]); `index`: the group of each column."""
    rows, columns = weight.shape
    index = numpy.arange(columns) // group if index is None else index
    groups, most = int(index.max()) + 1, 2**bits - 1
    codes = numpy.zeros((rows, columns), dtype=numpy.int64)
    scales = numpy.zeros((rows, groups), dtype=numpy.float16)
    zeros = numpy.full((rows, groups), 2 ** (bits - 1), dtype=numpy.int64)
    for number in range(groups):
        part = weight[:, index == number]
        low, high = numpy.minimum(part.min(1), 0), numpy.maximum(part.max(1), 0)
        if symmetric:
            scale = (numpy.abs(part).max(1) / (2 ** (bits - 1) - 1)).astype(numpy.float16)
        else:
            scale = ((high - low) / most).astype(numpy.float16)
            # Zero itself cannot be told in GPTQ's first format.
            zeros[:, number] = numpy.clip(numpy.round(-low / scale.astype(numpy.float64)), 1, most)
        scales[:, number] = scale
        steps = part / scale[:, None].astype(numpy.float64)
        codes[:, index == number] = numpy.clip(numpy.round(steps) + zeros[:, number, None], 0, most)
    return codes, scales, zeros


def meaning(codes: Array, scales: Array, zeros: Array, index: Array) -> Array:
    """float32 [out, in] of codes, with scales and zero points [out, groups] and the group of each column."""
    wide = scales.astype(numpy.float32)
    return (codes - zeros[:, index]).astype(numpy.float32) * wide[:, index]


def pack_words(codes: Array, bits: int) -> torch.Tensor:
    """[n, k] along the last axis, the first in the lowest bits: int32 [n, k * bits / 32]."""
    each = 32 // bits
    words = numpy.zeros((codes.shape[0], -(-codes.shape[1] // each)), dtype=numpy.uint32)
    for column in range(codes.shape[1]):
        words[:, column // each] |= codes[:, column].astype(numpy.uint32) << numpy.uint32(bits * (column % each))
    return torch.from_numpy(words.view(numpy.int32).copy())


def unpack_words(words: torch.Tensor, bits: int, count: int) -> Array:
    each, stored = 32 // bits, words.numpy().view(numpy.uint32)
    found = numpy.zeros((stored.shape[0], count), dtype=numpy.int64)
    for column in range(count):
        found[:, column] = stored[:, column // each] >> numpy.uint32(bits * (column % each)) & numpy.uint32(2**bits - 1)
    return found


def awq(group: int = 32, *, symmetric: bool = False) -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        rows, columns = weight.shape
        codes, scales, zeros = quantize_integers(weight, group, 4, symmetric=symmetric)
        mixed = numpy.arange(rows).reshape(-1, 8)[:, list(AWQ_ORDER)].reshape(-1)
        parts = {"qweight": pack_words(codes.T[:, mixed], 4), "scales": torch.from_numpy(scales.T.copy())}
        if not symmetric:
            parts["qzeros"] = pack_words(zeros.T[:, mixed], 4)
        read = numpy.zeros((columns, rows), dtype=numpy.int64)
        read[:, mixed] = unpack_words(parts["qweight"], 4, rows)
        points = numpy.full((len(scales.T), rows), 8)
        if not symmetric:
            points[:, mixed] = unpack_words(parts["qzeros"], 4, rows)
        return parts, meaning(read.T, scales, points.T, numpy.arange(columns) // group)

    return encode


def gptq(
    group: int = 32,
    bits: int = 4,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    version: int = 1,
    index: bool = True,
) -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        owner = numpy.arange(columns) // size
        if ordered:
            owner = random.permutation(owner)
        codes, scales, zeros = quantize_integers(weight, size, bits, symmetric=symmetric, index=owner)
        kept = (zeros - (version == 1)) % 2**bits
        parts = {
            "qweight": pack_words(codes, bits).t().contiguous(),
            "qzeros": pack_words(kept.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        if index:
            parts["g_idx"] = torch.from_numpy(owner.astype(numpy.int32))
        read = unpack_words(parts["qweight"].t().contiguous(), bits, columns)
        points = (unpack_words(parts["qzeros"], bits, rows) + (version == 1)) % 2**bits
        return parts, meaning(read, scales, points.T, owner)

    return encode


def pack_quantized(group: int = 32, bits: int = 4, *, symmetric: bool = True, ordered: bool = False) -> Encoder:
    """compressed-tensors: signed codes, stored with 2 ** (bits - 1) added."""

    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        owner = numpy.arange(columns) // size
        if ordered:
            owner = random.permutation(owner)
        codes, scales, zeros = quantize_integers(weight, size, bits, symmetric=symmetric, index=owner)
        rounded = torch.from_numpy(scales.astype(numpy.float32)).to(torch.bfloat16)
        parts = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": rounded,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_words(zeros.T, bits).t().contiguous()
        if ordered:
            parts["weight_g_idx"] = torch.from_numpy(owner.astype(numpy.int32))
        read = unpack_words(parts["weight_packed"], bits, columns)
        points = zeros
        if not symmetric:
            points = unpack_words(parts["weight_zero_point"].t().contiguous(), bits, rows).T
        return parts, meaning(read, rounded.float().numpy(), points, owner)

    return encode


def int8(granularity: str = "channel", *, symmetric: bool = True, static: float | None = None) -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        largest = numpy.abs(weight).max(1, keepdims=True) if granularity == "channel" else numpy.abs(weight).max()
        scale = torch.from_numpy(numpy.asarray(largest / 127, dtype=numpy.float32).reshape(-1, 1)).to(torch.bfloat16)
        wide = scale.float().numpy()
        zero = numpy.zeros(wide.shape) if symmetric else random.integers(-20, 20, wide.shape)
        codes = numpy.clip(numpy.round(weight / wide) + zero, -128, 127).astype(numpy.int8)
        if granularity == "tensor":
            scale = scale.view(1)
        parts = {"weight": torch.from_numpy(codes), "weight_scale": scale}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zero.astype(numpy.int8))
        if static is not None:
            parts["input_scale"] = torch.tensor([static])
        return parts, (codes.astype(numpy.float32) - zero.astype(numpy.float32)) * wide

    return encode


def fp8(
    granularity: str = "tensor",
    *,
    block: tuple[int, int] = (32, 32),
    static: float | None = None,
    scales: torch.dtype = torch.float32,
    name: str = "weight_scale",
) -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[granularity]
        scale = numpy.zeros((-(-rows // high), -(-columns // wide)), dtype=numpy.float32)
        spread = numpy.zeros(weight.shape, dtype=numpy.float32)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                part = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
                one = torch.tensor(float(numpy.abs(weight[part]).max()) / 448).to(scales)
                scale[row, column] = float(one)
                spread[part] = float(one)
        codes = torch.from_numpy(weight.astype(numpy.float32) / spread).to(torch.float8_e4m3fn)
        stored = torch.from_numpy(scale).to(scales)
        parts = {"weight": codes, name: stored.view(()) if granularity == "tensor" else stored}
        if static is not None:
            parts["input_scale"] = torch.tensor(static)
        return parts, _fp8_values(codes) * spread

    return encode


def _fp8_values(codes: torch.Tensor) -> Array:
    """By sign, four bits of exponent and three of mantissa."""
    stored = codes.view(torch.uint8).numpy().astype(numpy.int64)
    sign, exponent, mantissa = stored >> 7, stored >> 3 & 15, stored & 7
    value = numpy.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return (numpy.where(sign == 1, -value, value)).astype(numpy.float32)


def nf4(*, nested: bool = True) -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        rows, columns = weight.shape
        blocks = weight.astype(numpy.float32).reshape(-1, 64)
        absmax = numpy.abs(blocks).max(1)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns],
        }  # fmt: skip
        parts: Parts = {"weight.quant_map": torch.from_numpy(NF4.copy())}
        if nested:
            offset = float(absmax.mean())
            table = numpy.linspace(-1, 1, 256).astype(numpy.float32)
            centred = numpy.pad(absmax - numpy.float32(offset), (0, -len(absmax) % 256)).reshape(-1, 256)
            outer = numpy.abs(centred).max(1).astype(numpy.float32)
            small = numpy.round((centred / outer[:, None] + 1) * 127.5).astype(numpy.uint8)
            absmax = (table[small] * outer[:, None]).reshape(-1)[: len(absmax)] + numpy.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {
                "weight.absmax": torch.from_numpy(small.reshape(-1)[: len(absmax)].copy()),
                "weight.nested_absmax": torch.from_numpy(outer),
                "weight.nested_quant_map": torch.from_numpy(table),
            }
        else:
            parts["weight.absmax"] = torch.from_numpy(absmax)
        middles = (NF4[1:] + NF4[:-1]) / 2
        codes = numpy.searchsorted(middles, (blocks / absmax[:, None]).reshape(-1))
        parts["weight"] = torch.from_numpy((codes[0::2] << 4 | codes[1::2]).astype(numpy.uint8)).view(-1, 1)
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        packed, read = parts["weight"].numpy().reshape(-1), numpy.zeros(rows * columns, dtype=numpy.float32)
        read[0::2], read[1::2] = NF4[packed >> 4], NF4[packed & 15]
        read *= absmax.repeat(64)
        return parts, read.reshape(rows, columns)

    return encode


def bnb_int8() -> Encoder:
    def encode(weight: Array, random: numpy.random.Generator) -> tuple[Parts, Array]:
        largest = numpy.abs(weight).max(1).astype(numpy.float32)
        codes = numpy.clip(numpy.round(weight / largest[:, None] * 127), -127, 127).astype(numpy.int8)
        parts = {
            "weight": torch.from_numpy(codes),
            "SCB": torch.from_numpy(largest),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return parts, codes.astype(numpy.float32) * (largest[:, None] / numpy.float32(127))

    return encode


def compressed(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, form: str = "pack-quantized", **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        **more,
    }


def write_quantized(source: Path, target: Path, made: Format, *, seed: int = 0, head: bool = False) -> dict[str, Any]:
    """The plain checkpoint of `source` in a format, at `target`; returns what every changed matrix means now, by its
    plain name. Linear layers are taken, the head only if asked, embeddings and routers never."""
    random = numpy.random.default_rng(seed)
    stored: Parts = {}
    means: dict[str, Array] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            linear = (tensor.dim() == 2 and module.endswith("_proj")) or (head and module == "lm_head")
            encode = next((found for part, found in made.modules.items() if part in module), made.encode)
            if not linear or encode is None:
                stored[name] = tensor
                continue
            parts, means[name] = encode(tensor.double().numpy(), random)
            stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": dict(made.config)}))
    return means


E2M1 = numpy.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(stack: Array) -> tuple[Parts, Array]:
    """Of matrices [experts, out, in]: 32 inputs share a power of two, the first of two codes in the lower half."""
    experts, rows, columns = stack.shape
    pieces = stack.reshape(experts, rows, columns // 32, 32).astype(numpy.float64)
    exponents = numpy.floor(numpy.log2(numpy.abs(pieces).max(-1))).astype(numpy.int64) - 2
    scaled = pieces / 2.0 ** exponents[..., None]
    codes = numpy.abs(numpy.abs(scaled)[..., None] - E2M1).argmin(-1) | (scaled < 0).astype(numpy.int64) << 3
    parts = {
        "blocks": torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(numpy.uint8)),
        "scales": torch.from_numpy((exponents + 127).astype(numpy.uint8)),
    }
    means = E2M1[codes & 7] * numpy.where(codes & 8, -1.0, 1.0) * 2.0 ** exponents[..., None]
    return parts, means.reshape(stack.shape).astype(numpy.float32)


def write_mxfp4(source: Path, target: Path, *, alternating: bool = False) -> dict[str, Any]:
    """As `write_quantized`, of a model whose experts lie one by one: in stacks, as gpt-oss has them. `alternating`: the
    rows of gate and up take turns, as there."""
    plain = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    modules = sorted({name.partition(".0.gate_proj")[0] for name in plain if ".experts.0.gate_proj" in name})
    means: dict[str, Array] = {}
    stored = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for module in modules:
        count = sum(name.startswith(f"{module}.") and name.endswith(".gate_proj.weight") for name in plain)
        gate, up, down = (
            numpy.stack([plain[f"{module}.{expert}.{part}_proj.weight"].numpy() for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        inner = gate.shape[1]
        joined = numpy.concatenate((gate, up), axis=1)
        turns = numpy.arange(2 * inner).reshape(2, inner).T.reshape(-1) if alternating else numpy.arange(2 * inner)
        for name, stack in (("gate_up", joined[:, turns]), ("down", down)):
            parts, read = mxfp4(stack)
            stored |= {f"{module}.{name}_proj_{part}": value.contiguous() for part, value in parts.items()}
            for expert in range(count):
                if name == "down":
                    means[f"{module}.{expert}.down_proj.weight"] = read[expert]
                    continue
                whole = numpy.empty_like(read[expert])
                whole[turns] = read[expert]
                means[f"{module}.{expert}.gate_proj.weight"] = whole[:inner].copy()
                means[f"{module}.{expert}.up_proj.weight"] = whole[inner:].copy()
    target.mkdir(parents=True, exist_ok=True)
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.gate", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return means
