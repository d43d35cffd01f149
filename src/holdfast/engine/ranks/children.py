"""Ranks that are children of this process: started, heard, ended. Knows nothing of models, nor of other machines.

`RankHandle` is what a group knows of each of its ranks, whoever has started it: a child is one, and a rank of another
node (nodes/link.py) is another.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from holdfast.execution.parallel.segment import Segment
from holdfast.held_interrupts import interrupts_held


class Answers(Protocol):
    """What a rank says: messages, in their order."""

    def send_bytes(self, message: bytes) -> None:
        """To it; only the first ones, which tell it how to start, go this way."""

    def poll(self, timeout_s: float) -> bool:
        """Whether there is one, within that time; also at the end of all."""

    def recv_bytes(self) -> bytes:
        """The next. EOFError: there will be none."""

    def close(self) -> None: ...


class RankHandle(Protocol):
    number: int

    @property
    def connection(self) -> Answers: ...

    @property
    def pid(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def ending(self) -> str:
        """How, for people."""

    @property
    def name(self) -> str:
        """For people: its number and where it is."""

    @property
    def stopped(self) -> bool:
        """By a signal: it does nothing, and hears of nothing."""

    def kill(self) -> None:
        """Does not wait for its end."""

    def await_end(self, timeout_s: float) -> bool:
        """Whether it has come within that time."""


class RankProcess:
    """A child and its socket."""

    def __init__(self, number: int, segment: Segment, on_end: Callable[[], None]) -> None:
        self.number, self._on_end = number, on_end
        ours, theirs = socket.socketpair()
        started: Future[subprocess.Popen[bytes]] = Future()
        # The system ends a child when the thread that started it ends: that one lives as long as the child.
        watcher = threading.Thread(
            target=self._watch, args=(started, segment.descriptor, theirs), name=f"rank-{number}", daemon=True
        )
        watcher.start()
        try:
            self._process = started.result()
        finally:
            theirs.close()
        self.connection: Answers = Connection(ours.detach())
        self._watcher = watcher

    def _watch(self, started: Future[subprocess.Popen[bytes]], segment: int, theirs: socket.socket) -> None:
        try:
            with interrupts_held():
                process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "holdfast.engine.ranks.entry", str(os.getpid()), str(segment),
                     str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(segment, theirs.fileno()),
                )  # fmt: skip
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._on_end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def name(self) -> str:
        return f"rank {self.number} (pid {self.pid})"

    @property
    def stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in ("T", "t")

    def kill(self) -> None:
        self._process.kill()

    def await_end(self, timeout_s: float) -> bool:
        self._watcher.join(max(0.0, timeout_s))
        return not self._watcher.is_alive()

    def ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "it still runs"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
