"""GGUF's K-quants in the order in which tensor cores take them: the same bytes, each tile of 16 rows x 256 columns in
one piece, and in it what a lane reads side by side.

    lane 4·g + c of a warp has rows g and g + 8 of a tile, and of every 32 columns 4·c .. 4·c + 3 and those + 16

    codes   [tiles, blocks, 2048]  4 x [lane][piece 2i, 2i + 1][row g, g + 8] words of eight codes: the low halves of
                                   their bytes are columns 0, 2, 1, 3 of the lane's first four, the high ones of the others
    high    [tiles, blocks, 512 a bit]  words of bits above the fourth: see `_woven_high`
    scales  [tiles, blocks, 256]   eight bytes a lane. Q4_K, Q5_K: six bits each for groups 2c, 2c + 1 of both rows in the
                                   first word, of minimums in the second, and in the last bytes of both a float16: the
                                   row's scale or minimum. Q6_K: scales of groups 4c .. 4c + 3 of both rows
    units   [tiles, blocks, 32]    Q6_K: float16 scales of rows g, g + 8

Made in place, a few tiles at a time. Pure torch, on any device; knows no kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from holdfast.execution.memory import exact_tensor
from holdfast.execution.weights.gguf_block_types import KINDS, spread

TILE_ROWS = 16
TILE_COLUMNS = 256
PIECE_ELEMENTS = 1 << 22
"""Of codes that are put into order at a time."""
FRAGMENT_LAYOUTS = frozenset(("Q4_K", "Q5_K", "Q6_K"))


class Fragments(NamedTuple):
    """A matrix in this order; all uint8 [tiles, blocks, bytes]."""

    layout: str
    codes: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    units: torch.Tensor | None


class Planes(NamedTuple):
    """Rows of a matrix as `gguf_blocks` keeps them."""

    quants: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    minimums: torch.Tensor | None
    small: torch.Tensor


def fits(layout: str, rows: int) -> bool:
    return layout in FRAGMENT_LAYOUTS and rows % TILE_ROWS == 0


def woven(layout: str, planes: Planes) -> Fragments:
    """In the memory of `planes`, which is theirs no longer; scales of Q4_K and Q5_K, in three planes there, in memory
    of their own."""
    rows, pieces, _ = planes.quants.shape
    tiles, blocks = rows // TILE_ROWS, pieces * 32 // TILE_COLUMNS
    codes = planes.quants.view(tiles, blocks, -1)
    high = None if planes.high is None else planes.high.view(torch.uint8).view(tiles, blocks, -1)
    if planes.minimums is None:
        scales, units = planes.small.view(tiles, blocks, -1), planes.scales.view(torch.uint8).view(tiles, blocks, -1)
    else:
        scales, units = exact_tensor((tiles, blocks, 256), torch.uint8, codes.device), None
    result = Fragments(layout, codes, high, scales, units)
    for first, last in _pieces(tiles, blocks):
        rows_here = slice(first * TILE_ROWS, last * TILE_ROWS)
        part = Planes(*(None if plane is None else plane[rows_here] for plane in planes))  # type: ignore[arg-type]
        made = _weave(layout, part, last - first)
        for target, source in zip(result[1:], made[1:], strict=True):
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                target[first:last] = source
    return result


def _pieces(tiles: int, blocks: int) -> list[tuple[int, int]]:
    at_once = max(1, PIECE_ELEMENTS // (blocks * TILE_ROWS * TILE_COLUMNS))
    return [(first, min(first + at_once, tiles)) for first in range(0, tiles, at_once)]


def _weave(layout: str, planes: Planes, tiles: int) -> Fragments:
    # tile, half, g, block, pair of pieces, second, c, byte
    quants = planes.quants.reshape(tiles, 2, 8, -1, 4, 2, 4, 4)[..., [0, 2, 1, 3]]
    codes = quants.permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(tiles, -1, 2048)
    high = None if planes.high is None else _woven_high(planes.high, tiles)
    if planes.minimums is None:
        small = planes.small.reshape(tiles, 2, 8, -1, 4, 4).permute(0, 3, 2, 4, 1, 5).reshape(tiles, -1, 256)
        halves = planes.scales.reshape(tiles, 2, 8, -1).permute(0, 3, 2, 1).contiguous()
        return Fragments(layout, codes, high, small, halves.view(torch.uint8).view(tiles, -1, 32))
    return Fragments(layout, codes, high, _woven_scales(layout, planes, tiles), None)


def _woven_high(words: torch.Tensor, tiles: int) -> torch.Tensor:
    """Bits [rows, pieces, bits] of 32 elements a word, to words of a lane in which the bits of a register's two codes
    are 16 apart: of Q6_K a word a piece, of Q5_K one for two pieces."""
    count = words.shape[-1]
    bits = spread(words.reshape(-1, 1).view(torch.uint8), 1, 1)
    # tile, half, g, block, pair of pieces, second, bit, step, c, pair of columns, which
    bits = bits.view(tiles, 2, 8, -1, 4, 2, count, 2, 4, 2, 2)
    if count == 2:
        # .. [pair of pieces / 2] lane [pair of pieces % 2, second] word
        order = bits.unflatten(4, (2, 2)).permute(0, 3, 4, 2, 9, 5, 6, 11, 1, 8, 10, 7)
    else:
        order = bits.permute(0, 3, 2, 8, 4, 10, 5, 1, 7, 9, 6)
    return _bytes_of_bits(order.reshape(-1, 8)).view(tiles, -1, 512 * count)


def _bytes_of_bits(bits: torch.Tensor) -> torch.Tensor:
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def _woven_scales(layout: str, planes: Planes, tiles: int) -> torch.Tensor:
    small = KINDS[layout].small
    assert small is not None
    assert planes.minimums is not None
    units, minimums = small(planes.small.flatten(0, 1))
    assert minimums is not None
    words = []
    for numbers in (units, minimums):
        # tile, half, g, block, c, second
        placed = numbers.view(tiles, 2, 8, -1, 4, 2).permute(0, 3, 2, 4, 1, 5).reshape(tiles, -1, 8, 4, 4).int()
        shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=placed.device)
        words.append((placed << shifts).sum(-1, dtype=torch.int32))
    # tile, half, g, block, scale or minimum
    halves = torch.cat((planes.scales, planes.minimums), -1).view(tiles, 2, 8, -1, 2).permute(0, 3, 2, 1, 4)
    split = halves.reshape(tiles, -1, 8, 4, 1).view(torch.uint8)
    lanes = torch.stack(words, -1).view(torch.uint8).view(tiles, -1, 8, 4, 2, 4)
    lanes[..., 3] = split
    return lanes.view(tiles, -1, 256)
