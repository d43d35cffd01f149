"""Rounding of inputs and products of rounded inputs, against torch's own conversions and float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.rounded.products import rounded_product, scale_sums
from holdfast.execution.triton_kernels.rounded.rounding import round_rows
from holdfast.execution.triton_kernels.rounded.tiles import RoundedTile, rounded_tile
from holdfast.footprint.rounded import MOST_PARTS, PART_BYTES

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPE = torch.bfloat16 if ON_GPU else torch.float16
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MOST = {FP8: 448.0, INT8: 127.0}
EPSILON = 1e-5
FLOAT32_SUMS = 2.0**-20
"""Of the sum of the terms' sizes."""
FLOAT8_SUMS = 2.0**-9
"""Of the root of the sum of the terms' squares. Hopper's tensor cores line up 32 products, and the sum so far, with the
largest of them and cut each off at about 2^-13 of it. Signs being random, such losses add up as the terms do. Taken
over into float32 after every 128 inputs they were 1.3e-4 of that root on an H200 and never more than 1.1e-3."""
FORMS = [(FP8, False), (FP8, True), (INT8, False)]
FORM_NAMES = ["fp8", "fp8 blocks", "int8"]


@pytest.fixture
def source() -> torch.Generator:
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(source: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=source, device=DEVICE)


def rounded(x: torch.Tensor, kind: torch.dtype, grouped: bool, static: float | None = None) -> Any:
    """What codes stand for, and their scales: by torch's conversions, on a CPU. A GPU's division by a number multiplies
    with its inverse."""
    wide = x.cpu().float().view(len(x), -1, 128 if grouped else x.shape[1])
    scales = (wide.abs().amax(-1) / MOST[kind]).clamp(min=1e-12)
    if static is not None:
        scales = torch.full_like(scales, static)
    inner = (wide / scales[..., None]).clamp(-448.0 if kind == FP8 else -128.0, MOST[kind])
    codes = inner.to(FP8).float() if kind == FP8 else inner.round()
    return codes.view(x.shape).to(DEVICE), scales.to(DEVICE)


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (unit.to(norm.dtype).float() * norm.float()).to(x.dtype)


