"""The AMX variant on CPUs without AMX: its sources compiled with tiles in plain C, against the variant this CPU has,
bit for bit. Where the CPU has AMX, the other tests of this folder run it. Needs AVX-512, which it uses too; where that
has no VNNI, pairs are multiplied without it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import cast

import pytest
import torch
from quantized_blocks import NEW_KINDS, OLD_KINDS
from quantized_blocks import drawn as drawn_blocks

from holdfast.execution import native
from holdfast.execution.native import products
from holdfast.execution.native.interface import Kernels
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.hardware import kernels, probe

FOLDER = Path(native.__file__).parent
SIZES = ((512, (1, 8, 9, 15, 16, 17, 21, 31, 33, 63, 65, 71, 130)), (2048, (9, 50)))
"""Columns, the second more than are laid out at a time, and rows."""
OPTIONS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mamx-tile", "-mamx-int8"]
VARIANT = next((name for name in ("avx512_vnni", "avx512") if name in kernels.runnable_variants()), None)
WIDE_OPTIONS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
WIDE_OPTIONS += ["-mavx512vnni"] if VARIANT == "avx512_vnni" else []
LAYOUTS = [
    ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    ScaledLayout(codes="int4", scales="bfloat16", group=64, ordered=True),
    ScaledLayout(codes="int8", group=128, inputs="int8"),
    ScaledLayout(codes="int8", zeros=True),
    ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    ScaledLayout(codes="fp8"),
]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
    pytest.mark.skipif(
        VARIANT is None or "amx_tile" in probe.processor().features,
        reason="no AVX-512, or AMX itself",
    ),
]


@pytest.fixture(scope="module")
def with_tiles(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("tiles")
    include = ["-include", str(Path(__file__).with_name("tiles_in_c.h")), f"-I{sysconfig.get_path('include')}"]
    flags = ["-std=gnu11", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-DVARIANT=amx"]

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        subprocess.run(["gcc", *flags, *OPTIONS, *WIDE_OPTIONS, *include, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sorted(FOLDER.glob("*.c"))))
    module = folder / "_kernels_amx.so"
    subprocess.run(["gcc", "-shared", *objects, "-lm", "-lpthread", "-o", str(module)], check=True)
    loader = ExtensionFileLoader("_kernels_amx", str(module))
    spec = importlib.util.spec_from_loader("_kernels_amx", loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return cast(Kernels, made)


@pytest.mark.parametrize("variant", [VARIANT], indirect=True)
@pytest.mark.parametrize("kind", [*OLD_KINDS, *NEW_KINDS])
def test_blocks(kind: str, with_tiles: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(lambda columns: blocks(kind, columns), with_tiles, monkeypatch)


@pytest.mark.parametrize("variant", [VARIANT], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_planes(layout: ScaledLayout, with_tiles: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(lambda columns: planes(layout, columns), with_tiles, monkeypatch)


def compare(make: Callable[[int], native.CompiledMatrix], with_tiles: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, counts in SIZES:
        with monkeypatch.context() as patched:
            here = make(columns)
            patched.setattr(products, "kernels", lambda: with_tiles)
            tiled = make(columns)
        for rows in counts:
            x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
            x[rows // 2, :32] = 0
            x[rows - 1] *= 1e30
            outs = [torch.full((rows, 37), float("nan")) for _ in range(2)]
            here.write(x, outs[0])
            tiled.write(x, outs[1])
            assert torch.equal(*outs)


def blocks(kind: str, columns: int) -> native.BlockMatrix:
    raw, _ = drawn_blocks(kind, 37, columns, seed=3)
    return native.BlockMatrix(torch.from_numpy(raw.copy()), kind)


def planes(layout: ScaledLayout, columns: int) -> native.ScaledBlockMatrix:
    generator, matrix = torch.Generator().manual_seed(4), ScaledMatrix(layout, 37, columns, torch.device("cpu"))
    codes = torch.randint(0, 120, matrix.codes.shape, generator=generator, dtype=torch.uint8)
    matrix.codes.copy_(codes if layout.four_bits else codes.view(matrix.codes.dtype))
    matrix.scales.copy_(torch.randint(110, 130, matrix.scales.shape, generator=generator))
    if matrix.zeros is not None:
        matrix.zeros.copy_(torch.randint(0, 16, matrix.zeros.shape, generator=generator))
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(columns, generator=generator))
    parts = (matrix.codes, matrix.scales, matrix.zeros, matrix.order, matrix.inputs)
    return native.ScaledBlockMatrix(layout, *parts)
