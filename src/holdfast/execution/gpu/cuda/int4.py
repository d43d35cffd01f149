"""Products with matrices of four-bit codes in the order of fragments.py, by the CUDA kernels beside this file; their
rows as numbers. Chooses how a product is cut by its shape. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import available, cubin
from holdfast.execution.gpu.cuda.fragments import BLOCK_COLUMNS, SLAB_ROWS, against_fragments
from holdfast.execution.gpu.cuda.module import Kernel, Module
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

_FOLDER = Path(__file__).parent
ROWS = (8, 16, 32, 64)
"""Of x, that a block multiplies with: more are cut into blocks of 64."""
EXPANDED_CHUNKS = 8 * 4
"""Pieces of 64 columns that a block expands."""
NO_GATE = -1

Macros = tuple[tuple[str, int], ...]


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

    @property
    def threads(self) -> int:
        return 32 * self.across * self.along

    @property
    def tile(self) -> int:
        return 32 * self.across

    def shared_bytes(self, groups: int, scale_bytes: int, zeros: bool) -> int:
        warps = self.across * self.along
        stage = warps * 2048 + self.along * self.rows * 256 + warps * 2 * groups * 16 * (scale_bytes + zeros)
        return self.stages * stage + (self.along - 1) * self.tile * self.rows * 4


def layout_macros(layout: ScaledLayout, columns: int, dtype: torch.dtype) -> Macros:
    group = layout.group or columns
    return (
        ("GROUPS", max(BLOCK_COLUMNS // group, 1)),
        ("SCALE_BYTES", 4 if layout.scales == "float32" else 2),
        ("SCALE_HALF", int(layout.scales == "float16")),
        ("ZEROS", int(layout.zeros)),
        ("HALF", int(dtype == torch.float16)),
    )


@cache
def _module(name: str, macros: Macros) -> Module:
    return Module(text(name), dict(macros))


def text(name: str) -> str:
    return "\n".join((_FOLDER / file).readtext() for file in ("common.cuh", f"{name}.cu"))


def defines(cut: ProductCut, macros: Macros, gate: int) -> Macros:
    about = ("ROWS", cut.rows), ("WM", cut.across), ("WK", cut.along), ("STAGES", cut.stages), ("BLOCKS", cut.blocks)
    return *macros, *about, ("GATE", gate)


@cache
def _product(cut: ProductCut, macros: Macros, gate: int) -> Kernel:
    known = dict(macros)
    shared = cut.shared_bytes(known["GROUPS"], known["SCALE_BYTES"], bool(known["ZEROS"]))
    module = _module("int4_product", defines(cut, macros, gate))
    return module.kernel("int4_product", threads=cut.threads, shared_bytes=shared)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def product_cut(rows: int) -> ProductCut:
    if rows <= 8:
        return ProductCut(8, 4, 2, 4, 2)
    if rows <= 16:
        return ProductCut(16, 4, 2, 4, 2)
    if rows <= 32:
        return ProductCut(32, 4, 2, 4, 1)
    return ProductCut(64, 8, 1, 4, 1)


def against_int4(layout: ScaledLayout, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot multiply with a matrix of int4 codes; None: nothing is against it."""
    if device.type != "cuda":
        return "the kernels in CUDA need a GPU"
    if dtype.itemsize != 2:
        return f"the kernels in CUDA multiply numbers of 2 bytes; these have {dtype.itemsize}"
    if not available():
        return "the kernels in CUDA are compiled by libnvrtc, which torch's CUDA build brings; none was found"
    return against_fragments(layout, rows, columns)


class FragmentMatrix:
    """A matrix that was rearranged (fragments.py), and what multiplies with it."""

    def __init__(self, matrix: ScaledMatrix, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._group = matrix.layout.group or matrix.columns
        self._macros = layout_macros(matrix.layout, matrix.columns, dtype)

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
        cut = cut or product_cut(rows)
        kernel = _product(cut, self._macros, gate)
        row_blocks = -(-rows // cut.rows)
        shares = len(workspace.sums) // (2 * row_blocks * cut.tile * cut.rows)
        blocks, units = self._blocks(cut, min(_processors(x.device.index or 0) * cut.blocks // row_blocks, shares))
        tiles = -(-matrix.rows // cut.tile)
        if not shares or row_blocks * tiles > len(workspace.counters):
            raise EngineError(
                "the workspace of a split product is too small",
                needed=f"{2 * row_blocks * cut.tile * cut.rows} sums and {row_blocks * tiles} counters",
                found=f"{len(workspace.sums)} and {len(workspace.counters)}",
            )
        if x.stride(0) % 8 or out.stride(0) % 2 or x.data_ptr() % 16:
            raise EngineError("inputs of a product do not begin at whole lines", found=f"stride {x.stride(0)}")
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
            kernel = _module("int4_rows", self._macros).kernel("int4_expand", threads=256)
            kernel(
                ((last - first) // SLAB_ROWS, -(-matrix.columns // 64 // EXPANDED_CHUNKS), 1), matrix.codes,
                matrix.scales, matrix.zeros, matrix.order, out, first // SLAB_ROWS, matrix.columns, self._group,
                out.stride(0),
            )  # fmt: skip

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        matrix = self._matrix
        if len(out):
            kernel = _module("int4_rows", self._macros).kernel("int4_embed", threads=256)
            kernel(
                (len(out), -(-matrix.columns // 16 // 256), 1), tokens, slots, positions, matrix.codes, matrix.scales,
                matrix.zeros, matrix.order, out, tokens.stride(0), matrix.rows, matrix.columns, self._group,
                out.stride(0),
            )  # fmt: skip


def compile_products(wanted: Iterable[tuple[ProductCut, Macros, int]]) -> None:
    """Side by side: what is then loaded lies in the cache."""
    capability = torch.cuda.get_device_capability()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda item: cubin(text("int4_product"), capability, dict(defines(*item))), wanted))
