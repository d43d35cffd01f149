"""Matrices as quantizers store them: files of the formats' own tools against what those tools read, broken ones against
a refusal that names the tensor, and weights quantized while loading against float64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import quantized_files as written
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from holdfast.checkpoints import Checkpoint, Packing, StoredTensor, packing_of
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.validation.packed_parts import find_packed
from holdfast.errors import CheckpointError
from holdfast.execution import native
from holdfast.execution.layers.experts import Groups, QuantizedStack
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.layers.rounding import rounded_inputs
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.packed import PackedSource, _awq_rows
from holdfast.execution.weights.quantize import fill_quantized
from holdfast.execution.weights.scaled_matrix import ScaledMatrix, fp8_values
from holdfast.footprint.cpu import weights_bytes
from holdfast.footprint.layouts import Quantize, scaled_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import TensorSpec, describe_config

CPU = torch.device("cpu")
BY_TOOLS = Path(__file__).parents[2] / "data" / "quantized" / "by_their_tools.safetensors"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def source_of(
    folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any], shape: tuple[int, int]
) -> PackedSource:
    """By way of a file, its header and the config, as a model's matrix goes."""
    file = folder / "one.safetensors"
    save_file({f"m.{name}": part.contiguous() for name, part in parts.items()}, file)
    headers = safetensors.read_headers((file,))
    quantization = describe_config({**LLAMA, "quantization_config": config}).quantization
    assert quantization is not None
    tensor = TensorSpec(name="layers.0.q", shape=shape, hf_name="m.weight", gguf_name="", linear=True)
    packing = packing_of(quantization, tensor, "bfloat16")
    assert packing is not None
    stored, missing = find_packed(tensor, packing, headers)
    if stored is None:
        raise CheckpointError(f"the checkpoint lacks {missing}")
    assert stored.packed is not None
    assert stored.nbytes == sum(part.nbytes for part in stored.packed.parts.values())
    with Checkpoint(headers, "safetensors") as checkpoint:

        def read(part: StoredTensor) -> torch.Tensor:
            return torch.from_numpy(checkpoint.read(part.name)).view(TYPES[part.layout]).view(part.shape)

        layout = scaled_layout(stored.packed.packing, tensor, stored)
        return PackedSource(stored.packed.packing, stored.packed.parts, layout, *shape, read)


def poisoned(layout: ScaledLayout, rows: int, columns: int) -> ScaledMatrix:
    matrix = ScaledMatrix(layout, rows, columns, CPU)
    matrix.codes.view(torch.uint8).fill_(0xAA)
    matrix.scales.fill_(float("nan") if matrix.scales.is_floating_point() else 200)
    return matrix


def numbers_of(source: PackedSource) -> torch.Tensor:
    """Below other rows of a larger matrix, and expanded: which must be the same."""
    before = max(3, source.layout.group_rows) if not source.layout.ordered else 0
    matrix = poisoned(source.layout, before + source.rows, source.columns)
    source.fill(matrix, before)
    found = torch.full((source.rows, source.columns), float("nan"))
    matrix.dequantize(before, before + source.rows, found)
    expanded = torch.full_like(found, float("nan"))
    source.expand(expanded)
    assert torch.equal(found, expanded)
    return found


# What the formats' own tools write

