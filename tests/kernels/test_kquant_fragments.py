"""K-quants in the order of tensor cores: the order itself against the definition of m16n8k16's fragments, the kernels
in CUDA against float64 (on a GPU), and that they compile for every GPU that there is (where NVRTC is)."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from quantized_blocks import drawn

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda import compiler, kquant, module
from holdfast.execution.gpu.cuda.kquant import BITS, KquantCut, KquantMatrix, product_cut
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.gguf_fragments import against_fragments_of

NAN = float("nan")
CPU = torch.device("cpu")
LAYOUTS = sorted(BITS)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels in CUDA need a GPU")
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ARITHMETIC = 2.0**-16
"""Of the sum of all products' sizes: float32's additions, and minimums in two halves of a number."""


def seeded() -> torch.Generator:
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def matrix_of(
    layout: str, rows: int, columns: int, source: torch.Generator, scale: float = 0.05
) -> tuple[QuantizedMatrix, torch.Tensor]:
    """A matrix in rows, and its elements in float32."""
    stored, exact = drawn(layout, rows, columns, int(torch.randint(1 << 30, (), generator=source)), scale=scale)
    matrix = QuantizedMatrix(layout, rows, columns, CPU)
    matrix.fill_rows(0, torch.from_numpy(stored))
    return matrix, torch.from_numpy(exact).float()


def memory_of(matrix: QuantizedMatrix) -> set[tuple[int, int]]:
    """Where it lies, and how long that is."""
    parts = matrix.fragments[1:] if matrix.fragments is not None else matrix._parts()
    pieces = [part.untyped_storage() for part in parts if part is not None]
    return {(piece.data_ptr(), piece.nbytes()) for piece in pieces}


def all_bytes(matrix: QuantizedMatrix) -> torch.Tensor:
    parts = matrix.fragments[1:] if matrix.fragments is not None else matrix._parts()
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts if part is not None])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_is_that_of_fragments(layout: str) -> None:
    """Registers of m16n8k16 as the PTX manual draws them, a0 to a3 of a lane: rows g, g+8, g, g+8 and columns 2t, 2t,
    2t+8, 2t+8, two each. Rows g and g+8 are ours 2g and 2g+1, columns of a register four neighbours. Elements are
    put together here one by one, from what a lane of the kernel reads."""
    rows, columns, bits = 32, 512, BITS[layout]
    matrix, exact = matrix_of(layout, rows, columns, seeded())
    taken = matrix.nbytes
    tiles = matrix.weave()
    assert matrix.nbytes == taken == len(all_bytes(matrix))
    codes, scales = (part.reshape(-1).view(torch.int32).tolist() for part in (tiles.codes, tiles.scales))
    high = [0] if tiles.high is None else tiles.high.reshape(-1).view(torch.int32).tolist()
    units = [0.0] if tiles.units is None else tiles.units.reshape(-1).view(torch.float16).tolist()

    def half(at: int) -> float:
        word = [scales[at + side] >> 24 & 255 for side in (0, 1)]
        return float(torch.tensor(word, dtype=torch.uint8).view(torch.float16))

    for tile, block, lane, piece, row in product(range(2), range(2), range(32), range(8), range(2)):
        g, t, at = lane // 4, lane % 4, 2 * tile + block
        word = codes[512 * at + 128 * (piece // 2) + 4 * lane + 2 * (piece % 2) + row]
        from_lane = 64 * at + 2 * (4 * g + piece // 2)
        for step, register, which in product(range(2), range(2), range(2)):
            code = word >> (4 * step + 8 * register + 16 * which) & 15
            place = 4 * row + 2 * step + register
            if bits == 6:
                top = high[256 * at + 128 * (piece // 4) + 4 * lane + piece % 4]
                code |= (top >> (2 * place + 16 * which) & 3) << 4
                byte = scales[from_lane + row] >> (8 * (2 * (piece % 2) + step)) & 255
                value = (code - 32) * ((byte ^ 128) - 128) * units[16 * at + 2 * g + row]
            else:
                if bits == 5:
                    top = high[128 * at + 4 * lane + piece // 2]
                    code |= (top >> (8 * (piece % 2) + place + 16 * which) & 1) << 4
                scale, minimum = (scales[from_lane + side] >> (6 * (2 * row + piece % 2)) & 63 for side in (0, 1))
                mine = 64 * at + 2 * (4 * g + 2 * row)
                value = code * scale * half(mine) - minimum * half(mine + 2)
            column = 256 * block + 32 * piece + 16 * step + 4 * t + 2 * register + which
            assert value == pytest.approx(float(exact[16 * tile + 2 * g + row, column]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_as_before(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a matrix is woven in pieces, and rows begin within a tile."""
    monkeypatch.setattr("holdfast.execution.weights.gguf_fragments.PIECE_ELEMENTS", 2 * 16 * 512)
    matrix, exact = matrix_of(layout, 80, 512, seeded())
    before, held = all_bytes(matrix).clone(), memory_of(matrix)
    matrix.weave()
    assert not torch.equal(all_bytes(matrix), before)
    assert memory_of(matrix) == held, "no other memory than before"
    out = torch.full((50, 512), NAN)
    matrix.dequantize(13, 63, out)
    assert torch.equal(out, exact[13:63])
    chosen = torch.tensor([79, 0, 17, 17, 16])
    matrix.dequantize_some(chosen, out[:5])
    assert torch.equal(out[:5], exact[chosen])
    assert matrix.weave() is matrix.fragments


