"""The processes that run templates which clients sent: started when one is needed, killed when it goes on too long.

Owns those processes and who waits for one. What a template may do is `text`'s; the program is `text.templates.worker`.

    nobody asked ─► start ─► idle ◄─► working ─► killed: too slow, ended badly, client gone
                              └► killed after a minute without work, and with the server
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import holdfast
from holdfast.errors import OverloadedError
from holdfast.server.http.errors import UNAVAILABLE, HttpFailure
from holdfast.text.templates.jobs import Outcome, Rendered, RenderJob, TemplateRefused, decode_outcome, encode_job
from holdfast.text.templates.template import stopped
from holdfast.text.templates.worker import LENGTH, READY

log = logging.getLogger("holdfast.server")

PROGRAM = ("-m", "holdfast.text.templates.worker")
MOST_WORKERS = 2
MOST_WAITING = 16
"""Requests that wait for one of them; more are refused."""
WALL_S = 6.0
"""Of one template, from when a worker has it: its processor time is limited to five seconds by the sandbox."""
START_S = 60.0
IDLE_S = 60.0
CLOSE_S = 1.0
MOST_ANSWER_BYTES = 128 << 20
"""The longest prompt, as JSON of bytes, and some more."""

_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""All that a worker is given of ours: what else is there may be secret."""


class TemplateWorkers:
    """Used from one event loop. `close` ends all of them."""

    def __init__(
        self,
        *,
        most_workers: int = MOST_WORKERS,
        most_waiting: int = MOST_WAITING,
        wall_s: float = WALL_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`program`: arguments of the interpreter, before the id of this process."""
        self._wall_s = wall_s
        self._program = program
        self._slots = asyncio.Semaphore(most_workers)
        self._most_waiting = most_waiting
        self._waiting = 0
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._endings: set[asyncio.Task[None]] = set()

    async def render(self, job: RenderJob) -> Rendered:
        """Raises RequestError with the template's own refusal, or for taking too long. Cancelling ends its process."""
        await self._take_slot()
        worker = None
        outcome: Outcome | None = None
        try:
            worker = self._idle.pop() if self._idle else self._start()
            outcome = await worker.run(encode_job(job), self._wall_s)
        finally:
            if worker is None:
                self._slots.release()
            elif isinstance(outcome, Rendered):
                self._keep(worker)
            else:  # Whatever state it is in, nobody meets it again.
                self._end(worker, self._slots.release)
        if isinstance(outcome, TemplateRefused):
            raise outcome.error()
        return outcome

    async def _take_slot(self) -> None:
        if self._slots.locked() and self._waiting >= self._most_waiting:
            raise OverloadedError(
                f"{self._waiting} requests with their own chat template are already waiting",
                needed=f"fewer than {self._most_waiting}",
                fix="try again later",
                field="chat_template",
            )
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    def _start(self) -> _Worker:
        try:
            worker = _Worker(self._program)
        except OSError as error:
            log.error("cannot start a process for a client's chat template: %s", error)
            raise _unavailable() from error
        self._all.add(worker)
        return worker

    def _keep(self, worker: _Worker) -> None:
        self._idle.append(worker)
        worker.retirement = asyncio.get_running_loop().call_later(IDLE_S, self._retire, worker)
        self._slots.release()

    def _retire(self, worker: _Worker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            self._end(worker, lambda: None)

    def _end(self, worker: _Worker, then: Callable[[], None]) -> None:
        """`then` is called when the process is gone, so that there are never more of them than slots."""

        async def bury() -> None:
            worker.kill()
            try:
                await asyncio.get_running_loop().run_in_executor(None, worker.process.wait)
            finally:
                self._all.discard(worker)
                then()

        ending = asyncio.get_running_loop().create_task(bury())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def close(self) -> None:
        """Ends all that there are; may be called twice, and without a running loop."""
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(CLOSE_S)
        self._idle.clear()
        self._all.clear()


class _Worker:
    """One process. Works for one request at a time."""

    def __init__(self, program: Sequence[str]) -> None:
        """Raises OSError when the machine has no process or file left."""
        self._ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            self._ours.close()
            raise
        finally:
            theirs.close()
        self._ours.setblocking(False)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.retirement: asyncio.TimerHandle | None = None

    async def run(self, job: bytes, wall_s: float) -> Outcome:
        if self.retirement is not None:
            self.retirement.cancel()
            self.retirement = None
        reader, writer = await self._ready()
        try:
            async with asyncio.timeout(wall_s):
                writer.write(LENGTH.pack(len(job)))
                writer.write(job)
                await writer.drain()
                return decode_outcome(await _receive(reader))
        except TimeoutError:
            raise stopped(f"more than {wall_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise stopped("its process died: memory limit, CPU limit or a crash") from None

    async def _ready(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The way to it, once it has imported what it needs."""
        if self._streams is None:
            try:
                async with asyncio.timeout(START_S):
                    reader, writer = await asyncio.open_connection(sock=self._ours)
                    self._streams = reader, writer
                    if await _receive(reader) != READY:
                        raise ConnectionError("unexpected first message")
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                log.error("the process for clients' chat templates did not start: %s", error)
                raise _unavailable() from error
        return self._streams

    def kill(self) -> None:
        """At once; it holds nothing that anybody needs."""
        if self.retirement is not None:
            self.retirement.cancel()
        self.process.kill()
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._ours.close()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    size_bytes = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
    if size_bytes > MOST_ANSWER_BYTES:
        raise ConnectionError("the response is too long")
    return await reader.readexactly(size_bytes)


def _environment() -> dict[str, str]:
    paths = [str(Path(holdfast.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONSAFEPATH": "1"}


def _unavailable() -> HttpFailure:
    return HttpFailure(
        UNAVAILABLE,
        "cannot start a process for the chat template; try again later",
        kind="service_unavailable_error",
        code="overloaded",
        retry=True,
    )
