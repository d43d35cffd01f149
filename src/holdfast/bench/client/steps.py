"""One level of load after another, each once all of the one before was answered, until one is enough.

Like `ClientProcesses` for who waits and reads. Between two levels the server is idle, so that no level pays for the
backlog of the one before. Judges nothing: who calls says when it is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.processes import ClientProcesses, client_processes
from holdfast.bench.client.worker import ClientReport
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import Phase, total_seconds

DRAIN = "drain"

GoesOn = Callable[[Phase, Sequence[TimedAnswer], float], bool]
"""Of a level that was answered: its phase, its answers and when it began; whether the next is to follow."""


class ClientSteps:
    """`phases` are those that took place, with the times between them."""

    def __init__(self, load: Load, workers: int, goes_on: GoesOn) -> None:
        self._load, self._workers, self._goes_on = load, workers, goes_on
        self._done: list[TimedAnswer] = []
        self._running: ClientProcesses | None = None
        self.reports: list[ClientReport] = []
        self.phases: list[Phase] = []
        self.start_s = time.monotonic()

    @property
    def answers(self) -> list[TimedAnswer]:
        return self._done + (self._running.answers if self._running is not None else [])

    def wait(self, meanwhile: Callable[[], None]) -> None:
        for phase in self._load.phases:
            # Prompts go by numbers, and none is to be in the server's prefix cache from the level before.
            step = msgspec.structs.replace(self._load, phases=(phase,), first_request=len(self._done))
            with client_processes(step, self._workers) as running:
                self._begin(phase, running)
                running.wait(meanwhile)
            self._done += running.answers
            self.reports += running.reports
            self._running = None
            if not self._goes_on(phase, running.answers, running.start_s):
                return

    def _begin(self, phase: Phase, running: ClientProcesses) -> None:
        if self.phases:
            ended_s = self.start_s + total_seconds(self.phases)
            self.phases.append(Phase(DRAIN, running.start_s - ended_s, 0.0, 0.0))
        else:
            self.start_s = running.start_s
        self.phases.append(phase)
        self._running = running

    def elapsed_s(self) -> float:
        """Of what was asked for: time between levels is none of it."""
        done_s = sum(phase.seconds for phase in self.phases if phase.name != DRAIN)
        if self._running is None:
            return done_s
        return done_s - max(0.0, self.phases[-1].seconds - self._running.elapsed_s())
