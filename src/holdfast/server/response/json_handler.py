"""A body in, one JSON answer out: what endpoints share that do not generate. Knows nothing of what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from holdfast.engine.interface import Engine
from holdfast.engine.requests.structured_output import TENANT
from holdfast.server.http.middleware import CLIENT_GONE, Record, tenant_of
from holdfast.server.http.request_body import read_body
from holdfast.server.response.generation import cancel_on_disconnect, coalesce
from holdfast.server.response.streams import ClientGone
from holdfast.server.settings import ServerSettings, body_limit

JSON = ((b"content-type", b"application/json"),)

Answering = Callable[[bytes, Record], Awaitable[Any]]
"""From a body to what is encoded as JSON, or to pieces of bytes (`Pieces`)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is encoded while it is sent."""

    content: Iterable[bytes]
    resources: AsyncExitStack
    """What is let go of when all of it is sent, or nobody is left to send it to."""
    headers: tuple[tuple[bytes, bytes], ...] = JSON


class Exchange:
    """An ASGI endpoint. A client that leaves cancels what is done for it."""

    def __init__(self, answer: Answering, engine: Engine, settings: ServerSettings) -> None:
        self._answer = answer
        self._engine = engine
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["holdfast.record"]
        TENANT.set(tenant_of(scope))
        try:
            limit_bytes = body_limit(self._settings, self._engine.info.max_model_len)
            body = await read_body(scope, receive, limit_bytes, self._settings.body_timeout_s)
            await cancel_on_disconnect(receive, self._serve(body, record, send))
        except ClientGone:
            record.status = CLIENT_GONE

    async def _serve(self, body: bytes, record: Record, send: Send) -> None:
        answer = await self._answer(body, record)
        if not isinstance(answer, Pieces):
            content = msgspec.json.encode(answer)
            headers = (*JSON, (b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return
        async with answer.resources:
            await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
            for piece in coalesce(answer.content):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
