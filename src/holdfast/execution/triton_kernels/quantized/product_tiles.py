"""How products of few rows are cut: tiles by shape and number type. No torch, no triton.

The constants are for Hopper (132 multiprocessors, 228 KiB of shared memory each) and are all here, so that one
benchmark can tune them; nothing is searched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.gpu import PROCESSORS, SPLIT_COUNTERS, SUMS_BYTES
from holdfast.footprint.scaled_layouts import ScaledLayout

FEW_ROWS = 2
"""So many are multiplied with a dense matrix and summed by plain arithmetic; more go to cuBLAS."""
FEW_QUANTIZED_ROWS = 8
"""Up to so many rows of a product with a quantized matrix scales are applied to sums alone, and a gate may ride
along."""
MOST_QUANTIZED_ROWS = 128
FEW_COLUMNS = 256
MORE_COLUMNS = 128
"""Of a step of few rows, and of more."""
VECTOR_ELEMENTS = 1 << 25
"""Up to so many of a matrix of int4 codes one row is multiplied by plain arithmetic: it begins and ends sooner; tensor
cores read larger ones faster."""
WIDE_BYTES = 8192
"""Of a matrix row: wider ones are read in pieces of half of this."""
VOCABULARY = 65536
"""Outputs that only a head has: its rows are so many that any tile keeps memory busy."""
WARP_BYTES = 512
"""What a warp loads at once, 16 bytes a thread."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    outputs: int
    """Rows of the matrix a program takes."""
    inputs: int
    """Columns it takes at a time."""
    warps: int


@dataclass(frozen=True, slots=True)
class QuantizedTile:
    rows: int
    """Of x, padded."""
    outputs: int
    """Rows of the matrix a program takes."""
    piece: int
    """Columns that share a scale."""
    pieces: int
    """Of a step."""
    splits: int
    """Programs that share the columns."""
    warps: int
    stages: int
    """Steps in flight."""


def few_rows_tile(
    outputs: int, inputs: int, element_bytes: int, *, gated: bool = False, normed: bool = False
) -> ProductTile:
    """One tile row is one load of all threads, or two, so that inputs and matrix lie alike over them."""
    if inputs * element_bytes >= WIDE_BYTES and not (normed and outputs >= VOCABULARY):
        return _wide_tile(inputs * element_bytes, element_bytes, gated)
    warps = 4
    while warps > 1 and warps * WARP_BYTES // 2 >= inputs * element_bytes:
        warps //= 2
    rows = 4 if outputs >= 4096 and not gated else 2 if outputs >= 2048 else 1
    return ProductTile(rows, warps * WARP_BYTES // element_bytes, warps)


def _wide_tile(row_bytes: int, element_bytes: int, gated: bool) -> ProductTile:
    """For long rows. Of 36 tiles for each product of an 8B shape's layer the fastest on an H200 in bfloat16: all four
    together take 110 us (92% of what memory gives), against 119 with the form for short rows."""
    if gated:
        return ProductTile(4, 8192 // element_bytes, 8)
    if row_bytes > WIDE_BYTES:
        return ProductTile(2, 2048 // element_bytes, 2)
    return ProductTile(2, 4096 // element_bytes, 8)


def scaled_tile(
    rows: int, outputs: int, columns: int, layout: ScaledLayout, element_bytes: int, *, gated: bool = False
) -> QuantizedTile:
    """For codes with scales."""
    piece = 128 if element_bytes == 2 else 64
    while columns % piece or (layout.group or columns) % piece:
        piece //= 2
    if rows <= FEW_QUANTIZED_ROWS:
        return _few_tile(outputs, columns, piece, 2 if piece == 128 else 4, element_bytes, gated)
    return _more_tile(rows, outputs, columns, piece, element_bytes, 3)


def block_tile(
    rows: int, outputs: int, columns: int, bits: int, element_bytes: int, *, gated: bool = False
) -> QuantizedTile:
    """For GGUF's blocks: pieces of 32, in a step of few rows as many as the larger blocks have."""
    if rows <= FEW_QUANTIZED_ROWS:
        return _few_tile(outputs, columns, 32, 4, element_bytes, gated or bits > 4)
    # Words of further bits take shared memory too, of which GPUs for desktops have less.
    return _more_tile(rows, outputs, columns, 32, element_bytes, 2 if 4 < bits < 8 else 3)


def _few_tile(outputs: int, columns: int, piece: int, warps: int, element_bytes: int, narrow: bool) -> QuantizedTile:
    """A warp has whole pieces. Of 30 tiles for each product of an 8B shape's layer in int4 the fastest on an H200."""
    taken, pieces = 32 if narrow or element_bytes > 2 else 64, FEW_COLUMNS // piece
    tiles = -(-outputs // taken)
    most = min(PROCESSORS * 4 // tiles, columns // FEW_COLUMNS // 2)
    return QuantizedTile(FEW_QUANTIZED_ROWS, taken, piece, pieces, _splits(most, tiles, taken, 8), warps, 3)


def _more_tile(rows: int, outputs: int, columns: int, piece: int, element_bytes: int, stages: int) -> QuantizedTile:
    """More than 32 rows are read by more outputs at a time: the second level cache would be asked too often for them.
    Programs are as many as run at once, so that none is left for a second round."""
    padded = max(16, 1 << (rows - 1).bit_length())
    wide = padded > 32 and element_bytes == 2
    taken = 128 if wide else 64
    tiles = -(-outputs // taken)
    most = PROCESSORS * 3 // tiles
    if wide:
        once = PROCESSORS // tiles
        most = once if 10 * once * tiles >= 9 * PROCESSORS else 2 * PROCESSORS // tiles
    most = min(most, columns // MORE_COLUMNS // 4)
    pieces = max(1, (MORE_COLUMNS if element_bytes == 2 else 64) // piece)
    splits = _splits(most, tiles, taken, padded)
    return QuantizedTile(padded, taken, piece, pieces, splits, taken // 16, stages if element_bytes == 2 else 2)


def _splits(most: int, tiles: int, outputs: int, rows: int) -> int:
    """No more than there is room for sums, of gates and ups both."""
    if tiles > SPLIT_COUNTERS:
        return 1
    return max(1, min(most, SUMS_BYTES // (tiles * rows * (2 * outputs + 1) * 4)))


@dataclass(frozen=True, slots=True)
class VectorTile:
    outputs: int
    """Rows of the matrix a program takes."""
    pieces: int
    """Of 32 columns that it takes at a time."""
    warps: int


def vector_tile(element_bytes: int) -> VectorTile:
    """One tile row is one load of all threads, so that inputs and codes lie alike over them."""
    return VectorTile(8, 2 * WARP_BYTES // element_bytes // 16, 2)
