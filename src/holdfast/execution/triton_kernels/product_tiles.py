"""How products of few rows are cut: tiles by shape and number type, and the split workspace. No torch, no triton.

The constants are for Hopper (132 multiprocessors, 228 KiB of shared memory each) and are all here, so that one
benchmark can tune them; nothing is searched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW_ROWS = 2
"""So many are multiplied and summed by plain arithmetic; more go through the tensor cores."""
MOST_ROWS = 16
"""Of a skinny product: the least a tensor core takes."""
PROGRAMS = 264
"""Two a multiprocessor: what tensor core programs are split to reach."""
MOST_SPLITS = 8
MOST_SPLIT_OUTPUTS = 64
"""Of a tile that is split."""
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
    splits: int = 1
    """Programs that share one output tile, each a part of the columns."""


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


def more_rows_tile(outputs: int, inputs: int, element_bytes: int, *, gated: bool = False) -> ProductTile:
    if element_bytes == 4:
        return ProductTile(32, 64, 4, stages=2)
    width = min(256 if not gated else 128, max(16, 1 << (inputs - 1).bit_length()))
    rows = 64 if outputs >= 65536 else 32
    tiles = -(-outputs // rows)
    splits = 1 if gated else max(1, min(MOST_SPLITS, PROGRAMS // tiles, inputs // (2 * width)))
    return ProductTile(rows, width, 4, stages=4, splits=splits)


def few_rows_block_tile(rows: int, outputs: int, blocks: int, lanes: int, element_bytes: int) -> ProductTile:
    """One tile row is one load of all threads, as many quants a thread as 16 bytes hold inputs."""
    warps = 4
    while warps > 1 and warps * WARP_BYTES // 2 >= blocks * lanes * element_bytes:
        warps //= 2
    taken = 4 // rows if outputs >= 2048 else 2 // rows if outputs >= 512 else 1
    return ProductTile(taken, max(1, warps * WARP_BYTES // element_bytes // lanes), warps)


def more_rows_block_tile(outputs: int, blocks: int, element_bytes: int) -> ProductTile:
    del outputs
    return ProductTile(32, min(8 if element_bytes == 2 else 4, 1 << (blocks - 1).bit_length()), 4, stages=3)


def fits_workspace(tile: ProductTile, outputs: int) -> bool:
    """Whether the programs that share output tiles find room for their partial sums and counters."""
    programs = -(-outputs // tile.outputs) * tile.splits
    return tile.splits == 1 or (programs <= PROGRAMS and tile.outputs <= MOST_SPLIT_OUTPUTS)


def split_partials() -> int:
    """float32 numbers that programs of split products leave for the last of them: enough for any product."""
    return PROGRAMS * MOST_ROWS * MOST_SPLIT_OUTPUTS


def split_workspace_bytes() -> int:
    """Of `products.SplitWorkspace`: partial sums and one counter an output tile."""
    return (split_partials() + PROGRAMS) * 4
