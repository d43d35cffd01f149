"""Products of few rows against float64: norms that ride along, bias, sums onto a stream, and gates."""

from __future__ import annotations

import os
from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from holdfast.errors import EngineError
from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.quantized import products
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_ROWS, ProductTile, few_rows_tile

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPSILON = 1e-5
SHAPES = [(7, 48), (18, 80)]
"""(outputs, inputs): fewer than a tile, and not a multiple of one."""
if ON_GPU:
    SHAPES += [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (128256, 1024), (576, 1536)]
TILES = [ProductTile(4, 32, 1), *([None] if ON_GPU else [])]
"""None: the table's, which would be a thousand programs or a single round of the loop for shapes this small."""
ROWS = range(1, FEW_ROWS + 1)


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator(DEVICE).manual_seed(seed)


class Case:
    """Inputs whose rows lie apart, and what float64 makes of them."""

    def __init__(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.source, self.dtype = seeded(rows, outputs, inputs, dtype), dtype
        self.outputs, self.inputs = outputs, inputs
        self.x = self.normal(rows, inputs + 16)[:, :inputs]
        self.x.mul_(3)
        self.weight = self.normal(outputs, inputs + 16)[:, :inputs]
        self.norm = self.normal(inputs)
        self.bias = self.normal(outputs)
        self.out = torch.full((rows, outputs + 8), NAN, dtype=dtype, device=DEVICE)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source, device=DEVICE).to(self.dtype)

    def exact(self, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The product, and the sum of its terms' sizes: what errors are relative to."""
        x = self.x.double()
        if normed:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.norm.double()
        weight = self.weight.double()
        return x @ weight.T, x.abs() @ weight.abs().T

    def check(self, wanted: torch.Tensor, terms: torch.Tensor, roundings: float = 2.2) -> None:
        """Sums are float32 (their errors grow with the terms), the result is rounded once."""
        found = self.out[:, : self.outputs].double()
        spread = terms / self.inputs**0.5
        tolerance = roundings * UNIT[self.dtype] * (wanted.abs() + 3 * spread) + 2.0**-20 * terms
        error = (found - wanted).abs()
        assert torch.isfinite(error).all()
        assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"
        assert torch.isnan(self.out[:, self.outputs :]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("tile", TILES)
def test_products(dtype: torch.dtype, rows: int, outputs: int, inputs: int, tile: ProductTile | None) -> None:
    for normed in (False, True):
        case = Case(rows, outputs, inputs, dtype)
        out = case.out[:, :outputs]
        norm = case.norm if normed else None
        products.skinny_product(case.x, case.weight, out, norm_weight=norm, epsilon=EPSILON, tile=tile)
        wanted, terms = case.exact(normed)
        case.check(wanted, terms)
        before = case.normal(rows, outputs)
        out.copy_(before)
        products.skinny_product(
            case.x, case.weight, out, norm_weight=norm, epsilon=EPSILON, bias=case.bias, accumulate=True, tile=tile
        )
        case.check(wanted + before.double() + case.bias.double(), terms)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_products(dtype: torch.dtype, rows: int, activation: Literal["silu", "gelu", "gelu_tanh"]) -> None:
    for inner, inputs in ((13, 80), *(((3072, 1024), (14336, 4096)) if ON_GPU else ())):
        for normed, biased in ((True, False), (False, True)):
            case = Case(rows, 2 * inner, inputs, dtype)
            case.weight.mul_(inputs**-0.5)
            wanted, terms = case.exact(normed)
            if biased:
                wanted = wanted + case.bias.double()
            gated, up = wanted.chunk(2, -1)
            case.outputs, case.out = inner, case.out[:, : inner + 8]
            products.skinny_gate_up(
                case.x, case.weight, case.out[:, :inner], activation=activation, epsilon=EPSILON,
                norm_weight=case.norm if normed else None, bias=case.bias if biased else None,
                tile=None if inner > 13 else ProductTile(4, 32, 1),
            )  # fmt: skip
            # An error of either factor is felt through the other; activations are no steeper than 1.13.
            gate_terms, up_terms = terms.chunk(2, -1)
            felt = 1.2 * ((gated.abs() + 1) * (up_terms + up.abs()) + (up.abs() + 1) * (gate_terms + gated.abs()))
            case.check(activate(gated, activation) * up, felt, roundings=3)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_products_of_many_rows_for_hopper(
    dtype: torch.dtype, activation: Literal["silu", "gelu", "gelu_tanh"]
) -> None:
    """Rows that fill no tile, more tiles than programs, and one step of inputs."""
    from holdfast.execution.triton_kernels.gated_hopper import gated_product_hopper

    for rows, inner, inputs in ((1, 128, 64), (65, 256, 192), (1100, 3072, 1024), (2050, 14336, 4096)):
        case = Case(rows, 2 * inner, inputs, dtype)
        case.x, case.weight = case.x.contiguous(), case.weight.contiguous().mul_(inputs**-0.5)
        wanted, terms = case.exact(False)
        gated, up = wanted.chunk(2, -1)
        # A line more than there are rows: it stays as it is.
        found = torch.full((rows + 1, inner), NAN, dtype=dtype, device=DEVICE)
        gated_product_hopper(case.x, case.weight, activation, found[:rows])
        assert torch.isnan(found[rows]).all()
        case.outputs, case.out = inner, torch.cat((found[:rows], case.out[:, :8]), 1)
        gate_terms, up_terms = terms.chunk(2, -1)
        felt = 1.2 * ((gated.abs() + 1) * (up_terms + up.abs()) + (up.abs() + 1) * (gate_terms + gated.abs()))
        case.check(activate(gated, activation) * up, felt, roundings=3)


def test_a_wider_stream_and_wider_sums_keep_their_width() -> None:
    """float16 weights with a float32 stream, and logits in float32 from float16 inputs."""
    for rows in ROWS:
        case = Case(rows, 40, 96, torch.float32)
        case.weight = case.weight.half()
        products.skinny_product(case.x, case.weight, case.out[:, :40])
        case.check(*case.exact(False))
        case.x = case.x.half()
        case.out.fill_(NAN)
        products.skinny_product(case.x, case.weight, case.out[:, :40])
        case.check(*case.exact(False))


def test_large_float16_inputs_are_normed_before_they_can_overflow() -> None:
    for rows in ROWS:
        case = Case(rows, 24, 64, torch.float16)
        case.x.fill_(30000.0)
        case.norm.fill_(4.0)
        products.skinny_product(case.x, case.weight, case.out[:, :24], norm_weight=case.norm, epsilon=EPSILON)
        case.check(*case.exact(True))


def test_limits() -> None:
    case = Case(FEW_ROWS + 1, 8, 32, torch.float32)
    with pytest.raises(EngineError, match="at most 2"):
        products.skinny_product(case.x, case.weight, case.out[:, :8])
    empty = torch.empty(0, 32, device=DEVICE)
    products.skinny_product(empty, case.weight, torch.empty(0, 8, device=DEVICE))


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_tile_is_one_load_of_all_threads_or_two(element_bytes: int) -> None:
    for outputs in (1, 30, 512, 576, 1024, 2048, 4096, 6144, 28672, 128256):
        for inputs in (16, 64, 576, 1024, 3072, 4096, 14336):
            few = few_rows_tile(outputs, inputs, element_bytes)
            assert few.inputs * element_bytes in (few.warps * 512, 2 * few.warps * 512)


def test_captured_once_and_replayed() -> None:
    if not ON_GPU:
        pytest.skip("needs a CUDA graph")
    case = Case(2, 1024, 3072, torch.bfloat16)
    out = case.out[:, :1024]

    def work() -> None:
        products.skinny_product(case.x, case.weight, out, norm_weight=case.norm, epsilon=EPSILON)
        products.skinny_product(case.x[:1], case.weight, out[:1], norm_weight=case.norm, epsilon=EPSILON)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        case.x.copy_(case.normal(2, 3072))
        out.fill_(NAN)
        graph.replay()
        case.check(*case.exact(True))
