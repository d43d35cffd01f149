"""Runs one program as an init would: its output passed through unchanged, signals passed on, nothing left behind.

    our stdout, stderr a terminal    the program gets one too (a pseudo-terminal), so that it prints as it would alone
    anything else                    pipes, one each

The program is the head of a session of its own. SIGTERM goes to it alone, so that it can end in its own order; what a
terminal sends goes to its whole group; the second request to end kills the group. Output that cannot be written on is
dropped, and the program goes on. Neither it nor what it started outlives us (orphans.py). Knows no engine and no
log.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.rescue.orphans import Guard, Process, adopt_orphans, left_behind, name_of
from holdfast.rescue.signals import ENDS, TO_ALL, Signals

READ_BYTES = 64 * 1024
GRACE_S = 10.0
"""Between a request to end and the end of patience."""
LEFT_GRACE_S = 4.0
"""The same for what a program left behind when it died."""
POLL_S = 0.25
WHO_IS_THERE_S = 5.0
"""So often the guard is told of processes that it would not find by itself."""
SAME_REQUEST_S = 0.5
"""Requests to end that follow each other sooner are one."""
NAMED_MOST = 4
LAST_WORDS_S = 2.0
"""What a program's children still print after it has ended is waited for so long."""
LINE_LIMIT_CHARS = 16 * 1024
"""A line that is longer is given in part: what follows is left out up to its end."""
_LINE_ENDS = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int
    """As a shell says it: 128 and the signal, where one ended it."""
    signal: int | None
    """What ended it; None: it ended by itself."""
    asked: bool
    """We were told to end, and passed it on."""
    ran_s: float


