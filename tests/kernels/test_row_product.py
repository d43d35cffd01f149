"""Products of a single row in CUDA, FP8 and int4, against float64 with inputs rounded as the formats say (on a GPU);
that they are cut to what a GPU has, and compile for every GPU that there is (where NVRTC is)."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda import compiler, module
from holdfast.execution.gpu.cuda.fragments import rearrange
from holdfast.execution.gpu.cuda.module import NO_GATE
from holdfast.execution.gpu.cuda.row_product import RowMatrix, against_row, row_cut, row_macros
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

NAN = float("nan")
EPSILON = 1e-5
LAYOUTS = {
    "fp8": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8 static": ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
    "fp8 blocks": ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=128, input_group=128),
    "fp8 bounded": ScaledLayout(codes="fp8", inputs="fp8", input_bound=1.5),
    "fp8 powers": ScaledLayout(
        codes="fp8", inputs="fp8", group=128, group_rows=128, input_group=128, input_powers=True
    ),
    "awq": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "gptq 32": ScaledLayout(codes="int4", scales="float16", group=32, zeros=True),
    "compressed 64": ScaledLayout(codes="int4", scales="bfloat16", group=64),
    "wide groups": ScaledLayout(codes="int4", scales="float32", group=256, zeros=True),
    "whole rows": ScaledLayout(codes="int4"),
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels in CUDA need a GPU")


def seeded() -> torch.Generator:
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def drawn(layout: ScaledLayout, rows: int, columns: int, source: torch.Generator) -> tuple[ScaledMatrix, torch.Tensor]:
    """A matrix on the GPU, ready to be multiplied with, and its elements in float64."""
    matrix = ScaledMatrix(layout, rows, columns, CPU)
    if layout.codes == "fp8":
        wide = (torch.randn(rows, columns, generator=source) * 100).clamp(-448, 448)
        matrix.codes.copy_(wide.to(torch.float8_e4m3fn))
    else:
        matrix.fill_codes(0, torch.randint(0, 16, (rows, columns), generator=source, dtype=torch.uint8))
    matrix.scales.copy_((torch.rand(matrix.scales.shape, generator=source) + 0.1) / 64)
    if matrix.zeros is not None:
        matrix.zeros.copy_(torch.randint(0, 17, matrix.zeros.shape, generator=source, dtype=torch.uint8))
    if matrix.inputs is not None:
        matrix.inputs.fill_(4.0 / 448)
    exact = torch.empty(rows, columns)
    matrix.dequantize(0, rows, exact)
    moved = ScaledMatrix(layout, rows, columns, CUDA)
    for name in ("codes", "scales", "zeros", "inputs"):
        if (plane := getattr(matrix, name)) is not None:
            getattr(moved, name).copy_(plane)
    if layout.codes == "int4":
        rearrange(moved)
    return moved, exact.to(CUDA).double()


def as_multiplied(x: torch.Tensor, matrix: ScaledMatrix) -> torch.Tensor:
    """x in float64, rounded where the layout rounds it: by torch on a CPU."""
    layout = matrix.layout
    if layout.inputs == "plain":
        return x.double()
    wide = x.cpu().float().view(len(x), -1, layout.group or x.shape[1])
    scale = (wide.abs().amax(-1, keepdim=True).clamp(max=layout.input_bound or 1e30) / 448).clamp(min=1e-12)
    if layout.input_powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    if matrix.inputs is not None:
        scale = matrix.inputs.cpu().view(1, 1, 1).expand_as(scale)
    codes = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).view(x.shape).to(CUDA)


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (unit.to(norm.dtype).float() * norm.float()).to(x.dtype)


def assert_close(found: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, more: torch.Tensor | None = None) -> None:
    """The result is rounded once; sums are float32."""
    wanted, terms = x @ exact.T, x.abs() @ exact.abs().T
    wanted = wanted if more is None else wanted + more
    tolerance = 1.1 * UNIT[found.dtype] * wanted.abs() + 2.0**-17 * terms
    worst = ((found.double() - wanted).abs() / tolerance).max().item()
    assert worst <= 1, f"{worst:.2f} of what is allowed"


@on_gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 256), torch.float16), ((1056, 1280), torch.bfloat16), ((9216, 14336), torch.bfloat16)]
)
def test_products(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    source, layout, (outputs, columns) = seeded(), LAYOUTS[name], shape
    if layout.group_rows > 1:
        outputs = -(-outputs // 256) * 256
    matrix, exact = drawn(layout, outputs, columns, source)
    assert against_row(matrix, dtype) is None
    row = RowMatrix(matrix, dtype)
    x = torch.randn(1, columns, generator=source).to(dtype).to(CUDA)
    bias = torch.randn(outputs, generator=source).to(dtype).to(CUDA)
    weight = (torch.randn(columns, generator=source) * 0.2 + 1).to(dtype).to(CUDA)
    out = torch.full((1, outputs), NAN, dtype=dtype, device=CUDA)
    row.product(x, out)
    assert_close(out, as_multiplied(x, matrix), exact)
    before = out.double()
    row.product(x, out, bias=bias, accumulate=True)
    assert_close(out, as_multiplied(x, matrix), exact, before + bias.double())
    gated = torch.full((1, outputs // 2), NAN, dtype=dtype, device=CUDA)
    row.product(x, gated, bias=bias, gate=0)
    gate, up = (as_multiplied(x, matrix) @ exact.T + bias.double()).chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    assert (gated.double() - silu).norm() <= 4 * UNIT[dtype] * silu.norm()
    # After a norm, an input that lies between two numbers may be rounded either way.
    close = 0.03 if layout.inputs == "fp8" else 2 * UNIT[dtype]
    wanted = as_multiplied(normed(x, weight), matrix) @ exact.T + bias.double()
    out.fill_(NAN)
    row.product(x, out, bias=bias, norm=weight, epsilon=EPSILON)
    assert (out.double() - wanted).norm() <= close * wanted.norm()
    gated.fill_(NAN)
    row.product(x, gated, bias=bias, gate=0, norm=weight, epsilon=EPSILON)
    gate, up = wanted.chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    assert (gated.double() - silu).norm() <= 2 * close * silu.norm()


@on_gpu
@pytest.mark.parametrize("name", ["fp8", "fp8 static", "fp8 blocks"])
def test_what_is_not_finite_stays_so(name: str) -> None:
    matrix, _ = drawn(LAYOUTS[name], 256, 512, seeded())
    row = RowMatrix(matrix, torch.bfloat16)
    for value in (NAN, float("inf")):
        x = torch.randn(1, 512, device=CUDA).bfloat16()
        x[0, 77] = value
        out = torch.zeros(1, 256, dtype=torch.bfloat16, device=CUDA)
        row.product(x, out)
        assert not torch.isfinite(out).any()
    out = torch.full((1, 256), NAN, dtype=torch.bfloat16, device=CUDA)
    row.product(torch.zeros_like(x), out)
    assert not out.any()


@on_gpu
@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_a_chain_of_early_kernels_waits_for_what_it_reads(name: str) -> None:
    """Each product reads what the one before it wrote, in a graph, again and again."""
    source, width, length = seeded(), 2048, 24
    matrices = [drawn(LAYOUTS[name], width, width, source)[0] for _ in range(4)]
    rows = [RowMatrix(matrix, torch.bfloat16) for matrix in matrices]
    weight = torch.full((width,), 0.5, dtype=torch.bfloat16, device=CUDA)
    buffers = [torch.full((1, width), NAN, dtype=torch.bfloat16, device=CUDA) for _ in range(length + 1)]

    def chain(*, apart: bool) -> None:
        for index in range(length):
            rows[index % 4].product(buffers[index], buffers[index + 1], norm=weight, epsilon=EPSILON)
            if apart:
                torch.cuda.synchronize()

    buffers[0].normal_()
    chain(apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(apart=False)
    for _ in range(20):
        buffers[0].normal_()
        chain(apart=True)
        wanted = buffers[-1].clone()
        for buffer in buffers[1:]:
            buffer.fill_(NAN)
        graph.replay()
        assert torch.equal(buffers[-1], wanted)


@on_gpu
def test_what_is_not_a_single_row_is_refused() -> None:
    matrix, _ = drawn(LAYOUTS["fp8"], 48, 256, seeded())
    row = RowMatrix(matrix, torch.bfloat16)
    x, out = torch.zeros(2, 256, dtype=torch.bfloat16, device=CUDA), torch.zeros(2, 48, device=CUDA).bfloat16()
    assert not row.takes(x)
    assert not row.takes(x[:1], gated=True)
    assert not row.takes(x[:1].half())
    assert not row.takes(x[:1], norm=torch.ones(256, device=CUDA))
    with pytest.raises(EngineError, match="not one of"):
        row.product(x, out)


@pytest.mark.parametrize("name", LAYOUTS)
def test_cuts_fit(name: str) -> None:
    shapes = (64, 256), (4096, 28672), (57344, 8192)
    for (rows, columns), processors, gate in product(shapes, (84, 132), (NO_GATE, 0)):
        matrix = ScaledMatrix(LAYOUTS[name], rows, columns, torch.device("meta"))
        cut = row_cut(matrix, gate, normed=True, processors=processors)
        assert cut.warps <= columns // 128
        assert cut.grid <= rows // 16
        assert cut.shared_bytes <= 98 << 10
        assert dict(row_macros(matrix, torch.bfloat16, cut, gate, normed=True))["BLOCKS"] * cut.warps == 16


@pytest.mark.skipif(not compiler.available(), reason="libnvrtc is not installed")
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("fp8", (8, 9)),
        ("fp8 bounded", (8, 9)),
        ("fp8 powers", (9, 0)),
        ("fp8 blocks", (9, 0)),
        ("fp8 static", (12, 0)),
        ("gptq 32", (8, 0)),
        ("wide groups", (8, 6)),
        ("compressed 64", (8, 9)),
        ("awq", (9, 0)),
    ],
)
def test_compiles(name: str, capability: tuple[int, int]) -> None:
    matrix = ScaledMatrix(LAYOUTS[name], 64, 1280, torch.device("meta"))
    for dtype, gate in ((torch.bfloat16, NO_GATE), (torch.float16, 0)):
        cut = row_cut(matrix, gate, normed=gate == 0, processors=84)
        macros = row_macros(matrix, dtype, cut, gate, normed=gate == 0)
        options = compiler.options(capability, dict(macros))
        assert compiler.compile_source(module.text("row_product"), options).startswith(b"\x7fELF")


CUOBJDUMP = Path(sysconfig.get_path("purelib")) / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.skipif(not (compiler.available() and CUOBJDUMP.exists()), reason="libnvrtc or cuobjdump is not installed")
@pytest.mark.parametrize(("columns", "normed"), [(4096, True), (14336, False), (16384, True), (28672, False)])
def test_fp8_rows_lie_in_registers_alone(columns: int, normed: bool, tmp_path: Path) -> None:
    matrix = ScaledMatrix(LAYOUTS["fp8"], 64, columns, torch.device("meta"))
    cut = row_cut(matrix, NO_GATE, normed=normed, processors=132)
    macros = row_macros(matrix, torch.bfloat16, cut, NO_GATE, normed=normed)
    made = compiler.compile_source(module.text("row_product"), compiler.options((9, 0), dict(macros)))
    (tmp_path / "row.cubin").write_bytes(made)
    told = subprocess.run([CUOBJDUMP, "-res-usage", tmp_path / "row.cubin"], capture_output=True, text=True).stdout
    assert " STACK:0 " in told
