"""Faults on purpose, for tests of what happens then: read from the environment by the engine process and its ranks.

    HOLDFAST_FAULT_DIE_ON_TOKEN=ID      the process ends at once when a prompt with this token id is to be computed
    HOLDFAST_FAULT_HANG_ON_TOKEN=ID     the loop hangs for ever when a prompt with this token id is to be computed
    HOLDFAST_FAULT_NO_MEMORY=ID         there is no memory for a sequence whose prompt has this token id
    HOLDFAST_FAULT_FAIL_LOADING=FILE    a start fails, with an error, while this file exists
    HOLDFAST_FAULT_STAND_STILL=FILE     the process stops itself, as by SIGSTOP, after as many tokens as this file says,
                                        which it removes; 0: also one that starts, before it is ready
    HOLDFAST_FAULT_RANK_NO_MEMORY=FILE  while this file exists, which it removes, the next rank that is not the first
                                        finds no memory for a step, or for another size of the KV pool

Without these variables nothing here does anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.engine.core.loop import StepHandle, StepRunner
from holdfast.errors import EngineError, StepMemoryError
from holdfast.records import Failure, StepFailure, StepPlan, StepResult, TokenMasks

DIE_ON_TOKEN = "HOLDFAST_FAULT_DIE_ON_TOKEN"
HANG_ON_TOKEN = "HOLDFAST_FAULT_HANG_ON_TOKEN"
NO_MEMORY = "HOLDFAST_FAULT_NO_MEMORY"
FAIL_LOADING = "HOLDFAST_FAULT_FAIL_LOADING"
STAND_STILL = "HOLDFAST_FAULT_STAND_STILL"
RANK_NO_MEMORY = "HOLDFAST_FAULT_RANK_NO_MEMORY"
EXIT_CODE = 139
MORE_THAN_THERE_IS = 1 << 60
"""Of bytes, on any machine."""

log = logging.getLogger("holdfast")


def with_faults(runner: StepRunner) -> StepRunner:
    if (token := os.environ.get(DIE_ON_TOKEN)) is not None:
        log.warning("%s is set: this engine crashes on purpose at token %s", DIE_ON_TOKEN, token)
        runner = _StopsOnToken(runner, int(token), lambda: os._exit(EXIT_CODE))
    if (token := os.environ.get(HANG_ON_TOKEN)) is not None:
        log.warning("%s is set: this engine hangs on purpose at token %s", HANG_ON_TOKEN, token)
        runner = _StopsOnToken(runner, int(token), _hang)
    if (token := os.environ.get(NO_MEMORY)) is not None:
        log.warning(
            "%s is set: this engine reports out of memory on purpose for sequences with token %s", NO_MEMORY, token
        )
        runner = _HasNoMemory(runner, int(token))
    if (path := os.environ.get(STAND_STILL)) is not None:
        log.warning("%s is set: this engine stands still on purpose when %s says so", STAND_STILL, path)
        runner = _StandsStill(runner, Path(path))
    return runner


def fail_loading() -> None:
    path = os.environ.get(FAIL_LOADING)
    if path is not None and Path(path).exists():
        raise EngineError(f"this start fails on purpose: {FAIL_LOADING} names a file that exists")


def lack_memory(*, on_gpu: bool) -> None:
    """Of a rank. On a CPU it asks for more than there is anywhere; on a GPU it fails as torch would."""
    if (path := os.environ.get(RANK_NO_MEMORY)) is not None:
        try:
            Path(path).unlink()
        except FileNotFoundError:
            return
        if on_gpu:
            raise RuntimeError(f"CUDA out of memory, on purpose: {RANK_NO_MEMORY} named a file that existed")
        bytearray(MORE_THAN_THERE_IS)


def _hang() -> None:
    while True:
        time.sleep(3600)


class _Faulty:
    """Whatever is no step goes to the runner as it is."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    @property
    def most_blocks(self) -> int:
        return self._runner.most_blocks

    def resize_kv(self, blocks: int) -> None:
        self._runner.resize_kv(blocks)

    def give_up_reads(self) -> list[int]:
        return self._runner.give_up_reads()

    def abandon_copies(self) -> None:
        self._runner.abandon_copies()

    def close(self) -> None:
        self._runner.close()


class _StopsOnToken(_Faulty):
    def __init__(self, runner: StepRunner, token: int, stop: Callable[[], None]) -> None:
        super().__init__(runner)
        self._token = token
        self._stop = stop

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        if any(self._token in start.token_ids for start in plan.starts):
            self._stop()
        return self._runner.submit(plan, masks)


class _StandsStill(_Faulty):
    """Whoever wants to meet an engine in the middle of an answer need not be quick."""

    def __init__(self, runner: StepRunner, path: Path) -> None:
        super().__init__(runner)
        self._path = path
        self._left: int | None = None
        """Tokens; None: it goes on."""
        self._look()

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        self._look()
        if self._left is not None:
            self._left -= sum(row.samples for row in plan.rows)
        return self._runner.submit(plan, masks)

    def _look(self) -> None:
        if self._left is None:
            with contextlib.suppress(FileNotFoundError):  # Also where another engine was first.
                left = int(self._path.read_text())
                self._path.unlink()
                self._left = left
        if self._left is not None and self._left <= 0:
            self._left = None
            os.kill(os.getpid(), signal.SIGSTOP)


class _HasNoMemory(_Faulty):
    """Fails the second step of such a sequence, when its answer has begun. The step is done all the same."""

    def __init__(self, runner: StepRunner, token: int) -> None:
        super().__init__(runner)
        self._token = token
        self._slots: dict[int, int] = {}
        """Slots of such sequences, and their steps so far."""

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        for start in plan.starts:
            self._slots.pop(start.slot, None)
            if self._token in start.token_ids[: start.prompt_length]:
                self._slots[start.slot] = 0
        failures = list[StepFailure]()
        for row in plan.rows:
            if row.slot in self._slots:
                self._slots[row.slot] += row.samples
                if self._slots[row.slot] > 1:
                    failure = Failure.of(StepMemoryError("out of memory, on purpose"))
                    failures.append(StepFailure(slot=row.slot, failure=failure))
        return _Failing(self._runner.submit(plan, masks), failures)


class _Failing:
    def __init__(self, step: StepHandle, failures: list[StepFailure]) -> None:
        self._step, self._failures = step, failures
        self.late = step.late

    def result(self) -> StepResult:
        return msgspec.structs.replace(self._step.result(), failures=self._failures)
