"""What the GPU knows of each slot: its token ids and its block tables, written where a plan says, read by kernels.

Sampled tokens are put here by the GPU itself, so that the next step can be launched before the host has seen them.
Plans are checked against the host's books (`batch.SlotBuffers`) first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing
import torch

from holdfast.execution.batch import RunnerLimits, as_planned
from holdfast.execution.gpu.memory.pinned_staging import PacketRing, Words
from holdfast.execution.triton_kernels.attention.move_pages import move_device_pages
from holdfast.execution.triton_kernels.scatter import scatter_words
from holdfast.footprint.gpu import UPDATE_WORDS, slot_words, whole_lines
from holdfast.kvcache.groups import KVLayout
from holdfast.records import BlockCopy, StepPlan


class DeviceSlots:
    def __init__(self, layout: KVLayout, limits: RunnerLimits, device: torch.device) -> None:
        slots, self._width = limits.max_num_seqs, limits.max_model_len + 1
        self._blocks = layout.blocks_for(limits.max_model_len)
        self._words = torch.zeros(slot_words(layout, as_planned(limits)), dtype=torch.int32, device=device)
        self._table_offset = slots * self._width
        self._table_words = slots * self._blocks
        self.tokens = self._words[: self._table_offset].view(slots, self._width)
        self.tables = [
            self._words[first : first + self._table_words].view(slots, self._blocks)
            for first in range(self._table_offset, len(self._words), self._table_words)
        ]
        self._updates = PacketRing(2 * whole_lines(UPDATE_WORDS), device)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes + self._updates.nbytes

    def send_beside_pages(self) -> None:
        """From now on pages come over the link beside steps."""
        self._updates.beside_pages = True

    def apply(self, plan: StepPlan) -> None:
        """Ids of sequences that start, and new entries of tables. What is not overwritten is never read again."""
        places, values = list[Words](), list[Words]()

        def write(first: int, numbers: list[int]) -> None:
            places.append(numpy.arange(first, first + len(numbers), dtype=numpy.int32))
            values.append(numpy.array(numbers, dtype=numpy.int32))

        for start in plan.starts:
            write(start.slot * self._width, start.token_ids)
        for entry in plan.table_writes:
            table = self._table_offset + entry.group * self._table_words
            write(table + entry.slot * self._blocks + entry.first, entry.blocks)
        if not places:
            return
        self._write(numpy.concatenate(places), numpy.concatenate(values))

    def put_tokens(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Sampled by another rank, for one that looks embeddings up."""
        places = numpy.array(slots, dtype=numpy.int32) * self._width + numpy.array(positions, dtype=numpy.int32)
        self._write(places.astype(numpy.int32), numpy.array(tokens, dtype=numpy.int32))

    def _write(self, all_places: Words, all_values: Words) -> None:
        for first in range(0, len(all_places), UPDATE_WORDS):
            part = slice(first, first + UPDATE_WORDS)
            at, what = self._updates.send([all_places[part], all_values[part]])
            scatter_words(self._words, at, what)

    def move_pages(self, pages: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        """From page to page, none of which is both read and written. Takes no memory that was not there at the start:
        there may be none when a pool becomes smaller."""
        self._move(pages, [copy.source for copy in copies], [copy.target for copy in copies])

    def load_mover(self, pages: torch.Tensor) -> None:
        """What the driver loads when pages are first moved, and may find no memory for then. Nothing is changed."""
        self._move(pages, [0], [0])

    def _move(self, pages: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        for first in range(0, len(sources), UPDATE_WORDS):
            part = slice(first, first + UPDATE_WORDS)
            pair = (numpy.array(sources[part], dtype=numpy.int32), numpy.array(targets[part], dtype=numpy.int32))
            move_device_pages(pages, *self._updates.send(pair))
