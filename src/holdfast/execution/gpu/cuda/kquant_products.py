"""Launches of kquant_products.cu: which variant for how many rows, and how a matrix is cut. Knows no layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.module import Kernel, Module
from holdfast.execution.weights.gguf_fragments import TILE_COLUMNS, TILE_ROWS, Fragments
from holdfast.footprint.gpu import PROCESSORS

SOURCE = Path(__file__).parent / "kquant_products.cu"
BITS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


class Cut(NamedTuple):
    eights: int
    """Of rows, together."""
    tiles: int
    """Of a warp."""
    warps: int
    stages: int
    blocks: int
    """Of a processor."""
    splits: int
    """Of columns, at most."""


def stage_bytes(bits: int, cut: Cut) -> int:
    tile = 2048 + (bits - 4) * 512 + 256 + (128 if bits == 6 else 0)
    return 8 * cut.eights * 544 + cut.warps * cut.tiles * tile


@cache
def kernel(layout: str, dtype: torch.dtype, eights: int, tiles: int, warps: int, stages: int, blocks: int) -> Kernel:
    bits = BITS[layout]
    cut = Cut(eights, tiles, warps, stages, blocks, 1)
    defines = {
        "BITS": bits, "BF16": int(dtype == torch.bfloat16), "N8": eights, "M": tiles, "WARPS": warps,
        "STAGES": stages, "BLOCKS": blocks,
    }  # fmt: skip
    shared = stages * stage_bytes(bits, cut)
    return Module(SOURCE, defines).kernel("kquant_product", threads=32 * warps, shared_bytes=shared)


def cut_for(layout: str, rows: int, outputs: int, columns: int) -> Cut:
    eights = 1 if rows <= 8 else 2 if rows <= 16 else 4
    tiles, stages = (1, 4) if eights < 4 else (1, 3)
    warps = 8
    groups = -(-outputs // (TILE_ROWS * warps * tiles))
    splits = max(1, min(2 * PROCESSORS // groups, columns // TILE_COLUMNS // 4))
    return Cut(eights, tiles, warps, stages, 2, splits)


def kquant_product(
    x: torch.Tensor,
    matrix: Fragments,
    out: torch.Tensor,
    sums: torch.Tensor,
    counters: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    cut: Cut | None = None,
) -> None:
    """out [rows, outputs] = (or +=) x [rows, columns] · matrixᵀ (+ bias). Safe in a CUDA graph."""
    rows, outputs, blocks = len(x), len(matrix.codes) * TILE_ROWS, matrix.codes.shape[1]
    cut = cut or cut_for(matrix.layout, rows, outputs, blocks * TILE_COLUMNS)
    groups = -(-outputs // (TILE_ROWS * cut.warps * cut.tiles))
    layers = -(-rows // (8 * cut.eights))
    steps = -(-blocks // cut.splits)
    splits = -(-blocks // steps)
    needed = groups * layers * splits * cut.warps * cut.tiles * cut.eights * 128
    if splits > 1 and (needed > len(sums) or groups * layers > len(counters)):
        raise EngineError(
            "the workspace of a split product is too small",
            needed=f"{needed} sums and {groups * layers} counters",
            found=f"{len(sums)} and {len(counters)}",
        )
    kernel(matrix.layout, x.dtype, *cut[:5])(
        (groups, splits, layers), x, matrix.codes, matrix.high, matrix.scales, matrix.units, out, bias, sums, counters,
        rows, outputs, blocks, steps, x.stride(0), out.stride(0), int(accumulate),
    )  # fmt: skip
