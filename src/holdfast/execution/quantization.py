"""GGUF's 32-element quantized blocks in memory: split into quants and scales once, dequantized by rows, bit-exact.

    on disk  ─► per block: scale fp16 | (minimum fp16) | quants
    in memory─► scales [rows, blocks] | minimums [rows, blocks] | quants [rows, blocks, bytes]

The same bytes in all; only the order changes, so that each part is contiguous. Knows no products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.errors import CheckpointError
from holdfast.execution.memory import exact_tensor

BLOCK_ELEMENTS = 32


@dataclass(frozen=True, slots=True)
class _Layout:
    scale_bytes: int
    """Of the fp16 scale, and the fp16 minimum where there is one."""
    quant_bytes: int
    packed: bool
    """Two 4-bit quants a byte: elements 0-15 in the low nibbles, 16-31 in the high ones."""
    offset: int
    """Subtracted from a quant before it is scaled."""


_LAYOUTS = {
    "Q8_0": _Layout(scale_bytes=2, quant_bytes=32, packed=False, offset=0),
    "Q4_0": _Layout(scale_bytes=2, quant_bytes=16, packed=True, offset=8),
    "Q4_1": _Layout(scale_bytes=4, quant_bytes=16, packed=True, offset=0),
}
QUANTIZED_LAYOUTS = frozenset(_LAYOUTS)


class QuantizedMatrix:
    """A [rows, columns] matrix that stays quantized. Rows can be filled piece by piece while loading."""

    def __init__(self, layout: str, rows: int, columns: int, device: torch.device) -> None:
        if columns % BLOCK_ELEMENTS:
            raise CheckpointError(
                f"a {layout} matrix has rows of {columns} elements", needed=f"a multiple of {BLOCK_ELEMENTS}"
            )
        self.layout, self.rows, self.columns = layout, rows, columns
        self._kind = _LAYOUTS[layout]
        blocks = columns // BLOCK_ELEMENTS
        quant_type = torch.uint8 if self._kind.packed else torch.int8
        self.quants = exact_tensor((rows, blocks, self._kind.quant_bytes), quant_type, device)
        scales = (rows, blocks, 1)
        self.scales = exact_tensor(scales, torch.float16, device)
        self.minimums = exact_tensor(scales, torch.float16, device) if self._kind.scale_bytes == 4 else None

    @property
    def nbytes(self) -> int:
        parts = (self.quants, self.scales, self.minimums)
        return sum(part.nbytes for part in parts if part is not None)

    def fill_rows(self, first: int, stored: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Stored bytes of whole rows go to rows first, first+1, ...; `order` picks the stored row for each."""
        blocks = stored.view(-1, self.columns // BLOCK_ELEMENTS, self._kind.scale_bytes + self._kind.quant_bytes)
        if order is not None:
            blocks = blocks.index_select(0, order.to(blocks.device))
        target = slice(first, first + blocks.shape[0])
        scale_bytes = self._kind.scale_bytes
        self.quants[target] = blocks[..., scale_bytes:].view(self.quants.dtype)
        self.scales[target] = blocks[..., :2].contiguous().view(torch.float16)
        if self.minimums is not None:
            self.minimums[target] = blocks[..., 2:4].contiguous().view(torch.float16)

    def dequantize(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first..last-1 into `out` [last-first, columns]."""
        part = slice(first, last)
        minimums = None if self.minimums is None else self.minimums[part]
        _dequantize(self._kind, self.quants[part], self.scales[part], minimums, out)

    def dequantize_some(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The rows of these indices into `out` [len(rows), columns]."""
        minimums = None if self.minimums is None else self.minimums.index_select(0, rows)
        _dequantize(self._kind, self.quants.index_select(0, rows), self.scales.index_select(0, rows), minimums, out)


def dequantize_stored(layout: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Stored bytes of whole rows, as the file has them, into `out` [rows, columns]."""
    kind = _LAYOUTS[layout]
    blocks = stored.view(out.shape[0], -1, kind.scale_bytes + kind.quant_bytes)
    quants = blocks[..., kind.scale_bytes :]
    scales = blocks[..., :2].contiguous().view(torch.float16)
    minimums = blocks[..., 2:4].contiguous().view(torch.float16) if kind.scale_bytes == 4 else None
    _dequantize(kind, quants if kind.packed else quants.view(torch.int8), scales, minimums, out)


def _dequantize(
    kind: _Layout, quants: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, out: torch.Tensor
) -> None:
    # The arithmetic is float32, one rounding an operation, as the reference does it; a narrower target
    # is rounded once, at the end.
    wide = out
    if out.dtype != torch.float32 or not out.is_contiguous() or out.device != quants.device:
        wide = torch.empty(out.shape, dtype=torch.float32, device=quants.device)
    blocks = wide.view(out.shape[0], -1, BLOCK_ELEMENTS)
    if kind.packed:
        half = BLOCK_ELEMENTS // 2
        blocks[..., :half] = quants & 0x0F
        blocks[..., half:] = quants >> 4
    else:
        blocks.copy_(quants)
    if kind.offset:
        blocks -= kind.offset
    blocks *= scales.float()
    if minimums is not None:
        blocks += minimums.float()
    if wide is not out:
        out.copy_(wide)