def test_what_cannot_lie_so_is_named() -> None:
    assert against_fragments_of("Q4_K", 4096) is None
    assert "16 rows" in (against_fragments_of("Q6_K", 4100) or "")
    assert "Q8_0" in (against_fragments_of("Q8_0", 4096) or "")
    about = kquant.against_kquant("Q4_K", 4096, torch.bfloat16, CPU)
    assert about is not None
    assert "GPU" in about


@pytest.mark.skipif(not compiler.available(), reason="no libnvrtc of a CUDA build of torch here")
@pytest.mark.parametrize(
    ("capability", "shared_kib"),
    [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)],
)
def test_kernels_compile_for_every_gpu(capability: tuple[int, int], shared_kib: int) -> None:
    bits = sum(capability) % 3 + 4
    for gated, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        rows, limit = (1 if gated else 32), shared_kib << 10
        cut = product_cut(bits, rows, 4096, limit, columns=4096 * gated, gated=gated, normed=gated)
        options = compiler.options(capability, dict(kquant.defines(bits, dtype, cut, gated)))
        assert b"kquant_product" in compiler.compile_source(module.text("kquant_product"), options)
    options = compiler.options(capability, dict(kquant.rows_defines(bits, torch.bfloat16)))
    assert b"kquant_embed" in compiler.compile_source(module.text("kquant_rows"), options)


# ---- on a GPU ----


def workspace() -> SplitSums:
    return SplitSums(torch.full((1 << 22,), NAN, device="cuda"), torch.zeros(4096, dtype=torch.int32, device="cuda"))


def on_device(matrix: QuantizedMatrix) -> KquantMatrix:
    woven = matrix.weave()
    return KquantMatrix(woven._replace(**{
        name: None if part is None else part.cuda()
        for name, part in zip(woven._fields[1:], woven[1:], strict=True)
    }))  # fmt: skip


def close(out: torch.Tensor, wanted: torch.Tensor, sizes: torch.Tensor) -> None:
    """To one rounding of the result, and float32's arithmetic before."""
    allowed = wanted.abs() * UNIT[out.dtype] * 1.01 + sizes * ARITHMETIC
    assert bool(((out.cpu().double() - wanted).abs() <= allowed).all())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 64, 100])
