"""Processes that must end: those that are killed or left take a moment to go, on a busy machine a long one."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil
from deadlines import PATIENCE_S


def still_running(processes: Iterable[psutil.Process], timeout_s: float = PATIENCE_S) -> list[psutil.Process]:
    """Those that have not ended by then. One whose parent has not asked for its exit code has ended."""
    left, until_s = [*processes], time.monotonic() + timeout_s
    while left := [one for one in left if _runs(one)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # Between the two questions.
        return False
