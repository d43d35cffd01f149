"""The other side of grammar workers: starts the service they are forked from, connects to new ones, kills them.

Knows processes and sockets; what is asked of a worker is the caller's. No llguidance here: nothing that a client sent
is compiled in this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import EngineError, RequestError
from holdfast.held_interrupts import interrupts_held
from holdfast.records.structured import Vocabulary
from holdfast.socket_folder import SocketFolder
from holdfast.text.structured import wire

if TYPE_CHECKING:
    from holdfast.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("holdfast")

BACKLOG = 256
"""Connections that may wait for a service that still starts."""
CONNECT_S = 0.5
QUICK_DEATHS, QUICK_DEATH_S = 5, 30.0
"""A service that died so often within so long is not started again before that time has passed."""


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    check_has_bytes(tokenizer)
    assert tokenizer.pieces is not None
    spell = tokenizer.pieces.spell
    named = ((tokenizer.convert_ids_to_tokens(token), token) for token in tokenizer.all_special_ids)
    special = {name: token for name, token in named if name is not None}
    return Vocabulary([spell(token) for token in range(tokenizer.ids_end)], special)


def check_model(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
    """Raises RequestError for models whose outputs cannot follow a grammar."""
    if not eos_ids:
        field = "structured_outputs"
        raise RequestError(f"{field} needs a model with an EOS token", found="no EOS token", field=field)
    check_has_bytes(tokenizer)


def check_has_bytes(tokenizer: Tokenizer) -> None:
    if tokenizer.pieces is None:
        raise RequestError(
            "structured output is not available: this model's tokenizer does not map each token to bytes",
            field="structured_outputs",
        )


class GrammarService:
    """One process, started when it is first needed and again when it has died. Safe to use from several threads.

    `vocabulary` is asked for once, when it starts."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], eos_ids: Sequence[int], vocab_size: int) -> None:
        self._vocabulary, self._eos_ids, self._vocab_size = vocabulary, list(eos_ids), vocab_size
        self._packed: bytes | None = None
        self._lock = threading.Lock()
        self._folder: SocketFolder | None = None
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths_s: list[float] = []
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def address(self) -> str:
        """Where workers are to be had, from any process of this user; there before the service is started."""
        with self._lock:
            return self._listen()

    def _listen(self) -> str:
        if self._folder is None:
            folder = SocketFolder()
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(folder.path / "grammars.sock"))
            self._listener.listen(BACKLOG)
            self._folder = folder
        return str(self._folder.path / "grammars.sock")

    def start(self, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Returns at once where it runs already, and otherwise when its vocabulary was handed over. `unwanted`: whether
        it was stopped since whoever wanted it asked."""
        with self._lock:
            if unwanted():
                return
            if self._closed:
                raise EngineError("structured output has shut down")
            if self._process is not None and self._process.poll() is None:
                return
            if self._process is not None:
                self._bury()
            self._check_deaths()
            self._launch()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Answers in progress need a service: one that has died is replaced at once."""
        code = process.wait()
        if not self._closed and self._process is process:
            log.error("the structured output service exited (%s); restarting it", code)
            with contextlib.suppress(EngineError):
                self.start()

    def _bury(self) -> None:
        now_s = time.monotonic()
        self._deaths_s = [died_s for died_s in self._deaths_s if now_s - died_s < QUICK_DEATH_S] + [now_s]
        self._process = None

    def _check_deaths(self) -> None:
        recent = [died_s for died_s in self._deaths_s if time.monotonic() - died_s < QUICK_DEATH_S]
        if len(recent) > QUICK_DEATHS:
            raise EngineError(
                f"structured output is not available: its process died {len(recent)} times in {QUICK_DEATH_S:g} s",
                fix="see its last lines in the server log; try again in 30 s",
            )

    def _launch(self) -> None:
        if self._packed is None:
            self._packed = wire.pack(wire.Setup(self._vocabulary(), self._eos_ids, self._vocab_size))
        try:
            self._listen()
            assert self._listener is not None
            descriptor = self._listener.fileno()
            command = [sys.executable, "-m", "holdfast.text.structured.service", str(descriptor)]
            with interrupts_held():
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor])
            assert self._process.stdin is not None
            self._process.stdin.write(self._packed)
            self._process.stdin.flush()
            watch = threading.Thread(target=self._watch, args=[self._process], name="grammar-service", daemon=True)
            watch.start()
        except OSError as error:
            raise EngineError(f"the structured output service could not be started: {error}") from error

    def restart(self, pid: int | None) -> None:
        """The one of this pid does not answer: a new one takes its place, unless another has already."""
        with self._lock:
            if self.pid == pid:
                self._end()
        self.start()

    def stop(self) -> None:
        """Gives its memory back; what is asked for next starts it again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()
            if self._listener is not None:
                self._listener.close()
            if self._folder is not None:
                self._folder.remove()


class WorkerConnection:
    """One worker, ours alone. It lives as long as the connection, unless its limits or `kill` end it before."""

    def __init__(self, address: str, limits: wire.WorkerLimits, *, marked: bool = False) -> None:
        """Raises OSError where there is no service, or no descriptor left."""
        self.limits = limits
        self.socket = socket.socket(socket.AF_UNIX)
        self.marker: wire.Marker | None = None
        self._inbox = wire.Inbox()
        self._pid: int | None = None
        self._process: int | None = None
        try:
            self.marker = wire.Marker() if marked else None
            # Where too many wait for a service already, nobody is held up.
            self.socket.settimeout(CONNECT_S)
            self.socket.connect(address)
            descriptors = [self.marker.descriptor] if self.marker else []
            socket.send_fds(self.socket, [wire.pack(limits)], descriptors)
            self.socket.settimeout(None)
        except OSError:
            self.close()
            raise
        finally:
            if self.marker is not None:
                os.close(self.marker.descriptor)

    def send(self, message: wire.ToWorker) -> None:
        self.socket.sendall(wire.pack(message))

    def receive(self) -> list[wire.FromWorker] | None:
        """What has come; None: it has ended. Blocks as the socket does."""
        try:
            received = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        self._inbox.put(received)
        found: list[wire.FromWorker] = []
        while (message := self._inbox.from_worker()) is not None:
            if isinstance(message, wire.Hello):
                self._meet(message.pid)
            else:
                found.append(message)
        return found

    def _meet(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):  # It may be gone already.
            self._process = os.pidfd_open(pid)

    @property
    def met(self) -> bool:
        """It has been forked: the service lives."""
        return self._pid is not None

    def cpu_s(self) -> float:
        """Of processor time that it has used."""
        if self._pid is None:
            return 0.0
        try:
            # Of its only thread. The clock of the process may stand still for long where it has a limit.
            with open(f"/proc/{self._pid}/schedstat", "rb") as schedstat:
                return int(schedstat.read().split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            pass
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # The system's name for the clock of another process.
        except OSError:
            return 0.0

    def kill(self) -> None:
        if self._process is None:
            self.socket.setblocking(False)  # Its first word may be there, unread.
            self.receive()
        if self._process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.socket.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None
        if self.marker is not None:
            self.marker.close()
