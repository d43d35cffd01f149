"""The endpoints that generate: read the body, ask, send the answer whole or as events, notice who left.

An ASGI endpoint rather than a request/response function, because one try/finally must hold the whole life of a
request: whatever happens, its streams are closed, and with them its pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from holdfast.engine.interface import Engine
from holdfast.engine.requests.structured_output import TENANT
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta
from holdfast.server.http.errors import describe
from holdfast.server.http.middleware import CLIENT_GONE, Record, tenant_of
from holdfast.server.http.request_body import read_body
from holdfast.server.request.logprob_budget import LogprobBudget, LogprobReservation, check_kept
from holdfast.server.request.parse import GenerationRequest
from holdfast.server.response.serialize import ResponseChoice, ResponseFormatter
from holdfast.server.response.streams import ClientGone, Conversation
from holdfast.server.settings import ServerSettings, body_limit


class Reader(Protocol):
    def __call__(
        self, raw: bytes, engine: Engine, settings: ServerSettings, *, request_id: str | None
    ) -> Awaitable[GenerationRequest]: ...


SENT_BYTES = 64 << 10
"""At a time: what a connection's own buffer holds before it asks us to wait."""

PING_S = 10.0
"""Of silence in a stream, where its API has an event for it: a long prompt takes longer than many clients wait."""

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers a proxied response unless it is told not to, here or in its own configuration.
    (b"x-accel-buffering", b"no"),
]


class Generation:
    def __init__(
        self,
        read: Reader,
        shape: Callable[[GenerationRequest], ResponseFormatter],
        engine: Engine,
        settings: ServerSettings,
        metrics: ServingMetrics,
        room: LogprobBudget,
    ) -> None:
        self._read = read
        self._shape = shape
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["holdfast.record"]
        TENANT.set(tenant_of(scope))
        try:
            settings = self._settings
            most_bytes = body_limit(settings, self._engine.info.max_model_len)
            body = await read_body(scope, receive, most_bytes, settings.body_timeout_s)
            await cancel_on_disconnect(receive, self._serve(body, record, send, _named(scope, record)))
        except ClientGone:
            record.status = CLIENT_GONE

    async def _serve(self, body: bytes, record: Record, send: Send, request_id: str | None) -> None:
        ask = await self._read(body, self._engine, self._settings, request_id=request_id)
        record.model, record.stream = ask.model, ask.stream
        await self.answer(ask, record, send)

    async def answer(self, ask: GenerationRequest, record: Record, send: Send) -> None:
        """What a request asks for, sent."""
        if ask.logprobs is not None and not ask.stream and not ask.default_max_tokens:
            context, wanted = self._engine.info.max_model_len, ask.params.max_tokens or 0
            longest = sum(min(wanted, max(context - len(prompt), 0)) for prompt in ask.prompts)
            check_kept(ask.params.n * longest, ask.logprobs)
        async with self._room.hold(ask.prompt_logprob_entries):
            with self._room.keep() as kept:
                await self._converse(ask, record, send, kept)

    def taken(self, ask: GenerationRequest) -> None:
        """Called when the engine has taken a request."""

    async def _converse(self, ask: GenerationRequest, record: Record, send: Send, kept: LogprobReservation) -> None:
        conversation = Conversation(ask, self._engine, self._metrics)
        try:
            await conversation.open()
            # From here on it was taken: how it ends is counted.
            record.answer_id = ask.answer_id
            self.taken(ask)
            if ask.stream:
                await _Events(self._shape(ask), ask, conversation, send).run(record)
            else:
                await self._whole(self._shape(ask), conversation, send, kept)
        finally:
            await conversation.close()
            record.prompt_tokens = conversation.prompt_tokens
            record.completion_tokens = conversation.completion_tokens
            record.cached_tokens = conversation.cached_tokens
            record.finish_reason = conversation.finish_reason
            record.ttft_s = conversation.ttft_s

    async def _whole(
        self, shape: ResponseFormatter, conversation: Conversation, send: Send, kept: LogprobReservation
    ) -> None:
        pieces: list[list[str]] = [[] for _ in conversation.answers]

        async def consume(answer: ResponseChoice, delta: AnswerDelta) -> None:
            pieces[answer.index].append(delta.text)
            if delta.logprobs is not None:
                kept.take(len(delta.logprobs), sum(map(len, delta.logprobs)))
            shape.keep(answer, delta)

        await conversation.follow(consume)
        for answer, texts in zip(conversation.answers, pieces, strict=True):
            answer.text = "".join(texts)
        body = shape.body(conversation.answers, conversation.usage())
        left_bytes = sum(map(len, body))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(left_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in coalesce(body):
            left_bytes -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": left_bytes > 0})
            if left_bytes:
                # A client that reads fast would keep the loop to itself: sending waits only for one that does not. But
                # one that has all of it may leave at once, and has not left early.
                await asyncio.sleep(0)


class _Events:
    """A stream of server-sent events, each sent as it comes: nothing is gathered."""

    def __init__(
        self, shape: ResponseFormatter, ask: GenerationRequest, conversation: Conversation, send: Send
    ) -> None:
        self._shape = shape
        self._ask = ask
        self._conversation = conversation
        self._send = send
        self._writes = 0

    async def run(self, record: Record) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        # Headers leave at once: a client, and a proxy in front of it, sees that its request was taken.
        await self._write(self._shape.beginning(self._conversation.usage()))
        try:
            await self._follow()
        except ClientGone:
            raise
        except Exception as error:
            # The status is sent: what is left is an event that says so.
            body = describe(error)[1]
            record.fail(body)
            await self._write(self._shape.failure(body), last=True)
            return
        await self._write(self._shape.ending(self._conversation.usage()), last=True)

    async def _consume(self, answer: ResponseChoice, delta: AnswerDelta) -> None:
        if not answer.begun and not delta.prompt_computed:
            await self._open(answer, delta)
        usage = self._conversation.usage() if self._ask.continuous_usage else None
        event = self._shape.event(answer, delta, usage)
        if event:
            await self._write(event)

    async def _open(self, first: ResponseChoice, delta: AnswerDelta) -> None:
        """All answers to a prompt begin with its first token, before any of them shows one, as vLLM has it."""
        continuous = self._ask.continuous_usage
        usage = self._conversation.usage(without=len(delta.token_ids)) if continuous else None
        for answer in self._conversation.beside(first):
            answer.begun = True
            for piece in coalesce(self._shape.opening(answer, usage)):
                await self._write(piece)

    async def _follow(self) -> None:
        pings = asyncio.create_task(self._ping()) if self._shape.ping else None
        try:
            await self._conversation.follow(self._consume)
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)

    async def _ping(self) -> None:
        while True:
            before = self._writes
            await asyncio.sleep(PING_S)
            if self._writes == before:
                await self._write(self._shape.ping)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._writes += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


def _named(scope: Scope, record: Record) -> str | None:
    """The client's own X-Request-Id, where the door has taken it: it becomes part of the answer's id."""
    wanted = record.request_id.encode()
    return record.request_id if (b"x-request-id", wanted) in scope["headers"] else None


def coalesce(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes with few calls, and never more of them in one than `SENT_BYTES` and a piece."""
    waiting: list[bytes] = []
    size_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        size_bytes += len(piece)
        if size_bytes >= SENT_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size_bytes = 0
    if size_bytes:
        yield b"".join(waiting)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; a client that leaves cancels it. Returns or raises only when `work` has ended."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
    if not finished:
        raise ClientGone
    worker.result()
