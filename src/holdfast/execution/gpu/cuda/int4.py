"""Products with matrices of four-bit codes in the order of fragments.py, by the CUDA kernels beside this file; their
rows as numbers. Chooses how a product is cut by its shape. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import cubin
from holdfast.execution.gpu.cuda.fragments import BLOCK_COLUMNS, SLAB_ROWS, against_fragments
from holdfast.execution.gpu.cuda.int4_wide import (
    LARGE_ELEMENTS,
    SMALL_ELEMENTS,
    WIDE_ROWS,
    WideCut,
    WideMatrix,
    wide_cut,
    wide_cuts,
)
from holdfast.execution.gpu.cuda.module import (
    NO_GATE,
    SILU,
    STATIC_SHARED_BYTES,
    Kernel,
    Macros,
    Module,
    against_gpu,
    processors,
    text,
)
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.triton_kernels.shared_memory import shared_memory_bytes
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.gpu import SPLIT_COUNTERS
from holdfast.footprint.scaled_layouts import ScaledLayout

ROWS = (8, 16, 32, 64)
"""Of x, that a block multiplies with: more are cut into blocks of 64."""
EXPANDED_WARPS, EXPANDED_CHUNKS = 8, 4
"""Of a block, and pieces of 64 columns that each expands."""
FRAGMENT_ROWS = 256
"""Of x, that products are for on other GPUs than Hopper: with more, expanding and cuBLAS are about as fast (H200)."""
NARROW_ROWS = 32
"""With more, products on Hopper are those of int4_wide."""


@dataclass(frozen=True, slots=True)
class ProductCut:
    rows: int
    across: int
    """Warps, of 32 matrix rows each."""
    along: int
    """Times as many, that share the columns."""
    stages: int
    blocks: int
    """On a processor at once."""
    hopper: bool = False
    """Multiplied by wgmma."""

    @property
    def threads(self) -> int:
        return 32 * self.across * self.along

    @property
    def tile(self) -> int:
        return 32 * self.across

    def shared_bytes(self, macros: Macros) -> int:
        layout, warps = dict(macros), self.across * self.along
        of_group = 16 * (layout["SCALE_BYTES"] + layout["ZEROS"])
        stage = warps * 2048 + self.along * self.rows * 256 + warps * 2 * layout["GROUPS"] * of_group
        return self.stages * (-(-stage // 1024) * 1024) + (self.along - 1) * self.tile * self.rows * 4


def code_macros(layout: ScaledLayout, dtype: torch.dtype) -> Macros:
    """What decoding depends on."""
    return (
        ("SCALE_BYTES", 4 if layout.scales == "float32" else 2),
        ("SCALE_HALF", int(layout.scales == "float16")),
        ("ZEROS", int(layout.zeros)),
        ("HALF", int(dtype == torch.float16)),
    )


def layout_macros(layout: ScaledLayout, columns: int, dtype: torch.dtype) -> Macros:
    return ("GROUPS", max(BLOCK_COLUMNS // (layout.group or columns), 1)), *code_macros(layout, dtype)


@cache
def _module(name: str, macros: Macros) -> Module:
    return Module(text(name), dict(macros))


def defines(cut: ProductCut, macros: Macros, gate: int) -> Macros:
    about = ("ROWS", cut.rows), ("WM", cut.across), ("WK", cut.along), ("STAGES", cut.stages), ("BLOCKS", cut.blocks)
    shared = ("SHARED_BYTES", cut.shared_bytes(macros))
    return *macros, *about, ("GATE", gate), shared, *([("WGMMA", 1)] if cut.hopper else [])


def rows_defines(macros: Macros) -> Macros:
    return *macros, ("WARPS", EXPANDED_WARPS), ("CHUNKS", EXPANDED_CHUNKS)


@cache
def _product(cut: ProductCut, macros: Macros, gate: int) -> Kernel:
    module = _module("int4_product", defines(cut, macros, gate))
    return module.kernel("int4_product", threads=cut.threads, shared_bytes=cut.shared_bytes(macros), early=True)


@cache
def _rows(name: str, macros: Macros) -> Kernel:
    return _module("int4_rows", rows_defines(macros)).kernel(name, threads=32 * EXPANDED_WARPS)


class CutLimits(NamedTuple):
    """What cuts depend on."""

    processors: int
    shared_bytes: int
    """That a block may have; all of a processor together have about as many."""
    hopper: bool


SMALL = CutLimits(processors=84, shared_bytes=98 << 10, hopper=False)
"""For desktops."""


@cache
def _gpu(device: int) -> CutLimits:
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return CutLimits(processors(device), shared_memory_bytes() - STATIC_SHARED_BYTES, hopper)


@lru_cache(maxsize=4096)
def product_cut(rows: int, elements: int, macros: Macros, gpu: CutLimits) -> ProductCut:
    """By the number of rows and of the matrix's elements: of some twenty for each product of an 8B shape's layer the
    fastest on an H200. Fewer stages and blocks where a GPU has less shared memory."""
    large = elements > LARGE_ELEMENTS
    if rows <= 8:
        cut = ProductCut(8, 4, 1, 4, 4) if large else ProductCut(8, 2, 4, 4, 2)
    elif rows <= 16:
        cut = ProductCut(16, 4, 2, 4, 2) if large else ProductCut(16, 2, 4, 3, 2)
    elif rows <= 32:
        cut = ProductCut(32, 8, 1, 4, 1, gpu.hopper) if large else ProductCut(32, 4, 2, 4, 1, gpu.hopper)
    elif rows <= 64 and elements <= SMALL_ELEMENTS:
        cut = ProductCut(64, 4, 2, 3, 1, gpu.hopper)
    else:
        cut = ProductCut(64, 8, 1, 4, 1, gpu.hopper)
    while cut.stages > 2 and cut.blocks * cut.shared_bytes(macros) > gpu.shared_bytes:
        cut = replace(cut, blocks=cut.blocks // 2) if cut.blocks > 1 else replace(cut, stages=cut.stages - 1)
    if cut.shared_bytes(macros) > gpu.shared_bytes:
        cut = replace(cut, across=4, along=1)
    return cut


def against_int4(layout: ScaledLayout, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot multiply with a matrix of int4 codes; None: nothing is against it."""
    if against := against_gpu(dtype, device):
        return against
    return against_fragments(layout, rows, columns) or against_cuts(
        rows, columns, layout_macros(layout, columns, dtype), _gpu(device.index or 0)
    )


