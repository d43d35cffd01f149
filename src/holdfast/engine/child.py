"""One engine process and the socket to it: started, spoken to, listened to until it has ended, stopped.

Knows nothing of requests; what is said is `messages`'.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from pathlib import Path

import zmq
import zmq.asyncio

from holdfast.config import EngineConfig
from holdfast.engine import messages
from holdfast.engine.early import EarlyProcess, cannot_start
from holdfast.errors import EngineDiedError
from holdfast.planner import Plan

STOP_TIMEOUT_S = 3.0
LAST_WORDS_S = 1.0
"""For what a process had written when it ended: on a machine with much to do, a socket takes its time."""

POLL_S = 0.1


class Child:
    def __init__(self, started: EarlyProcess, socket: zmq.asyncio.Socket) -> None:
        self._started, self._process = started, started.process
        self._socket = socket
        self._exit = asyncio.create_task(_ended(self._process), name="engine-exit")

    @classmethod
    async def spawn(
        cls,
        context: zmq.asyncio.Context,
        path: Path,
        config: EngineConfig,
        plan: Plan | None = None,
        early: EarlyProcess | None = None,
        grammar_address: str | None = None,
    ) -> Child:
        """`early`: a process that waits already; it is this one's from now on. Raises NoResourcesError when the machine
        has no process, file or memory left, EngineDiedError for other reasons."""
        started, socket = early, None
        try:
            socket = context.socket(zmq.PAIR)
            socket.linger = 0
            # This side connects and has no limit on what waits, so that a send never blocks, whether the process has
            # bound yet, is busy, or is already dead.
            socket.sndhwm = 0
            socket.reconnect_ivl = 10
            started = early or EarlyProcess(path)
            socket.connect(started.address)
        except (EngineDiedError, OSError, zmq.ZMQError) as error:
            if socket is not None:
                socket.close(linger=0)
            if started is not None:
                started.end()
            raise error if isinstance(error, EngineDiedError) else cannot_start(error) from error
        child = cls(started, socket)
        child.send(messages.Begin(dataclasses.asdict(config), plan, grammar_address))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: messages.ToEngine) -> None:
        self._socket.send(messages.encode(message), zmq.NOBLOCK)

    async def receive(self) -> messages.FromEngine | None:
        """The next message, or None when the process has ended and said all it had to say."""
        receiving = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait({receiving, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            # The process is gone; what it had written may still be on its way through the socket.
            await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
        if not receiving.done():
            receiving.cancel()
            return None
        return messages.decode_from_engine(receiving.result())

    def ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def stop(self, *, at_once: bool = False) -> None:
        """`at_once`: it is loading and would not listen."""
        if self._process.returncode is None and at_once:
            self._process.kill()
        elif self._process.returncode is None:
            self.send(messages.Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
        await self._exit
        self._started.forget()
        self._socket.close(linger=0)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        await asyncio.to_thread(process.wait)
    except RuntimeError:  # The system has no thread left to wait in.
        while process.poll() is None:
            await asyncio.sleep(POLL_S)
