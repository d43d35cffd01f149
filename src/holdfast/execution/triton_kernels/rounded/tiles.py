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
STEP = 128
"""Inputs a program takes at a time: a block of scales, and after so many sums are taken over into float32."""


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
