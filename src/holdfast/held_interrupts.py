"""Ctrl-C where it must not come: in processes of ours that begin, and in the middle of what must not be left half done.
Knows nothing of what they do."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

AGAIN_S = 1.0
"""After Ctrl-C, the next one comes at once, in the middle of whatever takes so long: a disk may hang."""


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


@contextlib.contextmanager
def interrupts_put_off(however_often: bool = False) -> Iterator[None]:
    """What is done within is done to its end: Ctrl-C comes afterwards, and at once where it comes again later, unless
    it waits `however_often` it comes: only for what takes no time. Masked in this thread it would be heard by others of
    the process, and still come here."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard, first_s = list[tuple[int, FrameType | None]](), 0.0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if not heard:
            heard.append((number, frame))
            first_s = time.monotonic()
        elif not however_often and time.monotonic() - first_s >= AGAIN_S:
            before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            before(*heard[0])
