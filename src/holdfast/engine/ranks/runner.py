"""A runner of several ranks: every plan goes to the others first, then this rank computes its share of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from holdfast.engine.core.loop import StepHandle, StepRunner
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.group import RankGroup
from holdfast.execution.parallel.gpu.together import GpuCollectives
from holdfast.records import StepPlan, StepResult, TokenMasks


class RankedRunner:
    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        self._runner, self._group = runner, group

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return self._group.pids

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        try:  # From the first byte on: a plan that has reached the others and is not followed here is left by all.
            self._group.send_plan(plan)
            return self._runner.submit(plan, masks)
        except BaseException:
            self._group.interrupt()
            raise

    @property
    def most_blocks(self) -> int:
        return self._runner.most_blocks

    def resize_kv(self, blocks: int) -> None:
        self._runner.resize_kv(blocks)  # First: what it cannot have, the others are not asked for.
        self._group.order(messages.ResizePool(blocks))
        self._group.answers(messages.Done)

    def give_up_reads(self) -> list[int]:
        return []

    def abandon_copies(self) -> None:
        """There are no tiers below the pool here."""

    def close(self) -> None:
        self._group.close()
        self._runner.close()


class RankedGpuRunner(RankedRunner):
    """The same of GPUs, whose steps are computed after they were submitted: a rank that ended is named then."""

    def __init__(self, runner: StepRunner, group: RankGroup, collectives: GpuCollectives) -> None:
        super().__init__(runner, group)
        self._collectives = collectives

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        try:
            return _Watched(super().submit(plan, masks), self._group)
        except Exception:
            self._group.check()  # Whose end is the reason.
            raise

    def close(self) -> None:
        self._collectives.give_up()  # Whatever waits on the GPU for ranks that leave.
        super().close()
        with contextlib.suppress(
            RuntimeError
        ):  # A device that has failed gives nothing back; it ends with the process.
            self._collectives.close()


class _Watched:
    def __init__(self, step: StepHandle, group: RankGroup) -> None:
        self._step, self._group = step, group

    @property
    def late(self) -> Sequence[int]:
        return self._step.late

    def result(self) -> StepResult:
        try:
            return self._step.result()
        except Exception:
            self._group.check()  # Whose end is the reason.
            raise