def against_cuts(outputs: int, columns: int, macros: Macros, gpu: CutLimits) -> str | None:
    """Why products of this shape cannot be cut for this GPU."""
    cuts = [(rows, product_cut(rows, outputs * columns, macros, gpu)) for rows in (*ROWS, FRAGMENT_ROWS)]
    counters = max(-(-rows // cut.rows) * -(-outputs // cut.tile) for rows, cut in cuts)
    return f"{outputs} outputs take {counters} counters, of {SPLIT_COUNTERS}" if counters > SPLIT_COUNTERS else None


class FragmentMatrix:
    """A matrix that was rearranged (fragments.py), and what multiplies with it: to `most_rows` of x. `gate`: the
    model's, for which products are compiled ahead."""

    def __init__(self, matrix: ScaledMatrix, dtype: torch.dtype, gate: int = SILU) -> None:
        self._matrix = matrix
        self._group = matrix.layout.group or matrix.columns
        self._macros = layout_macros(matrix.layout, matrix.columns, dtype)
        index = matrix.codes.device.index or 0
        self._gpu = _gpu(index)
        self._wide = WideMatrix(matrix, self._macros) if self._gpu.hopper else None
        self.most_rows = FRAGMENT_ROWS if self._wide is None else WIDE_ROWS
        elements, capability = matrix.rows * matrix.columns, torch.cuda.get_device_capability(index)
        heights = [rows for rows in (*ROWS, 2 * ROWS[-1]) if self._wide is None or rows <= NARROW_ROWS]
        cuts = tuple(product_cut(rows, elements, self._macros, self._gpu) for rows in heights)
        wide = () if self._wide is None else wide_cuts(elements, self._macros, gate)
        _compile_ahead(cuts, wide, self._macros, gate, capability)

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        workspace: SplitSums,
        *,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        gate: int = NO_GATE,
        cut: ProductCut | None = None,
    ) -> None:
        """out [rows, outputs] = (or +=) x [rows, columns] · matrixᵀ + bias; with `gate` this activation of the first
        half times the second. `cut` replaces the table's."""
        rows, matrix = len(x), self._matrix
        if not rows:
            return
        if x.stride(0) % 8 or x.data_ptr() % 16 or out.stride(0) % 2 or out.data_ptr() % 4:
            raise EngineError("inputs of a product do not begin at whole lines", found=f"stride {x.stride(0)}")
        elements, gpu = matrix.rows * matrix.columns, self._gpu
        if self._wide is not None and rows > NARROW_ROWS and cut is None:
            wide = wide_cut(rows, elements, self._macros, gated=gate != NO_GATE)
            self._wide.product(x, out, workspace, wide, gpu.processors, bias=bias, accumulate=accumulate, gate=gate)
            return
        cut = cut or product_cut(rows, elements, self._macros, gpu)
        kernel = _product(cut, self._macros, gate)
        row_blocks = -(-rows // cut.rows)
        shares = len(workspace.sums) // (2 * row_blocks * cut.tile * cut.rows)
        blocks, units = self._blocks(cut, min(gpu.processors * cut.blocks // row_blocks, shares))
        tiles = -(-matrix.rows // cut.tile)
        if not shares or row_blocks * tiles > len(workspace.counters):
            raise EngineError(
                "the workspace of a split product is too small",
                needed=f"{2 * row_blocks * cut.tile * cut.rows} sums and {row_blocks * tiles} counters",
                found=f"{len(workspace.sums)} and {len(workspace.counters)}",
            )
        kernel(
            (blocks, row_blocks, 1), x, matrix.codes, matrix.scales, matrix.zeros, out, bias, workspace.sums,
            workspace.counters, rows, matrix.rows // (1 if gate == NO_GATE else 2), matrix.columns, self._group,
            x.stride(0), out.stride(0), units, int(accumulate),
        )  # fmt: skip

    def _blocks(self, cut: ProductCut, most: int) -> tuple[int, int]:
        """Blocks that run at once, and units of work of each."""
        steps = -(-self._matrix.columns // BLOCK_COLUMNS // cut.along)
        total = -(-self._matrix.rows // cut.tile) * steps
        units = -(-total // max(most, 1))
        return -(-total // units), units

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first..last-1, whole slabs, into out [last - first, columns]; columns in the order of the inputs."""
        matrix = self._matrix
        if last > first:
            _rows("int4_expand", self._macros)(
                ((last - first) // SLAB_ROWS, -(-matrix.columns // 64 // EXPANDED_WARPS // EXPANDED_CHUNKS), 1),
                matrix.codes, matrix.scales, matrix.zeros, matrix.order, out, first // SLAB_ROWS, matrix.columns,
                self._group, out.stride(0),
            )  # fmt: skip

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        matrix = self._matrix
        if len(out):
            _rows("int4_embed", self._macros)(
                (len(out), -(-matrix.columns // 16 // (32 * EXPANDED_WARPS)), 1), tokens, slots, positions,
                matrix.codes, matrix.scales, matrix.zeros, matrix.order, out, tokens.stride(0), matrix.rows,
                matrix.columns, self._group, out.stride(0),
            )  # fmt: skip


@cache
def _compile_ahead(
    cuts: tuple[ProductCut, ...], wide: tuple[tuple[WideCut, int], ...], macros: Macros, gate: int,
    capability: tuple[int, int],
) -> None:  # fmt: skip
    """Side by side, all that products of a matrix may want: what is then loaded lies in the cache."""
    wanted = [("int4_product", defines(cut, macros, one)) for cut, one in product(set(cuts), (NO_GATE, gate))]
    wanted += [("int4_wide", cut.defines(macros, one)) for cut, one in wide]
    wanted.append(("int4_rows", rows_defines(macros)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: cubin(text(one[0]), capability, dict(one[1])), wanted))
