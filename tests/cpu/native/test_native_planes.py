"""Compiled products with planes of codes and scales, as quantized checkpoints have them, against float64 over what the
torch form reads from the same planes: odd shapes, extremes, rounded inputs, and any number of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from holdfast.execution import native
from holdfast.execution.layers.rounding import rounded_inputs
from holdfast.execution.native import loading
from holdfast.execution.native.planes import ScaledBlockMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.hardware import kernels

CPU, GUARD = torch.device("cpu"), 1234.5
IN_INTEGERS = [name for name in kernels.runnable_variants() if name != "portable"]
LAYOUTS = {
    "awq": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "gptq": ScaledLayout(codes="int4", scales="float16", group=32),
    "gptq-ordered": ScaledLayout(codes="int4", scales="float16", group=64, zeros=True, ordered=True),
    "w4a16-row": ScaledLayout(codes="int4", scales="bfloat16"),
    "w8a16": ScaledLayout(codes="int8", scales="bfloat16", group=128),
    "w8a16-zeros": ScaledLayout(codes="int8", scales="float16", group=32, zeros=True),
    "llm-int8": ScaledLayout(codes="int8"),
    "w8a8": ScaledLayout(codes="int8", inputs="int8"),
    "w8a8-static-zeros": ScaledLayout(codes="int8", zeros=True, inputs="int8", static_inputs=True),
    "w4a8": ScaledLayout(codes="int4", group=128, inputs="int8"),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "nf4": ScaledLayout(codes="nf4", group=64),
    "fp8": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8-static": ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
    "fp8-blocks": ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8", input_group=128),
    "fp8-uneven-blocks": ScaledLayout(codes="fp8", scales="bfloat16", group=32, group_rows=24),
    "fp8-weights-only": ScaledLayout(codes="fp8", scales="bfloat16"),
}
SUMMED_IN_INTEGERS = [name for name, layout in LAYOUTS.items() if layout.group_rows != 24]


def drawn(layout: ScaledLayout, rows: int, columns: int, seed: int, scale: float = 0.02) -> ScaledMatrix:
    """Any codes that are numbers."""
    generator, matrix = torch.Generator().manual_seed(seed), ScaledMatrix(layout, rows, columns, CPU)
    bits = torch.randint(0, 256, matrix.codes.shape, generator=generator, dtype=torch.uint8)
    if layout.codes == "fp8":
        bits[(bits & 127) == 127] = 0x31
    matrix.codes.copy_(bits if layout.four_bits else bits.view(matrix.codes.dtype))
    if layout.scales == "uint8":
        matrix.scales.copy_(torch.randint(110, 130, matrix.scales.shape, generator=generator))
    else:
        matrix.scales.copy_(scale * (0.5 + torch.rand(matrix.scales.shape, generator=generator)))
    if matrix.zeros is not None:
        low, high = (-128, 128) if layout.codes == "int8" else (0, 16)
        matrix.zeros.copy_(torch.randint(low, high, matrix.zeros.shape, generator=generator))
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(columns, generator=generator))
    if matrix.inputs is not None:
        matrix.inputs.fill_(0.03)
    return matrix


def numbers(matrix: ScaledMatrix) -> torch.Tensor:
    out = torch.empty(matrix.rows, matrix.columns)
    matrix.dequantize(0, matrix.rows, out)
    return out.double()


def compiled(matrix: ScaledMatrix, bias: torch.Tensor | None = None) -> ScaledBlockMatrix:
    """It takes the planes over: what is expected is read before."""
    return ScaledBlockMatrix(
        matrix.layout, matrix.codes, matrix.scales, matrix.zeros, matrix.order, matrix.inputs, bias
    )


def inputs_of(matrix: ScaledMatrix, x: torch.Tensor) -> torch.Tensor:
    return x if matrix.layout.inputs == "plain" else rounded_inputs(x.contiguous(), matrix.layout, matrix.inputs)


def bound(matrix: ScaledMatrix, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A few units of float32's last place of every term, more where one sum takes all terms one by one, and of what
    zero points take off again; in whole numbers, half a unit of sixteen bits of the largest input of 32 for each."""
    in_order = loading.kernels().VARIANT == "portable" or matrix.layout.group_rows == 24
    taken, sizes = inputs_of(matrix, x).double().abs(), weights.abs()
    if matrix.zeros is not None:
        sizes = sizes + 256 * matrix.scales.double().abs().max()
    limit = 2.0 ** (-15 if in_order else -19) * (taken @ sizes.T) + 1e-30
    if matrix.layout.inputs == "plain":
        ordered = taken if matrix.order is None else taken[:, matrix.order.long()]
        peaks = ordered.view(len(x), -1, 32).amax(2).repeat_interleave(32, 1)
        if matrix.order is not None:
            peaks = torch.empty_like(peaks).index_copy_(1, matrix.order.long(), peaks)
        limit += peaks @ weights.abs().T / 65000
    return limit


