"""Cubins in the cache folder, and what the CUDA kernels are not for: no GPU is needed, NVRTC is replaced."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
import torch
from quantized_blocks import drawn

pytest.importorskip("triton")

from holdfast.execution.gpu.cuda import compiler, int4, int4_experts, kquant, module, row_product
from holdfast.execution.gpu.cuda.kquant import BITS, KquantMatrix, against_cuts, product_cut
from holdfast.execution.gpu.layers.linear import Scratch
from holdfast.execution.gpu.memory.oom import is_shortage
from holdfast.execution.triton_kernels.layer import activation_code
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

CPU = torch.device("cpu")
DESKTOP, A100, HOPPER = 99 << 10, 163 << 10, 227 << 10


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that were compiled."""
    found: list[str] = []

    def compile_source(source: str, options: list[str]) -> bytes:
        found.append(source)
        return b"\x7fELF" + source.encode()

    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(compiler, "_made", {})
    return found


def test_compiled_once_for_all_processes(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.cubin("a", (9, 0))
    monkeypatch.setattr(compiler, "_made", {})
    assert compiler.cubin("a", (9, 0)) == first
    assert compiled == ["a"]
    compiler.cubin("a", (8, 0))
    compiler.cubin("a", (9, 0), {"ROWS": 8})
    assert compiled == ["a"] * 3


@pytest.mark.parametrize("damage", [b"", b"half a file"])
def test_damaged_cubin_is_compiled_again(
    damage: bytes, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = compiler.cubin("a", (9, 0))
    (kept,) = (tmp_path / "cuda").iterdir()
    kept.write_bytes(damage)
    monkeypatch.setattr(compiler, "_made", {})
    assert compiler.cubin("a", (9, 0)) == wanted
    assert kept.read_bytes() == wanted


def test_what_the_driver_refused_is_compiled_again(compiled: list[str]) -> None:
    compiler.cubin("a", (9, 0))
    compiler.cubin("a", (9, 0), fresh=True)
    assert compiled == ["a", "a"]


def test_without_a_cache_folder_a_process_compiles_once(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file"))
    compiler.cubin("a", (9, 0))
    compiler.cubin("a", (9, 0))
    assert compiled == ["a"]


def test_shortage_in_the_driver_is_a_shortage() -> None:
    assert isinstance(module.DriverError("a launch failed in the CUDA driver: out of memory"), RuntimeError)
    assert is_shortage(module.DriverError("a launch failed in the CUDA driver: out of memory"))


@pytest.mark.parametrize(("dynamic", "asked"), [(46 << 10, False), (48 << 10, True), (64 << 10, True)])
def test_shared_memory_is_asked_for_with_what_a_kernel_has_of_its_own(
    dynamic: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 KiB, which need not be asked for, are of both."""
    driver = Mock()
    driver.cuFuncSetAttribute.return_value = 0
    monkeypatch.setattr(module, "_driver", lambda: driver)
    module.Kernel(ctypes.c_void_p(1), 128, dynamic)
    assert driver.cuFuncSetAttribute.called == asked


def test_gates_are_numbered_as_other_kernels_number_activations() -> None:
    assert activation_code("silu") == module.SILU
    numbered = [f"if (kind == {activation_code(name)}) return" for name in ("silu", "gelu")]
    assert all(line in module.text("int4_product") for line in numbered)
    assert activation_code("gelu_tanh") == 2


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_products_are_compiled_ahead_for_the_models_own_gate(
    activation: Literal["silu", "gelu_tanh"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first step with a gate would wait for NVRTC."""
    ahead: list[dict[str, int]] = []
    for file in (int4, int4_experts, row_product):
        monkeypatch.setattr(file, "cubin", lambda _, capability, defines: ahead.append(defines))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(int4, "_gpu", lambda index: int4.CutLimits(132, HOPPER - 1024, True))
    gate, shared = activation_code(activation), Scratch(torch.float16, CPU, activation=activation)
    layout = ScaledLayout(codes="int4", scales="float16", group=128)
    int4._compile_ahead.cache_clear()
    int4.FragmentMatrix(ScaledMatrix(layout, 256, 128, CPU), torch.float16, shared.quantized.gate)
    assert {defines["GATE"] for defines in ahead if "GATE" in defines} == {module.NO_GATE, gate}
    ahead.clear()
    int4_experts.compile_expert_products.cache_clear()
    int4_experts.compile_expert_products(layout, 4, torch.float16, (9, 0), shared.quantized.gate)
    assert {(defines["GATES"], defines["ACTIVATION"]) for defines in ahead} == {(0, 0), (1, gate)}
    assert shared.quantized.rows.gate == shared.rounded.rows.gate == gate
    forms: list[int] = []
    monkeypatch.setattr(row_product, "row_cut", lambda matrix, gate, normed: forms.append(gate))
    monkeypatch.setattr(row_product, "row_macros", lambda *_, normed: ())
    row_product._compile_ahead.cache_clear()
    row_product.RowMatrix(ScaledMatrix(layout, 256, 128, CPU), torch.float16, shared.rounded.rows.gate)
    assert set(forms) == {module.NO_GATE, gate}


@pytest.mark.parametrize("bits", sorted(BITS.values()))
def test_kquant_cuts_fit_where_they_are_taken(bits: int) -> None:
    for limit in (DESKTOP, A100, HOPPER):
        for outputs in (4096, 28672, 151_936):
            assert against_cuts(bits, outputs, limit) is None
            for rows in (1, 8, 9, 16, 17, 32, 33, 128):
                cut = product_cut(bits, rows, outputs, limit)
                assert cut.blocks * cut.shared_bytes(bits, 0) + 1024 <= limit
        for columns in (4096, 8192):
            for gated in (False, True):
                one = product_cut(bits, 1, 4096, limit, columns=columns, gated=gated, normed=True)
                assert one.shared_bytes(bits, columns) + 1024 <= limit, "a row's norm rides along on every GPU"
    assert "shared memory" in str(against_cuts(bits, 28672, 48 << 10))


def test_too_many_outputs_are_not_taken() -> None:
    assert against_cuts(4, 524_288, HOPPER) is None
    assert "counters" in str(against_cuts(4, 524_352, HOPPER))
    assert against_cuts(4, 262_144, DESKTOP) is None
    layout = ScaledLayout(codes="int4", scales="float16", group=128, zeros=True)
    gpu = int4.CutLimits(132, HOPPER - 1024, True)
    macros = int4.layout_macros(layout, 4096, torch.bfloat16)
    assert int4.against_cuts(128_256, 4096, macros, gpu) is None
    assert "counters" in str(int4.against_cuts(1_048_576, 4096, macros, gpu))


def woven(rows: int) -> KquantMatrix:
    stored, _ = drawn("Q4_K", rows, 256, 0, scale=0.05)
    matrix = QuantizedMatrix("Q4_K", rows, 256, CPU)
    matrix.fill_rows(0, torch.from_numpy(stored))
    return KquantMatrix(matrix.weave())


def test_gates_are_taken_in_whole_tiles() -> None:
    assert woven(64).takes_gate
    assert not woven(48).takes_gate


def test_norms_ride_along_in_the_type_of_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = woven(64), torch.zeros(1, 256, dtype=torch.bfloat16)
    norm = torch.ones(256, dtype=torch.bfloat16)
    assert matrix.takes_norm(x, norm, gated=True)
    assert not matrix.takes_norm(x, norm.float(), gated=True)
    assert not matrix.takes_norm(x.expand(2, -1), norm, gated=True)
    monkeypatch.setattr(kquant, "shared_memory_bytes", lambda: DESKTOP)
    assert matrix.takes_norm(x, norm, gated=True)
    monkeypatch.setattr(kquant, "shared_memory_bytes", lambda: 32 << 10)
    assert not matrix.takes_norm(x, norm, gated=True)
