"""Products of many rows with matrices of four-bit codes on Hopper, by int4_wide.cu: how one is cut into tiles, and how
those are given to blocks. Safe in a CUDA graph once a kernel was compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch

from holdfast.execution.gpu.cuda.fragments import BLOCK_COLUMNS, SLAB_ROWS
from holdfast.execution.gpu.cuda.module import NO_GATE, Kernel, Macros, Module, TensorMap, text
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.weights.scaled_matrix import ScaledMatrix

LINE_COLUMNS = 64
"""Of x, that a line of 128 bytes holds."""
LEAST_UNITS = 4
"""Of 128 columns, that a block takes of a split tile: fewer cost more in sums than they save."""
MOSTLY_FULL, MOSTLY_FULL_AGAIN = 0.9, 0.6
"""Of the processors, from which tiles are not split: the only ones, or those that are left after others. Sums cost more
there (H200)."""
SMALL_ELEMENTS, LARGE_ELEMENTS = 1 << 25, 1 << 26
"""Of matrices that are cut otherwise."""
MOST_STAGES = 8
HEIGHTS = tuple(range(64, 257, 32))
"""Of tiles, in rows of x."""
WIDE_ROWS = 2048
"""Of x, that products are for: with more, expanding and cuBLAS are faster (H200)."""
MOST_SHARED_BYTES = 226 << 10
"""Of a block, on Hopper."""


@dataclass(frozen=True, slots=True)
class WideCut:
    rows: int
    """Of x, of a tile: one of HEIGHTS."""
    warpgroups: int
    slabs: int
    """Times 64 matrix rows, of a warpgroup; where gated two, or two warpgroups."""
    stages: int
    blocks: int = 1
    """On a processor at once."""

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def tile(self) -> int:
        return 64 * self.warpgroups * self.slabs

    def shared_bytes(self, macros: Macros) -> int:
        layout, pieces = dict(macros), self.tile // SLAB_ROWS
        of_group = SLAB_ROWS * (layout["SCALE_BYTES"] + layout["ZEROS"])
        stage = self.rows * 256 + pieces * (1024 + layout["GROUPS"] * of_group)
        return self.stages * (-(-stage // 1024) * 1024)

    def defines(self, macros: Macros, gate: int) -> Macros:
        about = ("ROWS", self.rows), ("WARPGROUPS", self.warpgroups), ("SLABS", self.slabs), ("STAGES", self.stages)
        shared = ("SHARED_BYTES", self.shared_bytes(macros))
        return *macros, *about, ("BLOCKS", self.blocks), ("GATE", gate), ("WGMMA", 1), shared


@lru_cache(maxsize=4096)
def wide_cut(rows: int, elements: int, macros: Macros, *, gated: bool) -> WideCut:
    """By the number of rows and of the matrix's elements: for each product of an 8B shape's layer the fastest of some
    on an H200."""
    most = 256 if rows > 512 or (rows > 128 and elements > SMALL_ELEMENTS) else 128
    # Of equal row blocks: the least that holds one wastes the fewest rows.
    in_block = -(-rows // -(-rows // most))
    height = next(height for height in HEIGHTS if in_block <= height)
    slabs = 2 if height <= 128 and (gated or elements > LARGE_ELEMENTS) else 1
    cut = WideCut(height, 2, slabs, MOST_STAGES)
    while cut.shared_bytes(macros) > MOST_SHARED_BYTES:
        cut = replace(cut, stages=cut.stages - 1)
    return cut


def wide_cuts(elements: int, macros: Macros, gate: int) -> tuple[tuple[WideCut, int], ...]:
    """All of a matrix's, without a gate and with the model's."""
    of_gate = product(range(HEIGHTS[0], WIDE_ROWS + 1, 32), (NO_GATE, gate))
    found = [(wide_cut(rows, elements, macros, gated=gate != NO_GATE), gate) for rows, gate in of_gate]
    return tuple(dict.fromkeys(found))


class Shares(NamedTuple):
    """How tiles are given to blocks."""

    blocks: int
    split_tiles: int
    """Cut by columns, so that the last tiles keep all processors busy."""
    units: int
    """Of 128 columns, that a block takes of those."""


def shares(tiles: int, steps: int, processors: int, most_split: int) -> Shares:
    """`most_split`: blocks that the workspace has room for."""
    left, sharing = tiles % processors, min(processors, most_split)
    units = max(-(-left * steps // max(sharing, 1)), min(LEAST_UNITS, steps))
    full = MOSTLY_FULL if tiles < processors else MOSTLY_FULL_AGAIN
    if not left or left > full * processors or units >= steps:
        return Shares(min(tiles, processors), 0, steps)
    return Shares(processors if tiles > processors else -(-left * steps // units), left, units)


class WideMatrix:
    """A matrix that was rearranged (fragments.py), described to Hopper's copies for each height of tiles."""

    def __init__(self, matrix: ScaledMatrix, macros: Macros) -> None:
        self._matrix, self._macros = matrix, macros
        self._group = matrix.layout.group or matrix.columns
        self._maps: dict[tuple[int, bool], tuple[TensorMap, ...]] = {}

    def product(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, cut: WideCut, processors: int, *,
        bias: torch.Tensor | None, accumulate: bool, gate: int,
    ) -> None:  # fmt: skip
        rows, matrix = len(x), self._matrix
        tiles = -(-matrix.rows // cut.tile) * -(-rows // cut.rows)
        given = shares(
            tiles, matrix.columns // BLOCK_COLUMNS, processors * cut.blocks,
            len(workspace.sums) // (2 * cut.tile * cut.rows),
        )  # fmt: skip
        kernel(cut, self._macros, gate)(
            (given.blocks, 1, 1), _inputs(x.data_ptr(), *x.shape, x.stride(0), cut.rows),
            *self._described(cut.tile, gate != NO_GATE), out, bias, workspace.sums, workspace.counters, rows,
            matrix.rows // (1 if gate == NO_GATE else 2), matrix.columns, self._group, out.stride(0), given.split_tiles,
            given.units, int(accumulate),
        )  # fmt: skip

    def _described(self, tile: int, gated: bool) -> tuple[TensorMap, ...]:
        """Codes, scales and zeros, as a matrix or as that of a gate and of what it gates."""
        if (tile, gated) not in self._maps:
            matrix, halves, groups = self._matrix, 1 + gated, dict(self._macros)["GROUPS"]
            tall, slabs = matrix.rows // SLAB_ROWS // halves, tile // SLAB_ROWS // halves

            def described(plane: torch.Tensor, element_bytes: int, wide: int, box: int) -> TensorMap:
                shape, strides = (halves, tall, wide), (tall * wide, wide)
                return TensorMap(plane.data_ptr(), element_bytes, shape, strides, (halves, slabs, box))

            words = [described(matrix.codes, 4, matrix.columns * SLAB_ROWS // 8, BLOCK_COLUMNS * SLAB_ROWS // 8)]
            planes = (matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros)
            wide, box = matrix.columns // self._group * SLAB_ROWS, groups * SLAB_ROWS
            self._maps[tile, gated] = (
                *words, *(described(plane, plane.element_size(), wide, box) for plane in planes)
            )  # fmt: skip
        return self._maps[tile, gated]


@lru_cache(maxsize=4096)
def _inputs(place: int, rows: int, columns: int, stride: int, tile_rows: int) -> TensorMap:
    return TensorMap(place, 2, (rows, columns), (stride,), (tile_rows, LINE_COLUMNS), swizzled=True)


@cache
def kernel(cut: WideCut, macros: Macros, gate: int) -> Kernel:
    module = Module(text("int4_wide"), dict(cut.defines(macros, gate)))
    return module.kernel("int4_wide", threads=cut.threads, shared_bytes=cut.shared_bytes(macros), early=True)
