"""LoRA adapters of several ranks: one is there when all ranks have their part of it, and none has it where one of them
could not read it. Every rank reads for itself; what is kept here is who has said so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from holdfast.engine.core.loop import StepHandle
from holdfast.engine.ranks.messages import AdapterSettled
from holdfast.records import AdapterArrival, Failure, StepPlan, StepResult

WAIT_S = 0.005
"""For other ranks, where a step has nothing else to do."""

Settled = Callable[[float], list[tuple[int, AdapterSettled]]]
"""What other ranks have said since it was asked last, with their numbers; waits so many seconds at most."""


class AskedPlaces:
    """Of one rank: which step has asked for each place last."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def note(self, plan: StepPlan) -> None:
        for asked in plan.fetches:
            self._steps[asked.place] = plan.step_id

    def pop(self, place: int) -> int:
        return self._steps.pop(place)


@dataclass(slots=True)
class _Asked:
    step_id: int
    said: dict[int, Failure | None] = field(default_factory=dict)
    """By rank: why it has not got it, or that it has."""


class JoinedAdapters:
    """Of the first rank, for `size` ranks in all."""

    def __init__(self, size: int, settled: Settled) -> None:
        self._size, self._settled = size, settled
        self._asked: dict[int, _Asked] = {}

    def note(self, plan: StepPlan) -> None:
        """It has gone to all ranks."""
        for asked in plan.fetches:
            self._asked[asked.place] = _Asked(plan.step_id)

    def forget(self) -> None:
        """A step was left in the middle: who has what is not known, and all is asked for anew."""
        self._asked.clear()

    def joined(self, plan: StepPlan, handle: StepHandle) -> StepHandle:
        """The same step; of adapters it says what all ranks together have."""
        return _JoinedStep(self, plan, handle) if self._asked else handle

    def join(self, plan: StepPlan, result: StepResult) -> StepResult:
        for arrival in result.adapters:
            asked = self._asked.get(arrival.place)
            if asked is not None and asked.step_id <= result.step_id:
                asked.said[0] = arrival.failure
        others_alone = not plan.rows and any(0 in asked.said for asked in self._asked.values())
        for rank, told in self._settled(WAIT_S if others_alone else 0.0):
            asked = self._asked.get(told.arrival.place)
            if asked is not None and asked.step_id == told.asked_in:
                asked.said[rank] = told.arrival.failure
        there = [(place, asked) for place, asked in self._asked.items() if len(asked.said) == self._size]
        for place, _ in there:
            del self._asked[place]
        found = [AdapterArrival(place, _failure(asked.said)) for place, asked in there]
        return msgspec.structs.replace(result, adapters=found)


class _JoinedStep:
    def __init__(self, owner: JoinedAdapters, plan: StepPlan, handle: StepHandle) -> None:
        self._owner, self._plan, self._handle, self.late = owner, plan, handle, handle.late

    _result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._owner.join(self._plan, self._handle.result())
        return self._result


def _failure(said: dict[int, Failure | None]) -> Failure | None:
    """Why none has it, with the number of the first rank that has not; where all say the same, as one rank would."""
    failed = {rank: failure for rank, failure in said.items() if failure is not None}
    if not failed:
        return None
    rank = min(failed)
    if len(failed) == len(said) and len({failure.message for failure in failed.values()}) == 1:
        return failed[rank]
    return msgspec.structs.replace(failed[rank], message=f"rank {rank}: {failed[rank].message}")
