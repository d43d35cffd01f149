"""A runner of several ranks: every plan goes to the others first, then this rank computes its share of it.

Of a pipeline several plans are under way at once. Each is finished when its result is asked for, or when another wants
a slot that one of its rows still has; always in the order of plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.engine.core.loop import StepHandle, StepRunner
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.adapters import JoinedAdapters
from holdfast.engine.ranks.group import RankGroup
from holdfast.errors import EngineDiedError
from holdfast.records import StepPlan, StepResult, TokenMasks


class RankedRunner:
    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        self._runner, self._group = runner, group
        self._under_way = deque[_UnderWay]()
        self._adapters = JoinedAdapters(group.size, group.settled_adapters)

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
