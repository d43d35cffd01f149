"""Threads for reads that may never end: each has a limit, and one beyond it is given up together with its thread.

A thread that waits for a dead file server cannot be ended. It is left behind, another takes its place, and whatever
it still does writes nowhere. Knows nothing of what is read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_LEFT_BEHIND = 16
"""Threads that wait for files which do not come; with so many of them no others take their places."""


class GivenUpError(Exception):
    """Raised where a read that was given up would write; seen by nobody."""


class Read(Future[T]):
    """Done when it has ended or was given up."""

    def __init__(self) -> None:
        super().__init__()
        self._changing = threading.Lock()
        self._began_s: float | None = None

    def begin(self) -> None:
        """Called where files come into play: from here on its time counts."""
        self._began_s = time.monotonic()

    def overdue(self, limit_s: float) -> bool:
        return self._began_s is not None and not self.done() and time.monotonic() - self._began_s > limit_s

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around every write to what others read too. Nothing within it may wait for a file."""
        with self._changing:
            if self.done():
                raise GivenUpError
            yield

    def end(self, result: T | None, error: BaseException | None) -> bool:
        """False where it was given up before."""
        with self._changing:
            if self.done():
                return False
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]
            return True


class Readers(Generic[T]):
    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._queue: SimpleQueue[tuple[Read[T], Callable[[Read[T]], T]] | None] = SimpleQueue()
        self._left_behind = self._started = 0
        self._counting = threading.Lock()

    def submit(self, work: Callable[[Read[T]], T]) -> Read[T]:
        read = Read[T]()
        self._queue.put((read, work))
        with self._counting:
            if self._started < self._threads:
                self._start()
        return read

    def give_up(self, read: Read[T], error: Exception) -> None:
        if read.end(None, error):
            with self._counting:
                self._left_behind += 1
                if self._left_behind <= MOST_LEFT_BEHIND:
                    self._start()

    def close(self) -> None:
        """Those that read nothing end."""
        for _ in range(self._started):
            self._queue.put(None)

    def _start(self) -> None:
        # A daemon: a process must be able to end whatever its files do.
        self._started += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            read, work = item
            if not read.set_running_or_notify_cancel():
                continue
            result, error = None, None
            try:
                result = work(read)
            except BaseException as raised:
                error = raised
            if not read.end(result, error) and self._another_took_the_place():
                return

    def _another_took_the_place(self) -> bool:
        with self._counting:
            took = self._left_behind <= MOST_LEFT_BEHIND
            self._left_behind -= 1
            self._started -= took
            return took
