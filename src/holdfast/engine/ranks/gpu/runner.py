"""A runner of several ranks on GPUs, whose steps are computed after they were submitted: a rank that ended meanwhile is
named when the result is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.loop import StepHandle
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.runner import RankedRunner
from holdfast.execution.gpu.memory.oom import finish
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.parallel.gpu.link import GpuRankLink
from holdfast.records import StepPlan, StepResult, TokenMasks


class RankedGpuRunner(RankedRunner):
    def __init__(self, runner: GpuRunner, group: RankGroup, link: GpuRankLink) -> None:
        super().__init__(runner, group)
        self._link, self._device = link, runner.device

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        try:
            return _Watched(super().submit(plan, masks), self._group)
        except Exception:
            self._group.check()  # Whose end is the reason.
            raise

    def check_ranks(self) -> None:
        """Raises where one of the others has ended."""
        self._group.check()

    def close(self) -> None:
        self._link.give_up()  # Whatever waits on the GPU for ranks that leave.
        finish(self._device)  # What no longer waits still reads their memory, which goes with them.
        super().close()
        self._link.leave()


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
