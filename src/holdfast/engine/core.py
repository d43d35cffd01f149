"""The loop: what the scheduler plans, the runner does, the scheduler learns. Nothing else happens in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.records import EngineOutput, EngineStats, Request, StepPlan, StepResult
from holdfast.scheduler import Scheduler


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Waits for the step."""


class StepRunner(Protocol):
    """Executes plans strictly in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> StepHandle: ...

    def close(self) -> None: ...


class EngineCore:
    """`steps_ahead`: how many steps may be planned before the oldest is applied (0: none, 1: overlap).
    `device_bytes`: what this process holds on a GPU now."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        steps_ahead: int = 0,
        device_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._steps_ahead = steps_ahead
        self._device_bytes = device_bytes
        self._in_flight: deque[StepHandle] = deque()
        self._ended_at_once: list[EngineOutput] = []

    def add(self, request: Request) -> None:
        ended = self.scheduler.add(request, time.monotonic())
        if ended is not None:
            self._ended_at_once.append(ended)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._ended_at_once = [output for output in self._ended_at_once if output.request_id != request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._ended_at_once) or self.scheduler.has_unfinished

    def step(self) -> list[EngineOutput]:
        """Whatever stops it in the middle (an error, Ctrl-C) ends every request it holds: see `start_over`."""
        try:
            return self._step()
        except BaseException:
            self.start_over()
            raise

    def start_over(self) -> None:
        """Drops all requests, steps in flight and cached blocks. Right whatever state an interruption left behind: the
        runner learns a sequence anew when it is started, and reads no page that was not written since."""
        self._in_flight.clear()
        self._ended_at_once.clear()
        self.scheduler = self.scheduler.emptied()

    def _step(self) -> list[EngineOutput]:
        outputs, self._ended_at_once = self._ended_at_once, []
        plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            self._in_flight.append(self.runner.submit(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self._steps_ahead):
            outputs += self.scheduler.apply(self._in_flight.popleft().result(), time.monotonic())
        return outputs

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._device_bytes is None:
            return stats
        return msgspec.structs.replace(stats, device_bytes=self._device_bytes())

    def close(self) -> None:
        self._in_flight.clear()
        self.runner.close()
