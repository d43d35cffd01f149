"""Standard output and error that never wait for whoever reads them: a log that nobody reads must not hold up a server.

    written ─► the pipe, terminal or socket, as long as it takes something
            ─► a bounded backlog, which a thread passes on when there is room again
            ─► nothing, beyond that; how many lines were lost is said when there is room

A regular file is written as ever. Knows nothing of what is said.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import socket
import stat
import sys
import threading
from collections import deque

BACKLOG_BYTES = 1 << 20
LOOK_S = 1.0
"""Between two looks whether anybody reads again."""
LAST_WORDS_S = 1.0
"""For the backlog, when the process ends."""


def unblock_output() -> None:
    """From now on `sys.stdout` and `sys.stderr` wait for nobody."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None, closed, or not of a file at all.
            if not isinstance(stream, Unblocked) and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, Unblocked(stream.fileno()))


class Unblocked(io.TextIOBase):
    """Text to a descriptor, which stays open and as it is. May be written to by any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._target, self._waits = _open_again(descriptor)
        self._socket = _as_socket(descriptor)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = self._lost_lines = 0
        self._lock = threading.RLock()  # A warning may be written while a line is.
        self._passing_on: threading.Thread | None = None
        self._emptied = threading.Event()
        atexit.register(self._say_last_words)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raw = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if not self._backlog:
                raw = raw[self._put(raw) :]
            if raw:
                self._keep(raw)
        return len(text)

    def _keep(self, raw: bytes) -> None:
        if self._backlog_bytes + len(raw) > BACKLOG_BYTES:
            self._lost_lines += raw.count(b"\n")
            return
        self._backlog.append(raw)
        self._backlog_bytes += len(raw)
        if self._passing_on is None:
            self._emptied.clear()
            passing_on = threading.Thread(target=self._pass_on, name="log-backlog", daemon=True)
            with contextlib.suppress(RuntimeError):  # No thread can be had: the next line tries again.
                passing_on.start()
                self._passing_on = passing_on

    def _put(self, raw: bytes) -> int:
        """How much of it was taken without waiting. Whoever reads may be gone for good: then all of it goes nowhere."""
        done = 0
        try:
            while done < len(raw):
                if self._socket is not None:
                    done += self._socket.send(raw[done:], socket.MSG_DONTWAIT)
                elif not self._waits:
                    done += os.write(self._target, raw[done:])
                elif select.select([], [self._target], [], 0)[1]:
                    done += os.write(self._target, raw[done : done + select.PIPE_BUF])
                else:
                    return done
        except BlockingIOError:
            return done
        except OSError:
            return len(raw)
        return done

    def _pass_on(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                select.select([], [self._target], [], LOOK_S)
            with self._lock:
                while self._backlog:
                    first = self._backlog.popleft()
                    self._backlog_bytes -= len(first)
                    if rest := first[self._put(first) :]:
                        self._backlog.appendleft(rest)
                        self._backlog_bytes += len(rest)
                        break
                if not self._backlog and self._lost_lines:
                    said = f"... {self._lost_lines} lines were dropped here: nothing was reading the output\n".encode()
                    self._lost_lines = 0
                    if rest := said[self._put(said) :]:
                        self._backlog.append(rest)
                        self._backlog_bytes += len(rest)
                if not self._backlog:
                    self._passing_on = None
                    self._emptied.set()
                    return

    def _say_last_words(self) -> None:
        if self._passing_on is not None:
            self._emptied.wait(LAST_WORDS_S)


def _open_again(descriptor: int) -> tuple[int, bool]:
    """The same pipe or terminal, opened once more so that nobody else's descriptor changes by not waiting; and whether
    that could not be, and writing to it may wait."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags), False
    return os.dup(descriptor), True


def _as_socket(descriptor: int) -> socket.socket | None:
    return socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
