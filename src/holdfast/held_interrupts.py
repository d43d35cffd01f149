"""Processes of ours that hear nothing of Ctrl-C, from before their first line on. Knows nothing of what they do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT does not reach a process that this thread starts meanwhile, and reaches the thread afterwards.

    A terminal sends Ctrl-C to all of a group. Ours ignore it, and the front decides; but one that has not come to that
    line yet would die of it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
