"""Products with quantized blocks against float64, and expanded rows against the CPU's expansion, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.quantization import QuantizedMatrix
from holdfast.execution.triton_kernels import blocks
from holdfast.execution.triton_kernels.product_tiles import ProductTile

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
NAN = float("nan")
LAYOUTS = ["Q8_0", "Q4_0", "Q4_1"]
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(10, 160), *([(1024, 3072), (6144, 4096), (49152, 576)] if ON_GPU else [])]
"""(outputs, inputs)"""


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator().manual_seed(seed)


class Case:
    def __init__(self, layout: str, outputs: int, inputs: int) -> None:
        self.source = seeded(layout, outputs, inputs)
        self.outputs, self.inputs = outputs, inputs
        count = inputs // 32
        stored = torch.randint(0, 256, (outputs, count, BLOCK_BYTES[layout]), dtype=torch.uint8, generator=self.source)
        for place in (0, 2) if layout == "Q4_1" else (0,):
            numbers = torch.randn(outputs, count, 1, generator=self.source).mul_(0.1).half()
            stored[..., place : place + 2] = numbers.view(torch.uint8)
        matrix = QuantizedMatrix(layout, outputs, inputs, CPU)
        matrix.fill_rows(0, stored.view(outputs, -1))
        self.exact = torch.empty(outputs, inputs)
        matrix.dequantize(0, outputs, self.exact)
        planes = (matrix.quants, matrix.scales, matrix.minimums)
        self.planes = blocks.BlockPlanes(layout, *(None if part is None else part.to(DEVICE) for part in planes))

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(dtype: torch.dtype, layout: str, rows: int, outputs: int, inputs: int) -> None:
    case = Case(layout, outputs, inputs)
    tile = None
    if not ON_GPU:
        tile = ProductTile(4, 4, 1) if rows <= 2 else ProductTile(16, 4, 1)
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
        blocks.block_product(
            x, case.planes, target, accumulate=accumulate, bias=bias if accumulate else None, tile=tile
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
    case = Case(layout, 9, 1120)
    out = torch.full((6, 1130), NAN, dtype=dtype, device=DEVICE)
    blocks.dequantize_tile(case.planes, 2, 7, out[:5, :1120])
    assert torch.equal(out[:5, :1120].cpu(), case.exact[2:7].to(dtype))
    assert torch.isnan(out[5:]).all()
    assert torch.isnan(out[:, 1120:]).all()

    tokens_of_slots = torch.tensor([[1, 9, -1], [4, 5, 8]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, -1, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([2, 0, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.full((5, 1120), NAN, dtype=dtype, device=DEVICE)
    blocks.embed_blocks(tokens_of_slots, slots, positions, case.planes, rows)
    assert torch.equal(rows[[0, 4]].cpu(), case.exact[[8, 1]].to(dtype))
    assert not rows[1:4].any(), "no such row"


def test_limits() -> None:
    case = Case("Q8_0", 4, 32)
    with pytest.raises(EngineError, match="16"):
        blocks.block_product(torch.zeros(17, 32, device=DEVICE), case.planes, torch.zeros(17, 4, device=DEVICE))
    blocks.block_product(torch.zeros(0, 32, device=DEVICE), case.planes, torch.zeros(0, 4, device=DEVICE))
