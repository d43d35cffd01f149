"""Signals of a supervisor, from its first word to its last: a container's first process hears only what it handles.

a program runs       they go to it (process.py)
between two runs     a request to end ends the waiting, judging or asking at once: ToldToEnd
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

TO_THE_HEAD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TO_ALL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ToldToEnd(BaseException):
    """Nothing runs that it could be passed on to. No Exception: whoever catches those must not swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"told to end by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """Handled from `with` to its end, on the main thread."""

    def __init__(self) -> None:
        self._receiver: Callable[[int], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for number in (*TO_THE_HEAD, *TO_ALL, signal.SIGTSTP, signal.SIGWINCH):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def to(self, receiver: Callable[[int], None]) -> Iterator[None]:
        """While a program starts, runs and is cleared away, all of them go there."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver = None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """In here rather than in a loop: it also works while our own reader keeps us waiting."""
        if self._receiver is not None:
            self._receiver(number)
        elif number in ENDS:
            raise ToldToEnd(number)
        elif number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