def guarded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((rows + 2, columns + 7), GUARD)
    view = whole[1:-1, 3:-4]
    view.fill_(float("nan"))
    return view, whole


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 128), (141, 896)])
def test_product_equals_float64(name: str, outputs: int, columns: int) -> None:
    matrix = drawn(LAYOUTS[name], outputs, columns, seed=outputs)
    weights, generator = numbers(matrix), torch.Generator().manual_seed(columns)
    cases = []
    for rows in (1, 2, 5, 8, 9, 64, 71):
        x = torch.randn(rows, columns + 16, generator=generator)[:, 8:-8]
        cases.append((x, inputs_of(matrix, x).double() @ weights.T, bound(matrix, weights, x)))
    bias = torch.randn(outputs, generator=generator)
    made = compiled(matrix, bias)
    assert made.nbytes == matrix.layout.bytes_for(outputs, columns) + bias.nbytes
    for x, exact, limit in cases:
        out, whole = guarded(len(x), outputs)
        made.write(x, out)
        assert ((out - exact - bias).abs() <= limit + 1e-6).all()
        made.add(x, out)
        assert ((out - 2 * exact - 2 * bias).abs() <= 2 * limit + 1e-5).all()
        out.fill_(GUARD)
        assert (whole == GUARD).all()


# In floats, few rows and many are multiplied in different ways.
@pytest.mark.parametrize("variant", IN_INTEGERS, indirect=True)
@pytest.mark.parametrize("name", SUMMED_IN_INTEGERS)
def test_a_row_depends_neither_on_its_company_nor_on_threads(name: str) -> None:
    matrix = compiled(drawn(LAYOUTS[name], 256, 512, seed=12))
    x, alone, before = torch.randn(70, 512), torch.empty(70, 256), torch.get_num_threads()
    for row in range(70):
        matrix.write(x[row : row + 1], alone[row : row + 1])
    try:
        for most, threads in ((2, 1), (3, 2), (7, 3), (13, 1), (31, 2), (64, 3), (70, 1)):
            torch.set_num_threads(threads)
            together = torch.empty(most, 256)
            matrix.write(x[:most], together)
            assert torch.equal(together, alone[:most])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", IN_INTEGERS[:1], indirect=True)
@pytest.mark.parametrize("name", SUMMED_IN_INTEGERS)
def test_variants_agree_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for other in IN_INTEGERS:
        monkeypatch.setenv(kernels.FORCED_VARIANT, other)
        kernels.kernel_choice.cache_clear()
        loading._find.cache_clear()
        out, x = torch.full((70, 48), float("nan")), torch.randn(70, 768, generator=torch.Generator().manual_seed(2))
        compiled(drawn(LAYOUTS[name], 48, 768, seed=4)).write(x, out)
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


ENDS = ["awq", "gptq", "w8a16", "w8a16-zeros", "w8a8", "mxfp4", "fp8", "nf4"]


@pytest.mark.parametrize("name", ENDS)
def test_codes_inputs_and_scales_at_their_ends(name: str) -> None:
    for byte in (0x00, 0x80, 0x7E, 0xFE, 0xFF):
        for scale in (6e-8, 60000.0):
            if (name, byte) != ("fp8", 0xFF):  # No number in float8.
                _codes_at_an_end(name, byte, scale)


