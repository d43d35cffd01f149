"""Products of experts kept as four-bit codes, in the layout's own order, by int4_experts.cu: for lines of few tokens,
where they are bound by memory. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import cubin
from holdfast.execution.gpu.cuda.fragments import BLOCK_COLUMNS, SLAB_ROWS
from holdfast.execution.gpu.cuda.int4 import code_macros
from holdfast.execution.gpu.cuda.module import Kernel, Macros, Module, against_gpu, text
from holdfast.execution.triton_kernels.experts.launch import (
    GATES_IN_MATRIX,
    GATES_IN_OUT,
    Activation,
    ExpertAssignments,
    Gates,
    gates_of,
)
from holdfast.execution.triton_kernels.experts.planes import ScaledPlanes
from holdfast.execution.triton_kernels.experts.tiles import most_tiles
from holdfast.footprint.scaled_layouts import ScaledLayout

MOST_EXPERTS = 1024
"""A warp reads the lengths of all lines."""


@dataclass(frozen=True, slots=True)
class ExpertCut:
    rows: int
    """Pairs of one expert's line that a block takes at most."""
    warps: int
    """Of 32 matrix rows each."""
    stages: int
    blocks: int
    """On a processor at once."""
    units: int = 1
    """Of 128 columns, that are copied together."""

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.units * (self.warps * 2048 + self.rows * 256)

    def defines(self, macros: Macros, activation: int, gates: int) -> Macros:
        about: Macros = ("ROWS", self.rows), ("WARPS", self.warps), ("STAGES", self.stages), ("BLOCKS", self.blocks)
        about += ("UNITS", self.units), ("SHARED_BYTES", self.shared_bytes)
        return *macros, *about, ("ACTIVATION", activation), ("GATES", gates)


FEW, FEW_ODD = ExpertCut(8, 4, 2, 4, 2), ExpertCut(8, 4, 4, 4)
MORE = ExpertCut(16, 4, 3, 4)
FEW_AVERAGE, MOST_AVERAGE = 5, 18
"""Pairs of an expert, to which a block takes 8 and 16: with more, Triton's kernels are as fast."""
LEAST_PAIRS = 16
"""With fewer Triton's kernels are as fast, which cut columns into segments."""


def expert_cut(pairs: int, experts: int, columns: int) -> ExpertCut | None:
    """By the pairs that an expert has on the average, the fastest of some with 128 experts of 768 and 8 for each token
    of 2,048 on an H200; None: not with these kernels."""
    average = pairs / experts
    if pairs < LEAST_PAIRS or average > MOST_AVERAGE:
        return None
    if average > FEW_AVERAGE:
        return MORE
    return FEW if columns // BLOCK_COLUMNS % FEW.units == 0 else FEW_ODD


def against_int4_experts(
    layout: ScaledLayout, experts: int, outputs: int, columns: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why these kernels cannot multiply with experts of this shape, gates and ups together; None: nothing is against
    it."""
    if against := against_gpu(dtype, device):
        return against
    group = layout.group or columns
    if layout.codes != "int4" or layout.group_rows != 1 or layout.scales == "uint8":
        return f"codes are {layout}"
    if outputs % (2 * SLAB_ROWS) or columns % BLOCK_COLUMNS:
        return f"experts of {outputs} x {columns} are not whole tiles of {2 * SLAB_ROWS} x {BLOCK_COLUMNS}"
    if group % BLOCK_COLUMNS:
        return f"groups have {group} columns"
    return f"there are {experts} experts" if experts > MOST_EXPERTS else None


def expert_macros(layout: ScaledLayout, experts: int, dtype: torch.dtype) -> Macros:
    return ("EXPERTS", experts), *code_macros(layout, dtype)


@cache
def _kernel(cut: ExpertCut, macros: Macros, activation: int, gates: int) -> Kernel:
    module = Module(text("int4_experts"), dict(cut.defines(macros, activation, gates)))
    return module.kernel("int4_experts", threads=cut.warps * 32, shared_bytes=cut.shared_bytes, early=True)


def multiply_int4(
    x: torch.Tensor,
    matrix: ScaledPlanes,
    lines: ExpertAssignments,
    out: torch.Tensor,
    *,
    by_token: bool,
    cut: ExpertCut,
    activation: Activation | None = None,
    gates: Gates = "matrix",
) -> None:
    """As `triton_kernels.experts.scaled.multiply_scaled`."""
    experts, per_token = len(lines.counts), lines.weights.shape[1]
    pairs, outputs, columns = len(out), out.shape[1], x.shape[1]
    if not pairs:
        return
    if x.stride(0) % 8 or x.data_ptr() % 16 or out.stride(0) % 2 or out.data_ptr() % 4:
        raise EngineError("inputs of a product do not begin at whole lines", found=f"stride {x.stride(0)}")
    code, where = gates_of(activation, gates)
    kernel = _kernel(cut, expert_macros(matrix.layout, experts, x.dtype), code, where)
    across = -(-outputs // (cut.warps * (16 if where == GATES_IN_MATRIX.value else 32)))
    kernel(
        (most_tiles(pairs // per_token, per_token, experts, cut.rows) * across, 1, 1), x, matrix.codes, matrix.scales,
        matrix.zeros, out, lines.counts, lines.pairs, outputs, columns, matrix.layout.group or columns, x.stride(0),
        out.stride(0), lines.pairs.stride(0), per_token if by_token else 1,
    )  # fmt: skip


@cache
def compile_expert_products(
    layout: ScaledLayout, experts: int, dtype: torch.dtype, capability: tuple[int, int], activation: int
) -> None:
    """Side by side, all that products with experts may want: what is then loaded lies in the cache. `activation`: the
    model's; without gates the kernel's macro is that of none. Gates and ups in act-order are multiplied apart."""
    macros, gated = expert_macros(layout, experts, dtype), (GATES_IN_OUT if layout.ordered else GATES_IN_MATRIX).value
    wanted = [
        cut.defines(macros, activation if gates else 0, gates) for cut in (FEW, FEW_ODD, MORE) for gates in (0, gated)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: cubin(text("int4_experts"), capability, dict(one)), wanted))
