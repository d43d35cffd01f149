"""Products of a single row with matrices of float8_e4m3fn codes, as checkpoints have them, or of four-bit codes in the
order of fragments.py, by the CUDA kernel beside this file: with the norm before it, the rounding of its inputs, and the
gate or the sum behind it. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy
import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import cubin
from holdfast.execution.gpu.cuda.fragments import SLAB_ROWS
from holdfast.execution.gpu.cuda.int4 import layout_macros
from holdfast.execution.gpu.cuda.module import (
    NO_GATE,
    SILU,
    STATIC_SHARED_BYTES,
    Kernel,
    Macros,
    Module,
    against_gpu,
    text,
)
from holdfast.execution.gpu.cuda.module import (
    processors as processors_of,
)
from holdfast.execution.triton_kernels.shared_memory import shared_memory_bytes
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.rounded import FP8_CAPABILITY

UNIT_COLUMNS = 128
WARPS = 16
"""On a processor: with fewer, too few bytes are on their way; with more, they have too few registers."""
MOST_COLUMNS = 1 << 15
"""A block holds all of x, and some of it in registers for a while."""
FP8_DEPTHS = {False: ((14336, 5), (16384, 4), (28672, 3), (MOST_COLUMNS, 2)),
              True: ((4096, 5), (8192, 4), (12288, 3), (MOST_COLUMNS, 2))}  # fmt: skip
"""Units of a warp that are on their way, to so many columns; of a row that is normed first, and of one that is not."""


class RowCut(NamedTuple):
    """How a product is cut."""

    warps: int
    depth: int
    grid: int
    shared_bytes: int


def against_row(matrix: ScaledMatrix, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot multiply a row with this matrix; None: nothing is against it."""
    layout, device = matrix.layout, matrix.codes.device
    if against := against_gpu(dtype, device):
        return against
    if layout.codes == "fp8":
        if layout.inputs != "fp8" or layout.scales != "float32":
            return f"codes are {layout}"
        if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return "this GPU does not convert FP8"
    elif not matrix.in_fragments:
        return f"codes are {layout}"
    if matrix.rows % SLAB_ROWS or matrix.columns % UNIT_COLUMNS or matrix.columns > MOST_COLUMNS:
        return f"{matrix.rows} x {matrix.columns} are not whole slabs of {SLAB_ROWS} x {UNIT_COLUMNS}"
    most = max(row_cut(matrix, gate, normed=False).shared_bytes for gate in (NO_GATE, SILU))
    if most > shared_memory_bytes() - STATIC_SHARED_BYTES:
        return f"{matrix.rows} outputs take {most} bytes of shared memory in a block"
    return None


