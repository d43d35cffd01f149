"""GGUF's K-quants in the order in which tensor cores take them: the same bytes, each tile of 16 rows x 256 columns in
one piece, and in it what a lane reads side by side.

    lane 4·g + t of a warp has rows 2·g and 2·g + 1 of a tile, and of every 32 columns 4·t .. 4·t + 3 and those + 16

    codes   [tiles, blocks, 2048]  4 x [lane][piece 2·i, 2·i + 1][row] words of eight codes: the low halves of bytes are
                                   columns 0, 2, 1, 3 of the lane's first four, the high ones of the others
    high    [tiles, blocks, 512 a bit]  words of bits above the fourth: see `_woven_high`
    scales  [tiles, blocks, 256]   eight bytes a lane. Q4_K, Q5_K: six bits each for groups 2·t, 2·t + 1 of both rows in
                                   the first word, of minimums in the second; the last bytes of both are a float16: by
                                   t scale and minimum of the first row, and of the second. Q6_K: scales of groups
                                   4·t .. 4·t + 3 of both rows
    units   [tiles, blocks, 32]    Q6_K: float16 scales of the rows

Made in place, a few tiles at a time, and put back for a reader of rows: planes of scales that become one lie in one
piece of memory from the beginning (`SmallPlanes`). Pure torch, on any device; knows no kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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


class SmallPlanes(NamedTuple):
    """What Q4_K and Q5_K have beside codes, 16 bytes a block, plane after plane in one piece of memory:

    | small | scales | minimums |
    """

    small: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor

    @classmethod
    def within(cls, memory: torch.Tensor, rows: int) -> SmallPlanes:
        """Views of `memory`, uint8 [16 bytes of all blocks]."""
        small, scales, minimums = memory.split([memory.nbytes // 16 * size for size in (12, 2, 2)])
        halves = (plane.view(torch.float16).view(rows, -1, 1) for plane in (scales, minimums))
        return cls(small.view(rows, -1, 12), *halves)


class Planes(NamedTuple):
    """Rows of a matrix as `gguf_blocks` keeps them."""

    quants: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    minimums: torch.Tensor | None
    small: torch.Tensor


def against_fragments_of(layout: str, rows: int) -> str | None:
    """Why a matrix of this kind cannot lie so; None: it can."""
    if layout not in FRAGMENT_LAYOUTS:
        return f"tiles are of {', '.join(sorted(FRAGMENT_LAYOUTS))}, not of {layout}"
    return f"tiles have {TILE_ROWS} rows, and {rows} do not divide by that" if rows % TILE_ROWS else None


def woven(layout: str, planes: Planes, together: torch.Tensor | None) -> Fragments:
    """In the memory of `planes`, which is theirs no longer. `together`: where those of Q4_K and Q5_K lie that are
    `SmallPlanes`; held twice meanwhile."""
    rows, pieces, _ = planes.quants.shape
    tiles, blocks = rows // TILE_ROWS, pieces * 32 // TILE_COLUMNS
    codes = planes.quants.view(tiles, blocks, -1)
    high = None if planes.high is None else planes.high.view(torch.uint8).view(tiles, blocks, -1)
    if together is None:
        scales, units = planes.small.view(tiles, blocks, -1), planes.scales.view(torch.uint8).view(tiles, blocks, -1)
    else:
        scales, units = together.view(tiles, blocks, -1), None
        planes = planes._replace(**SmallPlanes.within(together.clone(), rows)._asdict())
    result = Fragments(layout, codes, high, scales, units)
    with torch.inference_mode():  # As what was loaded so must be changed.
        _fill(result, planes)
    if codes.device.type == "cuda":
        # A product may read codes before the kernel before it has ended.
        torch.cuda.synchronize(codes.device)
    return result


def _fill(result: Fragments, planes: Planes) -> None:
    tiles, blocks, _ = result.codes.shape
    for first, last in _pieces(tiles, blocks):
        rows_here = slice(first * TILE_ROWS, last * TILE_ROWS)
        part = Planes(*(None if plane is None else plane[rows_here] for plane in planes))  # type: ignore[arg-type]
        made = _weave(result.layout, part, last - first)
        for target, source in zip(result[1:], made[1:], strict=True):
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
                target[first:last] = source


def _pieces(tiles: int, blocks: int) -> list[tuple[int, int]]:
    at_once = max(1, PIECE_ELEMENTS // (blocks * TILE_ROWS * TILE_COLUMNS))
    return [(first, min(first + at_once, tiles)) for first in range(0, tiles, at_once)]


# Dimensions by letter, to read the orders below: T tile, r row of a lane, g, B block, i pair of pieces, p piece of a
# pair, t, s step of 16 columns, q pair of columns, w which of a pair, b bit, y byte, m scale or minimum.
_ROWS = "TgrB"


def _turn(part: torch.Tensor, have: str, want: str) -> torch.Tensor:
    return part.permute(*(have.index(letter) for letter in want))


def _weave(layout: str, planes: Planes, tiles: int) -> Fragments:
    quants = planes.quants.reshape(tiles, 8, 2, -1, 4, 2, 4, 4)[..., [0, 2, 1, 3]]
    codes = _turn(quants, "TgrBipty", "TBigtpry").reshape(tiles, -1, 2048)
    high = None if planes.high is None else _woven_high(planes.high, tiles)
    if planes.minimums is not None:
        return Fragments(layout, codes, high, _woven_scales(layout, planes, tiles), None)
    scales = _turn(planes.small.reshape(tiles, 8, 2, -1, 4, 4), "TgrBty", "TBgtry").reshape(tiles, -1, 256)
    units = _turn(planes.scales.reshape(tiles, 8, 2, -1), _ROWS, "TBgr").contiguous()
    return Fragments(layout, codes, high, scales, units.view(torch.uint8).view(tiles, -1, 32))


def _woven_high(words: torch.Tensor, tiles: int) -> torch.Tensor:
    """Bits [rows, pieces, bits] of 32 elements a word, to words of a lane in which the bits of a register's two codes
    are 16 apart: of Q6_K a word a piece, of Q5_K one for two pieces."""
    count = words.shape[-1]
    bits = spread(words.reshape(-1, 1).view(torch.uint8), 1, 1).view(tiles, 8, 2, -1, 4, 2, count, 2, 4, 2, 2)
    order = _turn(_halved(bits, count), *_HIGH[count]).reshape(-1, 8)
    return (
        (order << torch.arange(8, dtype=torch.uint8, device=order.device))
        .sum(-1, dtype=torch.uint8)
        .view(tiles, -1, 512 * count)
    )


_HIGH = {1: ("TgrBipbstqw", "TBgtiwprsqb"), 2: ("TgrBhipbstqw", "TBhgtipwrsqb")}
"""By the number of bits. h: half of the block."""


def _halved(bits: torch.Tensor, count: int) -> torch.Tensor:
    return bits if count == 1 else bits.unflatten(4, (2, 2))


def _woven_scales(layout: str, planes: Planes, tiles: int) -> torch.Tensor:
    small = KINDS[layout].small
    assert small is not None
    assert planes.minimums is not None
    numbers = small(planes.small.flatten(0, 1))
    shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=planes.small.device)
    words = []
    for part in numbers:
        assert part is not None
        placed = _turn(part.view(tiles, 8, 2, -1, 4, 2), "TgrBtp", "TBgtrp").reshape(tiles, -1, 8, 4, 4)
        words.append((placed.int() << shifts).sum(-1, dtype=torch.int32))
    lanes = torch.stack(words, -1).view(torch.uint8).view(tiles, -1, 8, 4, 2, 4)
    halves = torch.cat((planes.scales, planes.minimums), -1).view(tiles, 8, 2, -1, 2)
    lanes[..., 3] = _turn(halves, "TgrBm", "TBgrm").reshape(tiles, -1, 8, 4, 1).view(torch.uint8)
    return lanes.view(tiles, -1, 256)


def some_tiles(fragments: Fragments, tiles: torch.Tensor) -> Fragments:
    codes, high, scales, units = (None if part is None else part.index_select(0, tiles) for part in fragments[1:])
    assert codes is not None
    assert scales is not None
    return Fragments(fragments.layout, codes, high, scales, units)


def unwoven(fragments: Fragments) -> Planes:
    """The reverse of `woven`, in memory of its own; of some tiles where `fragments` has some."""
    codes, high, scales, units = fragments[1:]
    tiles, rows = len(codes), len(codes) * TILE_ROWS
    quants = _turn(codes.view(tiles, -1, 4, 8, 4, 2, 2, 4)[..., [0, 2, 1, 3]], "TBigtpry", "TgrBipty")
    words = None if high is None else _rows_of_high(high)
    flat = quants.reshape(rows, -1, 16)
    if units is None:
        return _with_scales(flat, words, scales)
    small = _turn(scales.view(tiles, -1, 8, 4, 2, 4), "TBgtry", "TgrBty").reshape(rows, -1, 16)
    halves = _turn(units.contiguous().view(torch.float16).view(tiles, -1, 8, 2), "TBgr", _ROWS)
    return Planes(flat, words, halves.reshape(rows, -1, 1), None, small)


def _rows_of_high(high: torch.Tensor) -> torch.Tensor:
    tiles, blocks, size = high.shape
    count = size // 512
    bits = spread(high.reshape(-1, 1), 1, 1)
    have, want = _HIGH[count]
    shape = {"T": tiles, "B": blocks, "g": 8, "t": 4, "i": 4 if count == 1 else 2, "b": count}
    order = _turn(bits.view(*(shape.get(letter, 2) for letter in want)), want, have).reshape(-1, 8)
    packed = (order << torch.arange(8, dtype=torch.uint8, device=order.device)).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32).view(tiles * TILE_ROWS, -1, count)


def _with_scales(quants: torch.Tensor, words: torch.Tensor | None, scales: torch.Tensor) -> Planes:
    tiles, rows = len(scales), len(quants)
    lanes = scales.reshape(tiles, -1, 8, 4, 2, 4)
    halves = lanes[..., 3].contiguous().view(torch.float16).view(tiles, -1, 8, 2, 2)
    units, minimums = _turn(halves, "TBgrm", "TgrBm").reshape(rows, -1, 2).split(1, -1)
    shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=scales.device)
    numbers = (lanes.contiguous().view(torch.int32) >> shifts) & 63
    placed = _turn(numbers.view(tiles, -1, 8, 4, 2, 2, 2), "TBgtmrp", "TgrBmtp").reshape(rows, -1, 2, 8)
    first, last = placed[..., :4], placed[..., 4:]
    six = first | last >> 4 << 6
    rest = last[..., 0, :] & 15 | (last[..., 1, :] & 15) << 4
    small = torch.cat((six.flatten(-2), rest), -1).to(torch.uint8)
    return Planes(quants, words, units.contiguous(), minimums.contiguous(), small)
