"""POST /invocations: SageMaker's one path for every kind of request. Leads to the endpoint that the body's fields tell.

Knows nothing of what is asked there: the body goes on as it came, but for the adapter that a header names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.http.middleware import CLIENT_GONE
from holdfast.server.http.request_body import read_body
from holdfast.server.request.json_body import decode_object
from holdfast.server.response.streams import ClientGone
from holdfast.server.settings import ServerSettings, body_limit

CLASSIFIED = "/classify"
BY_FIELDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("messages", "encoding_format"), "/v1/embeddings"),
    (("messages", "dimensions"), "/v1/embeddings"),
    (("messages", "embed_dtype"), "/v1/embeddings"),
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("query", "documents"), "/v1/rerank"),
    (("queries", "documents"), "/v1/score"),
    (("queries", "items"), "/v1/score"),
    (("text_1", "text_2"), "/v1/score"),
    (("data_1", "data_2"), "/v1/score"),
    (("input",), "/v1/embeddings"),
)
"""The first whose fields are all there decides."""

ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
"""The header by which SageMaker names an adapter: it knows nothing of bodies."""


class Invocations:
    def __init__(self, routes: Iterable[Route], engine: Engine, settings: ServerSettings) -> None:
        self._endpoints = {route.path: route.app for route in routes}
        self._engine = engine
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_bytes = body_limit(self._settings, self._engine.info.max_model_len)
        try:
            body = await read_body(scope, receive, limit_bytes, self._settings.body_timeout_s)
        except ClientGone:
            scope["holdfast.record"].status = CLIENT_GONE
            return
        given = decode_object(body)
        endpoint = self._endpoints[self._path(given)]
        adapter = dict(scope["headers"]).get(ADAPTER, b"").decode("latin-1")
        if adapter:
            body = msgspec.json.encode(given | {"model": adapter})
        came = False

        async def again() -> Message:
            nonlocal came
            if came:
                return await receive()
            came = True
            return {"type": "http.request", "body": body, "more_body": False}

        await endpoint(scope, again, send)

    def _path(self, given: dict[str, Any]) -> str:
        named = {name for name, value in given.items() if value is not None}
        path = next((path for fields, path in BY_FIELDS if named.issuperset(fields)), None)
        if path is None:
            raise RequestError(
                "the body has the fields of no endpoint",
                needed="; ".join(f"{' and '.join(fields)} ({path})" for fields, path in BY_FIELDS),
            )
        whole = path in ("/v1/chat/completions", "/v1/embeddings")
        return CLASSIFIED if whole and self._engine.info.labels else path
