"""Products of int4 codes with many rows on Hopper: how tiles are given to blocks, and the kernel against float64 of
elements as they are rounded (on such a GPU)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from int4_matrices import AWQ, LAYOUTS, NAN, UNIT, assert_close, drawn, on_device, rounded_elements, seeded, workspace

from holdfast.execution.gpu.cuda import compiler, module
from holdfast.execution.gpu.cuda.int4 import layout_macros
from holdfast.execution.gpu.cuda.int4_wide import (
    MOST_SHARED_BYTES,
    WIDE_ROWS,
    WideCut,
    WideMatrix,
    shares,
    wide_cut,
    wide_cuts,
)
from holdfast.execution.gpu.cuda.module import NO_GATE, SILU
from holdfast.execution.triton_kernels.layer import activation_code

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel needs Hopper"
)
CUTS = (
    WideCut(64, 2, 1, 4),
    WideCut(64, 2, 2, 3),
    WideCut(96, 2, 2, 3),
    WideCut(128, 2, 1, 3),
    WideCut(128, 2, 2, 2),
    WideCut(160, 2, 1, 3),
    WideCut(192, 2, 1, 2),
    WideCut(224, 2, 1, 2),
    WideCut(256, 2, 1, 2),
)


@pytest.mark.parametrize(
    ("tiles", "steps", "processors", "room"),
    [
        (24, 32, 132, 156),
        (112, 32, 132, 128),
        (448, 32, 132, 64),
        (131, 8, 132, 264),
        (7, 3, 132, 264),
        (9, 5, 4, 0),
        (132, 32, 132, 128),
        (264, 32, 132, 128),
    ],
)
def test_all_work_is_given_once(tiles: int, steps: int, processors: int, room: int) -> None:
    """As the kernel's blocks take it."""
    given = shares(tiles, steps, processors, room)
    assert 0 < given.blocks <= processors
    assert given.split_tiles * steps <= given.blocks * given.units
    assert -(-given.split_tiles * steps // given.units) <= max(room, 0)
    taken = [0] * (tiles * steps)
    for block in range(given.blocks):
        first = block * given.units
        for unit in range(first, min(first + given.units, given.split_tiles * steps)):
            taken[unit] += 1
        for tile in range(given.split_tiles + block, tiles, given.blocks):
            for unit in range(tile * steps, (tile + 1) * steps):
                taken[unit] += 1
    assert set(taken) == {1}


GELU = activation_code("gelu_tanh")


@pytest.mark.parametrize("name", LAYOUTS)
def test_cuts_fit(name: str) -> None:
    macros = layout_macros(LAYOUTS[name], 4096, torch.bfloat16)
    for elements, gate in product((1 << 24, 1 << 27), (NO_GATE, SILU, GELU)):
        ahead = [cut for cut, of in wide_cuts(elements, macros, max(gate, SILU)) if of == gate]
        for rows in (33, 64, 65, 97, 129, 161, 200, 256, 300, 513, 1025, WIDE_ROWS):
            cut = wide_cut(rows, elements, macros, gated=gate != NO_GATE)
            assert cut.shared_bytes(macros) <= MOST_SHARED_BYTES
            assert cut.stages >= 3
            assert cut.slabs == 2 or cut.warpgroups == 2
            assert -(-rows // cut.rows) * cut.rows - rows < max(64, 32 * -(-rows // cut.rows))
            assert cut in ahead


@pytest.mark.skipif(not compiler.available(), reason="libnvrtc is not installed")
@pytest.mark.parametrize(
    ("cut", "dtype", "gate"), [(CUTS[0], torch.bfloat16, -1), (CUTS[1], torch.float16, 0), (CUTS[7], torch.float16, 0)]
)
def test_compiles(cut: WideCut, dtype: torch.dtype, gate: int) -> None:
    macros = layout_macros(LAYOUTS["gptq 32"], 4096, dtype)
    options = compiler.options((9, 0), dict(cut.defines(macros, gate)))
    assert compiler.compile_source(module.text("int4_wide"), options).startswith(b"\x7fELF")


@on_hopper
@pytest.mark.parametrize(
    ("cut", "name", "dtype"),
    [
        *((cut, "awq", torch.float16) for cut in CUTS),
        (CUTS[0], "awq", torch.bfloat16),
        *product(CUTS[:1], list(LAYOUTS)[1:], (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_products(cut: WideCut, name: str, dtype: torch.dtype) -> None:
    """Of odd numbers of rows, fewer and more than a tile has, and outputs that are not whole tiles."""
    source, device, outputs, columns = seeded(), torch.device("cuda"), 1056, 1280
    matrix, exact = drawn(LAYOUTS[name], outputs, columns, source)
    elements = rounded_elements(matrix, exact, dtype).to(device)
    wide = WideMatrix(on_device(matrix, device), layout_macros(matrix.layout, columns, dtype))
    bias = torch.randn(outputs, generator=source).to(dtype).to(device)
    rest: dict[str, Any] = {"workspace": workspace(device), "cut": cut, "processors": 24}
    for rows in (cut.rows - 27, 3 * cut.rows + 5):
        x = torch.randn(rows, columns, generator=source).to(dtype).to(device)
        wanted, terms = x.double() @ elements.T, x.double().abs() @ elements.abs().T
        out = torch.full((rows, outputs + 2), NAN, dtype=dtype, device=device)[:, :outputs]
        wide.product(x, out, **rest, bias=None, accumulate=False, gate=NO_GATE)
        assert_close(out, wanted, terms)
        before = out.double()
        wide.product(x, out, **rest, bias=bias, accumulate=True, gate=NO_GATE)
        assert_close(out, before + wanted + bias.double(), terms)
        if name == "awq":
            gated = torch.full((rows, outputs // 2), NAN, dtype=dtype, device=device)
            wide.product(x, gated, **rest, bias=bias, accumulate=False, gate=SILU)
            both = (wanted + bias.double()).view(rows, 2, -1)
            silu = torch.nn.functional.silu(both[:, 0]) * both[:, 1]
            assert (gated.double() - silu).norm() <= 4 * UNIT[dtype] * silu.norm()
    assert not rest["workspace"].counters.any()


@on_hopper
@pytest.mark.parametrize("name", ["compressed 64", "whole rows"])
def test_scales_below_those_of_float16(name: str) -> None:
    """bfloat16 and float32 have them: elements are still rounded once."""
    source, device, outputs, columns, dtype = seeded(), torch.device("cuda"), 256, 1280, torch.float16
    matrix, exact = drawn(LAYOUTS[name], outputs, columns, source, scale=2.0**-17)
    elements = rounded_elements(matrix, exact, dtype).to(device)
    wide = WideMatrix(on_device(matrix, device), layout_macros(matrix.layout, columns, dtype))
    x = torch.randn(64, columns, generator=source).to(dtype).to(device)
    out = torch.full((64, outputs), NAN, dtype=dtype, device=device)
    wide.product(x, out, workspace(device), CUTS[0], 132, bias=None, accumulate=False, gate=NO_GATE)
    assert_close(out, x.double() @ elements.T, x.double().abs() @ elements.abs().T)


@on_hopper
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_results_are_the_same_each_time(cut: WideCut) -> None:
    """Whoever is last adds up in the same order; in a graph too, with inputs that came after it was captured."""
    source, device = seeded(), torch.device("cuda")
    matrix, exact = drawn(AWQ, 2048, 1408, source)
    wide = WideMatrix(on_device(matrix, device), layout_macros(AWQ, 1408, torch.float16))
    x = torch.zeros(cut.rows + 9, 1408, dtype=torch.float16, device=device)
    out, shared = torch.empty(len(x), 2048, dtype=torch.float16, device=device), workspace(device)

    def multiply() -> None:
        wide.product(x, out, shared, cut, 132, bias=None, accumulate=False, gate=NO_GATE)

    multiply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    x.copy_(torch.randn(x.shape, generator=source))
    found = []
    for again in (multiply, graph.replay, multiply, graph.replay):
        out.fill_(NAN)
        again()
        found.append(out.clone())
    elements = rounded_elements(matrix, exact, torch.float16).to(device)
    assert_close(found[0], x.double() @ elements.T, x.double().abs() @ elements.abs().T)
    assert all(torch.equal(one, found[0]) for one in found)
