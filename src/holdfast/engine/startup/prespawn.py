"""An engine process that is started before it is known what it will load: it imports what every engine needs, which
takes most of its start, while the front finds the model and plans. Imports little itself, so that it comes first."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from holdfast.errors import EngineDiedError, NoResourcesError
from holdfast.held_interrupts import interrupts_held
from holdfast.socket_folder import SocketFolder

_SHORTAGES = {
    errno.EMFILE: "file descriptors of this process (ulimit -n)",
    errno.ENFILE: "file descriptors of this machine (sysctl fs.file-max)",
    errno.EAGAIN: "processes (ulimit -u)",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
}
"""What there may be more of in a moment, by what the system says."""


def cannot_start(error: Exception) -> EngineDiedError:
    """Why there is no engine process; NoResourcesError where the same may go well later."""
    short = shortage(error)
    if short is None:
        return EngineDiedError(f"the engine process could not be started: {error}")
    return NoResourcesError(
        f"the engine process could not be started, will retry: {error}",
        needed=short,
        fix="free some, or raise the limit; the start is retried until it succeeds",
    )


def shortage(error: BaseException | None) -> str | None:
    """What the system had none of, where that is at the bottom of this error."""
    while error is not None:
        number = getattr(error, "errno", None)  # of OSError, and of ZMQError, which is none
        if number in _SHORTAGES:
            return _SHORTAGES[number]
        error = error.__cause__
    return None


LAST_LINES_S = 1.0
"""For what a process had written when it ended to be passed on."""
LONGEST_LINE = 64 * 1024
"""In bytes; a longer one is passed on in pieces."""


def _pass_on(lines: IO[bytes]) -> None:
    """To its end, whatever becomes of our own output: a process whose pipe is full would stand still."""
    from holdfast.observability.logs import write_log_line

    with lines:
        while line := lines.readline(LONGEST_LINE):
            with contextlib.suppress(OSError, ValueError):
                write_log_line(line.decode("utf-8", "backslashreplace").rstrip("\n"))


class EarlyProcess:
    """Whoever takes it over ends it. Until then `end` does; and when the front dies, so does the process."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of its socket. Raises EngineDiedError when the machine has no process or file left for it."""
        self._folder: SocketFolder | None = None
        self._log: threading.Thread | None = None
        try:
            if path is None:
                self._folder = SocketFolder()
                path = self._folder.path / "0.sock"
            self.address = f"ipc://{path}"
            # -u: its last words before a crash must reach the log. Its standard input stays open as long as we live.
            # On a terminal its lines go through us: whoever draws a prompt or a bar there knows where the cursor is.
            with interrupts_held():
                self.process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "holdfast.engine.process.entry", self.address],
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE if sys.stderr is not None and sys.stderr.isatty() else None,
                )
        except OSError as error:
            if self._folder is not None:
                self._folder.remove()
            raise cannot_start(error) from error
        if self.process.stderr is not None:
            self._log = threading.Thread(target=_pass_on, args=(self.process.stderr,), name="engine-log", daemon=True)
            try:
                self._log.start()
            except RuntimeError as error:  # No thread is left: as with no process.
                self._log = None
                self.end()
                raise cannot_start(OSError(errno.EAGAIN, str(error))) from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        """Removes what stands in the file system; the process has ended."""
        if self._log is not None:
            self._log.join(LAST_LINES_S)
        elif self.process.stderr is not None:
            self.process.stderr.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self._folder is not None:
            self._folder.remove()
