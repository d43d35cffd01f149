"""What one rank of a pipeline has to do with the other stages, through memory that all ranks share.

    stage s     hands its stream on when a step's layers are computed; the first of its ranks does, all have the same
    stage s+1   takes it, all of its ranks, when they come to that step
    last stage  shows what rank 0 samples from: logits, each rank its part of the vocabulary

Between machines a socket takes the place of that memory, from each rank of a stage to the one at its place in the next.
One step lies between two stages at a time: a stage that is faster waits, and nothing is lost by it, because the slower
one has its next step at hand. Knows no layers and no plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holdfast.execution.parallel.segment import Segment, Watch
from holdfast.execution.parallel.sockets.stage_lines import LineIn, LineOut


class PipelineStage:
    """Of the rank of this number. `watch`: called while others are awaited, and raises where they will not come."""

    def __init__(self, segment: Segment, rank: int, watch: Watch) -> None:
        layout = segment.layout
        self.index, self.place = divmod(rank, layout.tensor_parallel)
        self.count, self.rank, self.ranks_each = layout.stages, rank, layout.tensor_parallel
        self._segment, self._watch, self._sent, self._taken = segment, watch, 0, 0
        first_of = [stage * layout.tensor_parallel for stage in range(layout.stages + 1)]
        self._last_ranks = range(first_of[-2], first_of[-1])
        self._before = first_of[self.index - 1]
        behind = self.index + 1
        self._behind = range(first_of[behind], first_of[behind + 1]) if behind < self.count else range(1)
        self._lines_in: Mapping[int, LineIn] = {}
        self._lines_out: Mapping[int, LineOut] = {}

    def use_lines(self, incoming: Mapping[int, LineIn], outgoing: Mapping[int, LineOut]) -> None:
        """In place of shared memory, with the ranks that they are by the numbers of: those of other machines."""
        self._lines_in, self._lines_out = incoming, outgoing

    def close(self) -> None:
        """Its sockets, where it has any."""
        for incoming in self._lines_in.values():
            incoming.close()
        for outgoing in self._lines_out.values():
            outgoing.close()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def samples(self) -> bool:
        return self.rank == 0

    def note_alive(self) -> None:
        """So that whoever waits sees that this rank is not hanging."""
        word = self._segment.alive[self.rank]
        word.post(word.value + 1)

    def go_on_from(self, count: int) -> None:
        """After an alarm: what was under way is nobody's, and all ranks count from here."""
        self._sent = self._taken = count
        self._segment.sent[self.rank].post(count)
        self._segment.taken[self.rank].post(count)

    def take(self, out: torch.Tensor) -> None:
        """`out` becomes the stream of the stage before. Contiguous."""
        self._watch(0.0)
        line = self._lines_in.get(self._before + self.place)
        if line is not None:
            line.take(out)
        else:
            self._segment.sent[self._before].wait(self._taken + 1, self._watch)
            out.copy_(_as(self._segment.stream(self.index - 1), out))
        self._note_taken()

    def hand_on(self, stream: torch.Tensor) -> None:
        """To the stage behind, once that one has taken the last. Contiguous."""
        if self._lines_out:
            self._send(stream)
        elif self.place == 0:
            self._put(self._segment.stream(self.index), stream)

    def show(self, part: torch.Tensor) -> None:
        """Of the last stage, to rank 0: its columns of some rows. Contiguous."""
        if self._lines_out:
            self._send(part)
        else:
            self._put(self._segment.answer(self.place), part)

    def collect(self, out: torch.Tensor, widths: Sequence[int]) -> None:
        """Of rank 0: what the ranks of the last stage show, side by side; `widths` of their columns."""
        begin = 0
        for place, (rank, width) in enumerate(zip(self._last_ranks, widths, strict=True)):
            part, line = out[:, begin : begin + width], self._lines_in.get(rank)
            if line is not None:
                whole = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
                line.take(whole)
                part.copy_(whole)
            else:
                self._segment.sent[rank].wait(self._taken + 1, self._watch)
                part.copy_(_as(self._segment.answer(place), part))
            begin += width
        self._note_taken()

    def _put(self, area: torch.Tensor, numbers: torch.Tensor) -> None:
        for rank in self._behind:
            self._segment.taken[rank].wait(self._sent, self._watch)
        _as(area, numbers).copy_(numbers)
        self._sent += 1
        self._segment.sent[self.rank].post(self._sent)

    def _send(self, numbers: torch.Tensor) -> None:
        for line in self._lines_out.values():
            line.put(numbers)
        self._sent += 1
        self._segment.sent[self.rank].post(self._sent)

    def _note_taken(self) -> None:
        self._taken += 1
        self._segment.taken[self.rank].post(self._taken)


def _as(area: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The beginning of a shared area, as so many numbers of that kind."""
    return area[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
