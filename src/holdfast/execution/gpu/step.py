"""From a plan's rows to arrays on the device: single tokens first, then chunks, with the tiles attention walks them in.

Knows the order of things and nothing of arithmetic. A step of single tokens alone has the same addresses every time,
so that a graph can be replayed on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from holdfast.execution.batch import RunnerLimits, scored_places
from holdfast.execution.gpu.decoder import DeviceRows
from holdfast.execution.gpu.layers.attention import DecodeRows, PrefillRows
from holdfast.execution.gpu.memory.pinned_staging import PacketRing
from holdfast.execution.triton_kernels.tiles import prefill_tiles
from holdfast.footprint.gpu import decode_packet_words, mixed_packet_words, whole_lines
from holdfast.records import Row

Integers = numpy.typing.NDArray[numpy.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    rows: DeviceRows
    sampling: torch.Tensor | None
    """Index into the tokens of each row that samples; None: the first tokens, one for each of them."""
    sampling_slots: torch.Tensor
    sampling_lengths: torch.Tensor
    """Tokens known to each: where the sampled one goes."""
    order: Integers
    """Of the rows that sample, the place in the plan of each in the batch."""
    scored: torch.Tensor | None = None
    """Index into the tokens of each that is scored, row by row in the plan's order."""


def is_decode(rows: Sequence[Row]) -> bool:
    """Whether all are single tokens that sample."""
    return all(row.count == 1 and row.samples for row in rows)


def halves(rows: Sequence[Row]) -> list[list[Row]]:
    """The same work in two steps: half of the rows each, or half of one row's tokens; none where there is one token."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return [list(rows[:middle]), list(rows[middle:])]
    row = rows[0]
    if row.count == 1:
        return []
    first = row.count // 2
    return [
        [_part(row, row.start, first, samples=False)],
        [_part(row, row.start + first, row.count - first, samples=row.samples)],
    ]


def _part(row: Row, start: int, count: int, *, samples: bool) -> Row:
    first, end = max(row.score_from, start), min(row.score_to, start + count)
    return Row(row.slot, start, count, samples, *((first, end) if first < end else ()))


class BatchBuilder:
    """`tile_tokens`: of a prompt that one tile of attention takes. `block_tokens`: of a page."""

    def __init__(self, limits: RunnerLimits, device: torch.device, tile_tokens: int, block_tokens: int) -> None:
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._tile_tokens, self._block_tokens = tile_tokens, block_tokens
        self._apart = whole_lines(rows)
        self._decode = PacketRing(decode_packet_words(rows), device)
        self._mixed = PacketRing(mixed_packet_words(rows, tokens), device)

    @property
    def nbytes(self) -> int:
        return self._decode.nbytes + self._mixed.nbytes

    def send_beside_pages(self) -> None:
        """From now on pages come over the link beside steps."""
        self._decode.beside_pages = self._mixed.beside_pages = True

    def decode(self, rows: Sequence[Row], size: int) -> DeviceStep:
        """Padded to `size` rows. The same size gives the same addresses."""
        slots = numpy.full(size, -1, dtype=numpy.int32)
        positions, lengths = numpy.zeros(size, dtype=numpy.int32), numpy.zeros(size, dtype=numpy.int32)
        count = len(rows)
        slots[:count] = [row.slot for row in rows]
        positions[:count] = [row.start for row in rows]
        lengths[:count] = positions[:count] + 1
        at_slots, at_positions, at_lengths = self._decode.send([slots, positions, lengths], self._apart)
        return self._decode_step(at_slots, at_positions, at_lengths, count)

    def decode_places(self, size: int) -> DeviceStep:
        """Where the rows of a padded step will lie, whatever lies there now."""
        slots, positions, lengths = (self._decode.arrived[first:][:size] for first in (0, self._apart, 2 * self._apart))
        return self._decode_step(slots, positions, lengths, size)

    @staticmethod
    def _decode_step(slots: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, count: int) -> DeviceStep:
        rows = DeviceRows(slots=slots, positions=positions, decode=DecodeRows(slots, lengths), prefill=None)
        return DeviceStep(
            rows=rows,
            sampling=None,
            sampling_slots=slots,
            sampling_lengths=lengths,
            order=numpy.arange(count, dtype=numpy.int32),
        )

    def mixed(self, rows: Sequence[Row]) -> DeviceStep:
        slots, starts, counts = (
            numpy.array(numbers, dtype=numpy.int32)
            for numbers in zip(*((row.slot, row.start, row.count) for row in rows), strict=True)
        )
        samples = numpy.array([row.samples for row in rows], dtype=bool)
        order = numpy.argsort(counts > 1, kind="stable")
        slots, starts, counts, samples = slots[order], starts[order], counts[order], samples[order]
        firsts = (numpy.cumsum(counts) - counts).astype(numpy.int32)
        single = int((counts == 1).sum())
        total = int(counts.sum())
        token_slots = numpy.repeat(slots, counts)
        positions = (numpy.arange(total, dtype=numpy.int32) + numpy.repeat(starts - firsts, counts)).astype(numpy.int32)
        lasts = firsts + counts - 1
        scored, _, _ = scored_places(rows, lasts[numpy.argsort(order)].astype(numpy.int64))
        tile_rows, tile_starts = prefill_tiles(counts[single:], starts[single:], self._tile_tokens)
        page_counts = -(-(starts + counts)[single:] // self._block_tokens)
        page_firsts = (numpy.cumsum(page_counts) - page_counts).astype(numpy.int32)
        pages = page_counts.tolist()
        arrays = [
            token_slots, positions, starts[:single] + 1, slots[single:], starts[single:], counts[single:],
            firsts[single:], tile_rows, tile_starts, page_firsts, lasts[samples], slots[samples],
            (starts + counts)[samples], scored.astype(numpy.int32),
        ]  # fmt: skip
        sent = self._mixed.send(arrays)
        places = numpy.cumsum([row.samples for row in rows]) - 1
        return DeviceStep(
            rows=DeviceRows(
                slots=sent[0],
                positions=sent[1],
                decode=DecodeRows(sent[0][:single], sent[2]) if single else None,
                prefill=PrefillRows(*sent[3:10], total_pages=sum(pages), most_pages=max(pages)) if pages else None,
            ),
            sampling=sent[10],
            sampling_slots=sent[11],
            sampling_lengths=sent[12],
            order=places[order[samples]].astype(numpy.int32),
            scored=sent[13] if len(scored) else None,
        )
