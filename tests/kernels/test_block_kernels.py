"""Products with quantized blocks against float64, and expanded rows against the CPU's expansion, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from quantized_blocks import NEW_KINDS, OLD_KINDS, block_shape, drawn

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.triton_kernels.quantized import blocks
from holdfast.execution.triton_kernels.quantized.block_products import block_gate_up, block_product
from holdfast.execution.triton_kernels.quantized.product_tiles import QuantizedTile, VectorTile
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.triton_kernels.quantized.vector_products import vector_product, vectors_of_blocks
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
NAN = float("nan")
LAYOUTS = [*OLD_KINDS, *NEW_KINDS]
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(10, 5), *([(6144, 128)] if ON_GPU else [])]
"""(outputs, inputs in 32; of blocks with 256 elements their next multiple)"""


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator().manual_seed(seed)


class Case:
    def __init__(self, layout: str, outputs: int, pieces: int) -> None:
        self.source = seeded(layout, outputs, pieces)
        elements, _ = block_shape(layout)
        inputs = -(-32 * pieces // elements) * elements
        self.outputs, self.inputs = outputs, inputs
        stored, exact = drawn(layout, outputs, inputs, int(torch.randint(1 << 30, (), generator=self.source)))
        self.exact = torch.from_numpy(exact)
        matrix = QuantizedMatrix(layout, outputs, inputs, CPU)
        matrix.fill_rows(0, torch.from_numpy(stored))
        planes = (matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small)
        self.planes = blocks.BlockPlanes(layout, *(None if part is None else part.to(DEVICE) for part in planes))

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype).to(DEVICE)


def workspace() -> SplitSums:
    return SplitSums(torch.full((1 << 22,), NAN, device=DEVICE), torch.zeros(4096, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 16] + ([100] if ON_GPU else []))
@pytest.mark.parametrize(("outputs", "pieces"), SHAPES)
def test_products(dtype: torch.dtype, layout: str, rows: int, outputs: int, pieces: int) -> None:
    case = Case(layout, outputs, pieces)
    inputs, tile = case.inputs, None
    if not ON_GPU:
        tile = QuantizedTile(8 if rows <= 8 else 16, 16, 32, 2, 2, 4, 2)
    x = case.normal(rows, inputs + 32, dtype=dtype)[:, :inputs]
    out = torch.full((rows, outputs + 4), NAN, dtype=dtype, device=DEVICE)
    bias, before = case.normal(outputs, dtype=dtype), case.normal(rows, outputs, dtype=dtype)
    exact = case.exact.double().to(DEVICE)
    wanted, terms = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    for accumulate in (False, True):
        target = out[:, :outputs]
        if accumulate:
            target.copy_(before)
            wanted = wanted + before.double() + bias.double()
        block_product(
            x, case.planes, target, workspace(), accumulate=accumulate, bias=bias if accumulate else None, tile=tile
        )  # fmt: skip
        # The result and the elements are rounded once each; sums are float32.
        tolerance = 2.2 * UNIT[dtype] * (wanted.abs() + 3 * terms / inputs**0.5) + 2.0**-20 * terms
        error = (target.double() - wanted).abs()
        assert torch.isfinite(error).all()
        assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"
        assert torch.isnan(out[:, outputs:]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_expanded_bit_for_bit(dtype: torch.dtype, layout: str) -> None:
    case = Case(layout, 9, 35)
    width = case.inputs
    out = torch.full((6, width + 10), NAN, dtype=dtype, device=DEVICE)
    blocks.dequantize_tile(case.planes, 2, 7, out[:5, :width])
    assert torch.equal(out[:5, :width].cpu(), case.exact[2:7].to(dtype))
    assert torch.isnan(out[5:]).all()
    assert torch.isnan(out[:, width:]).all()

    tokens_of_slots = torch.tensor([[1, 9, -1], [4, 5, 8]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, -1, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([2, 0, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.full((5, width), NAN, dtype=dtype, device=DEVICE)
    blocks.embed_blocks(tokens_of_slots, slots, positions, case.planes, rows)
    assert torch.equal(rows[[0, 4]].cpu(), case.exact[[8, 1]].to(dtype))
    assert not rows[1:4].any(), "no such row"


@pytest.mark.parametrize("layout", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("rows", [5, 16])
def test_whole_blocks_of_a_step_and_a_gate(layout: str, rows: int) -> None:
    dtype, inner = (torch.bfloat16, 14336) if ON_GPU else (torch.float32, 20)
    case = Case(layout, 2 * inner, 128 if ON_GPU else 16)
    tile = None if ON_GPU else QuantizedTile(8 if rows <= 8 else 16, 16, 32, 8, 2, 4, 2)
    x, shared = case.normal(rows, case.inputs, dtype=dtype), workspace()
    wanted = x.double() @ case.exact.double().to(DEVICE).T
    out = torch.full((rows, 2 * inner), NAN, dtype=dtype, device=DEVICE)
    block_product(x, case.planes, out, shared, tile=tile)
    assert (out.double() - wanted).norm() <= 2 * UNIT[dtype] * wanted.norm() + 2.0**-18 * wanted.norm()
    if rows <= 8:
        gated = torch.full((rows, inner), NAN, dtype=dtype, device=DEVICE)
        block_gate_up(x, case.planes, gated, shared, tile=tile)
        wanted = torch.nn.functional.silu(wanted[:, :inner]) * wanted[:, inner:]
        assert (gated.double() - wanted).norm() <= 4 * UNIT[dtype] * wanted.norm() + 2.0**-16 * wanted.norm()
    assert not shared.counters.any(), "counters are left as they were found"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", ["Q4_K", "Q4_0", "Q4_1"])
def test_products_with_a_vector(dtype: torch.dtype, layout: str) -> None:
    case = Case(layout, *((6144, 128) if ON_GPU else (10, 10)))
    vectors = vectors_of_blocks(case.planes)
    assert vectors is not None
    tile = None if ON_GPU else VectorTile(4, 8, 1)
    x, norm = case.normal(1, case.inputs, dtype=dtype), case.normal(case.inputs, dtype=dtype)
    before, out = case.normal(1, case.outputs, dtype=dtype), torch.full((1, case.outputs), NAN, dtype=dtype)
    out = out.to(DEVICE)
    exact = case.exact.double().to(DEVICE)
    wide = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * norm.double()
    for normed, accumulate in ((False, False), (True, False), (False, True)):
        if accumulate:
            out.copy_(before)
        vector_product(
            x, vectors, out, accumulate=accumulate, norm_weight=norm if normed else None, epsilon=1e-5, tile=tile
        )  # fmt: skip
        taken = wide if normed else x.double()
        wanted = taken @ exact.T + (before.double() if accumulate else 0)
        terms = taken.abs() @ exact.abs().T
        error = (out.double() - wanted).abs()
        assert (error <= 1.1 * UNIT[dtype] * wanted.abs() + 2.0**-17 * terms).all()
    assert vectors_of_blocks(Case("Q6_K", 4, 8).planes) is None


def test_limits() -> None:
    case = Case("Q8_0", 4, 1)
    for rows, multiply in ((129, block_product), (9, block_gate_up)):
        with pytest.raises(EngineError, match=r"at most|128"):
            multiply(
                torch.zeros(rows, 32, device=DEVICE), case.planes, torch.zeros(rows, 2, device=DEVICE), workspace()
            )
    block_product(torch.zeros(0, 32, device=DEVICE), case.planes, torch.zeros(0, 4, device=DEVICE), workspace())
