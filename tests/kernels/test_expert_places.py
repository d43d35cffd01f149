"""Experts in two stacks, those that stay on the GPU and those that wait elsewhere: the same products as in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from expert_case import DEVICE, NAN, ON_GPU, ExpertCase, Shape, seeded

from holdfast.execution.triton_kernels.experts.blocks import multiply_blocks
from holdfast.execution.triton_kernels.experts.direct import multiply_dense, multiply_rounded
from holdfast.execution.triton_kernels.experts.expanded import multiply_expanded
from holdfast.execution.triton_kernels.experts.planes import RoundedRows, ScaledPlanes
from holdfast.execution.triton_kernels.experts.rounding import round_rows
from holdfast.execution.triton_kernels.experts.scaled import multiply_scaled
from holdfast.execution.triton_kernels.experts.tiles import ExpertTile, ScaledTile
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.weights.gguf_block_types import KINDS
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

SHAPE = Shape(128, 64, 8, 768, 256) if ON_GPU else Shape(5, 4, 2, 384, 24)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
ACTIVATION: Literal["silu"] = "silu"
SCALED = {
    "int4": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "fp8": ScaledLayout(codes="fp8", group=128, group_rows=8),
    "fp8 rounded": ScaledLayout(codes="fp8", group=128, group_rows=8, inputs="fp8"),
}


class Placed:
    """Every second expert stays, in another order; the others wait."""

    def __init__(self, experts: int) -> None:
        self._stay, self._wait = list(range(experts))[::-2], list(range(experts))[-2::-2]
        self.places = torch.empty(experts, dtype=torch.int32)
        for place, expert in enumerate(self._stay):
            self.places[expert] = place
        for place, expert in enumerate(self._wait):
            self.places[expert] = -1 - place
        self.places = self.places.to(DEVICE)

    def cut(self, *planes: torch.Tensor | None) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        return [self._some(plane, self._stay) for plane in planes], [self._some(plane, self._wait) for plane in planes]

    def _some(self, plane: torch.Tensor | None, chosen: Sequence[int]) -> torch.Tensor | None:
        """In memory of its own, beside which something else lies."""
        if plane is None:
            return None
        apart = torch.cat([plane.view(torch.uint8).view(len(self.places), -1)[expert] for expert in chosen])
        return apart.view(plane.dtype).view(-1, *plane.shape[1:])


def written(shape: Shape) -> torch.Tensor:
    return torch.full((shape.tokens * shape.per_token, shape.outputs), NAN, dtype=DTYPE, device=DEVICE)


def test_plain_numbers() -> None:
    case, placed = ExpertCase(SCALED["int4"], SHAPE, gated=True), Placed(SHAPE.experts)
    weight = case.weights.to(DTYPE)
    x, whole, apart = case.normal(SHAPE.tokens, SHAPE.columns).to(DTYPE), written(SHAPE), written(SHAPE)
    tile = ExpertTile(16, 16, 128, 4, 2)
    multiply_dense(x, weight, case.lines, whole, by_token=True, activation=ACTIVATION, tile=tile, described=False)
    (stay,), (wait,) = placed.cut(weight.view(-1, SHAPE.columns))
    assert stay is not None
    assert wait is not None
    rows = 2 * SHAPE.outputs
    multiply_dense(
        x, stay.view(-1, rows, SHAPE.columns), case.lines, apart, by_token=True, activation=ACTIVATION, tile=tile,
        places=placed.places, waiting=wait.view(-1, rows, SHAPE.columns),
    )  # fmt: skip
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, apart)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", [*SCALED, "int4 expanded"])
def test_codes_with_scales(kind: str, gated: bool) -> None:
    layout = SCALED[kind.removesuffix(" expanded")]
    case, placed = ExpertCase(layout, SHAPE, gated=gated), Placed(SHAPE.experts)
    stay, wait = placed.cut(case.matrix.codes, case.matrix.scales, case.matrix.zeros)
    x = case.normal(case.pairs, SHAPE.columns).to(DTYPE)
    found = []
    for matrix, places, waiting in (
        (case.planes, None, None),
        (ScaledPlanes(layout, *stay), placed.places, ScaledPlanes(layout, *wait)),  # type: ignore[arg-type]
    ):
        out, activation = written(SHAPE), ACTIVATION if gated else None
        if layout.inputs == "fp8":
            groups = SHAPE.columns // layout.group
            rounded = RoundedRows(
                torch.empty(case.pairs, SHAPE.columns, dtype=torch.uint8, device=DEVICE),
                torch.empty(case.pairs, groups, dtype=torch.float32, device=DEVICE),
            )
            round_rows(x, rounded.codes, rounded.scales)
            multiply_rounded(
                rounded, matrix, case.lines, out, by_token=False, activation=activation, places=places,
                waiting=waiting, tile=ExpertTile(16, 16, 128, 4, 2),
            )  # fmt: skip
        elif kind == "int4 expanded":
            multiply_expanded(
                x, matrix, case.lines, out, by_token=False, activation=activation, places=places, waiting=waiting,
                tile=ScaledTile(16, 32, 1, 4, 2), span=128,
            )  # fmt: skip
        else:
            multiply_scaled(
                x, matrix, case.lines, out, by_token=False, activation=activation, places=places, waiting=waiting,
                tile=ScaledTile(16, 32, 1, 4, 2),
            )  # fmt: skip
        found.append(out)
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_blocks_of_gguf(kind: str) -> None:
    shape = SHAPE._replace(columns=256)
    case, placed = ExpertCase(SCALED["int4"], shape, gated=True), Placed(shape.experts)
    rows, about = shape.experts * 2 * shape.outputs, KINDS[kind]
    matrix = QuantizedMatrix(kind, rows, shape.columns, DEVICE)
    source = seeded(kind)
    blocks = torch.randint(0, 256, (rows, shape.columns // about.elements, about.nbytes), generator=source)
    stored = blocks.to(torch.uint8)
    for at in (about.scale_at, about.minimum_at):
        if at is not None:  # Small numbers.
            stored[..., at : at + 2] = torch.tensor([0, 0x20], dtype=torch.uint8)
    matrix.fill_rows(0, stored.view(rows, -1).to(DEVICE))
    planes = matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small
    stay, wait = placed.cut(*planes)
    x, whole, apart = case.normal(shape.tokens, shape.columns).to(DTYPE), written(shape), written(shape)
    tile = ExpertTile(16, 16, 4, 4, 2)
    multiply_blocks(
        x, BlockPlanes(kind, *planes), case.lines, whole, by_token=True, activation=ACTIVATION, tile=tile
    )  # fmt: skip
    multiply_blocks(
        x, BlockPlanes(kind, *stay), case.lines, apart, by_token=True, activation=ACTIVATION, tile=tile,  # type: ignore[arg-type]
        places=placed.places, waiting=BlockPlanes(kind, *wait),  # type: ignore[arg-type]
    )  # fmt: skip
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, apart)
