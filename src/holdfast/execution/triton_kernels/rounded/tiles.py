"""How products of rounded inputs are cut: tiles by shape. No torch, no triton.

The constants are for Hopper and are all here, so that one benchmark can tune them; nothing is searched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.gpu import PROCESSORS

SKINNY_ROWS = 64
"""Up to so many are one tile, and our own product is as fast as cuBLAS's; with more, tiles are square and never share
inputs, and cuBLAS is faster where it can be taken."""
SKINNY_OUTPUTS = 64
"""The least a tensor core takes of its first operand."""
PROGRAMS = 256
"""As many as keep memory busy: sharing inputs among more costs more in sums than it wins."""
PREFETCH_BYTES = 256
"""Of each matrix row of a program, fetched to cache before the inputs are there: for 8 and 32 rows an 8B model's layer
took an H200 75.1 and 79.6 us, without 76.8 and 81.2, with 1024 bytes 77.9 and 84.0."""
SCALED_ROWS = 512
SCALED_OUTPUTS = 16384
"""With fewer of both, cuBLAS's product is faster without scales, and its sums are scaled by a kernel of ours."""
FAST_ROWS = 128
"""With more, cuBLAS may keep sums of all inputs in its tensor cores. H200, four products of an 8B model's layer: for
128 rows 3% faster so, for 256 6%, for 8,192 14%. Sums over 14,336 inputs are then off by 0.28% of the result; otherwise
by less than shows beside the 0.17% of rounding to bfloat16."""
MOST_ROW_INPUTS = 8192
"""Of one row that every program rounds for itself: of more it takes longer than a kernel that rounds them once and
tensor cores, 22 and 20 us for the 14,336 of an 8B model on an H200. Of 4,096 the four products of its layer, norms and
gate included, take 71 us so, and 73 otherwise."""
STEP = 128
"""Inputs a program takes at a time: a block of scales, and after so many sums are taken over into float32."""
SKINNY_TOGETHER = 32
"""The same of few rows, as many as a tensor core adds at once. On an H200 errors are 4.6e-5 of the root of the sum of
the terms' squares then, and 1.3e-4 after 128."""


@dataclass(frozen=True, slots=True)
class RoundedTile:
    outputs: int
    rows: int
    columns: int
    warps: int
    stages: int
    """Tiles in flight."""
    parts: int = 1
    """Programs that share the inputs of one tile."""


def rounded_tile(rows: int, outputs: int, inputs: int) -> RoundedTile:
    if rows > SKINNY_ROWS:
        return RoundedTile(128, 128, STEP, 8, 4)
    padded = max(16, 1 << (rows - 1).bit_length())
    # Two to four programs fit on a multiprocessor; a few more of them than that would be a second round of all.
    resident, stages = {16: (4, 5), 32: (4, 4), 64: (2, 5)}[padded]
    tiles, steps = -(-outputs // SKINNY_OUTPUTS), -(-inputs // STEP)
    parts = min(-(-PROGRAMS // tiles), resident * PROCESSORS // tiles, steps // 2)
    return RoundedTile(SKINNY_OUTPUTS, padded, STEP, 4, stages, max(1, parts))


THREAD_COLUMNS = 32
"""Of one row that a thread of a product of one row takes: two loads of 16 bytes."""


@dataclass(frozen=True, slots=True)
class RowTile:
    outputs: int
    """Rows of the matrix a program takes at a time."""
    steps: int
    """So often; all of them together are within a block of scales."""
    warps: int


def row_tile(inputs: int, *, gated: bool = False) -> RowTile:
    """Of 23 tiles the fastest on an H200 for an 8B model's layer: its gate reads 3.6 TB/s (88% of what memory gives),
    with norm and rounding."""
    warps = min(8, max(1, (1 << (inputs - 1).bit_length()) // (32 * THREAD_COLUMNS)))
    return RowTile(2, 8, warps) if gated else RowTile(4, 2, warps)