class Case:
    """A random matrix, and inputs, as numbers in float64."""

    def __init__(
        self, source: torch.Generator, rows: int, outputs: int, inputs: int, kind: torch.dtype, grouped: bool
    ) -> None:
        self.kind, self.grouped, self.outputs = kind, grouped, outputs
        self.x = (normal(source, rows, inputs + 16) * 3).to(TYPE)[:, :inputs]
        self.norm = (normal(source, inputs) * 0.2 + 1).to(TYPE)
        self.bias = normal(source, outputs).to(TYPE)
        self.codes = (normal(source, outputs, inputs) * MOST[kind] / 4).clamp(-MOST[kind], MOST[kind]).to(kind)
        shape = (-(-outputs // 128), inputs // 128) if grouped else (outputs, 1)
        self.scales = torch.rand(shape, generator=source, device=DEVICE) * 0.01 + 1e-4
        wide = self.scales.double()
        if grouped:
            wide = wide.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
        self.matrix = self.codes.double() * wide
        self.out = torch.full((rows, outputs + 8), NAN, dtype=TYPE, device=DEVICE)

    def product(self, x: torch.Tensor, static: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x rounded, and what sums may be off by."""
        codes, scales = rounded(x, self.kind, self.grouped, static)
        wide = (codes.double().view(*scales.shape, -1) * scales.double()[..., None]).view(x.shape)
        allowed = FLOAT32_SUMS * (wide.abs() @ self.matrix.abs().T)
        if ON_GPU and self.kind == FP8:
            allowed += FLOAT8_SUMS * (wide.square() @ self.matrix.square().T).sqrt()
        return wide @ self.matrix.T, allowed

    def check(self, wanted: torch.Tensor, allowed: torch.Tensor) -> None:
        found = self.out[:, : self.outputs].double()
        error, tolerance = (found - wanted).abs(), 2.2 * UNIT[TYPE] * wanted.abs() + allowed
        assert torch.isfinite(error).all()
        assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"
        assert torch.isnan(self.out[:, self.outputs :]).all()

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = torch.full((MOST_PARTS * PART_BYTES // 4,), NAN, device=DEVICE)
        return parts, torch.zeros(MOST_PARTS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("kind", "grouped", "before"),
    [
        pytest.param(*form, before, id=f"{name}-{before}")
        for form, name in zip(FORMS, FORM_NAMES, strict=True)
        for before in ("nothing", "norm", "gate", "static")
        if not (form[1] and before == "static")  # Groups have scales of their own.
    ],
)
def test_codes_are_the_nearest(source: torch.Generator, kind: torch.dtype, grouped: bool, before: str) -> None:
    for rows, columns in ((5, 384), *(((1, 14336), (300, 4096)) if ON_GPU else ())):
        wide = (normal(source, rows, 2 * columns) * 4).to(TYPE)
        # Zeros, numbers far apart, and numbers that a type would not hold once squared.
        wide[0, :columns] = 0
        wide[-1] *= 300
        norm = (normal(source, columns) * 0.2 + 1).to(TYPE)
        x = wide[:, :columns]
        static = 0.031 if before == "static" else None
        given: dict[str, Any] = {}
        wanted_of = x
        if before == "norm":
            given, wanted_of = {"norm": norm, "epsilon": EPSILON}, normed(x, norm)
        elif before == "gate":
            x = (wide / 40).to(TYPE)
            gate, up = x.chunk(2, -1)
            wanted_of = (activate(gate.float(), "silu").to(TYPE).float() * up.float()).to(TYPE)
            given = {"activation": "silu"}
        elif before == "static":
            given = {"static": torch.tensor([static], device=DEVICE)}
        codes = torch.full((rows, columns), 7, dtype=torch.uint8, device=DEVICE).view(kind)
        scales = torch.full((columns // 128 if grouped else 1, rows), NAN, device=DEVICE).t()
        round_rows(x, codes, scales, grouped=grouped, **given)
        wanted, wanted_scales = rounded(wanted_of, kind, grouped, static)
        if before in ("nothing", "static"):
            assert torch.equal(scales, wanted_scales)
            assert torch.equal(codes.float(), wanted)
        else:
            # One step of the type before it may round otherwise: a norm's root and an activation are not exact.
            assert torch.allclose(scales, wanted_scales, rtol=4 * UNIT[TYPE])
            steps = (codes.float() * scales.repeat_interleave(columns // scales.shape[1], 1)).double()
            exact = wanted_of.double()
            step = 2.0**-4 * exact.abs() if kind == FP8 else 0.5 * scales.double()[:, :1].expand_as(exact)
            least = scales.double().repeat_interleave(columns // scales.shape[1], 1) * 2.0**-10
            assert ((steps - exact).abs() <= 1.1 * step + least + 4 * UNIT[TYPE] * exact.abs()).all()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("bound", "powers"), [(2.5, False), (0.0, True), (2.5, True)])
def test_scales_that_are_bounded_or_powers_of_two(
    source: torch.Generator, grouped: bool, bound: float, powers: bool
) -> None:
    """As fbgemm and DeepSeek's ue8m0 have it; what is not finite stays so."""
    x = (normal(source, 6, 256) * 2).to(TYPE)
    x[0], x[1] = 0, x[1] / 1000
    x[2] = 1.75  # 448 / 256: an exact power of two stays.
    x[5, 3] = NAN
    codes = torch.zeros((6, 256), dtype=torch.uint8, device=DEVICE).view(FP8)
    scales = torch.full((2 if grouped else 1, 6), NAN, device=DEVICE).t()
    round_rows(x, codes, scales, grouped=grouped, bound=bound, powers=powers)
    wide = x.cpu().float().view(6, -1, 128 if grouped else 256)
    wanted = (wide.abs().amax(-1).clamp(max=bound or 1e30) / 448).clamp(min=1e-12)
    if powers:
        wanted = torch.exp2(torch.ceil(torch.log2(wanted)))
    assert torch.equal(scales[:5].cpu(), wanted[:5])
    assert not torch.isfinite(scales[5]).all()
    exact = (wide / wanted[..., None]).clamp(-448, 448).to(FP8).float().view(6, 256)
    assert torch.equal(codes[:5].cpu().float(), exact[:5])
    assert bool((wide[:5].abs() > 2.5).any()), "something is cut off"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("broken", [NAN, float("inf")])
@pytest.mark.parametrize("static", [False, True])
def test_a_row_that_is_not_finite_has_no_finite_product(kind: torch.dtype, broken: float, static: bool) -> None:
    x = torch.ones((2, 128), dtype=torch.float32, device=DEVICE)
    x[1, 17] = broken
    given = torch.tensor([0.1], device=DEVICE) if static else None
    codes, scales = torch.zeros((2, 128), dtype=kind, device=DEVICE), torch.full((2, 1), 3.0, device=DEVICE)
    round_rows(x, codes, scales, static=given)
    assert torch.isfinite(scales[0]).all()
    matrix = torch.ones((16, 128), device=DEVICE).to(kind)
    out = torch.zeros((2, 16), dtype=TYPE, device=DEVICE)
    arrivals = torch.zeros(MOST_PARTS, dtype=torch.int32, device=DEVICE)
    rounded_product(
        codes, scales, matrix, torch.ones((16, 1), device=DEVICE), out, torch.empty(9, device=DEVICE), arrivals,
        tile=RoundedTile(64, 16, 128, 4, 2),
    )  # fmt: skip
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).any()


SHAPES = [(1, 70, 96), (17, 130, 384)]
if ON_GPU:
    SHAPES += [(3, 6144, 4096), (64, 4096, 14336), (17, 576, 1536), (200, 72, 100), (8192, 6144, 4096)]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "kind", "grouped"),
    [
        pytest.param(*shape, *form, id=f"{name}-{'x'.join(map(str, shape))}")
        for form, name in zip(FORMS, FORM_NAMES, strict=True)
        for shape in SHAPES
        if not (form[1] and shape[2] % 128)  # Blocks are of 128 columns.
    ],
)
def test_products(
    source: torch.Generator, rows: int, outputs: int, inputs: int, kind: torch.dtype, grouped: bool
) -> None:
    case = Case(source, rows, outputs, inputs, kind, grouped)
    codes, scales = torch.empty(rows, inputs, device=DEVICE).to(kind), torch.empty(rows, inputs // 128 or 1).to(DEVICE)
    scales = scales if grouped else scales[:, :1]
    round_rows(case.x, codes, scales, grouped=grouped)
    wanted, allowed = case.product(case.x)
    parts, arrivals = case.sums()
    out = case.out[:, :outputs]
    tiles = [None] if ON_GPU else [RoundedTile(64, 16, 128, 4, 2, parts=min(3, -(-inputs // 128)))]
    for tile in tiles:
        given: dict[str, Any] = {"grouped": grouped, "tile": tile}
        rounded_product(codes, scales, case.codes, case.scales, out, parts, arrivals, **given)
        case.check(wanted, allowed)
        before = normal(source, rows, outputs).to(TYPE)
        out.copy_(before)
        rounded_product(
            codes, scales, case.codes, case.scales, out, parts, arrivals, bias=case.bias, accumulate=True, **given
        )
        case.check(wanted + before.double() + case.bias.double(), allowed)
        assert not arrivals.any()


def test_sums_are_scaled_after_a_product_without_scales(source: torch.Generator) -> None:
    for rows, outputs in ((3, 70), *(((300, 6144),) if ON_GPU else ())):
        sums, scales = normal(source, rows, outputs + 8).to(TYPE)[:, :outputs], normal(source, outputs, 1)
        by_row, bias = normal(source, rows, 1), normal(source, outputs).to(TYPE)
        before = normal(source, rows, outputs).to(TYPE)
        wanted = sums.double() * by_row.double() * scales.double().T
        out = before.clone()
        scale_sums(sums, by_row, scales, out, bias=bias, accumulate=True)
        torch.testing.assert_close(
            out.double(), wanted + bias.double() + before.double(), rtol=2 * UNIT[TYPE], atol=4 * UNIT[TYPE]
        )
        scale_sums(sums, by_row, scales, sums)
        torch.testing.assert_close(sums.double(), wanted, rtol=2 * UNIT[TYPE], atol=4 * UNIT[TYPE])


def test_parts_never_outgrow_their_workspace() -> None:
    for outputs in (16, 576, 1024, 4096, 6144, 14336, 28672, 128256):
        for inputs in (64, 896, 4096, 14336, 53248):
            for rows in (1, 3, 17, 64, 65, 8192):
                tile = rounded_tile(rows, outputs, inputs)
                tiles = -(-outputs // tile.outputs) * -(-rows // tile.rows)
                assert tile.parts == 1 or tiles * tile.parts <= MOST_PARTS
                assert tile.parts == 1 or tile.outputs * tile.rows * 4 <= PART_BYTES
