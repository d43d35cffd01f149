"""The front's side of the engine process: starts it, talks to it, and starts it again when it dies.

An open request is held here, not there: prompt, parameters, seed, and every token that has gone out. So when the
engine process dies, however it dies, another one is started and each open request goes on after its last token; its
client sees a pause. A request that was aboard each time the engine died is ended with a typed error instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from holdfast.config import EngineConfig
from holdfast.engine import messages
from holdfast.engine.answers import Answer
from holdfast.engine.door import Door
from holdfast.engine.startup import FoundModel, Progress, with_located_model
from holdfast.errors import DrainingError, EngineDiedError, EngineError, HoldfastError, OverloadedError
from holdfast.records import AnswerDelta, EngineInfo, EngineStats, Failure, FinishReason, SamplingParams
from holdfast.text import Tokenizer

log = logging.getLogger("holdfast")

MAX_DEATHS_ABOARD = 3
"""A request that was in the engine at this many deaths is taken for their cause."""

MAX_DEATHS_WITHOUT_OUTPUT = 3
"""The engine is given up when it dies this often without a token in between."""

STOP_TIMEOUT_S = 3.0


class ProcessEngine:
    """Implements `engine.interface.Engine`. Use on one asyncio loop."""

    def __init__(
        self,
        config: EngineConfig,
        model: FoundModel,
        tokenizer: Tokenizer | None,
        *,
        on_progress: Progress = lambda stage, done, total: None,
    ) -> None:
        self._config = with_located_model(config, model)
        self._model = model
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._door: Door | None = None
        self._info: EngineInfo | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        self._context = zmq.asyncio.Context()
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._open: dict[str, tuple[Answer, _Stream]] = {}
        self._streams = 0
        self._ready = False
        self._draining = False
        self._stopping = False
        self._failure: Failure | None = None
        self._restarts = 0
        self._deaths_without_output = 0
        self._stats = EngineStats()
        self._stats_before = EngineStats()
        self._listeners: list[Callable[[EngineStats], None]] = []

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine is not ready yet")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def ready(self) -> bool:
        return self._ready and not self._draining

    @property
    def failure(self) -> Failure | None:
        return self._failure

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def unfinished(self) -> int:
        return self._streams

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return None if self._child is None else self._child.process.pid

    def stats(self) -> EngineStats:
        return self._stats

    def on_step(self, listener: Callable[[EngineStats], None]) -> None:
        self._listeners.append(listener)

    async def start(self) -> None:
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[AnswerDelta]:
        self._refuse_if_closed(request_id)
        assert self._door is not None
        requests = self._door.admit(
            prompt_token_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        if len(self._open) + len(requests) > self._config.max_num_seqs + self._config.max_queued_requests:
            raise OverloadedError(
                f"{len(self._open)} requests are open and the queue is full",
                needed=f"room for {len(requests)}",
                found=f"{self._config.max_num_seqs} running and {self._config.max_queued_requests} waiting at most",
                fix="try again later, or serve with a larger --max-queued-requests",
                request_id=request_id,
            )
        if any(request.request_id in self._open for request in requests):
            raise EngineError(f"request id {request_id!r} is in use", request_id=request_id)
        stream = _Stream(self, [request.request_id for request in requests])
        for index, request in enumerate(requests):
            self._open[request.request_id] = (Answer(request, index, self._tokenizer), stream)
        self._streams += 1
        if self._ready:  # While it restarts, requests simply wait here; all of them are handed over afterwards.
            self._send(messages.Add(requests))
        return stream

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open and self._failure is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._open:
            self._end_all(
                DrainingError(f"the server is shutting down and the request did not finish in {timeout_s:g} s")
            )

    async def stop(self) -> None:
        was_ready = self._ready
        self._stopping, self._ready = True, False
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._child is not None:
            await self._child.stop(at_once=not was_ready)
        self._end_all(DrainingError("the server has shut down"))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def reset_prefix_cache(self) -> None:
        self._send(messages.ResetPrefixCache())

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._failure is not None:
            raise messages.unpack_failure(self._failure, request_id)
        if self._draining or self._stopping:
            raise DrainingError("the server is shutting down", fix="send it to another server", request_id=request_id)
        if self._door is None:
            raise EngineError(
                "the engine is not ready yet", fix="wait for /health to answer 200", request_id=request_id
            )

    def _send(self, message: messages.ToEngine) -> None:
        if self._child is not None and self._ready:
            self._child.send(message)

    async def _launch(self) -> None:
        """Returns with a ready engine, or raises what kept it from becoming one."""
        child = await _Child.spawn(self._context, self._folder / f"{self._restarts}.sock", self._config)
        self._child = child
        while True:
            message = await child.receive()
            if isinstance(message, messages.Ready):
                break
            if isinstance(message, messages.Loading):
                self._on_progress(message.stage, message.done, message.total)
            elif isinstance(message, messages.StartFailed):
                await child.stop()
                raise messages.unpack_failure(message.failure)
            elif message is None:
                raise EngineDiedError(f"the engine process ended while starting ({child.ending()})")
        self._info = msgspec.structs.replace(message.info, model=self._model.files.name)
        self._door = Door(self._model.spec, message.info.max_model_len, self._seeds)
        self._stats_before = self._stats
        self._ready = True
        self._on_progress("ready", 0, 0)

    async def _supervise(self) -> None:
        while True:
            assert self._child is not None
            while (message := await self._child.receive()) is not None:
                if isinstance(message, messages.News):
                    self._take(message)
            try:
                await self._relaunch()
            except HoldfastError as error:
                log.error("%s", error)
                self._failure = messages.pack_failure(error)
                self._end_all(error)
                return
            if self._open:
                self._send(messages.Add([answer.resumed() for answer, _ in self._open.values()]))

    async def _relaunch(self) -> None:
        """Until one lives, or too many in a row have died."""
        while True:
            assert self._child is not None
            self._ready = False
            self._restarts += 1
            self._deaths_without_output += 1
            ending = self._child.ending()
            await self._child.stop()
            self._end_suspects(ending)
            if self._deaths_without_output >= MAX_DEATHS_WITHOUT_OUTPUT:
                raise EngineDiedError(
                    f"the engine process died {self._deaths_without_output} times without an answer in between"
                    f" (last: {ending})",
                    fix="read the engine's last lines above; restart with smaller limits",
                )
            log.error("the engine process ended (%s) with %d requests open; starting it again", ending, len(self._open))
            try:
                return await self._launch()
            except EngineDiedError as error:
                log.error("%s", error)

    def _end_suspects(self, ending: str) -> None:
        for request_id, (answer, stream) in list(self._open.items()):
            answer.deaths_aboard += 1
            if answer.deaths_aboard >= MAX_DEATHS_ABOARD:
                error = EngineDiedError(
                    f"the engine process died {answer.deaths_aboard} times with this request aboard (last: {ending})",
                    request_id=request_id,
                )
                del self._open[request_id]
                stream.put(error)

    def _take(self, news: messages.News) -> None:
        self._stats = _continued(self._stats_before, news.stats)
        stopped: list[str] = []
        for output in news.outputs:
            found = self._open.get(output.request_id)
            if found is None:
                continue  # Aborted on this side while the step ran.
            answer, stream = found
            self._deaths_without_output = 0
            if output.failure is not None:
                del self._open[output.request_id]
                stream.put(messages.unpack_failure(output.failure, output.request_id))
                continue
            delta = answer.take(output)
            if answer.finished:
                del self._open[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            stream.put(delta)
        for listener in self._listeners:
            listener(self._stats)
        if stopped:
            self._send(messages.Abort(stopped))

    def _end_all(self, error: HoldfastError) -> None:
        streams = {id(stream): stream for _, stream in self._open.values()}
        if self._open:
            self._send(messages.Abort(list(self._open)))
        self._open.clear()
        for stream in streams.values():
            stream.put(error)

    def close_stream(self, request_ids: list[str]) -> None:
        """A stream has ended or was left by its reader; what still runs of it is aborted."""
        self._streams -= 1
        running = [request_id for request_id in request_ids if self._open.pop(request_id, None) is not None]
        if running:
            self._send(messages.Abort(running))


class _Stream(AsyncIterator[AnswerDelta]):
    """The deltas of one request's answers. A class, because a generator that was never begun cannot clean up."""

    def __init__(self, engine: ProcessEngine, request_ids: list[str]) -> None:
        self._engine = engine
        self._request_ids = request_ids
        self._running = len(request_ids)
        self._queue: asyncio.Queue[AnswerDelta | HoldfastError] = asyncio.Queue()
        self._closed = False

    def put(self, item: AnswerDelta | HoldfastError) -> None:
        self._queue.put_nowait(item)

    async def __anext__(self) -> AnswerDelta:
        if self._closed or self._running == 0:
            await self.aclose()
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, HoldfastError):
            await self.aclose()
            raise item
        if item.finish_reason is not None:
            self._running -= 1
            if self._running == 0:
                await self.aclose()
        if item.finish_reason is FinishReason.ERROR:
            raise EngineError("the request ended in an error")
        return item

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.close_stream(self._request_ids)


