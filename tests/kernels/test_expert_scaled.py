"""Experts in codes with scales against float64: every kind of codes, plain and rounded inputs, gated and not."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from expert_case import DEVICE, NAN, ON_GPU, UNIT, ExpertCase, Shape, seeded

from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.experts.direct import multiply_rounded
from holdfast.execution.triton_kernels.experts.expanded import multiply_expanded
from holdfast.execution.triton_kernels.experts.ordering import gather_expert_columns
from holdfast.execution.triton_kernels.experts.planes import RoundedRows
from holdfast.execution.triton_kernels.experts.rounding import round_rows
from holdfast.execution.triton_kernels.experts.scaled import multiply_scaled, span_of
from holdfast.execution.triton_kernels.experts.tiles import MANY, ExpertTile, ScaledTile, expanded_tile, scaled_tile
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
SMALL = ExpertTile(16, 16, 128, 4, 2)
PLAIN = {
    "int4": ScaledLayout(codes="int4", scales="float16", group=128),
    "int4 zeros": ScaledLayout(codes="int4", scales="bfloat16", group=32, zeros=True),
    "int4 rows": ScaledLayout(codes="int4", scales="float32"),
    "int4 odd": ScaledLayout(codes="int4", scales="float32", group=192),
    "nf4": ScaledLayout(codes="nf4", group=64),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "int8": ScaledLayout(codes="int8", scales="float16", group=128),
    "int8 zeros": ScaledLayout(codes="int8", scales="float16", group=128, zeros=True),
    "fp8 rows": ScaledLayout(codes="fp8"),
    "fp8 blocks": ScaledLayout(codes="fp8", group=128, group_rows=128),
}
ROUNDED = {
    "fp8 rows": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8 static": ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
    "fp8 blocks": ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8"),
    "int8": ScaledLayout(codes="int8", inputs="int8"),
}


class Case(ExpertCase):
    tile = ScaledTile(16, 32, 2, 4, 2)

    def run(self, x: torch.Tensor | RoundedRows, dtype: torch.dtype, by_token: bool) -> torch.Tensor:
        """What is beyond the columns and the pairs stays as it is."""
        outputs = self.shape.outputs
        out = torch.full((self.pairs + 1, outputs + 4), NAN, dtype=dtype, device=DEVICE)
        target = out[: self.pairs, :outputs]
        activation: Literal["silu"] | None = "silu" if self.gated else None
        if isinstance(x, RoundedRows):
            small = None if ON_GPU else SMALL
            multiply_rounded(
                x, self.planes, self.lines, target, by_token=by_token, activation=activation, tile=small
            )  # fmt: skip
        else:
            tile = None if ON_GPU else self.tile
            multiply_scaled(x, self.planes, self.lines, target, by_token=by_token, activation=activation, tile=tile)
        assert torch.isnan(out[self.pairs :]).all()
        assert torch.isnan(out[:, outputs:]).all()
        return out[: self.pairs, :outputs]


SHAPES = [Shape(5, 4, 2, 384, 24)]
if ON_GPU:
    SHAPES += [Shape(1, 128, 8, 1536, 768), Shape(40, 16, 4, 768, 200), Shape(300, 16, 4, 768, 136)]
    SHAPES += [Shape(1200, 8, 2, 1536, 264), Shape(8, 128, 8, 768, 2048)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_plain_inputs(kind: str, shape: Shape, dtype: torch.dtype) -> None:
    gated = dtype == TYPES[0]
    case = Case(PLAIN[kind], shape, gated=gated)
    x = case.normal(shape.tokens if gated else case.pairs, shape.columns + 8).to(dtype)[:, : shape.columns]
    # NF4's values are rounded to x's type; all else is exact until it is added in float32, unless codes are expanded.
    expanded = ON_GPU and case.pairs / shape.experts >= MANY
    unit = 2.0**-20 + (2 * UNIT[dtype] if expanded else UNIT[dtype] if kind == "nf4" else 0)
    case.check(case.run(x, dtype, gated), x.double(), gated, unit)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_rounded_inputs(kind: str, shape: Shape, gated: bool) -> None:
    layout = ROUNDED[kind]
    case = Case(layout, shape, gated=gated)
    x = case.normal(shape.tokens if gated else case.pairs, shape.columns + 8).to(TYPES[0])[:, : shape.columns]
    rounded = round_to(layout, x, case.matrix)
    numbers = rounded.codes.view(torch.float8_e4m3fn) if layout.inputs == "fp8" else rounded.codes
    wide = numbers.double().view(len(x), rounded.scales.shape[1], -1) * rounded.scales.double().unsqueeze(-1)
    # Hopper's tensor cores add products of fp8 with about 14 bits.
    unit = 2.0**-12 if ON_GPU and layout.inputs == "fp8" else 2.0**-20
    case.check(case.run(rounded, TYPES[0], gated), wide.view(len(x), -1), gated, unit)


def round_to(layout: ScaledLayout, x: torch.Tensor, matrix: ScaledMatrix) -> RoundedRows:
    kind = torch.uint8 if layout.inputs == "fp8" else torch.int8
    groups = x.shape[1] // layout.group if layout.group else 1
    rounded = RoundedRows(
        torch.full((len(x), x.shape[1]), 99, dtype=kind, device=DEVICE),
        torch.full((len(x), groups), NAN, dtype=torch.float32, device=DEVICE),
    )
    if matrix.inputs is not None:
        matrix.inputs.fill_(0.011)
    round_rows(x, rounded.codes, rounded.scales, matrix.inputs)
    return rounded


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8 blocks"])
def test_all_tokens_to_the_same_experts(kind: str) -> None:
    """Lines longer than a tile, and experts that nobody chose."""
    shape = Shape(21, 6, 2, 128, 20)
    case = Case(PLAIN[kind], shape, gated=True, crowded=True)
    assert int((case.lines.counts > 0).sum()) == 2
    x = case.normal(shape.tokens, shape.columns).to(TYPES[0])
    case.check(case.run(x, TYPES[0], True), x.double(), True, 2.0**-20)


@pytest.mark.parametrize("kind", ["int4 zeros", "mxfp4", "int8", "fp8 rows"])
@pytest.mark.parametrize("gated", [False, True])
def test_columns_in_segments(kind: str, gated: bool) -> None:
    case = Case(PLAIN[kind], Shape(3, 4, 2, 256, 20), gated=gated)
    case.tile = ScaledTile(8, 16, 1, 4, 2, segments=2)
    x = case.normal(3, 256).to(TYPES[0])
    case.check(case.run(x, TYPES[0], True), x.double(), True, 2.0**-20)


@pytest.mark.parametrize("kind", ["int4 zeros", "mxfp4", "int8", "fp8 rows"])
def test_codes_that_are_expanded_first(kind: str) -> None:
    """More lines than a tile has, and columns that are no whole number of steps."""
    layout, dtype = PLAIN[kind], TYPES[0]
    shape = Shape(18, 3, 2, 160 if layout.group < 128 else 256, 20)
    case = Case(layout, shape, gated=True)
    x = case.normal(shape.tokens, shape.columns).to(dtype)
    out = torch.full((case.pairs + 1, 24), NAN, dtype=dtype, device=DEVICE)
    multiply_expanded(
        x, case.planes, case.lines, out[: case.pairs, :20], by_token=True, activation="silu",
        tile=ScaledTile(16, 32, 1, 4, 2), span=span_of(layout, dtype) if layout.group else 64,
    )  # fmt: skip
    case.check(out[: case.pairs, :20], x.double(), True, 2.0**-20 + 2 * UNIT[dtype])
    assert torch.isnan(out[case.pairs :]).all()
    assert torch.isnan(out[:, 20:]).all()


@pytest.mark.parametrize("kind", ["int4", "rounded"])
def test_gates_that_are_there_already(kind: str) -> None:
    shape = Shape(5, 4, 2, 128, 24)
    case = Case(PLAIN[kind] if kind in PLAIN else ROUNDED["fp8 blocks"], shape, gated=False)
    x = case.normal(shape.tokens, shape.columns).to(TYPES[0])
    taken = x if kind in PLAIN else round_to(case.layout, x, case.matrix)
    up = case.run(taken, TYPES[0], True)
    gates = case.normal(case.pairs, shape.outputs).to(TYPES[0])
    found = gates.clone()
    if isinstance(taken, RoundedRows):
        multiply_rounded(
            taken, case.planes, case.lines, found, by_token=True, activation="silu", gates="out", tile=SMALL
        )  # fmt: skip
    else:
        multiply_scaled(
            taken, case.planes, case.lines, found, by_token=True, activation="silu", gates="out", tile=case.tile
        )  # fmt: skip
    wanted = activate(gates.double(), "silu") * up.double()
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=4 * UNIT[TYPES[0]])


def test_fp8_that_tensor_cores_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both factors are decoded by their bits, all of e4m3's codes among them."""
    monkeypatch.setattr("holdfast.execution.triton_kernels.experts.direct.multiplies_fp8", lambda: False)
    layout, shape = ROUNDED["fp8 rows"], Shape(4, 3, 2, 256, 24)
    case = Case(layout, shape, gated=True)
    x = case.normal(shape.tokens, shape.columns).to(TYPES[0])
    rounded = round_to(layout, x, case.matrix)
    rounded.codes[0] = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    rounded.codes[0, 127::128] = 0  # No numbers.
    wide = rounded.codes.view(torch.float8_e4m3fn).double() * rounded.scales.double()
    case.check(case.run(rounded, TYPES[0], True), wide, True, 2.0**-20)


