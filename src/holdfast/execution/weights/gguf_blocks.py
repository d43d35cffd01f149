"""GGUF's quantized blocks in memory: split into codes and scales once, dequantized by rows, bit-exact.

    on disk  ─► per block: scales, small scales and codes, as gguf_block_types.py knows them
    in memory─► scales, minimums, small [rows, blocks, ..] | quants [rows, columns / 32, ..] | high likewise

    codes of  8 bits   quants int8  [.., 32]
              4        quants uint8 [.., 16]: elements i and i + 16 of 32 in the halves of a byte
              5, 6     the lower four so, each bit above in `high` int32 [.., 1 or 2]: element i is bit i of a word
              2, 3     quants int32 [.., 2 or 3]: each bit in a word

The same bytes in all; only the order changes, so that each part is contiguous and all kinds are read alike. On a GPU
some are then put into the order of gguf_fragments.py. Knows no products.
"""

from __future__ import annotations

import numpy
import torch

from holdfast.checkpoints import StoredTensor
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.errors import CheckpointError
from holdfast.execution.device import tile_elements
from holdfast.execution.memory import MakeTensor, exact_tensor
from holdfast.execution.weights.gguf_block_types import KINDS, BlockKind, fill_elements, group_scales, spread
from holdfast.execution.weights.gguf_fragments import (
    TILE_ROWS,
    Fragments,
    Planes,
    SmallPlanes,
    against_fragments_of,
    some_tiles,
    unwoven,
    woven,
)
from holdfast.execution.weights.packed import require_mxfp4_scales
from holdfast.execution.weights.scaled_matrix import MXFP4_VALUES

BLOCK_ELEMENTS = 32
"""That quants are kept in, whatever the kind."""
PIECE_ELEMENTS = 1 << 20
"""Of codes that are split at a time."""

EXPAND_BYTES = 8 << 20
"""Of float32 rows expanded at a time."""
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

QUANTIZED_LAYOUTS = frozenset(KINDS)
STORED_LAYOUTS = QUANTIZED_LAYOUTS | {"MXFP4"}
"""That `dequantize_stored` reads. MXFP4 has a power of two where others have a half: in memory it is no
`QuantizedMatrix`, but the codes and scales of a `ScaledMatrix`."""


