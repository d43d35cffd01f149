"""Products of rounded inputs as a decoder calls them: every form, for few rows and more, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.gpu.layers import rounded_linear
from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.gpu.layers.mlp import GatedGpuMlp, MlpBuffers
from holdfast.execution.gpu.layers.rounded_linear import RoundedGpuLinear, RoundedWorkspace
from holdfast.execution.layers.linear import DenseLinear, DividedLinear, QuantizedLinear, StackedLinear
from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.rounded.rounding import largest_of_parts
from holdfast.execution.weights.decoder_weights import GatedWeights
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.rounded import GROUP, workspace_bytes
from holdfast.footprint.scaled_layouts import ScaledLayout

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPE = torch.bfloat16 if ON_GPU else torch.float32
CLOSE = 0.006 if ON_GPU else 1e-4
"""Of the result."""
ROUNDED_AGAIN = 0.06 if ON_GPU else 1e-3
"""The same where inputs were normed or gated before: one that lies between two codes may go either way."""
TOKENS = 1024 if ON_GPU else 3
EPSILON = 1e-5
FP8 = ScaledLayout(codes="fp8", inputs="fp8")
LAYOUTS = {
    "fp8": FP8,
    "fp8 static": ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
    "fp8 blocks": ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=128, input_group=128),
    "int8": ScaledLayout(codes="int8", inputs="int8"),
    "int8 static": ScaledLayout(codes="int8", inputs="int8", static_inputs=True),
}


def quantized(layout: ScaledLayout, rows: int, columns: int, bias: bool = False) -> QuantizedLinear:
    matrix = ScaledMatrix(layout, rows, columns, DEVICE)
    most = 448.0 if layout.codes == "fp8" else 127.0
    wide = (torch.randn(rows, columns, device=DEVICE) * most / 4).clamp(-most, most)
    matrix.codes.copy_(wide.to(matrix.codes.dtype))
    matrix.scales.copy_(torch.rand_like(matrix.scales) * 4 / most / columns**0.5 + 1e-5)
    if matrix.inputs is not None:
        matrix.inputs.fill_(6.0 / most)
    return QuantizedLinear(matrix, TYPE, torch.randn(rows, device=DEVICE).to(TYPE) if bias else None)


def exact(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """By float64, of x rounded as the checkpoint wants it."""
    matrix = linear.matrix
    assert isinstance(matrix, ScaledMatrix)
    layout = matrix.layout
    weight = torch.empty(matrix.rows, matrix.columns, device=DEVICE)
    matrix.dequantize(0, matrix.rows, weight)
    most = 448.0 if layout.codes == "fp8" else 127.0
    wide = x.cpu().float().view(len(x), -1, layout.group or x.shape[1])
    scale = (wide.abs().amax(-1, keepdim=True) / most).clamp(min=1e-12)
    if matrix.inputs is not None:
        scale = matrix.inputs.cpu().view(1, 1, 1).expand_as(scale)
    inner = (wide / scale).clamp(-448.0 if layout.codes == "fp8" else -128.0, most)
    inner = inner.to(torch.float8_e4m3fn).float() if layout.codes == "fp8" else inner.round()
    found = (inner.double() * scale.double()).view(x.shape).to(DEVICE) @ weight.double().T
    return found if linear.bias is None else found + linear.bias.double()


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (unit.to(norm.dtype).float() * norm.float()).to(x.dtype)


def near(found: torch.Tensor, wanted: torch.Tensor, close: float = CLOSE) -> None:
    assert torch.isfinite(found).all()
    error = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert (error < close).all(), f"{error.max().item()} of the result"


def poisoned(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=TYPE, device=DEVICE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_form_of_a_product(name: str) -> None:
    torch.manual_seed(len(name))
    inner, columns = 128, 256
    linear = quantized(LAYOUTS[name], 2 * inner, columns, bias=True)
    ours = gpu_linear(linear, Scratch(TYPE, DEVICE, TOKENS))
    assert isinstance(ours, RoundedGpuLinear)
    norm = (torch.randn(columns, device=DEVICE) * 0.2 + 1).to(TYPE)
    for rows in (1, TOKENS, *((2, 16, 64, 128, 256, 1024) if ON_GPU else ())):
        x = torch.randn(rows, columns, device=DEVICE).to(TYPE)
        wanted, wanted_normed = exact(linear, x), exact(linear, normed(x, norm))
        out = poisoned(rows, 2 * inner)
        ours.write(x, out)
        near(out, wanted)
        before = torch.randn(rows, 2 * inner, device=DEVICE).to(TYPE)
        out.copy_(before)
        ours.add(x, out)
        near(out, wanted + before.double())
        out = poisoned(rows, 2 * inner)
        ours.write_normed(x, norm, EPSILON, poisoned(rows, columns), out)
        near(out, wanted_normed, ROUNDED_AGAIN)
        gate, up = wanted_normed.chunk(2, -1)
        out = poisoned(rows, inner)
        ours.gated(x, norm, EPSILON, "silu", poisoned(rows, columns), poisoned(rows, 2 * inner), out)
        near(out, activate(gate, "silu") * up, ROUNDED_AGAIN)


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8"])
def test_an_mlp_rounds_what_it_gated(name: str) -> None:
    torch.manual_seed(3)
    inner, hidden = 256, 128
    gate_up, down = quantized(LAYOUTS[name], 2 * inner, hidden), quantized(LAYOUTS[name], hidden, inner)
    buffers = MlpBuffers(poisoned(TOKENS, 2 * inner), poisoned(TOKENS, inner))
    scratch = Scratch(TYPE, DEVICE, TOKENS)
    mlp = GatedGpuMlp(GatedWeights(gate_up, down), "silu", buffers, scratch, lambda _, base: base)
    norm = torch.ones(hidden, device=DEVICE).to(TYPE)
    for rows in (1, TOKENS):
        stream = torch.randn(rows, hidden, device=DEVICE).to(TYPE)
        gate, up = exact(gate_up, normed(stream, norm)).to(TYPE).float().chunk(2, -1)
        middle = (activate(gate, "silu").to(TYPE).float() * up).to(TYPE)
        wanted = exact(down, middle)
        before = stream.clone()
        mlp.add_normed(stream, norm, EPSILON, poisoned(rows, hidden))
        near(stream, before.double() + wanted, ROUNDED_AGAIN)


def columns_of(whole: QuantizedLinear, first: int, last: int, bias: torch.Tensor | None) -> DividedLinear:
    """As one rank has them."""
    matrix = whole.matrix
    assert isinstance(matrix, ScaledMatrix)
    layout = replace(matrix.layout, static_inputs=True, divided_inputs=True)
    part = ScaledMatrix(layout, matrix.rows, last - first, DEVICE)
    part.codes.view(torch.int8).copy_(matrix.codes.view(torch.int8)[:, first:last])
    part.scales.copy_(matrix.scales)
    assert part.inputs is not None
    part.inputs.fill_(1.0)
    return DividedLinear(QuantizedLinear(part, TYPE), layout, bias)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_parts_of_rows_are_rounded_as_whole_rows(name: str) -> None:
    """Each rank's by the largest of all, whoever has it; the bias is one's. Uneven parts, as three heads over two."""
    torch.manual_seed(5)
    whole, cut = quantized(LAYOUTS[name], 64, 384, bias=True), 256
    parts = [columns_of(whole, 0, cut, whole.bias), columns_of(whole, cut, 384, None)]
    for rows in (1, TOKENS, *((64, 128) if ON_GPU else ())):
        x = torch.randn(rows, 384, device=DEVICE).to(TYPE)
        x[0, 300] = 40.0  # That the first rank does not see.
        shown = torch.zeros(rows, 2, device=DEVICE)
        for rank, part in enumerate((x[:, :cut], x[:, cut:])):
            own = torch.full_like(shown, float("nan"))
            largest_of_parts(part, own, rank)
            shown += own
        assert torch.equal(shown, torch.stack([x[:, :cut].abs().amax(1), x[:, cut:].abs().amax(1)], 1).float())
        scratch = Scratch(TYPE, DEVICE, TOKENS, largest=lambda _, found=shown: found)
        first, second = (gpu_linear(part, scratch) for part in parts)
        out = poisoned(rows, 64)
        first.write(x[:, :cut], out)
        second.add(x[:, cut:], out)
        near(out, exact(whole, x))
        assert first.kind != second.kind
    with pytest.raises(EngineError, match="which other ranks have"):
        gpu_linear(parts[0], Scratch(TYPE, DEVICE, TOKENS))


def test_a_part_of_a_row_that_is_not_finite_makes_all_of_it_so() -> None:
    x, found = torch.ones(2, 128, device=DEVICE).to(TYPE), torch.empty(2, 2, device=DEVICE)
    x[0, 7] = float("nan")
    largest_of_parts(x, found, 1)
    assert found.tolist() == [[0.0, float("inf")], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ScaledLayout(codes="int8", inputs="int8", zeros=True), "zero points"),
        (ScaledLayout(codes="int8", inputs="fp8"), "int8 with inputs in fp8"),
        (ScaledLayout(codes="fp8", inputs="fp8", group=32), "scales for 1 x 32"),
        (ScaledLayout(codes="int8", inputs="int8", group=128, group_rows=128), "scales for 128 x 128"),
        (ScaledLayout(codes="fp8", inputs="fp8", scales="bfloat16"), "scales in bfloat16"),
        (ScaledLayout(codes="fp8", inputs="fp8", ordered=True), "order"),
        (ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=128, static_inputs=True), "scaled by row"),
        (ScaledLayout(codes="fp8", inputs="fp8", input_group=128), "inputs scaled by 128, and a matrix by row"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(layout: ScaledLayout, said: str) -> None:
    linear = QuantizedLinear(ScaledMatrix(layout, 128, 128, DEVICE), TYPE)
    with pytest.raises(EngineError) as refused:
        gpu_linear(linear, Scratch(TYPE, DEVICE, TOKENS))
    assert said in str(refused.value.found)


def test_it_is_said_which_kernels_multiply_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
    for layout in (FP8, LAYOUTS["int8"]):
        scratch = Scratch(TYPE, DEVICE, 2)
        gpu_linear(quantized(layout, 64, 512), scratch)
        gpu_linear(quantized(layout, 72, 512), scratch)
        said = [(decision.field, decision.value) for decision in scratch.rounded.decisions]
        kernels = "cublas, triton" if on_hopper else "triton"
        assert said == ([("fp8_products", kernels)] if layout is FP8 else [])
    # Of a matrix that lies nowhere, as on such GPUs.
    for capability, name, columns, cuda, reason in (
        ((8, 9), "fp8", 512, "13.0", "this GPU has 8.9"),
        ((9, 0), "fp8 blocks", 640, "13.0", "blocks by 512; these are 128 x 640"),
        ((9, 0), "fp8 blocks", 512, "12.8", "built with 12.8"),
        ((9, 0), "fp8 blocks", 512, "12.9", None),
    ):
        monkeypatch.setattr(rounded_linear, "capability_of", lambda device, found=capability: found)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        matrix = Mock(codes=Mock(device=torch.device("cuda")), layout=LAYOUTS[name], rows=128, columns=columns)
        found = rounded_linear.against_library(matrix)
        assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("names", [("fp8", "fp8 blocks"), ("int8", "fp8 static")])
def test_matrices_side_by_side(names: tuple[str, str]) -> None:
    """Each writes its own columns, and adds to its own."""
    torch.manual_seed(11)
    parts = [quantized(LAYOUTS[name], outputs, 128, bias=True) for name, outputs in zip(names, (64, 128), strict=True)]
    plain = DenseLinear(torch.randn(48, 128, device=DEVICE).to(TYPE) / 16)
    ours = gpu_linear(StackedLinear([parts[0], plain, parts[1]]), Scratch(TYPE, DEVICE, TOKENS))
    for rows in (1, TOKENS, *((16, 128, 512) if ON_GPU else ())):
        x = torch.randn(rows, 128, device=DEVICE).to(TYPE)
        between = x.double() @ plain.weight.double().T
        wanted = torch.cat((exact(parts[0], x), between, exact(parts[1], x)), 1)
        wide = poisoned(rows, 256)
        ours.write(x, wide[:, :240])
        near(wide[:, :240], wanted)
        ours.add(x, wide[:, :240])
        near(wide[:, :240], 2 * wanted)
        assert wide[:, 240:].isnan().all()


def test_without_room_and_for_lookups_it_says_so() -> None:
    linear = quantized(FP8, 64, 128)
    with pytest.raises(EngineError, match="no room"):
        gpu_linear(linear, Scratch(TYPE, DEVICE))
    ours, ids = gpu_linear(linear, Scratch(TYPE, DEVICE, 2)), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(EngineError, match="looked up"):
        ours.embed(ids[None], ids, ids, poisoned(1, 128))


def test_the_workspace_takes_what_was_planned() -> None:
    tokens, hidden, widest = 5, 128, 300
    room = RoundedWorkspace(tokens, TYPE, DEVICE)
    for columns in (hidden, widest, hidden):
        room.make_room(columns)
    room.sums(tokens, hidden)
    assert room.nbytes == workspace_bytes(tokens, widest, hidden, TYPE.itemsize)
    codes, scales = room.inputs(4, 256, torch.int8, grouped=True)
    assert codes.shape == (4, 256)
    assert scales.shape == (4, 256 // GROUP)
    assert scales.stride() == (1, 4)


@pytest.mark.parametrize("rows", [1, 64])
def test_captured_once_and_replayed(rows: int) -> None:
    """Kernels that start before the one they depend on is done, with sums in parts, give the same every time."""
    if not ON_GPU:
        pytest.skip("needs a CUDA graph")
    torch.manual_seed(7)
    scratch, hidden = Scratch(TYPE, DEVICE, rows), 1024
    layers = [[gpu_linear(quantized(FP8, hidden, hidden), scratch) for _ in range(2)] for _ in range(8)]
    norm = torch.ones(hidden, device=DEVICE).to(TYPE)
    stream, middle = poisoned(rows, hidden), poisoned(rows, hidden)

    def work() -> None:
        for first, second in layers:
            first.write_normed(stream, norm, EPSILON, stream, middle)
            second.add(middle, stream)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(5):
        start = torch.randn(rows, hidden, device=DEVICE).to(TYPE)
        stream.copy_(start)
        work()
        wanted = stream.clone()
        stream.copy_(start)
        middle.fill_(float("nan"))
        graph.replay()
        assert torch.equal(stream, wanted)
        assert torch.isfinite(wanted).all()
