"""Products of many rows with quantized matrices: where these are expanded to, and the gate in the product."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.gpu.layers.quantized_linear import SPARE_ROWS, QuantizedGpuLinear, QuantizedWorkspace
from holdfast.execution.layers.linear import QuantizedLinear, StackedLinear
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.gpu import EXPANDED_BYTES, SUMS_BYTES
from holdfast.footprint.scaled_layouts import ScaledLayout

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
FORMATS = ("awq", "nf4", "Q4_K", "Q8_0")


def drawn(name: str, rows: int, columns: int) -> ScaledMatrix | QuantizedMatrix:
    if name in ("Q4_K", "Q8_0"):
        blocks = QuantizedMatrix(name, rows, columns, DEVICE)
        for plane in (blocks.quants, blocks.small):
            if plane is not None:
                plane.view(torch.uint8).random_(0, 256)
        for scales in (blocks.scales, blocks.minimums):
            if scales is not None:
                scales.uniform_(0.0005, 0.001)
        return blocks
    layouts = {
        "awq": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
        "gptq": ScaledLayout(codes="int4", scales="float16", group=32, ordered=True),
        "nf4": ScaledLayout(codes="nf4", group=64),
    }
    matrix = ScaledMatrix(layouts[name], rows, columns, DEVICE)
    matrix.codes.view(torch.uint8).random_(0, 256)
    matrix.scales.uniform_(0.005, 0.015)
    if matrix.zeros is not None:
        matrix.zeros.random_(0, 16)
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(columns))
    return matrix


def test_a_spare_buffer_is_expanded_to_but_for_what_a_product_needs_of_it() -> None:
    columns = 1024
    spare = torch.full((6 * EXPANDED_BYTES // columns // 2, columns), 1.0, dtype=torch.float16, device=DEVICE)
    own, shared = QuantizedWorkspace(torch.float16, DEVICE), QuantizedWorkspace(torch.float16, DEVICE, spare)
    apart = torch.empty((SPARE_ROWS, columns), dtype=torch.float16, device=DEVICE)
    assert own.expanded(columns, apart, apart).nbytes == EXPANDED_BYTES
    assert shared.expanded(columns, apart, apart).data_ptr() == spare.data_ptr()
    assert shared.expanded(columns, apart, apart).nbytes == spare.nbytes
    for kept in (spare[:5000], spare[:5000, : columns // 3], spare[4999:5000, 7:]):
        shared.expanded(columns, apart, kept).fill_(0)
        assert (kept == 1).all()
        assert not spare[5001:-128].any(), "what lies behind is there to be used"
        spare.fill_(1)
    shared.expanded(columns, spare[:5000], apart).fill_(0)
    assert (spare[:5000] == 1).all()
    spare.fill_(1)
    # Less is left than the workspace has itself; and few rows, whose tile stays in the cache.
    for x, out in ((apart, spare[: len(spare) - 128]), (apart[1:], apart[1:])):
        room = shared.expanded(columns, x, out)
        assert room.nbytes == EXPANDED_BYTES
        room.fill_(0)
        assert (spare == 1).all()


def test_sums_lie_in_a_spare_buffer_but_for_what_a_product_needs_of_it() -> None:
    columns = 1024
    spare = torch.full((SUMS_BYTES // columns, columns), 1.0, dtype=torch.float16, device=DEVICE)
    shared = QuantizedWorkspace(torch.float16, DEVICE, spare)
    apart = torch.empty((200, columns), dtype=torch.float16, device=DEVICE)
    for x, out in ((apart, spare[:200]), (spare[:100], spare[100:200])):
        splits = shared.splits_beside(x, out)
        assert splits.sums.data_ptr() == spare[200:].data_ptr()
        splits.sums.fill_(0)
        assert (spare[:200] == 1).all()
    # Of products whose outputs stand side by side, one leaves the others' as they are.
    shared.splits_beside(apart, spare[:200, :256]).sums.fill_(0)
    assert (spare[:200] == 1).all()
    shared.splits_beside(apart, spare[: len(spare) // 2 + 1]).sums.fill_(7)  # Less is left than it has itself.
    assert not spare[200:].any()
    assert shared.splits_beside(apart, apart).counters is shared.splits().counters


@pytest.mark.parametrize("name", ["awq", "gptq"])
@pytest.mark.parametrize("biased", [False, True])
def test_products_through_several_pieces(name: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 rows, and inputs and outputs that lie in the buffer which could be expanded to."""
    from holdfast.execution.gpu.layers import quantized_linear

    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    rows, outputs, inputs = 131, 300, 128
    # The least that is left of it is more than the workspace's own.
    monkeypatch.setattr(quantized_linear, "EXPANDED_BYTES", 128 * inputs * 4)
    monkeypatch.setattr(quantized_linear, "SUMS_BYTES", 1024)
    monkeypatch.setattr(quantized_linear, "SPARE_ROWS", rows)
    spare = torch.full(((rows + 400) * outputs,), NAN, device=DEVICE)
    shared = QuantizedWorkspace(torch.float32, DEVICE, spare)
    matrix = drawn(name, outputs, inputs)
    bias = torch.randn(outputs, device=DEVICE) if biased else None
    exact = torch.empty(outputs, inputs, device=DEVICE)
    matrix.dequantize(0, outputs, exact)
    linear = QuantizedGpuLinear(QuantizedLinear(matrix, torch.float32, bias), shared)
    out = spare[: rows * outputs].view(rows, outputs)
    x = torch.randn(rows, inputs, device=DEVICE)
    wanted = x.double() @ exact.double().T + (0 if bias is None else bias.double())
    linear.write(x, out)
    assert torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-4)
    linear.add(x, out)
    assert torch.allclose(out.double(), 2 * wanted, rtol=1e-4, atol=1e-4)
    inside = spare[: rows * inputs].view(rows, inputs).copy_(x)
    apart = torch.full((rows, outputs), NAN, device=DEVICE)
    linear.write(inside, apart)
    assert torch.equal(inside, x)
    assert torch.allclose(apart.double(), wanted, rtol=1e-4, atol=1e-4)


