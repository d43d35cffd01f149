"""int4 codes in the order of tensor cores: the order itself against the definition of m16n8k16's fragments, the kernels
in CUDA against float64 (on a GPU), and that they compile for every GPU that there is (where NVRTC is)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from int4_matrices import AWQ, LAYOUTS, NAN, UNIT, assert_close, drawn, on_device, rounded_elements, seeded, workspace

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda import compiler, int4, module
from holdfast.execution.gpu.cuda.fragments import against_fragments, codes_of, fragments_of, rearrange, slabs_of
from holdfast.execution.gpu.cuda.int4 import FragmentMatrix, ProductCut
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels in CUDA need a GPU")


def test_order_is_that_of_fragments() -> None:
    """Registers of m16n8k16 as the PTX manual draws them, a0 to a3 of a lane: rows g, g+8, g, g+8 and columns 2t, 2t,
    2t+8, 2t+8, two each. Rows g and g+8 are ours 2g and 2g+1."""
    rows, columns, source = 48, 256, seeded()
    codes = torch.randint(0, 16, (rows, columns), generator=source, dtype=torch.uint8)
    matrix = ScaledMatrix(AWQ, rows, columns, torch.device("cpu"))
    matrix.fill_codes(0, codes)
    words = fragments_of(matrix.codes).reshape(-1).view(torch.int32).view(rows // 16, columns // 64, 32, 4)
    for slab, chunk, lane, word, register, second in product(
        range(3), range(4), range(32), range(4), range(4), range(2)
    ):
        g, t = lane // 4, lane % 4
        row = 16 * slab + 2 * g + register % 2
        column = 64 * chunk + 16 * word + 2 * t + 8 * (register // 2) + second
        # A shift by 4 · register brings a register's pair to the low bits of both halves.
        found = int(words[slab, chunk, lane, word]) >> (4 * register + 16 * second) & 15
        assert found == codes[row, column]


def test_codes_come_back() -> None:
    codes = torch.randint(0, 256, (64, 12, 16), generator=seeded(), dtype=torch.uint8)
    assert torch.equal(codes_of(fragments_of(codes)), codes)
    assert not torch.equal(fragments_of(codes), codes)
    plane = torch.arange(64 * 3).view(64, 3)
    assert slabs_of(plane).reshape(-1)[:18].tolist() == [*range(0, 48, 3), 1, 4]


def test_a_matrix_is_rearranged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():  # As weights are loaded.
        matrix, _ = drawn(AWQ, 96, 256, seeded())
    wanted, before = fragments_of(matrix.codes), matrix.nbytes
    monkeypatch.setattr("holdfast.execution.gpu.cuda.fragments.REARRANGED_BYTES", 32 * 128)
    rearrange(matrix)
    assert torch.equal(matrix.codes, wanted)
    assert matrix.nbytes == before
    with pytest.raises(EngineError, match="rearranged"):
        matrix.dequantize(0, 1, torch.empty(1, 256))


@pytest.mark.parametrize(
    ("layout", "rows", "columns", "said"),
    [
        (AWQ, 64, 256, None),
        (AWQ, 40, 256, "40 x 256"),
        (ScaledLayout(codes="int4", group=64), 64, 192, "64 x 192"),
        (ScaledLayout(codes="int4", group=96), 64, 384, "96 columns"),
        (ScaledLayout(codes="nf4", group=64), 64, 256, "nf4"),
    ],
)
def test_what_fits(layout: ScaledLayout, rows: int, columns: int, said: str | None) -> None:
    found = against_fragments(layout, rows, columns)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("gpu", [int4.SMALL, int4.CutLimits(132, 227 << 10, True)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_cuts_fit(name: str, gpu: int4.CutLimits) -> None:
    macros = int4.layout_macros(LAYOUTS[name], 4096, torch.bfloat16)
    for rows, elements in product((1, 8, 9, 16, 32, 33, 64, 256), (1 << 24, 1 << 26, 1 << 27)):
        cut = int4.product_cut(rows, elements, macros, gpu)
        assert cut.rows >= min(rows, 64)
        assert cut.blocks * cut.shared_bytes(macros) <= gpu.shared_bytes
        assert cut.threads * cut.blocks <= 512


@pytest.mark.skipif(not compiler.available(), reason="libnvrtc is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_compiles(capability: tuple[int, int]) -> None:
    gpu = int4.SMALL._replace(hopper=capability == (9, 0))
    for rows, dtype, gate in ((1, torch.bfloat16, -1), (64, torch.float16, 0)):
        macros = int4.layout_macros(LAYOUTS["gptq 32"], 4096, dtype)
        cut = int4.product_cut(rows, 1 << 24, macros, gpu)
        rows_macros = int4.rows_defines(macros)
        for name, known in (("int4_product", int4.defines(cut, macros, gate)), ("int4_rows", rows_macros)):
            options = compiler.options(capability, dict(known))
            assert compiler.compile_source(module.text(name), options).startswith(b"\x7fELF")


@on_gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 64, 129, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(name: str, rows: int, dtype: torch.dtype) -> None:
    check_products(name, rows, dtype, (1056, 1280) if rows % 2 else (4096, 4096))


@on_gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(17, torch.float16), (33, torch.bfloat16), (64, torch.float16), (200, torch.bfloat16)]
)
def test_products_of_other_gpus_than_hopper(
    name: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 17 rows on Hopper has kernels of its own; these are cut for a desktop's shared memory too."""
    monkeypatch.setattr(int4, "_gpu", lambda device: int4.SMALL)
    check_products(name, rows, dtype, (1056, 1280))


