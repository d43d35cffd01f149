"""Products with GGUF's K-quants in the order of gguf_fragments.py, by the CUDA kernels beside this file; their rows as
numbers. Chooses how a product is cut by its shape. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import cubin
from holdfast.execution.gpu.cuda.module import (
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
from holdfast.execution.weights.gguf_fragments import TILE_COLUMNS, TILE_ROWS, Fragments, against_fragments_of
from holdfast.footprint.gpu import SPLIT_COUNTERS

BITS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
EXPANDED_BLOCKS = 8
"""Of 256 columns, a warp each."""
KQUANT_ROWS = 128
"""Of x, that products are for: with more, expanding and cuBLAS are about as fast (H200)."""
MANY_OUTPUTS = 16384
"""Enough that blocks of few stages, two on a processor, are all busy with 32 rows."""

LEAST_WARPS = 4
DRIVER_SHARED_BYTES = 1024
"""Of a processor's shared memory, that the driver takes for each block; a single block may have all the rest."""


@dataclass(frozen=True, slots=True)
class KquantCut:
    parts: int
    """Of eight rows of x, that a block multiplies with; more rows are cut among blocks."""
    tiles: int
    """Of 16 matrix rows, of a warp; two where gated."""
    warps: int
    stages: int
    blocks: int
    """On a processor at once."""
    one: bool = False
    """A single row, which may be normed on the way."""

    @property
    def rows(self) -> int:
        return 8 * self.parts

    @property
    def tile(self) -> int:
        """Matrix rows of a block."""
        return TILE_ROWS * self.warps * self.tiles

    def shared_bytes(self, bits: int, columns: int) -> int:
        tile = 2048 + (bits - 4) * 512 + 256 + (128 if bits == 6 else 0)
        codes = self.stages * self.warps * self.tiles * tile
        if self.one:
            return codes + columns // TILE_COLUMNS * (512 + (16 * 16 if bits == 6 else 8 * 16 + 32))
        return codes + self.stages * self.rows * 544 + self.parts * (16 * 64 if bits == 6 else 8 * 64 + 256)


