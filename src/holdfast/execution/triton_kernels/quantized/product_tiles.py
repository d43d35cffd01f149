"""How products of few rows are cut: tiles by shape and number type. No torch, no triton.

The constants are for Hopper (132 multiprocessors, 228 KiB of shared memory each) and are all here, so that one
benchmark can tune them; nothing is searched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW_ROWS = 2
"""So many are multiplied and summed by plain arithmetic; more go through tensor cores: cuBLAS's products with dense
matrices, our own with quantized blocks."""
MOST_BLOCK_ROWS = 16
"""Of a product with quantized blocks: the least a tensor core takes."""
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
    """Columns it takes at a time: elements, or for quantized matrices blocks of 32."""
    warps: int
    stages: int = 1
    """Tiles in flight, where the compiler pipelines (tensor cores)."""


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


def few_rows_block_tile(rows: int, outputs: int, blocks: int, lanes: int, element_bytes: int) -> ProductTile:
    """One tile row is one load of all threads, as many quants a thread as 16 bytes hold inputs."""
    warps = 4
    while warps > 1 and warps * WARP_BYTES // 2 >= blocks * lanes * element_bytes:
        warps //= 2
    taken = 4 // rows if outputs >= 2048 else 2 // rows if outputs >= 512 else 1
    return ProductTile(taken, max(1, warps * WARP_BYTES // element_bytes // lanes), warps)


def more_rows_block_tile(blocks: int, element_bytes: int) -> ProductTile:
    return ProductTile(32, min(8 if element_bytes == 2 else 4, 1 << (blocks - 1).bit_length()), 4, stages=3)