def check_products(name: str, rows: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    source, layout, (outputs, columns) = seeded(), LAYOUTS[name], shape
    matrix, exact, device = *drawn(layout, outputs, columns, source), torch.device("cuda")
    moved = on_device(matrix, device)
    fragments = FragmentMatrix(moved, dtype)
    x = torch.randn(rows, columns, generator=source).to(dtype)
    bias = torch.randn(outputs, generator=source).to(dtype).to(device)
    taken = x if matrix.order is None else x[:, matrix.order.long()]
    wide = int4._gpu(0).hopper and rows > int4.NARROW_ROWS
    seen, elements = (taken, rounded_elements(matrix, exact, dtype)) if wide else (x, exact.double())
    wanted = seen.to(device).double() @ elements.to(device).T
    terms = seen.to(device).double().abs() @ elements.to(device).abs().T
    shares = workspace(device)
    out = torch.full((rows, outputs + 2), NAN, dtype=dtype, device=device)[:, :outputs]
    fragments.product(taken.to(device), out, shares)
    assert_close(out, wanted, terms)
    before = out.double()
    fragments.product(taken.to(device), out, shares, bias=bias, accumulate=True)
    assert_close(out, before + wanted + bias.double(), terms)
    gated = torch.full((rows, outputs // 2), NAN, dtype=dtype, device=device)
    fragments.product(taken.to(device), gated, shares, bias=bias, gate=0)
    both = (wanted + bias.double()).view(rows, 2, -1)
    silu = torch.nn.functional.silu(both[:, 0]) * both[:, 1]
    assert (gated.double() - silu).norm() <= 4 * UNIT[dtype] * silu.norm()
    assert not shares.counters.any()


@on_gpu
@pytest.mark.parametrize(("activation", "kind"), [("none", 1), ("tanh", 2)])
@pytest.mark.parametrize("rows", [4, 40])
def test_gates_of_gelu(activation: str, kind: int, rows: int) -> None:
    source, device = seeded(), torch.device("cuda")
    matrix, exact = drawn(AWQ, 512, 256, source)
    x = torch.randn(rows, 256, generator=source).half().to(device)
    out = torch.full((rows, 256), NAN, dtype=torch.float16, device=device)
    FragmentMatrix(on_device(matrix, device), torch.float16).product(x, out, workspace(device), gate=kind)
    gate, up = (x.double() @ exact.to(device).double().T).chunk(2, -1)
    gated = torch.nn.functional.gelu(gate, approximate=activation) * up
    assert (out.double() - gated).norm() <= 4 * UNIT[torch.float16] * gated.norm()


@on_gpu
@pytest.mark.parametrize(
    ("cut", "name"),
    [
        (ProductCut(8, 2, 4, 3, 2), "awq"),
        (ProductCut(8, 4, 1, 4, 4), "gptq 32"),  # Exactly 48 KiB of shared memory.
        (ProductCut(16, 8, 1, 4, 2), "awq"),
        (ProductCut(16, 4, 2, 4, 2), "gptq 32"),
        (ProductCut(64, 4, 2, 2, 1), "awq"),
    ],
    ids=str,
)
def test_cuts_agree_bit_for_bit_with_themselves(cut: ProductCut, name: str) -> None:
    """Whoever is last adds up in the same order."""
    source, device = seeded(), torch.device("cuda")
    matrix, exact = drawn(LAYOUTS[name], 4096, 1408, source)
    if matrix.order is not None:
        exact = exact[:, matrix.order.long()]
    fragments = FragmentMatrix(on_device(matrix, device), torch.bfloat16)
    x = torch.randn(cut.rows - 1, 1408, generator=source).bfloat16().to(device)
    shares = workspace(device)
    found = []
    for _ in range(5):
        out = torch.full((cut.rows - 1, 4096), NAN, dtype=torch.bfloat16, device=device)
        fragments.product(x, out, shares, cut=cut)
        found.append(out)
    wanted = x.double() @ exact.to(device).double().T
    assert_close(found[0], wanted, x.double().abs() @ exact.to(device).double().abs().T)
    assert all(torch.equal(out, found[0]) for out in found)


@on_gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_expanded_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    matrix, exact = drawn(LAYOUTS[name], 96, 1280, seeded())
    fragments = FragmentMatrix(on_device(matrix, device), dtype)
    out = torch.full((64, 1280), NAN, dtype=dtype, device=device)
    fragments.expand(32, 96, out)
    assert torch.equal(out.cpu(), exact[32:].to(dtype))
    tokens = torch.tensor([[3, 95, 200, 17], [50, 0, 1, 2]], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 0, 0, 1, -1], dtype=torch.int32, device=device)
    positions = torch.tensor([1, 0, 2, 0, 0], dtype=torch.int32, device=device)
    looked_up = torch.full((5, 1280), NAN, dtype=dtype, device=device)
    fragments.embed(tokens, slots, positions, looked_up)
    nothing = torch.zeros(1280)
    wanted = torch.stack((exact[95], exact[3], nothing, exact[50], nothing)).to(dtype)
    assert torch.equal(looked_up.cpu(), wanted)


@on_gpu
def test_products_are_captured() -> None:
    source, device = seeded(), torch.device("cuda")
    matrix, exact = drawn(AWQ, 512, 1024, source)
    fragments, shares = FragmentMatrix(on_device(matrix, device), torch.bfloat16), workspace(device)
    x, out = (
        torch.zeros(4, 1024, dtype=torch.bfloat16, device=device),
        torch.empty(4, 512, dtype=torch.bfloat16, device=device),
    )
    fragments.product(x, out, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fragments.product(x, out, shares)
    x.normal_()
    out.fill_(NAN)
    graph.replay()
    exact = exact.to(device).double()
    assert_close(out, x.double() @ exact.T, x.double().abs() @ exact.abs().T)
