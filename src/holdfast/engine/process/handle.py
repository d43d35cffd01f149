"""One engine process and the socket to it: started, spoken to, listened to until it has ended, stopped.

Knows nothing of requests; messages are in `protocol`, the watchdog is in `heartbeat`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import subprocess
from pathlib import Path

import zmq
import zmq.asyncio

from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.process.heartbeat import HeartbeatMonitor, loading_limit_s
from holdfast.engine.requests.front_parts import process_name
from holdfast.engine.startup.build import Progress
from holdfast.engine.startup.prespawn import EarlyProcess, cannot_start
from holdfast.errors import EngineDiedError, EngineError, EngineHungError
from holdfast.planner import Plan
from holdfast.records import Failure, SleepingKV

log = logging.getLogger("holdfast")

STOP_TIMEOUT_S = 3.0
KILLED_S = 20.0
"""For a process that was killed to be gone: one that waits in a driver may never be, and nobody waits for it longer."""
LAST_WORDS_S, LAST_LOOKS = 1.0, 10
"""For what a process had written when it ended: on a machine with much to do, a socket takes its time. In so many
parts: a front that is kept from running for longer than all of it misses one of them."""

POLL_S = 0.1


class Child:
    def __init__(self, started: EarlyProcess, socket: zmq.asyncio.Socket, limit_s: float, engine: int | None) -> None:
        """`limit_s`: of silence, until it is expected to answer within another. `engine`: its number, of several."""
        self._started, self._process = started, started.process
        self._socket = socket
        self._stage = "starting"
        self.cause: Failure | None = None
        """Why it ended, as it said at last."""
        self.watch = HeartbeatMonitor(limit_s, self._process.kill, named=process_name(engine))
        self._watching = asyncio.create_task(self.watch.run(), name="engine-watch")
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
        kept: SleepingKV | None = None,
        engine: int | None = None,
        again: bool = False,
    ) -> Child:
        """`early`: a process that waits already; it is this one's from now on. `again`: another has served before it.
        Raises NoResourcesError when the machine
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
        child = cls(started, socket, loading_limit_s(config), engine)
        try:
            debug = log.isEnabledFor(logging.DEBUG)
            child.send(protocol.Init(dataclasses.asdict(config), plan, grammar_address, kept, engine, debug, again))
        except BaseException:
            await child.stop(at_once=True)  # Nobody else knows the process, and the exit would wait for it.
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unresponsive(self) -> Failure | None:
        """Why it is taken to hang, unless it answers again."""
        return Failure.of(EngineHungError(self.watch.story)) if self.watch.late else None

    @property
    def progress(self) -> str:
        """Loading progress."""
        return f"{self._stage}; the last sign of progress was {self.watch.silent_s:.0f} s ago"

    def send(self, message: protocol.ToEngine) -> None:
        self._socket.send(protocol.encode(message), zmq.NOBLOCK)

    async def receive(self) -> protocol.FromEngine | None:
        """The next message, or None when the process has ended and said all it had to say."""
        receiving = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait({receiving, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            # The process is gone; what it had written may still be on its way through the socket.
            for _ in range(LAST_LOOKS):
                if (await asyncio.wait({receiving}, timeout=LAST_WORDS_S / LAST_LOOKS))[0]:
                    break
        if not receiving.done():
            receiving.cancel()
            return None
        self.watch.heard()
        message = protocol.decode_from_engine(receiving.result())
        if isinstance(message, protocol.Loading):
            self._stage = f"{message.stage} {message.done} of {message.total}" if message.total else message.stage
        elif isinstance(message, protocol.StepFailed):
            self.cause = message.failure
        return message

    def ending(self) -> str:
        if self.watch.hung:
            return f"it was killed after not responding for {self.watch.silent_s:.0f} s"
        code = self._process.returncode
        if code is None:
            return "still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def stop(self, *, at_once: bool = False) -> None:
        """`at_once`: it is loading, and would not listen; nor does one that hangs."""
        self._watching.cancel()
        if self._process.returncode is None and (at_once or self.watch.late):
            self._process.kill()
        elif self._process.returncode is None:
            self.send(protocol.Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
        await asyncio.wait({self._exit}, timeout=KILLED_S)
        if not self._exit.done():
            log.error("the engine process (pid %d) was killed but has not exited: it is stuck in a driver", self.pid)
        self._started.forget()
        self._socket.close(linger=0)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        await asyncio.to_thread(process.wait)
    except RuntimeError:  # The system has no thread left to wait in.
        while process.poll() is None:
            await asyncio.sleep(POLL_S)


async def ready(child: Child, on_progress: Progress) -> protocol.Ready:
    """What it says when it is; raises what kept it from becoming so, and has stopped it then."""
    while True:
        message = await child.receive()
        if isinstance(message, protocol.Ready):
            return message
        if isinstance(message, protocol.Loading):
            on_progress(message.stage, message.done, message.total)
        elif isinstance(message, protocol.StartFailed):
            await child.stop()
            raise message.failure.error()
        elif message is None:
            await child.stop()
            raise died(child, f"the engine process exited during startup ({child.ending()})")


def died(child: Child, message: str, request_id: str | None = None) -> EngineError:
    """Of a process that has ended: by itself, or because it hung."""
    if (cause := child.cause) is not None and not child.watch.hung:
        return EngineDiedError(
            f"{message}: {cause.message}",
            code=cause.code,
            needed=cause.needed,
            found=cause.found,
            fix=cause.fix,
            request_id=request_id,
        )
    return (EngineHungError if child.watch.hung else EngineDiedError)(message, request_id=request_id)


def blamed(child: Child, request_id: str) -> EngineError:
    """What a request is ended with that is the cause, or that was there each time."""
    what = "hung" if child.watch.hung else "crashed" if child.cause is None else "failed"
    story = f"the engine process {what} on this request repeatedly, even when it ran alone"
    return died(child, f"{story} ({child.ending()})", request_id)
