"""The order of four-bit codes that tensor cores read straight from memory: a pure rearrangement of a ScaledMatrix, byte
for byte as large.

    slab       16 matrix rows: whole slabs follow each other, so that one is rearranged where it lies
    codes      [slab][64 columns][lane][word], 8 codes a word: what a lane of m16n8k16 holds of 16 rows and 16 columns
    lane       4g + t: rows 2g and 2g + 1
    word       w: columns 16w + 2t + (0, 1, 8, 9)
    nibble     4e + 2p + r: column 16w + 8p + 2t + e, row 2g + r
    scales     [slab][group][16]; zeros alike

A shift by 4, 8 or 12 bits brings the next register's pair to the low bits of both halves. Knows no kernel.
"""

from __future__ import annotations

import torch

from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

SLAB_ROWS = 16
BLOCK_COLUMNS = 128
"""What a warp multiplies at a time."""
MOST_COLUMNS = 1 << 17
"""Tiles of expanded rows are whole slabs."""
REARRANGED_BYTES = 4 << 20
"""Of codes at a time; about five times as much is held beside the matrix meanwhile."""


def against_fragments(layout: ScaledLayout, rows: int, columns: int) -> str | None:
    """Why a matrix cannot lie in this order, None if it can."""
    group = layout.group or columns
    if layout.codes != "int4" or layout.group_rows != 1 or layout.scales == "uint8":
        return f"codes are {layout}"
    if rows % (2 * SLAB_ROWS) or columns % BLOCK_COLUMNS or columns > MOST_COLUMNS:
        return f"{rows} x {columns} are not whole tiles of {2 * SLAB_ROWS} x {BLOCK_COLUMNS}"
    if group not in (32, 64) and group % BLOCK_COLUMNS:
        return f"groups have {group} columns"
    return None


@torch.inference_mode()
def rearrange(matrix: ScaledMatrix) -> None:
    """In place, weights that were loaded in inference mode too. The matrix's own methods do not read it any more."""
    for codes in _slices(matrix):
        codes.copy_(fragments_of(codes))
    for plane in (matrix.scales, matrix.zeros):
        if plane is not None:
            plane.copy_(slabs_of(plane))
    if matrix.codes.is_cuda:
        torch.cuda.synchronize(matrix.codes.device)  # Products ask for codes before the kernel before them ends.
    matrix.in_fragments = True


def fragments_of(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns / 32, 16] in the layout's order to the same shape in that of fragments."""
    rows, pieces, half = codes.shape
    nibbles = torch.stack((codes & 15, codes >> 4), 2)  # row, piece, high, 16: columns 16 · high + 0..15
    nibbles = nibbles.view(-1, 8, 2, pieces // 2, 4, 2, 4, 2)  # slab, g, r, chunk, w, p, t, e
    ordered = nibbles.permute(0, 3, 1, 6, 4, 7, 5, 2)  # slab, chunk, g, t, w, e, p, r
    return (ordered[..., 0] | ordered[..., 1] << 4).reshape(rows, pieces, half)


def codes_of(fragments: torch.Tensor) -> torch.Tensor:
    """The reverse."""
    rows, pieces, half = fragments.shape
    ordered = torch.stack((fragments & 15, fragments >> 4), -1).view(-1, pieces // 2, 8, 4, 4, 2, 2, 2)
    nibbles = ordered.permute(0, 2, 7, 1, 4, 6, 3, 5).reshape(rows, pieces, 2, half)
    return nibbles[:, :, 0] | nibbles[:, :, 1] << 4


def _slices(matrix: ScaledMatrix) -> list[torch.Tensor]:
    rows = max(REARRANGED_BYTES * 2 // matrix.columns // SLAB_ROWS, 1) * SLAB_ROWS
    return [matrix.codes[first : first + rows] for first in range(0, matrix.rows, rows)]


def slabs_of(plane: torch.Tensor) -> torch.Tensor:
    """Scales or zeros [rows, groups], the sixteen of a slab side by side."""
    rows, groups = plane.shape
    return plane.view(rows // SLAB_ROWS, SLAB_ROWS, groups).transpose(1, 2).reshape(rows, groups)