def product_cut(
    bits: int,
    rows: int,
    outputs: int,
    shared_bytes: int,
    *,
    columns: int = 0,
    gated: bool = False,
    normed: bool = False,
) -> KquantCut:
    """The fastest of some for the products of an 8B shape's layer on an H200. Where blocks of a GPU have less shared
    memory, of fewer stages and warps: those of which most warps are on a processor at once. A gate takes two tiles of a
    warp; `normed`: a single row, of so many columns."""
    cut, of_processor = _fastest(bits, rows, outputs, gated=gated, normed=normed), shared_bytes + DRIVER_SHARED_BYTES

    def at_once(one: KquantCut) -> int:
        taken = one.shared_bytes(bits, columns) + STATIC_SHARED_BYTES + DRIVER_SHARED_BYTES
        return min(cut.blocks * cut.warps // one.warps, of_processor // taken)

    smaller = product((cut.warps, LEAST_WARPS), range(cut.stages, 1, -1))
    found = max(
        (replace(cut, warps=warps, stages=stages) for warps, stages in smaller),
        key=lambda one: (one.warps * at_once(one), one.stages, one.warps),
    )
    return replace(found, blocks=max(1, at_once(found)))


def _fastest(bits: int, rows: int, outputs: int, *, gated: bool, normed: bool) -> KquantCut:
    dense = bits > 4
    if normed:
        return KquantCut(1, 2, 8, 3 if dense else 4, 1, True) if gated else KquantCut(1, 1, 8, 3, 2, True)
    if rows <= 8:
        return KquantCut(1, 2, 4, 3, 2 if dense else 3)
    if rows <= 16:
        return KquantCut(2, 2, 4, 2, 2) if dense else KquantCut(2, 2, 8, 2, 2)
    if dense:
        return KquantCut(4, 2, 8, 2, 1)
    return KquantCut(4, 2, 8, 2, 2) if rows > 32 or outputs >= MANY_OUTPUTS else KquantCut(4, 2, 8, 3, 1)


def against_cuts(bits: int, outputs: int, shared_bytes: int) -> str | None:
    """Why products with so many outputs cannot be cut for a GPU whose blocks have so much shared memory. Those of a
    single row are not asked for (`takes_norm`)."""
    cuts = [(rows, product_cut(bits, rows, outputs, shared_bytes)) for rows in (8, 16, 32, KQUANT_ROWS)]
    most = max(cut.shared_bytes(bits, 0) for _, cut in cuts) + STATIC_SHARED_BYTES
    if most > shared_bytes:
        return f"the kernels in CUDA take {most} bytes of shared memory; this GPU has {shared_bytes}"
    counters = max(-(-rows // cut.rows) * -(-outputs // cut.tile) for rows, cut in cuts)
    return f"{outputs} outputs take {counters} counters, of {SPLIT_COUNTERS}" if counters > SPLIT_COUNTERS else None


def against_kquant(layout: str, rows: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot multiply with a matrix of GGUF's blocks; None: nothing is against it."""
    if against := against_gpu(dtype, device):
        return against
    return against_fragments_of(layout, rows) or against_cuts(BITS[layout], rows, shared_memory_bytes())


def defines(bits: int, dtype: torch.dtype, cut: KquantCut, gated: bool) -> Macros:
    return (
        ("BITS", bits), ("HALF", int(dtype == torch.float16)), ("PARTS", cut.parts), ("M", cut.tiles),
        ("WARPS", cut.warps), ("STAGES", cut.stages), ("BLOCKS", cut.blocks), ("GATED", int(gated)),
        ("ONE", int(cut.one)), ("SHARED_BYTES", cut.shared_bytes(bits, TILE_COLUMNS)),
    )  # fmt: skip


@cache
def _product(bits: int, dtype: torch.dtype, cut: KquantCut, gated: bool, columns: int) -> Kernel:
    """`columns`: of a single row, which takes shared memory by them; else 0. A module each, for what a kernel may take
    is kept with its module."""
    module = Module(text("kquant_product"), dict(defines(bits, dtype, cut, gated)))
    return module.kernel(
        "kquant_product", threads=32 * cut.warps, shared_bytes=cut.shared_bytes(bits, columns), early=True
    )


@cache
def _rows(bits: int, dtype: torch.dtype, name: str) -> Kernel:
    return Module(text("kquant_rows"), dict(rows_defines(bits, dtype))).kernel(name, threads=32 * EXPANDED_BLOCKS)


def rows_defines(bits: int, dtype: torch.dtype) -> Macros:
    return ("BITS", bits), ("HALF", int(dtype == torch.float16)), ("WARPS", EXPANDED_BLOCKS)


def compile_products(wanted: Iterable[tuple[int, torch.dtype, KquantCut, bool]]) -> None:
    """Side by side: what is then loaded lies in the cache."""
    capability = torch.cuda.get_device_capability()
    source = text("kquant_product")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda item: cubin(source, capability, dict(defines(*item))), wanted))


@cache
def compile_table(bits: int, dtype: torch.dtype, columns: int) -> None:
    """All that products want with matrices of this kind and so many columns."""
    cut = partial(product_cut, bits, shared_bytes=shared_memory_bytes())
    cuts = {cut(rows, outputs) for rows in (8, 16, 32, KQUANT_ROWS) for outputs in (1, MANY_OUTPUTS)}
    cuts.add(cut(1, 1, columns=columns, normed=True))
    gated = (cut(1, 1, columns=columns, gated=True, normed=True), cut(8, 1, gated=True))
    compile_products([(bits, dtype, one, False) for one in cuts] + [(bits, dtype, one, True) for one in gated])


class KquantMatrix:
    """A matrix that was put into this order, and what multiplies with it."""

    def __init__(self, fragments: Fragments) -> None:
        self._fragments, self._bits = fragments, BITS[fragments.layout]
        self._outputs = len(fragments.codes) * TILE_ROWS
        self._blocks = fragments.codes.shape[1]
        self._columns = self._blocks * TILE_COLUMNS
        self._planes = fragments[1:]

    def takes_norm(self, x: torch.Tensor, norm: torch.Tensor, *, gated: bool) -> bool:
        """Whether the norm of a single row rides along: weights of its type, and room for the whole row."""
        cut, room = self._cut(1, gated=gated, normed=True), shared_memory_bytes() - STATIC_SHARED_BYTES
        return len(x) == 1 and norm.dtype == x.dtype and cut.shared_bytes(self._bits, self._columns) <= room

    def _cut(self, rows: int, *, gated: bool, normed: bool) -> KquantCut:
        columns = self._columns if normed else 0
        return product_cut(
            self._bits, rows, self._outputs, shared_memory_bytes(), columns=columns, gated=gated, normed=normed
        )

    @property
    def takes_gate(self) -> bool:
        """Whether gates and ups are both whole tiles."""
        return self._outputs % (2 * TILE_ROWS) == 0

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        workspace: SplitSums,
        *,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        activation: int | None = None,
        norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
        cut: KquantCut | None = None,
    ) -> None:
        """out [rows, outputs] = (or +=) x [rows, columns] · matrixᵀ + bias; with `activation` that of the first half
        times the second. `norm`: of a single row. `cut` replaces the table's."""
        rows = len(x)
        if not rows:
            return
        gated = activation is not None
        odd = [part.dtype for part in (out, bias, norm) if part is not None and part.dtype != x.dtype]
        if odd or (gated and not self.takes_gate):
            raise EngineError("this product is not one of the CUDA kernels", found=f"{odd}, {self._outputs} outputs")
        cut = cut or self._cut(rows, gated=gated, normed=norm is not None)
        groups, row_blocks = -(-self._outputs // cut.tile), -(-rows // cut.rows)
        shares = len(workspace.sums) // (2 * row_blocks * cut.tile * cut.rows)
        if not shares or row_blocks * groups > len(workspace.counters):
            raise EngineError(
                "the workspace of a split product is too small",
                needed=f"{2 * row_blocks * cut.tile * cut.rows} sums and {row_blocks * groups} counters",
                found=f"{len(workspace.sums)} and {len(workspace.counters)}",
            )
        if x.stride(0) % 8 or x.data_ptr() % 16 or out.stride(0) % 2 or out.data_ptr() % 4:
            raise EngineError("inputs of a product do not begin at whole lines", found=f"stride {x.stride(0)}")
        most = max(1, min(processors(x.device.index or 0) * cut.blocks // row_blocks, shares))
        units = -(-groups * self._blocks // most)
        _product(self._bits, x.dtype, cut, gated, self._columns if cut.one else 0)(
            (-(-groups * self._blocks // units), row_blocks, 1), x, *self._planes, out, bias, norm, workspace.sums,
            workspace.counters, rows, self._outputs // (2 if gated else 1), self._columns, x.stride(0), out.stride(0),
            units, int(accumulate), activation or 0, float(epsilon),
        )  # fmt: skip

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first..last-1 into out [last - first, columns]."""
        if last > first:
            tiles = (last - 1) // TILE_ROWS - first // TILE_ROWS + 1
            _rows(self._bits, out.dtype, "kquant_expand")(
                (tiles, -(-self._blocks // EXPANDED_BLOCKS), 1), *self._planes, out, first, last - first, self._blocks,
                out.stride(0),
            )  # fmt: skip

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """`layer.embed` of a matrix in this order."""
        if len(out):
            _rows(self._bits, out.dtype, "kquant_embed")(
                (len(out), -(-self._blocks // EXPANDED_BLOCKS), 1), tokens, slots, positions, *self._planes, out,
                tokens.stride(0), self._outputs, self._blocks, out.stride(0),
            )  # fmt: skip
