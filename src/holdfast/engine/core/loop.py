"""The loop: what the scheduler plans, the runner does, the scheduler learns. Nothing else happens in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.errors import UnsupportedOptionError
from holdfast.records import EngineOutput, EngineStats, Request, StepPlan, StepResult, TokenMasks
from holdfast.scheduler import Scheduler
from holdfast.scheduler.outputs import refused

if TYPE_CHECKING:
    from holdfast.engine.core.structured_outputs import StructuredOutputManager

FORMS_WAIT_S = 0.02
"""For a grammar or a mask, where there is nothing else to do."""


class StepHandle(Protocol):
    @property
    def late(self) -> Sequence[int]:
        """Slots whose masks were not there in time, known as soon as the step is submitted."""

    def result(self) -> StepResult:
        """Waits for the step. May be asked again."""


class StepRunner(Protocol):
    """Executes plans strictly in the order in which they are submitted."""

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle: ...

    def close(self) -> None: ...


class EngineCore:
    """`steps_ahead`: how many steps may be planned before the oldest is applied (0: none, 1: overlap).
    `device_bytes`: what this process holds on a GPU now. `forms`: holds answers to a form; None: they are refused."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        steps_ahead: int = 0,
        device_bytes: Callable[[], int] | None = None,
        forms: StructuredOutputManager | None = None,
    ) -> None:
        self.forms = forms
        self.scheduler = scheduler
        self.runner = runner
        self._steps_ahead = steps_ahead
        self._device_bytes = device_bytes
        self._in_flight: deque[StepHandle] = deque()
        self._ended_at_once: list[EngineOutput] = []

    @property
    def on_device(self) -> bool:
        """The model is computed on a GPU, and the host's cores are free for other things."""
        return self._device_bytes is not None

    def add(self, request: Request) -> None:
        if request.params.structured_outputs is None:
            self._enter(request)
        elif self.forms is None:
            error = UnsupportedOptionError(
                "structured output is not enabled in this engine", field="structured_outputs"
            )
            self._ended_at_once.append(refused(request, error, time.monotonic()))
        else:
            self.forms.begin(request)

    def _enter(self, request: Request) -> None:
        ended = self.scheduler.add(request, time.monotonic())
        if ended is not None:
            self._end([ended])
            self._ended_at_once.append(ended)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        if self.forms is not None:
            self.forms.forget(request_id)
        self._ended_at_once = [output for output in self._ended_at_once if output.request_id != request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._ended_at_once) or self.scheduler.has_unfinished or self._compiling

    @property
    def _compiling(self) -> bool:
        return self.forms is not None and self.forms.compiling

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
        if self.forms is not None:
            self.forms.clear()

    def _step(self) -> list[EngineOutput]:
        if self._compiling:
            self._enter_formed()
        outputs, self._ended_at_once = self._ended_at_once, []
        while self._in_flight and self._in_flight[-1].late:  # These have sampled nothing that a step could go on from.
            outputs += self._apply_oldest()
        held = self.forms.held(ahead=bool(self._in_flight)) if self.forms is not None else frozenset[str]()
        plan = self.scheduler.schedule(time.monotonic(), held)
        if plan is not None:
            self._in_flight.append(self._submit(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self._steps_ahead):
            outputs += self._apply_oldest()
        elif plan is None and held and self.forms is not None and not outputs:
            self.forms.wait_for_masks(FORMS_WAIT_S)
        return outputs

    def _apply_oldest(self) -> list[EngineOutput]:
        result = self._in_flight.popleft().result()
        judge = None
        if self.forms is not None:
            judge = self.forms.judge
            self.forms.foresee(result, newest=not self._in_flight)
        return self._end(self.scheduler.apply(result, time.monotonic(), judge))

    def _submit(self, plan: StepPlan) -> StepHandle:
        before = self._in_flight[-1].result if self._in_flight else None
        masks = None if self.forms is None else self.forms.masks(plan, before)
        return self.runner.submit(plan, masks)

    def _enter_formed(self) -> None:
        """Requests whose grammar is compiled, in the order of their arrival; the others need not wait for them."""
        assert self.forms is not None
        idle = not (self._in_flight or self._ended_at_once or self.scheduler.has_unfinished)
        for request, problem in self.forms.formed(FORMS_WAIT_S if idle else 0.0):
            if problem is None:
                self._enter(request)
            else:
                self._ended_at_once.append(refused(request, problem, time.monotonic()))

    def _end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        if self.forms is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.forms.forget(output.request_id)
        return outputs

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._device_bytes is None:
            return stats
        return msgspec.structs.replace(stats, device_bytes=self._device_bytes())

    def close(self) -> None:
        self._in_flight.clear()
        if self.forms is not None:
            self.forms.close()
        self.runner.close()
