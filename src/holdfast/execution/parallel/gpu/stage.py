"""What one rank on a GPU has to do with the stages before and behind its own, as pipeline.py has it of one on a CPU.

    stage s     hands its stream on when a step's layers are launched: each of its ranks to the one at its place behind
    stage s+1   takes it
    last stage  its first rank, which has all logits, shows them to rank 0, which samples

All of it is launched, and waits on the device alone. Knows no layers and no plans.
"""

from __future__ import annotations

from typing import Protocol

import torch


class StageLines(Protocol):
    """To one rank behind and from one before; as lines.py has them."""

    def put(self, numbers: torch.Tensor) -> None: ...

    def take(self, out: torch.Tensor) -> None: ...

    def limit(self, limit_s: float) -> None: ...

    def check(self) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None: ...


class GpuStage:
    """Of the rank of this number, in `count` stages of `ranks_each`."""

    def __init__(self, rank: int, count: int, ranks_each: int, lines: StageLines) -> None:
        self.rank, self.count, self.ranks_each, self.lines = rank, count, ranks_each, lines
        self.index, self.place = divmod(rank, ranks_each)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def samples(self) -> bool:
        return self.rank == 0

    @property
    def shows(self) -> bool:
        """It has all logits of its stage, which is the last."""
        return self.is_last and self.place == 0

    def take(self, out: torch.Tensor) -> None:
        """`out` becomes the stream of the stage before."""
        self.lines.take(out)

    def hand_on(self, stream: torch.Tensor) -> None:
        """To the stage behind. Its ranks have the same stream: each hands it to one of them."""
        self.lines.put(stream)

    def show(self, numbers: torch.Tensor) -> None:
        """To rank 0, where this rank has them."""
        if self.shows:
            self.lines.put(numbers)

    def collect(self, out: torch.Tensor) -> None:
        """Of rank 0: what the last stage shows next."""
        self.lines.take(out)


def rank_before(rank: int, count: int, ranks_each: int) -> int | None:
    """Whose stream, or of rank 0 whose logits, a rank takes; None: nobody's."""
    if rank >= ranks_each:
        return rank - ranks_each
    return (count - 1) * ranks_each if rank == 0 else None


def rank_behind(rank: int, count: int, ranks_each: int) -> int | None:
    """To whom a rank hands on; None: to nobody."""
    stage, place = divmod(rank, ranks_each)
    if stage < count - 1:
        return rank + ranks_each
    return 0 if place == 0 else None
