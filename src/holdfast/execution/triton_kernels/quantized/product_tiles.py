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
"""Up to so many rows of a product with a quantized matrix scales are applied to sums alone, and norm and gate may ride
along."""
MOST_QUANTIZED_ROWS = 128
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


def scaled_tile(rows: int, outputs: int, columns: int, layout: ScaledLayout, *, gated: bool = False) -> QuantizedTile:
    """For codes with scales."""
    piece = _piece(layout.group or columns, columns)
    return _quantized_tile(rows, outputs, columns, piece, 4 if layout.four_bits else 8, gated)


def block_tile(rows: int, outputs: int, columns: int, bits: int, *, gated: bool = False) -> QuantizedTile:
    """For GGUF's blocks."""
    return _quantized_tile(rows, outputs, columns, 32, bits, gated)


def _quantized_tile(rows: int, outputs: int, columns: int, piece: int, bits: int, gated: bool) -> QuantizedTile:
    padded = max(FEW_QUANTIZED_ROWS, 1 << (rows - 1).bit_length())
    few = padded <= FEW_QUANTIZED_ROWS
    taken = (32 if gated else 64) if few else 64 if padded < 64 else 128
    pieces = 4 if few else max(1, (128 if bits < 8 else 64) // piece)
    tiles = -(-outputs // taken)
    programs = PROCESSORS * (4 if few else 2)
    room = SUMS_BYTES // (tiles * taken * padded * 8)
    splits = max(1, min(programs // tiles, columns // (piece * pieces) // 2, room))
    if tiles > SPLIT_COUNTERS:
        splits = 1
    return QuantizedTile(padded, taken, piece, pieces, splits, 4 if few else taken // 16, 4 if few else 3)


def _piece(group: int, columns: int) -> int:
    piece = 128
    while group % piece or columns % piece:
        piece //= 2
    return piece


@dataclass(frozen=True, slots=True)
class VectorTile:
    outputs: int
    """Rows of the matrix a program takes."""
    pieces: int
    """Of 32 columns that it takes at a time."""
    warps: int


def vector_tile(outputs: int, columns: int, element_bytes: int, *, gated: bool, rows: int) -> VectorTile:
    """One tile row is one load of all threads, so that inputs and codes lie alike over them."""
    warps = 4
    pieces = warps * 32 * 16 // element_bytes // 16
    return VectorTile(4 if gated else 8, pieces, warps)
