"""A runner of several ranks: every plan goes to the others first, then this rank computes its share of it.

Of a pipeline several plans are under way at once. Each is finished when its result is asked for, or when another wants
a slot that one of its rows still has; always in the order of plans.

A LoRA adapter is there when all ranks have their part of it, and none has it where one of them could not read it. Every
rank reads for itself; what is kept here is who has said so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.engine.core.loop import StepHandle, StepRunner
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import AdapterSettled
from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.records import AdapterArrival, Failure, StepPlan, StepResult, TokenMasks

WAIT_S = 0.005
"""For other ranks, where a step has nothing else to do."""

Settled = Callable[[float], list[tuple[int, AdapterSettled]]]
"""What other ranks have said since it was asked last, with their numbers; waits so many seconds at most."""


class RankedRunner:
    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        self._runner, self._group = runner, group
        self._under_way = deque[_UnderWay]()
        self._adapters = JoinedAdapters(group.size, group.settled_adapters, group.spread.nodes)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return self._group.pids

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        taken = {start.slot for start in plan.starts}
        if any(taken & step.slots for step in self._under_way):
            self.finish()
        try:  # From the first byte on: a plan that has reached the others and is not followed here is left by all.
            self._group.send_plan(plan)
            self._adapters.note(plan)
            handle = self._runner.submit(plan, masks)
        except EngineDiedError as error:
            self._leave()
            raise self._group.explained(error) from error
        except BaseException:
            self._leave()
            raise
        if self._group.link.stage is None:
            return self._adapters.joined(plan, handle)
        step = _UnderWay(self, plan, handle)
        self._under_way.append(step)
        return step

    def finish(self, until: _UnderWay | None = None) -> None:
        """Steps up to this one, or all."""
        while self._under_way:
            step = self._under_way[0]
            try:
                result = self._adapters.joined(step.plan, step.handle).result()
                self._tell_sampled(step.plan, result)
            except EngineDiedError as error:
                self._leave()
                raise self._group.explained(error) from error
            except BaseException:
                self._leave()
                raise
            step.done = result
            self._under_way.popleft()
            if step is until:
                return

    def _tell_sampled(self, plan: StepPlan, result: StepResult) -> None:
        if self._group.link.collectives is None:
            return  # Nobody else looks embeddings up.
        slots = [row.slot for row in plan.rows if row.samples]
        counted = [
            (slot, token) for slot, token in zip(slots, result.token_ids, strict=True) if slot not in result.late
        ]
        if counted:
            self._group.tell_sampled([slot for slot, _ in counted], [token for _, token in counted])

    def _leave(self) -> None:
        self._under_way.clear()
        self._adapters.forget()
        self._group.interrupt()

    @property
    def most_blocks(self) -> int:
        return self._runner.most_blocks

    def resize_kv(self, blocks: int) -> None:
        self.finish()
        self._runner.resize_kv(blocks)  # First: what it cannot have, the others are not asked for.
        self._group.order(messages.ResizePool(blocks))
        self._group.answers(messages.Done)

    def give_up_reads(self) -> list[int]:
        return []

    def abandon_copies(self) -> None:
        """There are no tiers below the pool here."""

    def close(self) -> None:
        self._under_way.clear()
        self._group.close()
        self._runner.close()


class _UnderWay:
    """A step that other stages go on with. One that nobody asks for any more is finished all the same, in its turn."""

    late: Sequence[int] = ()

    def __init__(self, owner: RankedRunner, plan: StepPlan, handle: StepHandle) -> None:
        self.plan, self.handle, self.done = plan, handle, None
        self.slots = {row.slot for row in plan.rows}
        self._owner = owner

    done: StepResult | None

    def result(self) -> StepResult:
        if self.done is None:
            self._owner.finish(until=self)
        assert self.done is not None, "a step that was left has no result"
        return self.done


@dataclass(slots=True)
class _Asked:
    step_id: int
    said: dict[int, Failure | None] = field(default_factory=dict)
    """By rank: why it has not got it, or that it has."""


class JoinedAdapters:
    """Of the first rank, for `size` ranks in all, on so many `nodes`."""

    def __init__(self, size: int, settled: Settled, nodes: int = 1) -> None:
        self._size, self._settled, self._spread = size, settled, Spread(size, nodes=nodes)
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
        found = [AdapterArrival(place, _failure(asked.said, self._spread)) for place, asked in there]
        return msgspec.structs.replace(result, adapters=found)


class _JoinedStep:
    def __init__(self, owner: JoinedAdapters, plan: StepPlan, handle: StepHandle) -> None:
        self._owner, self._plan, self._handle, self.late = owner, plan, handle, handle.late

    _result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._owner.join(self._plan, self._handle.result())
        return self._result


def _failure(said: dict[int, Failure | None], spread: Spread) -> Failure | None:
    """Why none has it, with the number of the first rank that has not, and of its node where there are several; where
    all say the same, as one rank would."""
    failed = {rank: failure for rank, failure in said.items() if failure is not None}
    if not failed:
        return None
    rank = min(failed)
    if len(failed) == len(said) and len({failure.message for failure in failed.values()}) == 1:
        return failed[rank]
    node = f" (node {spread.node_of(rank)})" if spread.nodes > 1 else ""
    return msgspec.structs.replace(failed[rank], message=f"rank {rank}{node}: {failed[rank].message}")