def test_products_are_right(layout: str, dtype: torch.dtype, rows: int) -> None:
    """With a bias, onto what is there; outputs are no multiple of a block's, and are part of a wider tensor."""
    source = seeded()
    matrix, exact = matrix_of(layout, 304, 1280, source)
    x = torch.randn(rows, 1280, generator=source).to(dtype)
    bias = torch.randn(304, generator=source).to(dtype)
    wanted, sizes = x.double() @ exact.double().t(), x.double().abs() @ exact.double().abs().t()
    device, splits = on_device(matrix), workspace()
    wide = torch.full((rows, 320), NAN, dtype=dtype, device="cuda")
    device.product(x.cuda(), wide[:, 4:308], splits)
    close(wide[:, 4:308], wanted, sizes)
    assert bool(wide[:, :4].isnan().all() and wide[:, 308:].isnan().all())
    before = wide[:, 4:308].double().cpu()
    device.product(x.cuda(), wide[:, 4:308], splits, bias=bias.cuda(), accumulate=True)
    close(wide[:, 4:308], wanted + before + bias.double(), sizes)
    assert int(splits.counters.abs().sum()) == 0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_gates_and_norms_ride_along(layout: str, rows: int) -> None:
    source, dtype = seeded(), torch.bfloat16
    matrix, exact = matrix_of(layout, 608, 1024, source, 1e-4)  # Gates of about one.
    x = (torch.randn(rows, 1024, generator=source) * 3).to(dtype)
    norm = None if rows > 1 else (torch.rand(1024, generator=source) + 0.5).to(dtype)
    inputs = x.float()
    if norm is not None:
        # Rounded before the norm's weights as well, as transformers does.
        inputs = (inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-5)).to(dtype).float() * norm.float()
    both = (inputs.to(dtype).double() @ exact.double().t()).to(dtype).double()
    gate, up = both.chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    out = torch.full((rows, 304), NAN, dtype=dtype, device="cuda")
    on_device(matrix).product(
        x.cuda(), out, workspace(), activation=0, norm=None if norm is None else norm.cuda(), epsilon=1e-5
    )
    # A rounding of each number that is rounded may go the other way.
    error = (out.cpu().double() - wanted).abs()
    assert bool((error <= wanted.abs() * 2.0**-5 + up.abs() * 2.0**-6 + gate.abs() * 2.0**-6 + 1e-3).all())
    assert float(error.median() / wanted.abs().median()) < 2.0**-7


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("scale", [6e-8, 60000.0])
def test_extreme_scales(scale: float) -> None:
    source = seeded()
    matrix, _ = matrix_of("Q4_K", 32, 512, source)
    matrix.scales.fill_(scale)
    assert matrix.minimums is not None
    matrix.minimums.fill_(scale)
    exact = torch.empty(32, 512)
    matrix.dequantize(0, 32, exact)
    x = torch.randn(8, 512, generator=source).to(torch.bfloat16)
    out = torch.full((8, 32), NAN, dtype=torch.bfloat16, device="cuda")
    on_device(matrix).product(x.cuda(), out, workspace())
    close(out, x.double() @ exact.double().t(), x.double().abs() @ exact.double().abs().t())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_as_numbers_are_exact(layout: str, dtype: torch.dtype) -> None:
    matrix, exact = matrix_of(layout, 304, 768, seeded())
    device = on_device(matrix)
    out = torch.full((101, 776), NAN, dtype=dtype, device="cuda")
    device.expand(37, 138, out[:, :768])
    assert torch.equal(out[:, :768].cpu(), exact[37:138].to(dtype))
    assert bool(out[:, 768:].isnan().all())
    tokens, slots, positions = (
        torch.tensor(part, dtype=torch.int32, device="cuda")
        for part in ([[3, 303, 77], [200, 1, 304]], [0, 0, 1, 1, -1, 0], [0, 1, 0, 2, 0, 2])
    )
    rows = torch.full((6, 768), NAN, dtype=dtype, device="cuda")
    device.embed(tokens, slots, positions, rows)
    none = torch.zeros(768)
    assert torch.equal(rows.cpu(), torch.stack([exact[3], exact[303], exact[200], none, none, exact[77]]).to(dtype))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_products_are_right_as_cut_for_less_shared_memory(
    layout: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kquant, "shared_memory_bytes", lambda: 99 << 10)
    source = seeded()
    matrix, exact = matrix_of(layout, 304, 1280, source)
    x = torch.randn(rows, 1280, generator=source).to(torch.bfloat16)
    out = torch.full((rows, 304), NAN, dtype=torch.bfloat16, device="cuda")
    on_device(matrix).product(x.cuda(), out, workspace())
    close(out, x.double() @ exact.double().t(), x.double().abs() @ exact.double().abs().t())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_norm_on_the_way_rounds_where_the_separate_one_does(layout: str) -> None:
    """Of these numbers none lies near a border between two: the same inputs, bit for bit the same product."""
    source = seeded()
    matrix, _ = matrix_of(layout, 304, 1280, source)
    device, splits, cut = on_device(matrix), workspace(), product_cut(4, 1, 304, 227 << 10, columns=1280, normed=True)
    x = torch.tensor([1.0, 3.0]).repeat(1, 640).bfloat16().cuda()
    norm = (torch.randn(1280, generator=source) * 0.2 + 1).bfloat16().cuda()
    normed = ((x.float() * torch.tensor(5.0).rsqrt().item()).bfloat16().float() * norm.float()).bfloat16()
    found, wanted = (torch.full((1, 304), NAN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    device.product(x, found, splits, norm=norm, cut=cut)
    device.product(normed, wanted, splits, cut=cut)
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weaving_many_matrices_takes_no_more_memory_than_one(layout: str) -> None:
    """What torch keeps of freed memory counts too: a GPU is full of weights by then."""
    matrices = [QuantizedMatrix(layout, 4096, 14336, torch.device("cuda")) for _ in range(16)]
    matrices[0].weave()
    held = torch.cuda.memory_reserved()
    for matrix in matrices[1:]:
        matrix.weave()
    assert torch.cuda.memory_reserved() == held


@pytest.mark.gpu
@on_gpu
def test_splits_and_graphs_change_nothing() -> None:
    """The same numbers, bit for bit, from a graph; and to rounding from another cut."""
    source = seeded()
    matrix, exact = matrix_of("Q4_K", 512, 4096, source)
    x = torch.randn(7, 4096, generator=source).to(torch.bfloat16).cuda()
    device, splits = on_device(matrix), workspace()
    first, again = (torch.full((7, 512), NAN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    device.product(x, first, splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.product(x, again, splits)
    for _ in range(3):
        again.fill_(NAN)
        graph.replay()
        assert torch.equal(first, again)
    device.product(x, again, splits, cut=KquantCut(2, 2, 4, 2, 1))
    wanted, sizes = x.cpu().double() @ exact.double().t(), x.cpu().double().abs() @ exact.double().abs().t()
    close(again, wanted, sizes)
    small = SplitSums(splits.sums[:1000], splits.counters)
    with pytest.raises(EngineError, match="workspace"):
        device.product(x, again, small)