class QuantizedMatrix:
    """A [rows, columns] matrix that stays quantized. Rows can be filled piece by piece while loading."""

    def __init__(
        self, layout: str, rows: int, columns: int, device: torch.device, make: MakeTensor = exact_tensor
    ) -> None:
        self._kind = kind = KINDS[layout]
        if columns % kind.elements:
            raise CheckpointError(
                f"a {layout} matrix has rows of {columns} elements", needed=f"a multiple of {kind.elements}"
            )
        self.layout, self.rows, self.columns = layout, rows, columns
        self.fragments: Fragments | None = None
        """All of it, once it was woven: the planes below are then no more."""
        blocks, pieces = columns // kind.elements, columns // BLOCK_ELEMENTS
        quant_type, width, high = _planes(kind)
        self.quants = make((rows, pieces, width), quant_type, device)
        self.high = make((rows, pieces, high), torch.int32, device) if high else None
        self._together: torch.Tensor | None = None
        """What has the scales, minimums and small ones, where they may become one plane."""
        small = kind.small_at
        self.small: torch.Tensor | None
        self.minimums: torch.Tensor | None
        if kind.minimum_at is not None and against_fragments_of(layout, rows) is None:
            self._together = make((rows * blocks * 16,), torch.uint8, device)
            self.small, self.scales, self.minimums = SmallPlanes.within(self._together, rows)
            return
        self.scales = make((rows, blocks, 1), torch.float16, device)
        self.minimums = None if kind.minimum_at is None else make((rows, blocks, 1), torch.float16, device)
        self.small = None if small is None else make((rows, blocks, small[1] - small[0]), torch.uint8, device)

    @property
    def nbytes(self) -> int:
        parts = self._parts() if self.fragments is None else self.fragments[1:]
        return sum(part.nbytes for part in parts if part is not None)

    def forget_together(self) -> None:
        """Its scales, minimums and small ones lie apart from now on: they never become one plane."""
        self._together = None

    def weave(self) -> Fragments:
        """Puts it into the order of `gguf_fragments`, which must fit; in the same memory."""
        if self.fragments is None:
            assert self.small is not None
            planes = Planes(self.quants, self.high, self.scales, self.minimums, self.small)
            self.fragments = woven(self.layout, planes, self._together)
            self.quants, self.scales = self.quants[:0], self.scales.new_empty(0)
            self.high = self.minimums = self.small = None
        return self.fragments

    def fill_rows(self, first: int, stored: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Stored bytes of whole rows go to rows first, first+1, ...; `order` picks the stored row for each."""
        rows = stored.view(-1, self.columns // self._kind.elements * self._kind.nbytes)
        count = len(rows) if order is None else len(order)
        at_once = max(1, tile_elements(PIECE_ELEMENTS, rows.device) // self.columns)
        for start in range(0, count, at_once):
            piece = slice(start, min(start + at_once, count))
            part = rows[piece] if order is None else rows.index_select(0, order[piece].to(rows.device))
            self._fill(first + start, part)

    def _fill(self, first: int, stored: torch.Tensor) -> None:
        kind, target = self._kind, slice(first, first + len(stored))
        blocks = stored.view(len(stored), -1, kind.nbytes)
        self.scales[target] = _half(blocks, kind.scale_at)
        if self.minimums is not None and kind.minimum_at is not None:
            self.minimums[target] = _half(blocks, kind.minimum_at)
        if self.small is not None and kind.small_at is not None:
            self.small[target] = blocks[..., slice(*kind.small_at)]
        codes = kind.codes(blocks.reshape(-1, kind.nbytes)).view(len(stored), -1, BLOCK_ELEMENTS)
        if kind.bits == 8:
            self.quants[target] = codes
            return
        if kind.bits < 4:
            self.quants[target] = _words(codes, 0, kind.bits)
            return
        half = BLOCK_ELEMENTS // 2
        self.quants[target] = codes[..., :half] & 15 | codes[..., half:] << 4
        if self.high is not None:
            self.high[target] = _words(codes, 4, kind.bits)

    def dequantize(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first..last-1 into `out` [last-first, columns]."""
        start, part = 0, self._parts()
        if self.fragments is not None:
            tiles = torch.arange(first // TILE_ROWS, -(-last // TILE_ROWS), device=self.fragments.codes.device)
            start, part = first // TILE_ROWS * TILE_ROWS, unwoven(some_tiles(self.fragments, tiles))
        rows = slice(first - start, last - start)
        self._dequantize([None if plane is None else plane[rows] for plane in part], out)

    def dequantize_some(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The rows of these indices into `out` [len(rows), columns]."""
        part = self._parts()
        if self.fragments is not None:
            part = unwoven(some_tiles(self.fragments, rows // TILE_ROWS))
            rows = torch.arange(len(rows), device=rows.device) * TILE_ROWS + rows % TILE_ROWS
        self._dequantize([None if plane is None else plane.index_select(0, rows) for plane in part], out)

    def _parts(self) -> tuple[torch.Tensor | None, ...]:
        return self.quants, self.high, self.scales, self.minimums, self.small

    def _dequantize(self, parts: list[torch.Tensor | None], out: torch.Tensor) -> None:
        quants, high, scales, minimums, small = parts
        assert quants is not None
        assert scales is not None
        codes = _codes(self._kind, quants, high)
        lows = None if minimums is None else minimums.reshape(-1, 1)
        _expand(self._kind, codes, scales.reshape(-1, 1), lows, None if small is None else small.flatten(0, 1), out)


def expand_into(
    target: torch.Tensor, raw: torch.Tensor, tensor: StoredTensor, order: torch.Tensor | None = None
) -> None:
    """Bytes of a tensor as numbers into `target`, in tiles of rows; `order` picks the stored row for each row. They may
    be plain too, and those of one expert."""
    layout = tensor.layout
    if layout not in PLAIN_TYPES and layout not in STORED_LAYOUTS:
        needed = ", ".join(PLAIN_TYPES)
        raise CheckpointError(f"tensors stored as {layout} cannot be expanded", needed=needed, found=layout)
    if layout == "MXFP4":
        require_mxfp4_scales(raw, tensor.name)
    rows = target.shape[0]
    stored = raw.view(rows, -1)
    tile_rows = max(1, EXPAND_BYTES // (4 * max(1, target.numel() // rows)))
    for first in range(0, rows, tile_rows):
        last = min(first + tile_rows, rows)
        part = stored[first:last] if order is None else stored.index_select(0, order[first:last])
        if layout in PLAIN_TYPES:
            target[first:last].copy_(part.view(PLAIN_TYPES[layout]).view(target[first:last].shape))
        elif target.dim() == 1:
            wide = torch.empty((1, rows), dtype=torch.float32)
            dequantize_stored(layout, raw, wide)
            target.copy_(wide[0])
            return
        else:
            dequantize_stored(layout, part.contiguous(), target[first:last])


def dequantize_stored(layout: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Stored bytes of whole rows, as the file has them, into `out` [rows, columns]."""
    if layout == "MXFP4":
        pieces = stored.view(-1, 1 + BLOCK_ELEMENTS // 2)
        values = torch.tensor(MXFP4_VALUES, device=stored.device)[spread(pieces[:, 1:], BLOCK_ELEMENTS // 2, 4).int()]
        out.copy_((values * torch.exp2(pieces[:, :1].float() - 127)).view(out.shape))
        return
    kind = KINDS[layout]
    blocks = stored.view(-1, kind.nbytes)
    minimums = None if kind.minimum_at is None else _half(blocks, kind.minimum_at)
    small = None if kind.small_at is None else blocks[:, slice(*kind.small_at)]
    _expand(kind, kind.codes(blocks), _half(blocks, kind.scale_at), minimums, small, out)


def read_rows(checkpoint: Checkpoint, name: str, out: torch.Tensor, order: torch.Tensor | None) -> None:
    """Stored bytes of whole rows, as the file has them, to where they stay: `out` [rows, bytes]. `order`: which stored
    row becomes each row.

    Without torch: its threads spin after every copy, and a model has hundreds. Beside two other busy processes on two
    cores they took 2 s where reading takes 0.3.
    """
    target = out.numpy()
    if order is None:
        checkpoint.read_into(name, target.reshape(-1))
    else:
        numpy.take(checkpoint.read(name).reshape(target.shape), order.numpy(), axis=0, out=target, mode="clip")


def _planes(kind: BlockKind) -> tuple[torch.dtype, int, int]:
    """(type of quants, how many of them 32 elements have, words of `high`)."""
    if kind.bits == 8:
        return torch.int8, BLOCK_ELEMENTS, 0
    if kind.bits < 4:
        return torch.int32, kind.bits, 0
    return torch.uint8, BLOCK_ELEMENTS // 2, kind.bits - 4


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    return blocks[..., place : place + 2].contiguous().view(torch.float16)


def _words(codes: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Bits first..last-1 of [.., 32] codes, each in a word of its own: int32 [.., last - first]."""
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    grouped = codes.reshape(*codes.shape[:-1], 4, 8)
    words = [((grouped >> bit & 1) << places).sum(-1, dtype=torch.uint8) for bit in range(first, last)]
    return torch.stack(words, -2).view(torch.int32).squeeze(-1)


def _codes(kind: BlockKind, quants: torch.Tensor, high: torch.Tensor | None) -> torch.Tensor:
    """[blocks of 32, 32]"""
    if kind.bits == 8:
        return quants.reshape(-1, BLOCK_ELEMENTS)
    if kind.bits < 4:
        return _bits(quants, 0)
    codes = spread(quants.reshape(-1, BLOCK_ELEMENTS // 2), BLOCK_ELEMENTS // 2, 4)
    return codes if high is None else codes | _bits(high, 4)


def _bits(words: torch.Tensor, first: int) -> torch.Tensor:
    """The reverse of `_words`."""
    count = words.shape[-1]
    bits = spread(words.reshape(-1, 1).view(torch.uint8), 1, 1).view(-1, count, BLOCK_ELEMENTS)
    codes = bits[:, 0] << first
    for place in range(1, count):
        codes |= bits[:, place] << first + place
    return codes


def _expand(
    kind: BlockKind,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    small: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    # The arithmetic is float32; a narrower target is rounded once, at the end.
    wide = out
    if out.dtype != torch.float32 or not out.is_contiguous() or out.device != codes.device:
        wide = torch.empty(out.shape, dtype=torch.float32, device=codes.device)
    group, added = group_scales(kind, scales, minimums, small)
    shape = (len(scales), kind.elements // kind.group, kind.group)
    fill_elements(kind, codes.view(shape), group, added, wide.view(shape))
    if wide is not out:
        out.copy_(wide)
