"""Collectives of ranks on one machine's CPU: each shows its numbers in memory that all of them see, and all add them up
in the order of ranks.

    rank r    writes its numbers to its slot, counts one up, waits for the counts of the others, reads their slots

Slots are used in turns: whoever writes to one again has seen everybody count past its last use, and so be done with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.execution.native.loading import kernels
from holdfast.execution.parallel.segment import COUNT_BITS, Segment, StageSegment, Watch

FLOAT_BYTES = 4


class SharedMemoryCollectives:
    """`segment`: of all ranks, or of one stage's. `rank`: among those. `watch`: called while others are awaited, and
    raises where they will not come."""

    name = "shared memory"

    def __init__(self, segment: Segment | StageSegment, rank: int, watch: Watch) -> None:
        self._segment, self.rank, self.size = segment, rank, segment.layout.size
        self._watch, self._count, self._kernels = watch, segment.counts[rank].value, kernels()

    @property
    def count(self) -> int:
        """Of what was done together so far."""
        return self._count

    def go_on_from(self, count: int) -> None:
        """After an alarm: what was under way is nobody's, and all ranks count from here."""
        self._count = count
        self._segment.counts[self.rank].post(count)

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dtype is torch.float32:
            self._sum(x.data_ptr(), x.numel())
            return
        for piece in x.view(-1).split(self._segment.layout.slot_bytes // x.element_size()):
            self._show(piece)
            self._count_up()
            parts = [self._shown(rank, self._count, piece, piece.numel()) for rank in range(self.size)]
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            piece.copy_(total)

    def _sum(self, address: int, count: int) -> None:
        """The same of float32, with as few calls as can be: it is for every half of a layer."""
        segment, compiled = self._segment, self._kernels
        most = segment.layout.slot_bytes // FLOAT_BYTES
        own, stride = segment.counts[self.rank], 2 * most
        for first in range(0, count, most):
            numbers, at = min(most, count - first), address + first * FLOAT_BYTES
            self._count += 1
            compiled.show(
                own.address, self._count & COUNT_BITS, segment.slot_address(self.rank, self._count), at, numbers
            )
            self._await_others()
            compiled.sum_slots(at, segment.slot_address(0, self._count), stride, self.size, numbers)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        rows = max(1, self._segment.layout.slot_bytes // (max(widths) * part.element_size()))
        for first in range(0, len(part), rows):
            self._gather_rows(part[first : first + rows], widths, None if out is None else out[first : first + rows])

    def _gather_rows(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        if out is None:
            self._show(part)
            self._count_up()
            return
        self._count_up()
        begin, turn = 0, self._count
        for rank, width in enumerate(widths):
            shown = part if rank == 0 else self._shown(rank, turn, part.new_empty(0), len(part) * width)
            out[:, begin : begin + width] = shown.view(len(part), width)
            begin += width

    def broadcast(self, x: torch.Tensor) -> None:
        flat = x.view(-1)
        for piece in flat.split(self._segment.layout.slot_bytes // x.element_size()):
            if self.rank == 0:
                self._show(piece)
            self._count_up()
            if self.rank:
                piece.copy_(self._shown(0, self._count, piece, piece.numel()))

    def close(self) -> None:
        self._segment.close()

    def _show(self, piece: torch.Tensor) -> None:
        """To the others, once this rank counts up."""
        flat = piece.reshape(-1)
        self._shown(self.rank, self._count + 1, flat, flat.numel()).copy_(flat)

    def _shown(self, rank: int, turn: int, like: torch.Tensor, elements: int) -> torch.Tensor:
        slot = self._segment.slot(rank, turn)
        return slot[: elements * like.element_size()].view(like.dtype)

    def _count_up(self) -> None:
        """Says that this rank is there, and waits for all others."""
        self._count += 1
        self._segment.counts[self.rank].post(self._count)
        self._await_others()

    def _await_others(self) -> None:
        for rank, count in enumerate(self._segment.counts):
            if rank != self.rank:
                count.wait(self._count, self._watch)
