"""`python -m holdfast ...` and engine processes without what every start imports: a process that has imported all of it
is forked for each, and what it starts itself before it has threads is forked once more. From main() on all is as in a
process of its own. Linux alone; knows nothing of tests.

    Popen in a test ──order, descriptors──► the process that is forked ──fork──► front ──fork──► its first engine
                    ◄───── pid, exit code ──
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

ENGINE = "holdfast.engine.process.entry"
RANK = "holdfast.engine.ranks.entry"
MAIN = {"holdfast": "holdfast.__main__", ENGINE: ENGINE, RANK: RANK}
"""What can be forked, and where its main() is."""
ENGINE_NAME = "forked-engine"
"""Of an engine's process: its words are those of the process that it was forked from."""
COMMANDS = ("bench", "chat", "rescue", "run", "run_batch", "serve")
READ_LATE = ("HOLDFAST_", "PYTEST_", "TERM", "COLUMNS", "LINES", "NO_COLOR", "PATH", "RAY_ADDRESS")
"""Variables that no import reads."""
UNSUPPORTED = ("shell", "gid", "gids", "uid")
LONGEST = 1 << 20
"""Of a message, in bytes."""
MOST_FILES = 1 << 12

REAL_POPEN = subprocess.Popen


class _Popen(subprocess.Popen[Any]):
    """Forks what can be forked, and starts all else as ever."""

    def _execute_child(self, *given: Any) -> None:
        parent = REAL_POPEN._execute_child
        how = inspect.signature(parent).bind(self, *given).arguments
        words = [os.fspath(word) for word in how["args"]] if isinstance(how["args"], list) else []
        place = words.index("-m") + 1 if words[:1] == [sys.executable] and "-m" in words[:3] else 0
        environment = dict(os.environ if how["env"] is None else how["env"])
        if (
            not place
            or words[place] not in MAIN
            or any(how[name] for name in UNSUPPORTED)
            or how["umask"] != -1
            or how["preexec_fn"] not in (None, take_terminal)
            or not self._may_fork(environment)
        ):
            parent(self, *given)
            return
        order = {
            "module": words[place],
            "words": words[place + 1 :],
            "unbuffered": "-u" in words[:place],
            "environment": environment,
            "folder": str(how["cwd"] or Path.cwd()),
            "session": bool(how["start_new_session"]),
            "group": how["process_group"],
            "terminal": how["preexec_fn"] is not None,
            "passed": list(how["pass_fds"]),
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        ours = how["p2cread"], how["c2pwrite"], how["errwrite"]
        files = [number if given < 0 else given for number, given in enumerate(ours)]
        self.pid = self._fork(order, [*files, *how["pass_fds"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in pipes))
        self._child_ended = self._watched()

    def _may_fork(self, environment: dict[str, str]) -> bool:
        raise NotImplementedError

    def _fork(self, order: dict[str, Any], files: list[int]) -> int:
        raise NotImplementedError

    def _watched(self) -> int | None:
        return None


class ForkedPopen(_Popen):
    """In a process with threads: another one is forked, whose children are none of ours."""

    def _may_fork(self, environment: dict[str, str]) -> bool:
        return forks().fits(environment)

    def _fork(self, order: dict[str, Any], files: list[int]) -> int:
        return forks().start(order, files)

    def _watched(self) -> int:
        return os.pidfd_open(self.pid)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if getattr(self, "_child_ended", None) is None:
            code: int | None = super()._internal_poll(*given, **named)
            return code
        with self._waitpid_lock:
            if self.returncode is None and (code := forks().exit_code(self.pid)) is not None:
                self.returncode = code
                os.close(self._child_ended)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if getattr(self, "_child_ended", None) is None:
            code: int = super()._wait(timeout=timeout)
            return code
        limit_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left_s = None if limit_s is None else limit_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with contextlib.suppress(OSError):  # Another thread has found that it has ended, and closed this.
                select.select([self._child_ended], [], [], min(1.0, 1.0 if left_s is None else left_s))
        assert self.returncode is not None
        return self.returncode


class _Grandchild(_Popen):
    """In a process that was forked itself. Of one with several threads nothing is forked."""

    def _may_fork(self, environment: dict[str, str]) -> bool:
        return threading.active_count() == 1 and _early(environment) == _early(dict(os.environ))

    def _fork(self, order: dict[str, Any], files: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            _become(order, files)
        return pid


class Forks:
    """The process that is forked, and the way to it. It ends with this one."""

    def __init__(self) -> None:
        self._environment = _early(dict(os.environ))
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = REAL_POPEN(
                [sys.executable, __file__, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether what was imported saw the environment that it would see now, but for what is read when needed."""
        return _early(environment) == self._environment

    def start(self, order: dict[str, Any], files: list[int]) -> int:
        return int(self._asked(order, files))

    def exit_code(self, pid: int) -> int | None:
        """None: it runs."""
        code: int | None = self._asked(pid, [])
        return code

    def _asked(self, message: object, files: list[int]) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
            answer = self._socket.recv(LONGEST)
        assert answer, f"the process that is forked has ended with {self.process.wait()}"
        return json.loads(answer)


@functools.cache
def forks() -> Forks:
    return Forks()


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}


def main(descriptor: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends with whoever started it.
    _import_all()
    orders = socket.socket(fileno=descriptor)
    while True:
        message, files, _, _ = socket.recv_fds(orders, LONGEST, MOST_FILES)
        if not message:
            os._exit(0)  # Without taking torch apart.
        order = json.loads(message)
        if isinstance(order, int):
            found, status = os.waitpid(order, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if answer == 0:
                _become(order, files)
            for file in files:
                os.close(file)
        orders.send(json.dumps(answer).encode())


def _import_all() -> None:
    gc.disable()
    importlib.import_module("holdfast.engine.startup.preload_torch").import_torch()
    importlib.import_module("holdfast.engine.process.main")._import_ahead()
    for name in ("cli.main", "engine.ranks.follower", "server.run", *MAIN.values()):
        importlib.import_module(f"holdfast.{name.removeprefix('holdfast.')}")
    for name in COMMANDS:
        importlib.import_module(f"holdfast.cli.commands.{name}")
    importlib.import_module("holdfast.doctor.rules.load").rulebook()  # Read from files that come with it.
    gc.freeze()


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """What was ordered, in this process. Nothing of its past is gone back to."""
    from holdfast.leave import leave

    code: object = 1
    try:
        _take_files(files, [0, 1, 2, *order["passed"]])
        if order["session"]:
            os.setsid()
        if order["group"] >= 0:
            os.setpgid(0, order["group"])
        if order["terminal"]:
            take_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            terminal = stream is sys.stderr or stream.isatty()
            stream.reconfigure(line_buffering=terminal, write_through=order["unbuffered"])
        if order["module"] == ENGINE:
            Path("/proc/self/comm").write_text(ENGINE_NAME)
        subprocess.Popen = _Grandchild
        gc.enable()
        module = importlib.import_module(MAIN[order["module"]])
        if order["module"] == RANK:  # It ends with its parent, which this one's is.
            order["words"][0] = str(os.getppid())
        sys.argv = [str(module.__file__), *order["words"]]
        code = module.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    leave(code if isinstance(code, int) else 0 if code is None else 1)


def _take_files(files: list[int], places: list[int]) -> None:
    """These descriptors, at these places, and no others."""
    above = 1 + max(*files, *places)
    for place, file in zip(places, [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files], strict=True):
        os.dup2(file, place)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in places:
            with contextlib.suppress(OSError):  # The list's own.
                os.close(file)


def take_terminal() -> None:
    """As a preexec_fn: what is typed in the terminal at standard input becomes a signal to this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