class OutputLines:
    """From pieces of output to lines. A carriage return ends one too: progress bars are written over themselves."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, piece: bytes) -> None:
        *lines, rest = _LINE_ENDS.split(self._rest + self._decoder.decode(piece))
        self._rest = rest[:LINE_LIMIT_CHARS]
        for line in lines:
            if line.strip():
                self._told(line[:LINE_LIMIT_CHARS])


class Supervised:
    """One program, from start to end. `run` may be called once.

    `say` tells what is passed on and what is lost; `server`: nobody reads its output on purpose, so that a reader who
    left does not end it. Another program learns of that as it would alone.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        signals: Signals,
        *,
        say: Callable[[str], None] = lambda text: None,
        server: bool = True,
    ) -> None:
        self.argv = list(argv)
        self._environment = dict(environment)
        self._on_line, self._say, self._server = on_line, say, server
        self._signals = signals
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal: int | None = None
        self._requests, self._requested_at = 0, 0.0
        self._first_request_at: float | None = None
        self._others: frozenset[int] = frozenset()
        self._guard: Guard | None = None
        self._guarded_at = 0.0
        self._status: int | None = None
        self._lost = False
        """Some of its output could not be written on, and that was said."""

    def run(self, tick: Callable[[Supervised], None] = lambda supervised: None) -> Ended:
        """Blocks until it has ended. `tick` is called now and then while it runs. OSError: it cannot be started.

        However this is left, the program has ended, and all that it started.
        """
        self._others = adopt_orphans()
        began = time.monotonic()
        with self._signals.to(self._signalled), contextlib.ExitStack() as stack:
            readers = self._start(stack)
            try:
                self._pump(readers, tick)
            except BaseException:
                self._send(signal.SIGKILL, whole_group=True)
                self._clear()
                raise
            assert self._status is not None
            code = os.waitstatus_to_exitcode(self._status)
            self._clear(unforeseen=code == 0 and not self._requests)
            return Ended(
                exit_code=128 - code if code < 0 else code,
                signal=-code if code < 0 else None,
                asked=self._requests > 0,
                ran_s=time.monotonic() - began,
            )

    @property
    def told_to_end_s(self) -> float | None:
        """So long ago the first request to end came; None: none has come."""
        return None if self._first_request_at is None else time.monotonic() - self._first_request_at

    def end(self, *, at_once: bool = False) -> None:
        """For who watches it: it does not count as a request from outside."""
        self._send(signal.SIGKILL if at_once else signal.SIGTERM, whole_group=at_once)

    # Starting

    def _start(self, stack: contextlib.ExitStack) -> dict[int, int]:
        """Where to read, and to which of our own descriptors it goes."""
        on_terminal = [os.isatty(number) for number in (1, 2)]
        slave: int | None = None
        if any(on_terminal):
            self._terminal, slave = _pseudo_terminal(1 if on_terminal[0] else 2)
            stack.callback(os.close, self._terminal)
        stdin: int | None = None
        if os.isatty(0):
            stdin = slave if slave is not None else subprocess.DEVNULL
        where = [slave if terminal and slave is not None else subprocess.PIPE for terminal in on_terminal]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        try:
            self._process = subprocess.Popen(
                self.argv, stdin=stdin, stdout=where[0], stderr=where[1], env=self._environment, start_new_session=True
            )
        finally:
            if slave is not None:  # Held here too, the end of the program would not end the terminal.
                os.close(slave)
        self._guard = stack.enter_context(Guard(self._process.pid))
        if self._requests:  # It came in between.
            self._send(signal.SIGTERM, whole_group=False)
        readers: dict[int, int] = {}
        for ours, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            if pipe is not None:
                readers[os.dup(pipe.fileno())] = ours
                pipe.close()
        if self._terminal is not None:
            readers[os.dup(self._terminal)] = 1 if on_terminal[0] else 2
        return readers

    # Running

    def _pump(self, readers: dict[int, int], tick: Callable[[Supervised], None]) -> None:
        lines = {reader: OutputLines(self._on_line) for reader in readers}
        until: float | None = None
        with selectors.DefaultSelector() as selector:
            for reader in readers:
                selector.register(reader, selectors.EVENT_READ)
            if self._terminal is not None and os.isatty(0):
                selector.register(0, selectors.EVENT_READ)
            while self._status is None or any(key.fd in readers for key in selector.get_map().values()):
                ready = selector.select(POLL_S)
                for key, _ in ready:
                    if key.fd == 0:
                        self._typed(selector)
                    elif not self._pass_on(key.fd, readers[key.fd], lines[key.fd]):
                        selector.unregister(key.fd)
                        os.close(key.fd)
                self._reap()
                if self._status is None:
                    self._tell_guard(self._process)
                    tick(self)
                elif until is None:
                    # All that it said itself, however long we were kept from reading it: its last words say why.
                    for key in list(selector.get_map().values()):
                        if key.fd in readers:
                            self._drain(key.fd, readers[key.fd], lines[key.fd])
                    until = time.monotonic() + LAST_WORDS_S
                elif not ready or time.monotonic() > until:
                    break  # Who still holds the pipe is no longer the program.
            for key in list(selector.get_map().values()):
                if key.fd in readers:
                    os.close(key.fd)
        for one in lines.values():
            one.feed(b"\n")  # What is left is a line too.

    def _drain(self, reader: int, ours: int, lines: OutputLines) -> None:
        """What is there by now; not what others write meanwhile."""
        there = int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)
        while there > 0 and (passed := self._pass_on(reader, ours, lines, min(there, READ_BYTES))):
            there -= passed

    def _pass_on(self, reader: int, ours: int, lines: OutputLines, most_bytes: int = READ_BYTES) -> int:
        """So many bytes. 0: there is no more, or nobody reads it."""
        try:
            piece = os.read(reader, most_bytes)
        except OSError as error:
            if error.errno == errno.EIO:  # How Linux says that nobody has the other end of a terminal.
                return 0
            raise
        lines.feed(piece)
        return len(piece) if piece and self._write(ours, piece) else 0

    def _write(self, ours: int, piece: bytes) -> bool:
        """False: nobody will read any more of it, and the program shall learn of that as it would alone."""
        view = memoryview(piece)
        while view:
            try:
                view = view[os.write(ours, view) :]
            except BlockingIOError:  # Somebody made it so for all who share it; it is waited for as ever.
                select.select([], [ours], [], POLL_S)
            except OSError as error:
                if isinstance(error, BrokenPipeError) and not self._server:
                    return False
                if not self._lost:
                    self._lost = True
                    self._say(
                        f"the server's output cannot be passed on ({error.strerror}): it is dropped, and the"
                        " server keeps running"
                    )
                return True
        return True

    def _typed(self, selector: selectors.BaseSelector) -> None:
        assert self._terminal is not None
        try:
            typed = os.read(0, READ_BYTES)
        except OSError:  # Our terminal is gone; SIGHUP says so too.
            typed = b""
        if not typed:
            selector.unregister(0)
            return
        with contextlib.suppress(OSError):  # The program may have closed its own.
            os.write(self._terminal, typed)

    def _tell_guard(self, program: subprocess.Popen[bytes] | None) -> None:
        now = time.monotonic()
        if self._guard is not None and program is not None and now - self._guarded_at >= WHO_IS_THERE_S:
            self._guarded_at = now
            self._guard.tell(left_behind(program.pid, self._others))

    def _reap(self) -> None:
        """The program, and whatever it left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._process is not None and pid == self._process.pid:
                self._status = status
                self._process.returncode = os.waitstatus_to_exitcode(status)

    # Signals

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._resize()
        elif number == signal.SIGTSTP:
            # A session without a terminal of its own ignores the polite form.
            self._send(signal.SIGSTOP, whole_group=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT, whole_group=True)
        elif number in ENDS:
            self._asked_to_end(number)
        else:
            self._send(number, whole_group=False)

    def _asked_to_end(self, number: int) -> None:
        """`timeout` and some service managers send their request to a process and to its group: that is one."""
        now = time.monotonic()
        if self._requests and now - self._requested_at < SAME_REQUEST_S:
            return
        self._requests, self._requested_at = self._requests + 1, now
        self._first_request_at = self._first_request_at or now
        name = signal.Signals(number).name
        if self._requests > 1:
            self._say(f"{name} again: killing the server")
            self._send(signal.SIGKILL, whole_group=True)
        else:
            self._say(f"{name} passed on; waiting for the server to exit (a second one kills it)")
            self._send(number, whole_group=number in TO_ALL)

    def _send(self, number: int, *, whole_group: bool) -> None:
        if self._process is None or (self._status is not None and not whole_group):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if whole_group else os.kill)(self._process.pid, number)

    def _resize(self) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                _copy_size(1 if os.isatty(1) else 2, self._terminal)

    # What it leaves behind

    def _clear(self, *, unforeseen: bool = False) -> None:
        """An engine whose server died holds its memory: the next start would find none. `unforeseen`: the program ended
        well and by itself, so that what it left may have been meant to stay."""
        assert self._process is not None
        head = self._process.pid
        if not Path("/proc/self/stat").exists():  # Not Linux: who is left cannot be asked, and its group gets no grace.
            self._send(signal.SIGKILL, whole_group=True)
            return
        if self._left(head) and unforeseen:
            self._say(f"the server exited; stopping the processes that it left behind: {_named(self._left(head))}")
        self._signal_left(head, signal.SIGTERM, LEFT_GRACE_S)
        if left := self._left(head):
            self._say(f"killed, because it outlived its server: {_named(left)}")
            self._signal_left(head, signal.SIGKILL, GRACE_S)
            if left := self._left(head):
                self._say(f"still running after SIGKILL (a driver or a disk may block it): {_named(left)}")

    def _signal_left(self, head: int, number: int, patience_s: float) -> None:
        """Until none is left: the end of one makes its children ours. SIGTERM goes to each once."""
        until = time.monotonic() + patience_s
        heard: set[int] = set()
        while (left := self._left(head)) and time.monotonic() < until:
            for one in left:
                if one.pid not in heard:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one.pid, number)
            heard |= {one.pid for one in left} if number != signal.SIGKILL else set()
            time.sleep(POLL_S / 5)

    def _left(self, head: int) -> list[Process]:
        self._reap()
        return left_behind(head, self._others)


def _named(left: Sequence[Process]) -> str:
    shown = ", ".join(f"{name_of(one.pid) or 'a process'} ({one.pid})" for one in left[:NAMED_MOST])
    return shown + (f" and {len(left) - NAMED_MOST} more" if len(left) > NAMED_MOST else "")


def _pseudo_terminal(like: int) -> tuple[int, int]:
    """Of the same size as ours; it changes nothing that is written to it, and repeats nothing that is typed."""
    master, slave = os.openpty()
    input_flags, output_flags, control_flags, local_flags, *rest = termios.tcgetattr(slave)
    output_flags &= ~termios.OPOST
    local_flags &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, [input_flags, output_flags, control_flags, local_flags, *rest])
    with contextlib.suppress(OSError):
        _copy_size(like, master)
    return master, slave


def _copy_size(source: int, target: int) -> None:
    size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)
