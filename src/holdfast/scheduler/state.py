"""What a scheduler has: who runs and who waits, slots, and steps in flight; and how a sequence leaves its line. Plans
nothing, and knows no results."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque

from holdfast.kvcache import KVCache
from holdfast.records import EngineStats
from holdfast.scheduler.audit import check_in_flight, check_lines
from holdfast.scheduler.fetching import Fetching
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.lora import LoraScheduler
from holdfast.scheduler.sequence import Sequence, Status
from holdfast.scheduler.stats import figures
from holdfast.scheduler.step_builder import StepInFlight


class SchedulerState:
    def __init__(self, limits: SchedulerLimits, kv: KVCache) -> None:
        self.limits = limits
        self.kv = kv
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._free_slots = list(range(limits.max_num_seqs))
        self._adapters = LoraScheduler(limits.max_loras)
        self._fetching = Fetching(kv, limits)
        self._in_flight: deque[StepInFlight] = deque()
        self._added_total = 0
        self._steps_total = self._step_tokens = self._preemptions_total = 0
        # Looking up a long prompt costs time; one that had no room is not tried again before something has changed.
        self._worth_admitting = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def has_copies(self) -> bool:
        """Pages are on their way between tiers, or shall be: there are steps to plan, be it without rows."""
        return self.kv.tiers is not None and self.kv.tiers.pending

    @property
    def steps_in_flight(self) -> int:
        """Plans given out and not applied yet."""
        return len(self._in_flight)

    def stats(self) -> EngineStats:
        return figures(
            self._running,
            self._waiting,
            self.kv,
            self._adapters,
            step_tokens=self._step_tokens,
            steps_total=self._steps_total,
            preemptions_total=self._preemptions_total,
            fetches_not_worth_total=self._fetching.computed_instead_total,
        )

    # --- who leaves a line ---

    def _leave(self, sequence: Sequence) -> None:
        """Ended or aborted. Rows of it in flight are executed and their tokens dropped."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            leave(self._waiting, sequence)
            self._fetching.end(sequence)
        sequence.status = Status.FINISHED
        self.kv.close(sequence.book)
        del self._sequences[sequence.request.request_id]
        self._worth_admitting = True

    def _stop_running(self, sequence: Sequence) -> None:
        """Pages and slot are free for the very next plan: it is executed after those in flight."""
        leave(self._running, sequence)
        self.kv.free(sequence.book)
        heapq.heappush(self._free_slots, sequence.slot)
        self._adapters.leave(sequence.request.adapter)
        sequence.slot = sequence.adapter_place = -1
        self._worth_admitting = True

    def _send_back(self, sequence: Sequence) -> None:
        """In line again, to be computed anew."""
        self._stop_running(sequence)
        sequence.status = Status.PREEMPTED
        sequence.computed = sequence.in_flight = sequence.fetches = 0
        sequence.looked_whole = False
        sequence.computes.clear()
        enter(self._waiting, sequence)
        self._preemptions_total += 1

    def check_invariants(self) -> None:
        """Recounts pages, slots, lines and what is in flight. For tests and debug runs."""
        self.kv.check_invariants()
        sequences = self._sequences.values()
        fetching = self._fetching.sequences
        check_lines(sequences, self._running, self._waiting, self._free_slots, self.limits.max_num_seqs, fetching)
        check_in_flight(sequences, ((entry.sequence, entry.row) for step in self._in_flight for entry in step.rows))


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


def enter(line: list[Sequence], sequence: Sequence) -> None:
    """A line is sorted by `order`, and no two orders are equal: everybody has exactly one place."""
    insort(line, sequence, key=_order)


def leave(line: list[Sequence], sequence: Sequence) -> None:
    place = bisect_left(line, sequence.order, key=_order)
    assert line[place : place + 1] == [sequence], f"{sequence.request.request_id} is not in the queue"
    del line[place]