def row_cut(matrix: ScaledMatrix, gate: int, *, normed: bool, processors: int | None = None) -> RowCut:
    """One round of blocks; warps of a block share the columns. As many units of a warp are on their way to registers as
    those hold beside what a warp has of x: with one more, some would lie in memory that no plan has."""
    units, fp8 = matrix.columns // UNIT_COLUMNS, matrix.layout.codes == "fp8"
    warps = min(WARPS, 1 << (units.bit_length() - 1))
    depth = 3 if matrix.layout.group == UNIT_COLUMNS // 4 else 4
    if fp8 and not matrix.layout.group:
        depth = next(units for most, units in FP8_DEPTHS[normed] if matrix.columns <= most)
    slabs = matrix.rows // SLAB_ROWS
    together = 2 if gate != NO_GATE and not fp8 else 1
    steps = -(-slabs // together)
    grid = min(steps, (processors or processors_of(matrix.codes.device.index or 0)) * (WARPS // warps))
    kept = -(-steps // grid) * together * warps * SLAB_ROWS * 4
    return RowCut(warps, depth, grid, _sums_at(matrix) + kept)


def _sums_at(matrix: ScaledMatrix) -> int:
    """Where sums lie in shared memory: behind x, and the scales or sums of its groups."""
    groups = matrix.columns // UNIT_COLUMNS * max(1, UNIT_COLUMNS // _group(matrix))
    return matrix.columns * 2 + (0 if matrix.layout.codes == "fp8" and not matrix.layout.group else groups * 4)


def row_macros(matrix: ScaledMatrix, dtype: torch.dtype, cut: RowCut, gate: int, *, normed: bool) -> Macros:
    layout = matrix.layout
    about = (
        (
            ("FP8", 1),
            ("BLOCKED", int(layout.group > 0)),
            ("FIXED", int(layout.static_inputs)),
            ("BOUND_BITS", int(numpy.float32(layout.input_bound).view(numpy.uint32))),
            ("POWERS", int(layout.input_powers)),
        )
        if layout.codes == "fp8"
        else (
            ("FP8", 0),
            ("UNITS_OF_GROUP", max(1, _group(matrix) // UNIT_COLUMNS)),
            *layout_macros(layout, matrix.columns, dtype),
        )
    )
    half = () if layout.codes != "fp8" else (("HALF", int(dtype == torch.float16)),)
    return (
        *about, *half, ("COLUMNS", matrix.columns), ("WARPS", cut.warps), ("BLOCKS", WARPS // cut.warps),
        ("DEPTH", cut.depth), ("NORM", int(normed)), ("GATE", gate), ("SUMS_AT", _sums_at(matrix)),
    )  # fmt: skip


def _group(matrix: ScaledMatrix) -> int:
    return matrix.layout.group or matrix.columns


@cache
def _kernel(macros: Macros, threads: int, shared_bytes: int) -> Kernel:
    # A module each, for what a kernel may take of shared memory is kept with its module.
    module = Module(text("row_product"), dict(macros))
    return module.kernel("row_product", threads=threads, shared_bytes=shared_bytes, early=True)


class RowMatrix:
    """A matrix that nothing is against (`against_row`), and what multiplies a row with it."""

    def __init__(self, matrix: ScaledMatrix, dtype: torch.dtype, gate: int = SILU) -> None:
        self._matrix, self._dtype = matrix, dtype
        _compile_ahead(self._all_macros(gate), torch.cuda.get_device_capability(matrix.codes.device))

    def takes(self, x: torch.Tensor, *, norm: torch.Tensor | None = None, gated: bool = False) -> bool:
        """Whether this is such a product: a single row, a norm of its type, gates and ups of whole slabs."""
        whole = not gated or self._matrix.rows % (2 * SLAB_ROWS) == 0
        return len(x) == 1 and x.dtype == self._dtype and whole and (norm is None or norm.dtype == x.dtype)

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        gate: int = NO_GATE,
        norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """out [1, outputs] = (or +=) x [1, columns] · matrixᵀ + bias, of x normed where `norm` says how; with `gate`
        this activation of the first half times the second."""
        matrix = self._matrix
        odd = [part.dtype for part in (out, bias, norm) if part is not None and part.dtype != x.dtype]
        if odd or not self.takes(x, norm=norm, gated=gate != NO_GATE):
            raise EngineError("this product is not one of the CUDA kernel's", found=f"{odd}, {tuple(x.shape)}")
        if x.data_ptr() % 16 or (norm is not None and norm.data_ptr() % 16):
            raise EngineError("inputs of a product do not begin at whole lines", found=f"{x.data_ptr() % 16} beyond")
        cut = row_cut(matrix, gate, normed=norm is not None)
        macros = row_macros(matrix, x.dtype, cut, gate, normed=norm is not None)
        _kernel(macros, 32 * cut.warps, cut.shared_bytes)(
            (cut.grid, 1, 1), x, matrix.codes, matrix.scales, matrix.zeros, out, bias, norm, matrix.inputs,
            matrix.rows // (1 if gate == NO_GATE else 2), float(epsilon), int(accumulate),
        )  # fmt: skip

    def _all_macros(self, of_model: int) -> tuple[Macros, ...]:
        forms = ((NO_GATE, False), (NO_GATE, True), (of_model, True))
        return tuple(
            row_macros(self._matrix, self._dtype, row_cut(self._matrix, gate, normed=normed), gate, normed=normed)
            for gate, normed in forms
        )


class RowProducts:
    """Makes them, and keeps of which matrices it does not, and why. `gate`: the model's."""

    def __init__(self, gate: int = SILU) -> None:
        self.gate = gate
        self.found: list[str | None] = []

    def make(self, matrix: ScaledMatrix, dtype: torch.dtype) -> RowMatrix | None:
        against = against_row(matrix, dtype)
        self.found.append(against)
        return RowMatrix(matrix, dtype, self.gate) if against is None else None


@cache
def _compile_ahead(wanted: tuple[Macros, ...], capability: tuple[int, int]) -> None:
    """Side by side, what products of a matrix may want: what is then loaded lies in the cache."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: cubin(text("row_product"), capability, dict(one)), wanted))
