"""How attention is cut: tile sizes by head width, number type and shared memory; shares of decode; tile lists. And the
product with a gate for Hopper, which takes whole tiles.

The constants were measured on Hopper; GPUs with less shared memory have smaller ones where those would not fit. All are
here, so that one benchmark can tune them; nothing is searched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from holdfast.execution.triton_kernels.shared_memory import HOPPER_BYTES, shared_memory_bytes
from holdfast.footprint.gpu import PROCESSORS

Words = numpy.typing.NDArray[numpy.int32]
Integers = numpy.typing.NDArray[numpy.integer[Any]]


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    """Query rows of a program: (token, head of the group) pairs in prefill, heads of the group in decode. At least."""
    keys: int
    """Keys it takes at a time."""
    warps: int
    stages: int
    """Key tiles in flight, the one being worked on included."""


_PREFILL = {
    # (padded head width, bytes an element)
    (64, 2): Tile(128, 128, 8, 3),
    (128, 2): Tile(128, 128, 8, 3),
    (256, 2): Tile(128, 64, 8, 2),
    # Exact float32 has no tensor cores: larger tiles than these spill registers.
    (64, 4): Tile(64, 32, 8, 2),
    (128, 4): Tile(32, 16, 8, 2),
    (256, 4): Tile(16, 32, 8, 2),
}
HOPPER_ROWS = 128
"""Of a program of `prefill_hopper`, which takes the same tile lists."""
GATED_COLUMNS, GATED_INPUTS = 128, 64
"""Of a tile of `gated_hopper`, of each half; and those of its inputs that are multiplied at a time."""
_LARGE_SHARED_BYTES = 163 * 1024
"""What the tiles above need: A100, Orin, Hopper and later in data centres. The others have 99 KiB."""
_PREFILL_IN_LITTLE = _PREFILL | {
    (128, 2): Tile(128, 64, 8, 2),
    (256, 2): Tile(64, 32, 8, 2),
    (256, 4): Tile(16, 16, 8, 2),
}
_CODES_WITHOUT_WARP_GROUPS = {(64, 2): Tile(64, 64, 8, 2), (128, 2): Tile(64, 64, 8, 2), (256, 2): Tile(64, 32, 8, 2)}
"""Over float8 pages where tensor cores take keys from registers (before Hopper, and on RTX 50): all warps along the
queries convert the same keys, and more of them at a time spill."""
_DECODE = {
    # These fit everywhere.
    (64, 2): Tile(16, 128, 4, 3),
    (128, 2): Tile(16, 64, 4, 3),
    (256, 2): Tile(16, 32, 4, 3),
    (64, 4): Tile(16, 32, 4, 2),
    (128, 4): Tile(16, 32, 8, 2),
    (256, 4): Tile(16, 16, 4, 2),
}
_DECODE_CODES = {
    # Over float8 pages; (padded head width, bytes of a query's element).
    (64, 2): Tile(16, 128, 2, 3),
    (128, 2): Tile(16, 64, 2, 3),
    (256, 2): Tile(16, 32, 2, 3),
    (64, 4): Tile(16, 32, 4, 2),
    (128, 4): Tile(16, 32, 8, 2),
    (256, 4): Tile(16, 16, 4, 2),
}

_FULL_SHARE_TOKENS = 512
"""Where rows alone fill the device, a split of fewer tokens costs more to join than it wins."""


def padded_width(head_dim: int) -> int:
    return max(64, _power_of_two(head_dim))


def prefill_tile(ratio: int, head_dim: int, element_bytes: int, *, codes: bool = False) -> Tile:
    """On the current device. `ratio`: query heads for each KV head. `codes`: of pages in float8; `element_bytes` is
    then the queries'."""
    table = _PREFILL if shared_memory_bytes() >= _LARGE_SHARED_BYTES else _PREFILL_IN_LITTLE
    if codes and shared_memory_bytes() < HOPPER_BYTES:
        table = table | _CODES_WITHOUT_WARP_GROUPS
    return _for_ratio(table[padded_width(head_dim), element_bytes], ratio)


def decode_tile(ratio: int, head_dim: int, element_bytes: int, *, codes: bool = False) -> Tile:
    """`codes`: of pages in float8; `element_bytes` is then the queries'."""
    table = _DECODE_CODES if codes else _DECODE
    return _for_ratio(table[padded_width(head_dim), element_bytes], ratio)


def prefill_tile_tokens(heads: int, kv_heads: int, head_dim: int, element_bytes: int, *, codes: bool = False) -> int:
    """Tokens of one row that a prefill program takes on the current device, all heads of one group at once."""
    ratio = heads // kv_heads
    return prefill_tile(ratio, head_dim, element_bytes, codes=codes).rows // ratio


def prefill_tiles(counts: Integers, starts: Integers, tile_tokens: int) -> tuple[Words, Words]:
    """(row, first token within the row) of every tile, those that see most keys first, so that none runs alone last."""
    tiles = -(-counts // tile_tokens)
    rows = numpy.repeat(numpy.arange(len(counts)), tiles)
    firsts = (numpy.arange(len(rows)) - numpy.repeat(numpy.cumsum(tiles) - tiles, tiles)) * tile_tokens
    seen = starts[rows] + numpy.minimum(firsts + tile_tokens, counts[rows])
    order = numpy.argsort(-seen, kind="stable")
    return rows[order].astype(numpy.int32), firsts[order].astype(numpy.int32)


def decode_share_tokens(rows: int, kv_heads: int, *, codes: bool = False) -> int:
    """Fewest tokens worth a split of their own (one tile of keys, if that is more)."""
    if rows * kv_heads < PROCESSORS:
        return 0
    if not codes:
        return _FULL_SHARE_TOKENS
    return (4 if rows * kv_heads >= 3 * PROCESSORS else 2) * _FULL_SHARE_TOKENS


def _for_ratio(tile: Tile, ratio: int) -> Tile:
    return tile if ratio <= tile.rows else Tile(_power_of_two(ratio), tile.keys, tile.warps, tile.stages)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
