"""A line of sequences sorted by `order`, first in line first: who runs, and who waits. Plain lists; no two orders
are equal, so everybody has exactly one place."""

from __future__ import annotations

from bisect import bisect_left, insort

from holdfast.scheduler.sequence import Sequence


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


def enter(line: list[Sequence], sequence: Sequence) -> None:
    insort(line, sequence, key=_order)


def leave(line: list[Sequence], sequence: Sequence) -> None:
    place = bisect_left(line, sequence.order, key=_order)
    assert line[place : place + 1] == [sequence], f"{sequence.request.request_id} is not in the queue"
    del line[place]
