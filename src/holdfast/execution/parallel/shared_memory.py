"""Collectives of ranks on one machine's CPU: each shows its numbers in memory that all of them see, and all add them up
in the order of ranks.

    rank r    writes its numbers to its slot, counts one up, waits for the counts of the others, reads their slots

Slots are used in turns: whoever writes to one again has seen everybody count past its last use, and so be done with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from holdfast.execution.native import CompiledSums, threads
from holdfast.execution.native.loading import kernels
from holdfast.execution.parallel.segment import LOOK_NS, SPIN_NS, Segment, StageSegment, Watch

COUNT = 9
"""Where a group's description (native/rank_sums.h) has what this rank has counted."""


class SharedMemoryCollectives:
    """`segment`: of all ranks, or of one stage's. `rank`: among those. `watch`: called while others are awaited, and
    raises where they will not come."""

    name = "shared memory"

    def __init__(self, segment: Segment | StageSegment, rank: int, watch: Watch) -> None:
        self._segment, self.rank, self.size = segment, rank, segment.layout.size
        self._watch, self._kernels = watch, kernels()
        numbers = segment.layout.slot_bytes // torch.float32.itemsize
        words = (segment.counts[0].address, segment.slots_address, numbers, self.size, rank)
        waiting = (segment.alarm.address, segment.calm_address, SPIN_NS, LOOK_NS)
        self._group = numpy.array([*words, *waiting, segment.counts[rank].value], dtype=numpy.int64)
        self.sums = CompiledSums(int(self._group.ctypes.data), watch)
        """The same sums, for compiled code to make."""

    @property
    def count(self) -> int:
        """Of what was done together so far."""
        return int(self._group[COUNT])

    def go_on_from(self, count: int) -> None:
        """After an alarm: what was under way is nobody's, and all ranks count from here."""
        self._group[COUNT] = count
        self._segment.counts[self.rank].post(count)

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dtype is torch.float32:
            self._kernels.sum_ranks(self.sums.group, self._watch, x.data_ptr(), x.numel(), threads())
            return
        for piece in x.view(-1).split(self._segment.layout.slot_bytes // x.element_size()):
            self._show(piece)
            self._meet()
            parts = [self._shown(rank, self.count, piece, piece.numel()) for rank in range(self.size)]
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            piece.copy_(total)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        rows = max(1, self._segment.layout.slot_bytes // (max(widths) * part.element_size()))
        for first in range(0, len(part), rows):
            self._gather_rows(part[first : first + rows], widths, None if out is None else out[first : first + rows])

    def _gather_rows(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        if out is None:
            self._show(part)
            self._meet()
            return
        self._meet()
        begin, turn = 0, self.count
        for rank, width in enumerate(widths):
            shown = part if rank == 0 else self._shown(rank, turn, part.new_empty(0), len(part) * width)
            out[:, begin : begin + width] = shown.view(len(part), width)
            begin += width

    def broadcast(self, x: torch.Tensor) -> None:
        flat = x.view(-1)
        for piece in flat.split(self._segment.layout.slot_bytes // x.element_size()):
            if self.rank == 0:
                self._show(piece)
            self._meet()
            if self.rank:
                piece.copy_(self._shown(0, self.count, piece, piece.numel()))

    def close(self) -> None:
        self._segment.close()

    def _show(self, piece: torch.Tensor) -> None:
        """To the others, once this rank counts up."""
        flat = piece.reshape(-1)
        self._shown(self.rank, self.count + 1, flat, flat.numel()).copy_(flat)

    def _shown(self, rank: int, turn: int, like: torch.Tensor, elements: int) -> torch.Tensor:
        slot = self._segment.slot(rank, turn)
        return slot[: elements * like.element_size()].view(like.dtype)

    def _meet(self) -> None:
        """Says that this rank is there, and waits for all others."""
        self._kernels.meet(self.sums.group, self._watch)
