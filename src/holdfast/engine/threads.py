"""Threads whose work can wait for everybody else's. Knows the system's priorities and nothing of the work."""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 15


def step_back() -> None:
    """The calling thread takes what time the others leave: none of the model's."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