class _Child:
    """One engine process and the socket to it."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        self.process = process
        self._socket = socket
        self._exit = asyncio.create_task(process.wait(), name="engine-exit")

    @classmethod
    async def spawn(cls, context: zmq.asyncio.Context, path: Path, config: EngineConfig) -> _Child:
        socket = context.socket(zmq.PAIR)
        socket.linger = 0
        # This side connects and has no limit on what waits, so that a send never blocks, whether the process has
        # bound yet, is busy, or is already dead.
        socket.sndhwm = 0
        socket.reconnect_ivl = 10
        address = f"ipc://{path}"
        socket.connect(address)
        # -u: its last words before a crash must reach the log. Its standard input stays open as long as we live.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-u", "-m", "holdfast.engine.process", address, stdin=asyncio.subprocess.PIPE
        )
        child = cls(process, socket)
        child.send(messages.Begin(dataclasses.asdict(config)))
        return child

    def send(self, message: messages.ToEngine) -> None:
        self._socket.send(messages.encode(message), zmq.NOBLOCK)

    async def receive(self) -> messages.FromEngine | None:
        """The next message, or None when the process has ended and said all it had to say."""
        receiving = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait({receiving, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            # The process is gone; what it had written may still be on its way through the socket.
            await asyncio.wait({receiving}, timeout=0.2)
        if not receiving.done():
            receiving.cancel()
            return None
        return messages.decode_from_engine(receiving.result())

    def ending(self) -> str:
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def stop(self, *, at_once: bool = False) -> None:
        """`at_once`: it is loading and would not listen."""
        if self.process.returncode is None and at_once:
            self.process.kill()
        elif self.process.returncode is None:
            self.send(messages.Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_TIMEOUT_S)
            except TimeoutError:
                self.process.kill()
        await self._exit
        self._socket.close(linger=0)


def _continued(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on where the process before left them."""
    return msgspec.structs.replace(
        now,
        steps_total=before.steps_total + now.steps_total,
        preemptions_total=before.preemptions_total + now.preemptions_total,
        prefix_queries_total=before.prefix_queries_total + now.prefix_queries_total,
        prefix_hits_total=before.prefix_hits_total + now.prefix_hits_total,
    )
