"""The recount of a scheduler: lines, slots, and what is in flight. For tests and debug runs; changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from holdfast.records import Row
from holdfast.scheduler.sequence import Sequence as Running
from holdfast.scheduler.sequence import Status


def check_lines(
    sequences: Iterable[Running],
    running: Sequence[Running],
    waiting: Sequence[Running],
    free_slots: Sequence[int],
    slots: int,
    fetching: Sequence[Running],
) -> None:
    """Everybody stands in exactly one line, in order; every slot is taken once or free."""
    assert set(sequences) == {*running, *waiting}, "a sequence is in no queue, or in a queue and gone"
    assert not set(running) & set(waiting), "a sequence is both running and waiting"
    for line in (running, waiting):
        orders = [sequence.order for sequence in line]
        assert all(one < next_one for one, next_one in pairwise(orders)), "a queue is out of order"
    taken = [sequence.slot for sequence in running]
    assert sorted([*taken, *free_slots]) == list(range(slots)), f"slots taken {taken}, free {sorted(free_slots)}"
    for sequence in running:
        assert sequence.status is Status.RUNNING, f"{sequence.request.request_id} runs as {sequence.status}"
        assert sequence.scheduled == sequence.book.length, (
            f"{sequence.request.request_id}: {sequence.scheduled} tokens scheduled, its book has {sequence.book.length}"
        )
        length = len(sequence.tokens) + sequence.sampling_in_flight
        assert sequence.scheduled <= length <= sequence.longest, (
            f"{sequence.request.request_id}: {sequence.scheduled} scheduled, {length} long, {sequence.longest} at most"
        )
    assert set(fetching) <= set(waiting), "who waits for pages is not in line"
    for sequence in waiting:
        assert sequence.status in (Status.WAITING, Status.PREEMPTED), f"{sequence.status} in the waiting queue"
        fetches = sequence.book.fetch is not None
        assert sequence.book.entries == 0 or fetches, f"{sequence.request.request_id} waits and holds pages"
        assert fetches == (sequence in fetching), f"{sequence.request.request_id} waits for pages: {fetches}"
        assert sequence.scheduled == 0, f"{sequence.request.request_id} waits with tokens computed"


def check_in_flight(sequences: Iterable[Running], rows: Iterable[tuple[Running, Row]]) -> None:
    """The counters of each sequence are those of the rows given out and not applied."""
    row_count: Counter[Running] = Counter()
    token_count: Counter[Running] = Counter()
    sample_count: Counter[Running] = Counter()
    for sequence, row in rows:
        row_count[sequence] += 1
        token_count[sequence] += row.count
        sample_count[sequence] += row.samples
    for sequence in sequences:
        name = sequence.request.request_id
        assert sequence.rows_in_flight == row_count[sequence], f"{name}: rows in flight do not add up"
        assert sequence.sampling_in_flight == sample_count[sequence], f"{name}: samples in flight do not add up"
        if sequence.status is Status.RUNNING:
            assert sequence.in_flight == token_count[sequence], f"{name}: tokens in flight do not add up"
