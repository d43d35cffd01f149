"""Faults on purpose, for tests of what happens then: read from the environment by the engine process alone.

    HOLDFAST_FAULT_DIE_ON_TOKEN=ID      the process ends at once when a prompt with this token id is to be computed
    HOLDFAST_FAULT_FAIL_LOADING=FILE    a start fails, with an error, while this file exists

Without these variables nothing here does anything.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from holdfast.engine.core import StepHandle, StepRunner
from holdfast.errors import EngineError
from holdfast.records import StepPlan

DIE_ON_TOKEN = "HOLDFAST_FAULT_DIE_ON_TOKEN"
FAIL_LOADING = "HOLDFAST_FAULT_FAIL_LOADING"
EXIT_CODE = 139

log = logging.getLogger("holdfast")


def with_faults(runner: StepRunner) -> StepRunner:
    token = os.environ.get(DIE_ON_TOKEN)
    if token is None:
        return runner
    log.warning("%s is set: this engine dies on purpose when it meets token %s", DIE_ON_TOKEN, token)
    return _DiesOnToken(runner, int(token))


def fail_loading() -> None:
    path = os.environ.get(FAIL_LOADING)
    if path is not None and Path(path).exists():
        raise EngineError(f"this start fails on purpose: {FAIL_LOADING} names a file that exists")


class _DiesOnToken:
    def __init__(self, runner: StepRunner, token: int) -> None:
        self._runner = runner
        self._token = token

    def submit(self, plan: StepPlan) -> StepHandle:
        if any(self._token in start.token_ids for start in plan.starts):
            os._exit(EXIT_CODE)
        return self._runner.submit(plan)

    def close(self) -> None:
        self._runner.close()