with safe_open(BY_TOOLS, "pt") as tools:
    CONFIGS: dict[str, Any] = json.loads(tools.metadata()["configs"])


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_the_tools_are_read_as_the_tools_read_them(name: str, tmp_path: Path) -> None:
    with safe_open(BY_TOOLS, "pt") as file:
        parts = {key.partition("/")[2]: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118
    expected = parts.pop("read")
    found = numbers_of(source_of(tmp_path, parts, CONFIGS[name], tuple(expected.shape)))
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


def test_mxfp4_of_gpt_oss() -> None:
    """blocks [rows, columns / 32, 16]: the even elements in the lower halves of bytes; powers of two beside them."""
    random = numpy.random.default_rng(1)
    codes, powers = random.integers(0, 16, (6, 96)), random.integers(110, 135, (6, 3)).astype(numpy.uint8)
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(numpy.uint8).reshape(6, 3, 16)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = numpy.zeros((6, 96), dtype=numpy.float32)
    for row in range(6):
        for column in range(96):
            code = int(codes[row, column])
            expected[row, column] = (
                (-1) ** (code >> 3) * table[code & 7] * 2.0 ** (int(powers[row, column // 32]) - 127)
            )
    tensors = {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(powers)}
    headers = {
        name: StoredTensor(f"m.{name}", tuple(one.shape), "U8", Path("m"), 0, one.numel())
        for name, one in tensors.items()
    }
    tensor = TensorSpec(name="layers.0.experts.up", shape=(6, 96), hf_name="m", gguf_name="", linear=True)
    layout = scaled_layout(Packing("mxfp4"), tensor)
    source = PackedSource(Packing("mxfp4"), headers, layout, 6, 96, lambda part: tensors[part.name[2:]])
    assert torch.equal(numbers_of(source), torch.from_numpy(expected))
    tensors["scales"][3, 1] = 255
    with pytest.raises(CheckpointError, match=r"m\.scales"):
        PackedSource(Packing("mxfp4"), headers, layout, 6, 96, lambda part: tensors[part.name[2:]])


def test_every_number_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = fp8_values(codes.view(torch.float8_e4m3fn))
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        if (exponent, mantissa) != (15, 7):  # NaN, which loading refuses.
            size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
            assert float(found[code]) == (-size if code >> 7 else size)


# Broken files

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
W4A16 = written.compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False})
W8A8 = written.compressed(
    {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}, "int-quantized",
)  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def lost(name: str) -> Callable[[Any], None]:
    return lambda parts: parts.pop(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Any], None]:
    def apply(parts: dict[str, torch.Tensor]) -> None:
        made = change(parts[name])
        parts[name] = parts[name] if made is None else made

    return apply


def told(**state: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(text: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(json.dumps(json.loads(bytes(text.tolist())) | state).encode()), dtype=torch.uint8
        )

    return change


def set_to(value: float) -> Callable[[torch.Tensor], None]:
    return lambda part: part.view(-1)[-1:].fill_(value)


def fp8_nan(codes: torch.Tensor) -> None:
    codes.view(torch.uint8)[1, 2] = 0xFF


STATE = "weight.quant_state.bitsandbytes__nf4"
BROKEN: list[tuple[str, dict[str, Any], written.Encoder, Callable[[Any], None], str]] = [
    ("awq without scales", AWQ, written.awq(), lost("scales"), "m.scales"),
    ("awq without zeros", AWQ, written.awq(), lost("qzeros"), "m.qzeros"),
    ("awq of other groups", AWQ, written.awq(64), lambda _: None, "m.qzeros"),
    ("awq turned", AWQ, written.awq(), changed("qweight", lambda part: part.t()), "m.qweight"),
    ("awq of another type", AWQ, written.awq(), changed("qweight", lambda part: part.long()), "m.qweight"),
    ("awq with NaN", AWQ, written.awq(), changed("scales", set_to(float("nan"))), "m.scales"),
    ("awq with infinity", AWQ, written.awq(), changed("scales", set_to(float("inf"))), "m.scales"),
    ("gptq in another order", GPTQ, written.gptq(ordered=True), lambda _: None, "m.g_idx"),
    ("gptq without its order", {**GPTQ, "desc_act": True}, written.gptq(), lost("g_idx"), "m.g_idx"),
    (
        "gptq with a group too many", {**GPTQ, "desc_act": True}, written.gptq(ordered=True),
        changed("g_idx", set_to(2)), "m.g_idx",
    ),
    (
        "gptq with a group below", {**GPTQ, "desc_act": True}, written.gptq(ordered=True),
        changed("g_idx", set_to(-1)), "m.g_idx",
    ),
    (
        "gptq with uneven groups", {**GPTQ, "desc_act": True}, written.gptq(ordered=True),
        changed("g_idx", lambda part: part.fill_(1)), "m.g_idx",
    ),
    ("gptq that is not symmetric", GPTQ, written.gptq(symmetric=False), lambda _: None, "m.qzeros"),
    ("gptq in its other format", GPTQ, written.gptq(version=2), lambda _: None, "m.qzeros"),
    (
        "gptq with a zero point out of range", {**GPTQ, "sym": False}, written.gptq(symmetric=False),
        changed("qzeros", set_to(-1)), "m.qzeros",
    ),
    ("gptq of other groups", GPTQ, written.gptq(64), lambda _: None, "m.qzeros"),
    ("gptq of other bits", GPTQ, written.gptq(bits=8), lambda _: None, "m.qweight"),
    (
        "w4a16 of another shape", W4A16, written.pack_quantized(symmetric=False),
        changed("weight_shape", set_to(32)), "m.weight_shape",
    ),
    ("w4a16 without zeros", W4A16, written.pack_quantized(), lambda _: None, "m.weight_zero_point"),
    (
        "w4a16 with short scales", W4A16, written.pack_quantized(symmetric=False),
        changed("weight_scale", lambda part: part[:-1]), "m.weight_scale",
    ),
    ("w4a16 of other groups", W4A16, written.pack_quantized(64, symmetric=False), lambda _: None, "m.weight_scale"),
    (
        "w4a16 with NaN", W4A16, written.pack_quantized(symmetric=False),
        changed("weight_scale", set_to(float("nan"))), "m.weight_scale",
    ),
    ("w8a8 without scale", W8A8, written.int8(static=1.0), lost("weight_scale"), "m.weight_scale"),
    ("w8a8 without the inputs' scale", W8A8, written.int8(), lambda _: None, "m.input_scale"),
    ("w8a8 with a scale of zero for inputs", W8A8, written.int8(static=0.0), lambda _: None, "m.input_scale"),
    ("w8a8 in floats", W8A8, written.fp8("channel", static=1.0), lambda _: None, "m.weight"),
    ("fp8 without scale", FP8, written.fp8(static=1.0), lost("weight_scale"), "m.weight_scale"),
    ("fp8 without the inputs' scale", FP8, written.fp8(), lambda _: None, "m.input_scale"),
    ("fp8 with a scale of zero for inputs", FP8, written.fp8(static=0.0), lambda _: None, "m.input_scale"),
    ("fp8 with rows of scales", FP8, written.fp8("channel", static=1.0), lambda _: None, "m.weight_scale"),
    ("fp8 with NaN among weights", FP8, written.fp8(static=1.0), changed("weight", fp8_nan), "m.weight"),
    (
        "fp8 of other blocks", BLOCKS, written.fp8("block", block=(64, 64), name="weight_scale_inv"),
        lambda _: None, "m.weight_scale_inv",
    ),
    ("fp8 in integers", FP8, written.int8(static=1.0), lambda _: None, "m.weight"),
    ("nf4 without its state", NF4, written.nf4(), lost(STATE), STATE),
    ("nf4 of another shape", NF4, written.nf4(), changed(STATE, told(shape=[32, 128])), STATE),
    ("nf4 of other blocks", NF4, written.nf4(), changed(STATE, told(blocksize=128)), STATE),
    (
        "nf4 with other outer blocks", NF4, written.nf4(),
        changed(STATE, told(nested_blocksize=2)), "m.weight.nested_absmax",
    ),
    ("nf4 without an offset", NF4, written.nf4(), changed(STATE, told(nested_offset=None)), STATE),
    ("nf4 with a state that is no text", NF4, written.nf4(), changed(STATE, lambda part: part.fill_(200)), STATE),
    ("nf4 with another table", NF4, written.nf4(), changed("weight.quant_map", set_to(2.0)), "m.weight.quant_map"),
    (
        "nf4 with NaN in its outer table", NF4, written.nf4(),
        changed("weight.nested_quant_map", set_to(float("nan"))), "m.weight.nested_quant_map",
    ),
    ("nf4 that is not nested", NF4, written.nf4(nested=False), lambda _: None, "m.weight.absmax"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "encode", "spoil", "name"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_broken_matrices_are_refused_by_the_tensors_name(
    config: dict[str, Any], encode: written.Encoder, spoil: Callable[[Any], None], name: str, tmp_path: Path
) -> None:
    random = numpy.random.default_rng(5)
    parts, _ = encode(random.normal(size=(64, 64)), random)
    spoil(parts)
    with pytest.raises(CheckpointError) as caught:
        source_of(tmp_path, parts, config, (64, 64)).expand(torch.empty(64, 64))
    assert name in str(caught.value)


@pytest.mark.parametrize("columns", [40, 96])
def test_rows_that_do_not_divide_are_refused(columns: int, tmp_path: Path) -> None:
    random = numpy.random.default_rng(5)
    config = {**GPTQ, "group_size": 64 if columns == 96 else 8}
    parts, _ = written.gptq(8)(random.normal(size=(64, columns)), random)
    with pytest.raises(CheckpointError, match="m"):
        source_of(tmp_path, parts, config, (64, columns))


@pytest.mark.parametrize("scale", [0.0, -0.5, 6e-8])
def test_odd_scales_that_are_numbers_are_taken(scale: float, tmp_path: Path) -> None:
    random = numpy.random.default_rng(5)
    parts, expected = written.awq()(random.normal(size=(64, 64)), random)
    factor = torch.tensor(scale, dtype=torch.float16) / parts["scales"][0, 3]
    parts["scales"][0, 3] = scale
    found = numbers_of(source_of(tmp_path, parts, AWQ, (64, 64)))
    expected[3, :32] *= float(factor)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("seed", range(40))
def test_spoiled_headers_and_bytes_never_escape(seed: int, tmp_path: Path) -> None:
    """Whatever is stored: numbers, or a refusal in words."""
    random = numpy.random.default_rng(seed)
    config, encode = [
        (AWQ, written.awq()), ({**GPTQ, "desc_act": True}, written.gptq(ordered=True)), (NF4, written.nf4()),
        (W4A16, written.pack_quantized(symmetric=False)), (FP8, written.fp8(static=1.0)),
    ][seed % 5]  # fmt: skip
    parts, _ = encode(random.normal(size=(64, 64)), random)
    name = list(parts)[int(random.integers(len(parts)))]
    part = parts[name]
    kind = seed // 5 % 4
    if kind == 0:
        parts[name] = (
            torch.from_numpy(random.integers(0, 256, part.numel() * part.itemsize, dtype=numpy.uint8))
            .view(part.dtype)
            .view(part.shape)
        )
    elif kind == 1:
        parts[name] = part.reshape(-1)[: int(random.integers(1, part.numel() + 1))]
    elif kind == 2:
        parts[name] = part.reshape(-1).view(torch.uint8)
    else:
        parts[name] = torch.cat((part.reshape(-1), part.reshape(-1)))
    said = "m."
    try:
        source_of(tmp_path, parts, config, (64, 64)).expand(torch.empty(64, 64))
    except CheckpointError as error:
        said = str(error)
    assert "m." in said


# Quantized while loading


@pytest.mark.parametrize("shape", [(5, 128), (33, 384), (1, 96)])
def test_int4_while_loading_is_near_and_never_worse_than_plain_rounding(shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    weights[0, :32] = 0
    group = 128 if shape[1] % 128 == 0 else 32
    matrix = poisoned(ScaledLayout(codes="int4", scales="float16", group=group), *shape)
    fill_quantized(matrix, 0, weights, "m")
    found = torch.full(shape, float("nan"))
    matrix.dequantize(0, shape[0], found)
    wide = weights.double()
    parts = wide.view(shape[0], -1, group)
    step = parts.abs().amax(-1, keepdim=True) / 7
    rounded = torch.where(step == 0, 0, (parts / step).round() * step).view(shape)
    assert float((found.double() - wide).square().sum()) <= float((rounded - wide).square().sum()) * 1.001
    assert float((found.double() - wide).square().mean().sqrt()) < 0.12
    assert bool((found[0, :32] == 0).all())


def test_fp8_while_loading_rounds_to_the_nearest_of_a_row() -> None:
    weights = torch.randn((7, 100), generator=torch.Generator().manual_seed(2)) * torch.logspace(-4, 2, 7)[:, None]
    weights[3] = 0
    matrix = poisoned(ScaledLayout(codes="fp8", inputs="fp8"), 7, 100)
    fill_quantized(matrix, 0, weights, "m")
    found = torch.full((7, 100), float("nan"))
    matrix.dequantize(0, 7, found)
    largest = weights.abs().amax(1, keepdim=True)
    error = (found - weights).abs()
    assert bool((error <= weights.abs() / 16 * 1.001 + largest / 448 * 2**-9).all())
    assert bool((found[3] == 0).all())


QUANTIZED_TO = {
    "fp8": ScaledLayout(codes="fp8", inputs="fp8"),
    "int4": ScaledLayout(codes="int4", scales="float16", group=32),
}


@pytest.mark.parametrize("layout", QUANTIZED_TO.values(), ids=QUANTIZED_TO.keys())
def test_weights_too_small_for_a_scale_become_zeros(layout: ScaledLayout) -> None:
    """A scale below the least normal number has no finite inverse."""
    weights = torch.randn((4, 64), generator=torch.Generator().manual_seed(3))
    weights[2] = 0
    weights[2, 3] = 1e-38
    matrix = poisoned(layout, 4, 64)
    fill_quantized(matrix, 0, weights, "m")
    matrix.dequantize(0, 4, found := torch.full((4, 64), float("nan")))
    assert bool(found.isfinite().all())
    assert float(found[2].abs().max()) < 1e-37


@pytest.mark.parametrize(("quantize", "wrong"), [("fp8", torch.nan), ("fp8", -torch.inf), ("int4", torch.nan),
                                                 ("int4", torch.inf), ("int4", 1e6)])  # fmt: skip
@pytest.mark.parametrize("experts", [False, True])
def test_weights_that_cannot_be_quantized_are_named(
    quantize: Quantize, wrong: float, experts: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16} if experts else {}
    oracle = oracles("Qwen3Moe" if experts else "Llama", hidden_size=64, intermediate_size=64, **more)
    name = f"model.layers.1.mlp.{'experts.2.' if experts else ''}down_proj.weight"
    (file,) = oracle.folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = tensors[name].float()
    tensors[name][5, 7] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(safetensors.read_headers((tmp_path / "model.safetensors",)), "safetensors")
    with checkpoint, pytest.raises(CheckpointError, match=re.escape(name)):
        load_weights(oracle.spec, checkpoint, dtype=torch.float32, device=CPU, expand=False, quantize=quantize)


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3Moe"])
def test_models_are_quantized_while_they_are_loaded(
    quantize: Quantize, architecture: str, oracles: Callable[..., Any]
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    more = experts if architecture == "Qwen3Moe" else {}
    oracle = oracles(architecture, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **more)
    for checkpoint in (oracle.checkpoint(), None):
        weights = load_weights(
            oracle.spec, checkpoint, dtype=torch.float32, device=CPU, expand=False, quantize=quantize
        )
        counted = weights_bytes(oracle.spec, None, dtype="float32", expand=False, quantize=quantize)
        assert weights.nbytes == counted
    assert not isinstance(weights.head, QuantizedLinear)
    exact = load_weights(oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=CPU, expand=True)
    near = load_weights(
        oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=CPU, expand=False, quantize=quantize
    )
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(1))
    for one, other in ((exact.layers[0].qkv, near.layers[0].qkv), (exact.layers[1].o, near.layers[1].o)):
        assert isinstance(other, QuantizedLinear)
        expected, found = torch.empty(3, one.rows), torch.full((3, one.rows), float("nan"))
        one.write(x, expected)
        other.write(x, found)
        error = float((found - expected).norm() / expected.norm())
        assert 1e-4 < error < (0.06 if quantize == "fp8" else 0.15)


# Products


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_inputs_are_rounded_row_by_row(kind: Any, group: int) -> None:
    x = torch.randn((5, 96), generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 5)[:, None]
    x[2] = 0
    layout = ScaledLayout(codes="fp8" if kind == "fp8" else "int8", inputs=kind, input_group=group)
    found = rounded_inputs(x, layout, None)
    for row in range(5):
        for first in range(0, 96, group or 96):
            part = x[row, first : first + (group or 96)].double()
            scale = float(part.abs().max()) / (448 if kind == "fp8" else 127)
            if scale == 0:
                assert bool((found[row] == 0).all())
                continue
            if kind == "int8":
                nearest = torch.round(part / scale) * scale
                torch.testing.assert_close(
                    found[row, first : first + (group or 96)].double(), nearest, rtol=1e-5, atol=scale * 0.01
                )
            else:
                error = (found[row, first : first + (group or 96)].double() - part).abs()
                assert bool((error <= part.abs() / 16 + scale * 2**-9).all())
    x[1, 5] = float("nan")
    for scale in (None, torch.tensor([0.01])):
        # What cannot be computed must stay visible, and in its row.
        seen = rounded_inputs(x, layout, scale).isnan().any(1)
        assert seen.tolist() == [False, True, False, False, False]
    x[1, 5] = 0
    static = rounded_inputs(x, layout, torch.tensor([0.01]))
    assert float(static.abs().max()) == pytest.approx(4.48 if kind == "fp8" else 1.28)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_multiply_their_own_codes(kind: Any, dtype: torch.dtype) -> None:
    """Static scales of inputs too: one for all experts."""
    random = torch.Generator().manual_seed(3)
    experts, rows, columns, lines = 3, 24, 64, 7
    layout = ScaledLayout(codes="fp8", inputs=kind, static_inputs=kind == "fp8")
    matrix = poisoned(layout, experts * rows, columns)
    matrix.codes.copy_(torch.randn((experts * rows, columns), generator=random))
    matrix.scales.copy_(torch.rand((experts * rows, 1), generator=random) + 0.5)
    if matrix.inputs is not None:
        matrix.inputs.fill_(0.02)
    x = torch.randn((lines, columns), generator=random).to(dtype)
    owner = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    groups = Groups(
        torch.tensor([0, 2]), torch.tensor([3, 7], dtype=torch.int32), torch.tensor([3, 3, 7], dtype=torch.int32)
    )
    found = QuantizedStack(matrix, experts).multiply(x, groups)
    wide = x.double()
    if kind == "fp8":
        wide = (x.float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.02
    weights = (matrix.codes.float().double() * matrix.scales.double()).view(experts, rows, columns)
    expected = torch.stack([weights[int(expert)] @ line for expert, line in zip(owner, wide, strict=True)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.skipif(not native.available(), reason="no compiled kernels")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (64, 144), (96, 272), (160, 1008), (8192, 48)])
def test_compiled_and_torch_turn_words_of_awq_alike(inputs: int, outputs: int) -> None:
    words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int32)
    layout = ScaledLayout(codes="int4", group=32, scales="float16", zeros=True)
    before, matrix = 3, poisoned(layout, 3 + outputs + 2, inputs)
    expected = poisoned(layout, 3 + outputs + 2, inputs)
    expected.fill_codes(before, _awq_rows(words))
    native.turn_awq(words, matrix.codes[before : before + outputs])
    assert torch.equal(matrix.codes, expected.codes)


def test_the_compiled_turn_of_awq_checks_what_it_is_given() -> None:
    words, codes = torch.zeros((32, 2), dtype=torch.int32), torch.zeros((16, 16), dtype=torch.uint8)
    assert not native.turns_awq(words[:31])
    assert not native.turns_awq(words[:, :1])
    for wrong in ((words[:31], codes), (words.short(), codes), (words, codes[:8]), (words, codes[:, :8].contiguous())):
        with pytest.raises(ValueError, match=r"AWQ|codes|bytes"):
            native.turn_awq(*wrong)