def _codes_at_an_end(name: str, byte: int, scale: float) -> None:
    layout = LAYOUTS[name]
    matrix = drawn(layout, 37, 512, seed=1, scale=scale)
    matrix.codes.view(torch.uint8).fill_(byte)
    if layout.scales == "uint8":
        matrix.scales.fill_(0 if scale < 1 else 254)
    elif layout.scales == "float16":
        matrix.scales.fill_(scale)
    if matrix.zeros is not None:
        matrix.zeros.view(torch.uint8).fill_(0 if byte & 1 else (0x7F if layout.codes == "int8" else 15))
    weights, made = numbers(matrix), None
    for rows in (1, 9, 71):
        for pattern in (torch.ones(512), 1.0 - 2 * (torch.arange(512) % 2), torch.arange(512) * -1e-3):
            x = pattern.expand(rows, 512).contiguous()
            exact, limit = inputs_of(matrix, x).double() @ weights.T, bound(matrix, weights, x)
            if made is None:
                made = compiled(matrix)
            out = torch.full((rows, 37), float("nan"))
            made.write(x, out)
            finite = exact.abs() < 3e38
            assert ((out - exact).abs() <= limit + 1e-36)[finite].all(), (byte, scale, rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_no_number_stays_in_its_row(name: str) -> None:
    layout = LAYOUTS[name]
    made = compiled(drawn(layout, 40, 256, seed=3))
    for rows, bad in itertools.product((1, 12, 80), (float("nan"), float("inf"))):
        x = torch.zeros(rows + 1, 256)
        x[0, 33] = bad
        out = torch.empty(rows + 1, 40)
        made.write(x, out)
        # A stored scale clips what is infinite, as it clips all that is too large.
        if bad != bad or not layout.static_inputs:
            assert not out[0].isfinite().any()
        assert (out[1:] == 0).all()


def test_what_products_cannot_read_is_refused() -> None:
    narrow = ScaledLayout(codes="int8", group=16)
    assert not narrow.compiles(64)
    assert not ScaledLayout(codes="int4", group=32, inputs="fp8").compiles(64)
    assert not ScaledLayout(codes="int8", group=128).compiles(192)
    assert not ScaledLayout(codes="fp8", zeros=True).compiles(64)
    with pytest.raises(ValueError, match="no compiled product for int8 g16"):
        compiled(drawn(narrow, 4, 64, seed=1))
    matrix = drawn(LAYOUTS["gptq-ordered"], 4, 128, seed=1)
    assert matrix.order is not None
    matrix.order[0] = matrix.order[1]
    with pytest.raises(ValueError, match="every input once"):
        compiled(matrix)
    with pytest.raises(ValueError, match="has zeros"):
        ScaledBlockMatrix(LAYOUTS["gptq-ordered"], matrix.codes, matrix.scales)


@pytest.mark.parametrize("name", ["awq", "w8a8", "fp8-blocks", "mxfp4"])
def test_experts_are_those_of_one_matrix_each(name: str) -> None:
    """Routing is tested with blocks; here that a layer's experts are multiplied as their matrices are."""
    layout, experts, hidden, inner = LAYOUTS[name], 3, 256, 128
    gate_up = [compiled(drawn(layout, 2 * inner, hidden, seed)) for seed in range(experts)]
    down = [compiled(drawn(layout, hidden, inner, seed + 10)) for seed in range(experts)]
    layer = native.ExpertLayer(
        gate_up=[[one] for one in gate_up], down=down, per_token=1, normalized=True, activation="silu"
    )
    x, out = torch.randn(9, hidden), torch.zeros(9, hidden)
    logits = torch.nn.functional.one_hot(torch.arange(9) % experts, experts).float()
    layer.add(x, logits, out, native.NativeExpertBuffers.allocate(9, 1, experts, hidden, inner))
    for token in range(9):
        both, gated, found = torch.empty(1, 2 * inner), torch.empty(1, inner), torch.empty(1, hidden)
        gate_up[token % experts].write(x[token : token + 1], both)
        native.activate_and_multiply(both, gated, "silu")
        down[token % experts].write(gated, found)
        torch.testing.assert_close(out[token], found[0], rtol=1e-5, atol=1e-5 * float(found.abs().max()))
