"""Products with codes and scales against float64, and expanded rows against the CPU's expansion, bit for bit."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.gpu.layers.quantized_linear import QuantizedGpuLinear, QuantizedWorkspace
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.triton_kernels.quantized import scaled_products, scaled_rows
from holdfast.execution.triton_kernels.quantized.product_tiles import QuantizedTile, VectorTile
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.triton_kernels.quantized.vector_products import vector_product, vectors_of_codes
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.bfloat16 if ON_GPU else torch.float16]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LAYOUTS = {
    "awq": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "gptq 32": ScaledLayout(codes="int4", scales="float16", group=32, zeros=True),
    "gptq 64": ScaledLayout(codes="int4", scales="bfloat16", group=64),
    "whole rows": ScaledLayout(codes="int4"),
    "nf4": ScaledLayout(codes="nf4", group=64),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "int8": ScaledLayout(codes="int8", scales="bfloat16"),
    "int8 32": ScaledLayout(codes="int8", scales="float16", group=32),
    "int8 zeros": ScaledLayout(codes="int8", scales="float16", group=128, zeros=True),
    "int8 zero a row": ScaledLayout(codes="int8", scales="bfloat16", zeros=True),
    "fp8": ScaledLayout(codes="fp8"),
    "fp8 blocks": ScaledLayout(codes="fp8", group=128, group_rows=128),
}
SHAPES = [(35, 384), *([(4096, 14336), (6144, 4096)] if ON_GPU else [])]
"""(outputs, inputs): no whole number of tiles, nor of steps."""


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator().manual_seed(seed)


def workspace() -> SplitSums:
    return SplitSums(torch.full((1 << 22,), NAN, device=DEVICE), torch.zeros(4096, dtype=torch.int32, device=DEVICE))


@dataclass
class Case:
    matrix: ScaledMatrix
    exact: torch.Tensor
    """float64 on the device."""
    source: torch.Generator

    @classmethod
    def draw(cls, layout: ScaledLayout, outputs: int, inputs: int) -> Case:
        source = seeded(layout, outputs, inputs)
        matrix = ScaledMatrix(layout, outputs, inputs, torch.device("cpu"))
        codes = torch.randint(0, 256, (outputs, inputs), generator=source, dtype=torch.uint8)
        if layout.four_bits:
            matrix.fill_codes(0, codes & 15)
        else:
            # FP8's two codes that are no numbers have a test of their own.
            codes[(codes & 127) == 127] = 0
            matrix.codes.view(torch.uint8).copy_(codes)
        if layout.scales == "uint8":
            matrix.scales.copy_(torch.randint(110, 130, matrix.scales.shape, generator=source, dtype=torch.uint8))
        else:
            matrix.scales.copy_((torch.rand(matrix.scales.shape, generator=source) + 0.1) / 64)
        if matrix.zeros is not None:
            least, beyond = (0, 16) if layout.four_bits else (-128, 128)
            matrix.zeros.copy_(torch.randint(least, beyond, matrix.zeros.shape, generator=source))
        if matrix.order is not None:
            matrix.order.copy_(torch.randperm(inputs, generator=source))
        exact = torch.empty(outputs, inputs, dtype=torch.float32)
        matrix.dequantize(0, outputs, exact)
        return cls(on_device(matrix), exact.double().to(DEVICE), source)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype).to(DEVICE)


def on_device(matrix: ScaledMatrix) -> ScaledMatrix:
    moved = ScaledMatrix(matrix.layout, matrix.rows, matrix.columns, DEVICE)
    for name in ("codes", "scales", "zeros", "order"):
        if (plane := getattr(matrix, name)) is not None:
            getattr(moved, name).view(torch.uint8).copy_(plane.view(torch.uint8))
    return moved


def small_tile(rows: int, layout: ScaledLayout) -> QuantizedTile | None:
    """In the interpreter: every tile, split and step is there, but small."""
    if ON_GPU:
        return None
    piece = min(layout.group or 64, 64)
    return QuantizedTile(8 if rows <= 8 else 64, 32, piece, 2 if layout.group != 128 else 1, 2, 4, 2)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor, inputs: int) -> None:
    """The result and the elements are rounded once each; sums are float32, of codes that scales and zero points make
    smaller."""
    unit = UNIT[found.dtype]
    tolerance = 2.2 * unit * (wanted.abs() + 3 * terms / inputs**0.5) + 2.0**-17 * terms
    error = (found.double() - wanted).abs()
    assert torch.isfinite(error).all()
    assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 33] + ([8, 16, 100] if ON_GPU else []))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[:2])
def test_products(name: str, rows: int, outputs: int, inputs: int) -> None:
    products(TYPES[0], name, rows, outputs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.float16] if ON_GPU else [])], ids=str)
@pytest.mark.parametrize("rows", [7, 20] + ([100] if ON_GPU else []))
def test_products_in_other_types(dtype: torch.dtype, rows: int) -> None:
    products(dtype, "awq", rows, *SHAPES[-1])


def products(dtype: torch.dtype, name: str, rows: int, outputs: int, inputs: int) -> None:
    case, shared = Case.draw(LAYOUTS[name], outputs, inputs), workspace()
    x = case.normal(rows, inputs + 32, dtype=dtype)[:, :inputs]
    out = torch.full((rows, outputs + 4), NAN, dtype=dtype, device=DEVICE)
    bias, before = case.normal(outputs, dtype=dtype), case.normal(rows, outputs, dtype=dtype)
    wanted, terms = x.double() @ case.exact.T, x.double().abs() @ case.exact.abs().T
    for accumulate in (False, True):
        target = out[:, :outputs]
        if accumulate:
            target.copy_(before)
            wanted = wanted + before.double() + bias.double()
        scaled_products.scaled_product(
            x, case.matrix, target, shared, accumulate=accumulate, bias=bias if accumulate else None,
            tile=small_tile(rows, LAYOUTS[name]),
        )  # fmt: skip
        assert_close(target, wanted, terms, inputs)
        assert torch.isnan(out[:, outputs:]).all()
        assert not shared.counters.any(), "counters are left as they were found"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["awq", "gptq 32", "int8"])
@pytest.mark.parametrize("rows", [1, 7])
def test_gate_rides_along(dtype: torch.dtype, name: str, rows: int) -> None:
    inner, inputs = (40, 256) if not ON_GPU else (14336, 4096)
    case, shared = Case.draw(LAYOUTS[name], 2 * inner, inputs), workspace()
    x, bias = case.normal(rows, inputs, dtype=dtype), case.normal(2 * inner, dtype=dtype)
    wanted, terms = x.double() @ case.exact.T + bias.double(), x.double().abs() @ case.exact.abs().T
    gated = torch.full((rows, inner), NAN, dtype=dtype, device=DEVICE)
    tile = small_tile(rows, LAYOUTS[name])
    scaled_products.scaled_gate_up(x, case.matrix, gated, shared, bias=bias, tile=tile)
    gate, up = wanted[:, :inner], wanted[:, inner:]
    error = (gated.double() - torch.nn.functional.silu(gate) * up).abs()
    # A gate and an up, each off by what a product may be.
    size = terms / inputs**0.5 + wanted.abs()
    allowed = 8 * UNIT[dtype] * (size[:, :inner] * up.abs() + size[:, inner:] * gate.abs()) + 16 * UNIT[dtype]
    assert (error <= allowed).all()
    assert not shared.counters.any()


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["awq", "gptq 32", "gptq 64", "whole rows"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[:: 2 if ON_GPU else 1])
def test_products_with_a_vector(dtype: torch.dtype, name: str, outputs: int, inputs: int) -> None:
    case = Case.draw(LAYOUTS[name], outputs, inputs)
    planes = vectors_of_codes(case.matrix)
    assert planes is not None
    tile = None if ON_GPU else VectorTile(8, 8, 1)
    x, norm = case.normal(1, inputs, dtype=dtype), case.normal(inputs, dtype=dtype)
    bias, before = case.normal(outputs, dtype=dtype), case.normal(1, outputs, dtype=dtype)
    out = torch.full((1, outputs + 4), NAN, dtype=dtype, device=DEVICE)
    target = out[:, :outputs]
    vector_product(x, planes, target, tile=tile)
    wanted, terms = x.double() @ case.exact.T, x.double().abs() @ case.exact.abs().T
    assert_close(target, wanted, terms, inputs)
    target.copy_(before)
    vector_product(x, planes, target, accumulate=True, bias=bias, tile=tile)
    assert_close(target, wanted + before.double() + bias.double(), terms, inputs)
    wide = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * norm.double()
    vector_product(x, planes, target, norm_weight=norm, epsilon=1e-5, tile=tile)
    assert_close(target, wide @ case.exact.T, wide.abs() @ case.exact.abs().T, inputs)
    assert torch.isnan(out[:, outputs:]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_are_expanded_bit_for_bit(dtype: torch.dtype, name: str, ordered: bool) -> None:
    case = Case.draw(replace(LAYOUTS[name], ordered=ordered), 9, 1152)
    width = case.matrix.columns
    out = torch.full((6, width + 10), NAN, dtype=dtype, device=DEVICE)
    scaled_rows.expand_scaled(case.matrix, 2, 7, out[:5, :width])
    assert torch.equal(out[:5, :width], case.exact[2:7].float().to(dtype))
    assert torch.isnan(out[5:]).all()
    assert torch.isnan(out[:, width:]).all()

    tokens_of_slots = torch.tensor([[1, 9, -1], [4, 5, 8]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, -1, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([2, 0, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.full((5, width), NAN, dtype=dtype, device=DEVICE)
    scaled_rows.embed_scaled(tokens_of_slots, slots, positions, case.matrix, rows)
    assert torch.equal(rows[[0, 4]], case.exact[[8, 1]].float().to(dtype))
    assert not rows[1:4].any(), "no such row"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_fp8_code(dtype: torch.dtype) -> None:
    matrix = ScaledMatrix(ScaledLayout(codes="fp8"), 1, 256, DEVICE)
    matrix.codes.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8))
    matrix.scales.fill_(1.0)
    out = torch.zeros((1, 256), dtype=dtype, device=DEVICE)
    scaled_rows.expand_scaled(matrix, 0, 1, out)
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(dtype)
    assert torch.equal(out[0].cpu().isnan(), wanted.isnan())
    assert torch.equal(out[0].cpu().nan_to_num(), wanted.nan_to_num())
    # And through a product with ones on the diagonal.
    eye = torch.eye(256, dtype=dtype, device=DEVICE)[:64]
    found = torch.full((64, 1), NAN, dtype=dtype, device=DEVICE)
    scaled_products.scaled_product(eye, matrix, found, workspace(), tile=QuantizedTile(64, 64, 64, 1, 1, 4, 2))
    matrix.codes.view(torch.uint8).clamp_(max=126)
    scaled_products.scaled_product(eye, matrix, found, workspace(), tile=QuantizedTile(64, 64, 64, 1, 1, 4, 2))
    assert torch.equal(found[:, 0].cpu(), wanted[:64])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 12, 150] + ([8192] if ON_GPU else []))
def test_linear_takes_each_way(rows: int, ordered: bool) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    outputs, inputs = (6144, 4096) if ON_GPU else (20, 64)
    layout = ScaledLayout(codes="int4", scales="float16", group=32, zeros=True, ordered=ordered)
    case = Case.draw(layout, 2 * outputs, inputs)
    shared = QuantizedWorkspace(dtype, DEVICE)
    linear = QuantizedGpuLinear(QuantizedLinear(case.matrix, dtype, case.normal(2 * outputs, dtype=dtype)), shared)
    x, norm = case.normal(rows, inputs, dtype=dtype), case.normal(inputs, dtype=dtype)
    bias = linear.bias
    assert bias is not None
    out, before = torch.full((2, rows, 2 * outputs), NAN, dtype=dtype, device=DEVICE).unbind()
    wanted, terms = x.double() @ case.exact.T + bias.double(), x.double().abs() @ case.exact.abs().T
    linear.write(x, out)
    assert_close(out, wanted, terms, inputs)
    before.copy_(out)
    linear.add(x, out)
    assert_close(out, before.double() + wanted, terms, inputs)
    normed, gated = torch.empty_like(x), torch.full((rows, outputs), NAN, dtype=dtype, device=DEVICE)
    linear.gated(x, norm, 1e-5, "silu", normed, out, gated)
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * norm.double()
    exact = wide @ case.exact.T + bias.double()
    exact = torch.nn.functional.silu(exact[:, :outputs]) * exact[:, outputs:]
    assert (gated.double() - exact).norm() <= 8 * UNIT[dtype] * exact.norm() + 2.0**-16 * exact.norm()


def test_limits() -> None:
    case = Case.draw(LAYOUTS["gptq 32"], 4, 32)
    with pytest.raises(EngineError, match="128"):
        scaled_products.scaled_product(
            torch.zeros(129, 32, device=DEVICE), case.matrix, torch.zeros(129, 4, device=DEVICE), workspace()
        )
    scaled_products.scaled_product(
        torch.zeros(0, 32, device=DEVICE), case.matrix, torch.zeros(0, 4, device=DEVICE), workspace()
    )
    with pytest.raises(EngineError, match="workspace"):
        scaled_products.scaled_product(
            torch.zeros(1, 64, device=DEVICE),
            Case.draw(LAYOUTS["gptq 32"], 4, 64).matrix,
            torch.zeros(1, 4, device=DEVICE),
            SplitSums(torch.zeros(4, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)),
            tile=QuantizedTile(8, 32, 32, 1, 2, 4, 2),
        )