def test_matrices_side_by_side_leave_each_other_what_they_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of GPTQ in act-order, gate beside up: both lie in the buffer that either expands to."""
    from holdfast.execution.gpu.layers import quantized_linear

    rows, outputs, inputs = 131, 160, 128
    monkeypatch.setattr(quantized_linear, "EXPANDED_BYTES", 128 * inputs * 4)
    monkeypatch.setattr(quantized_linear, "SUMS_BYTES", 1024)
    monkeypatch.setattr(quantized_linear, "SPARE_ROWS", rows)
    spare = torch.full((rows + 120, 2 * outputs), NAN, device=DEVICE)
    parts = [drawn("gptq", outputs, inputs) for _ in range(2)]
    exact = torch.empty(2 * outputs, inputs, device=DEVICE)
    for matrix, rows_of in zip(parts, exact.split(outputs), strict=True):
        matrix.dequantize(0, outputs, rows_of)
    stacked = StackedLinear([QuantizedLinear(matrix, torch.float32) for matrix in parts])
    linear = gpu_linear(stacked, Scratch(torch.float32, DEVICE, rows, spare))
    x = torch.randn(rows, inputs, device=DEVICE)
    linear.write(x, spare[:rows])
    assert torch.allclose(spare[:rows].double(), x.double() @ exact.double().T, rtol=1e-4, atol=1e-4)
    assert not spare[rows:].isnan().all(), "that buffer was expanded to"


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spare_rows", [0, 5000, 9000])
def test_gates_of_many_rows_in_the_product(name: str, spare_rows: int) -> None:
    """`spare_rows` of the expanded matrix, of 8,192: in pieces or whole."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    rows, inner, inputs = 4200, 4096, 4096
    dtype = torch.bfloat16 if name == "Q4_K" else torch.float16
    matrix = drawn(name, 2 * inner, inputs)
    exact = torch.empty(2 * inner, inputs, dtype=torch.float32, device=DEVICE)
    matrix.dequantize(0, 2 * inner, exact)
    factor = 1 / exact.std()
    spare = torch.full((spare_rows, inputs), NAN, dtype=dtype, device=DEVICE)
    linear = QuantizedGpuLinear(QuantizedLinear(matrix, dtype), QuantizedWorkspace(dtype, DEVICE, spare))
    assert linear.gating.value == "hopper"
    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    norm = (torch.rand(inputs, device=DEVICE) * factor / inputs**0.5).to(dtype)
    gate_up, normed = torch.full((rows, 2 * inner), NAN, dtype=dtype, device=DEVICE), torch.empty_like(x)
    out = torch.full((rows + 1, inner), NAN, dtype=dtype, device=DEVICE)
    linear.gated(x, norm, 1e-5, "silu", normed, gate_up, out[:rows])
    assert torch.isnan(gate_up).all(), "it is free while a product gates"
    assert torch.isnan(out[rows]).all()
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * norm.double()
    gates, ups = (wide @ exact.double().T).chunk(2, 1)
    wanted = torch.nn.functional.silu(gates) * ups
    error = (out[:rows].double() - wanted).norm() / wanted.norm()
    assert error < 4 * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-11)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [136, 200, 256, 300])
def test_products_whose_sums_lie_beside_inputs_and_outputs(rows: int) -> None:
    """Of the shape of an 8B model's last product, whose tiles are fewer than processors."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    outputs, inputs, dtype = 4096, 14336, torch.float16
    matrix = drawn("awq", outputs, inputs)
    exact = torch.empty(outputs, inputs, dtype=torch.float32, device=DEVICE)
    matrix.dequantize(0, outputs, exact)
    spare = torch.full((4096, inputs), NAN, dtype=dtype, device=DEVICE)
    linear = QuantizedGpuLinear(QuantizedLinear(matrix, dtype), QuantizedWorkspace(dtype, DEVICE, spare))
    x = spare[:rows].copy_(torch.randn(rows, inputs, device=DEVICE))
    before, out = x.clone(), spare.view(-1)[rows * inputs :][: rows * outputs].view(rows, outputs)
    wanted = x.double() @ exact.double().T
    linear.write(x, out)
    assert (out.double() - wanted).norm() < 2.0**-10 * wanted.norm()
    linear.add(x, out)
    assert (out.double() - 2 * wanted).norm() < 2.0**-9 * wanted.norm()
    assert torch.equal(x, before)
    assert not spare[2 * rows :].isnan().all(), "sums lay there"
