"""Keys typed while an answer is written: kept from being shown in the middle of it. Knows terminals, nothing of chats.

They are not lost: the terminal keeps them, and they appear at the next prompt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program without unwinding it; Ctrl-C unwinds it."""


@contextlib.contextmanager
def unseen_keys() -> Iterator[None]:
    """The terminal at stdin shows no keys within the block, and is as it was afterwards, however the block is left.

    Only kill -9 can leave it silent; `stty echo` helps then. Where stdin is no terminal nothing is done.
    """
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    if descriptor is None:
        yield
        return
    import termios

    before = termios.tcgetattr(descriptor)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]

    def restore() -> None:
        with contextlib.suppress(termios.error):  # The terminal may be gone: that is what SIGHUP says.
            termios.tcsetattr(descriptor, termios.TCSANOW, before)

    with _restoring_at_endings(restore):
        try:
            termios.tcsetattr(descriptor, termios.TCSANOW, silent)
            yield
        finally:
            restore()


@contextlib.contextmanager
def _restoring_at_endings(restore: Callable[[], None]) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # A handler that somebody else has set, or a signal that is ignored, is left alone.
    taken = [number for number in _ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
