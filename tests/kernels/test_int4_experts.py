"""Experts in four-bit codes by the CUDA kernel against float64: its layouts, long lines, gates."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from expert_case import NAN, UNIT, ExpertCase, Shape

from holdfast.execution.gpu.cuda import compiler
from holdfast.execution.gpu.cuda.int4_experts import (
    FEW,
    FEW_ODD,
    MORE,
    ExpertCut,
    against_int4_experts,
    expert_cut,
    expert_macros,
    multiply_int4,
)
from holdfast.execution.gpu.cuda.module import text
from holdfast.execution.ops.reference import activate
from holdfast.footprint.scaled_layouts import ScaledLayout

GPU = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TYPES = [torch.float16, torch.bfloat16]
LAYOUTS = {
    "zeros": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "plain": ScaledLayout(codes="int4", scales="bfloat16", group=128),
    "long scales": ScaledLayout(codes="int4", scales="float32", group=128, zeros=True),
    "wide groups": ScaledLayout(codes="int4", scales="float16", group=256, zeros=True),
    "rows": ScaledLayout(codes="int4", scales="float32"),
}
CUTS = [FEW, FEW_ODD, MORE, ExpertCut(32, 4, 3, 3), ExpertCut(16, 2, 2, 4, 2)]
SHAPES = [Shape(9, 128, 8, 1536, 96), Shape(70, 40, 4, 768, 208), Shape(3, 4, 2, 256, 16)]


def run(case: ExpertCase, x: torch.Tensor, cut: ExpertCut, *, by_token: bool) -> torch.Tensor:
    """What is beyond the columns and the pairs stays as it is."""
    outputs = case.shape.outputs
    out = torch.full((case.pairs + 1, outputs + 4), NAN, dtype=x.dtype, device=GPU)
    activation: Literal["silu"] | None = "silu" if case.gated else None
    multiply_int4(
        x, case.planes, case.lines, out[: case.pairs, :outputs], by_token=by_token, activation=activation, cut=cut
    )
    assert torch.isnan(out[case.pairs :]).all()
    assert torch.isnan(out[:, outputs:]).all()
    return out[: case.pairs, :outputs]


@on_gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: Shape, gated: bool, kind: str, dtype: torch.dtype) -> None:
    case = ExpertCase(LAYOUTS[kind], shape, gated=gated)
    x = case.normal(shape.tokens if gated else case.pairs, shape.columns + 8).to(dtype)[:, : shape.columns]
    for cut in CUTS:
        case.check(run(case, x, cut, by_token=gated), x.double(), gated, 2.0**-20)


@on_gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_tokens_to_the_same_experts(dtype: torch.dtype) -> None:
    """Lines longer than a block takes, and experts that nobody chose."""
    shape = Shape(77, 70, 2, 256, 48)
    case = ExpertCase(LAYOUTS["zeros"], shape, gated=True, crowded=True)
    x = case.normal(shape.tokens, shape.columns).to(dtype)
    for cut in CUTS:
        case.check(run(case, x, cut, by_token=True), x.double(), True, 2.0**-20)


@on_gpu
def test_gates_that_are_there_already() -> None:
    shape = Shape(20, 4, 2, 256, 64)
    case = ExpertCase(LAYOUTS["plain"], shape, gated=False)
    x = case.normal(shape.tokens, shape.columns).to(torch.bfloat16)
    up = run(case, x, FEW, by_token=True)
    gates = case.normal(case.pairs, shape.outputs).to(torch.bfloat16)
    found = gates.clone()
    multiply_int4(x, case.planes, case.lines, found, by_token=True, activation="silu", gates="out", cut=FEW)
    wanted = activate(gates.double(), "silu") * up.double()
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=4 * UNIT[torch.bfloat16])


@on_gpu
def test_rows_do_not_depend_on_how_many_there_are() -> None:
    """Bit for bit, whichever block takes them."""
    shape = Shape(64, 8, 2, 512, 64)
    case = ExpertCase(LAYOUTS["zeros"], shape, gated=True)
    x = case.normal(shape.tokens, shape.columns).to(torch.float16)
    found = [run(case, x, cut, by_token=True) for cut in (FEW, FEW_ODD)]
    assert torch.equal(found[0], found[1])


def test_cuts_by_the_pairs_of_an_expert() -> None:
    assert expert_cut(8, 128, 2048) is None
    assert expert_cut(64, 128, 2048) is FEW
    assert expert_cut(64, 128, 640) is FEW_ODD
    assert expert_cut(1024, 128, 2048) is MORE
    assert expert_cut(8192, 128, 2048) is None


@pytest.mark.parametrize(
    ("layout", "outputs", "columns", "reason"),
    [
        (LAYOUTS["zeros"], 1536, 2048, None),
        (LAYOUTS["zeros"], 1520, 2048, "not whole tiles"),
        (LAYOUTS["zeros"], 1536, 2000, "not whole tiles"),
        (ScaledLayout(codes="int4", scales="float16", group=32), 1536, 2048, "groups have 32 columns"),
        (ScaledLayout(codes="mxfp4", scales="uint8", group=32), 1536, 2048, "codes are"),
    ],
)
def test_what_is_left_to_triton(
    layout: ScaledLayout, outputs: int, columns: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.execution.gpu.cuda.int4_experts.against_gpu", lambda dtype, device: None)
    found = against_int4_experts(layout, 128, outputs, columns, torch.float16, GPU)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.skipif(not compiler.available(), reason="libnvrtc is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_compiled_for_other_gpus(capability: tuple[int, int]) -> None:
    macros = expert_macros(LAYOUTS["zeros"], 128, torch.float16)
    for cut in (FEW, MORE):
        given = compiler.options(capability, dict(cut.defines(macros, 0, 1)))
        assert compiler.compile_source(text("int4_experts"), given)