def test_no_tokens_at_all() -> None:
    case = Case(PLAIN["int4"], Shape(0, 4, 2, 128, 24), gated=False)
    multiply_scaled(
        torch.empty(0, 128, device=DEVICE), case.planes, case.lines, torch.empty(0, 24, device=DEVICE), by_token=True
    )
    round_rows(torch.empty(0, 128), torch.empty(0, 128, dtype=torch.int8), torch.empty(0, 1))


@pytest.mark.parametrize("groups", [1, 3])
def test_inputs_are_rounded_as_torch_rounds(groups: int) -> None:
    """e4m3 over its whole range, subnormal codes and ties included; int8; rows that hold zeros, or no numbers."""
    source = seeded(groups)
    x = torch.randn(40, 96, generator=source) * torch.exp2(torch.randint(-12, 3, (40, 96), generator=source))
    x[1] = 0
    x[2, 5] = NAN
    x[3] = torch.tensor([448.0, 0.5 / 512, 1.5 / 512, 17.0, 19.0, -21.0]).repeat(16)
    x = x.to(torch.float16)
    for kind, most in ((torch.uint8, 448.0), (torch.int8, 127.0)):
        codes = torch.full((40, 96), 99, dtype=kind, device=DEVICE)
        scales = torch.full((40, groups), NAN, device=DEVICE)
        round_rows(x.to(DEVICE), codes, scales)
        # A GPU divides by a number in another way than by a tensor of it.
        codes, scales = codes.cpu(), scales.cpu()
        wide = x.float().view(40, groups, -1)
        wanted = wide.abs().amax(-1).clamp(min=1e-10) / most
        finite = torch.isfinite(wanted)
        torch.testing.assert_close(scales[finite], wanted[finite], atol=0, rtol=0)
        assert not torch.isfinite(scales[~finite]).any()
        scaled = (wide * (1 / wanted).unsqueeze(-1)).clamp(-most, most).view(40, 96)
        if kind == torch.uint8:
            exact = scaled.to(torch.float8_e4m3fn).float()
            found = codes.view(torch.float8_e4m3fn).float()
        else:
            exact, found = scaled.round(), codes.float()
        whole = finite.repeat_interleave(96 // groups, 1)
        torch.testing.assert_close(found[whole], exact[whole], atol=0, rtol=0)


@pytest.mark.parametrize(("bound", "powers"), [(2.0, False), (0.0, True), (2.0, True)])
def test_scales_of_inputs_that_are_bounded_or_powers_of_two(bound: float, powers: bool) -> None:
    x = (torch.randn(5, 256, generator=seeded()) * 2).to(torch.float16)
    x[0], x[1, 7] = 0, NAN
    codes, scales = torch.empty(5, 256, dtype=torch.uint8, device=DEVICE), torch.full((5, 2), NAN, device=DEVICE)
    round_rows(x.to(DEVICE), codes, scales, bound=bound, powers=powers)
    wide = x.float().view(5, 2, 128)
    wanted = wide.abs().amax(-1).clamp(min=1e-10, max=bound or 1e30) / 448
    if powers:
        wanted = torch.exp2(torch.ceil(torch.log2(wanted)))
    rows = [0, 2, 3, 4]
    assert torch.equal(scales.cpu()[rows], wanted[rows])
    assert not torch.isfinite(scales[1, 0])
    exact = (wide * (1 / wanted)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).float().view(5, 256)
    assert torch.equal(codes.cpu().view(torch.float8_e4m3fn).float()[rows], exact[rows])


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("tokens", [3, 21])
def test_columns_in_the_order_of_each_expert(tokens: int, by_token: bool) -> None:
    """Few pairs and more than experts; rows of no pair are left alone."""
    shape = Shape(tokens, 5, 2, 288, 20)
    lines = Case(PLAIN["int4 rows"], shape, gated=False).lines
    source = seeded(tokens)
    order = torch.stack([torch.randperm(288, generator=source) for _ in range(5)]).to(torch.int32).to(DEVICE)
    x = torch.randn(tokens if by_token else 2 * tokens, 288, generator=source).to(DEVICE)
    out = torch.full((2 * tokens + 1, 288), NAN, device=DEVICE)
    gather_expert_columns(x, order, lines, out[:-1], by_token=by_token)
    seen = 0
    for expert, count in enumerate(lines.counts.tolist()):
        for pair in lines.pairs[expert, :count].tolist():
            assert torch.equal(out[pair], x[pair // 2 if by_token else pair][order[expert].long()])
            seen += 1
    assert seen == 2 * tokens
    assert bool(out[-1].isnan().all())


@pytest.mark.parametrize("many", [False, True])
def test_rounded_inputs_may_replace_the_numbers_themselves(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in a program, or several."""
    monkeypatch.setattr("holdfast.execution.triton_kernels.experts.rounding.MANY_ROWS", 20 if many else 99)
    x = torch.randn(33, 768, generator=seeded()).to(torch.float16).to(DEVICE)
    codes, scales = torch.empty(33, 768, dtype=torch.uint8, device=DEVICE), torch.empty(33, 6, device=DEVICE)
    for row in range(33):
        round_rows(x[row : row + 1], codes[row : row + 1], scales[row : row + 1])
    line = x.view(torch.uint8)
    here, scales_here = line[:, :768], line[:, 768 : 768 + 24].view(torch.float32)
    round_rows(x, here, scales_here)
    assert torch.equal(here, codes)
    assert torch.equal(scales_here, scales)


@pytest.mark.parametrize("group", [0, 32, 128, 192, 256])
def test_segments_have_whole_groups(group: int) -> None:
    layout = ScaledLayout(codes="int4", group=group)
    for columns in (32 * count for count in range(1, 80)):
        for pairs in (1, 8, 100):
            tile = scaled_tile(pairs, 128, layout, span_of(layout, torch.bfloat16), columns, 2, 99 * 1024)
            assert columns % tile.segments == 0
            assert tile.segments == 1 or columns // tile.segments % (group or 32) == 0
            assert tile.rows * tile.segments == 16


@pytest.mark.parametrize("kind", PLAIN)
def test_tiles_fit_where_there_is_little_shared_memory(kind: str) -> None:
    layout = PLAIN[kind]
    span = span_of(layout, torch.bfloat16)
    for pairs in (1, 8, 64, 512, 2000, 10**5):
        tile = scaled_tile(pairs, 128, layout, span, 2048, 2, 99 * 1024)
        codes = tile.segments * tile.lines * span // (2 if layout.four_bits else 1)
        inputs = tile.segments * tile.rows * span * 2
        assert tile.stages * tile.parts * (codes + inputs) <= 99 * 1024
        assert expanded_tile(pairs, 128, span, 2, 99 * 1024) is None
