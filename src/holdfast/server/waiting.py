"""Answers before there is an engine to serve: probes and clients learn why they have to wait.

    bind ─► waiting: every answer is 503 with the reason ─► serve, at the same socket

For what comes before loading and takes long, such as a cluster that has to place ranks. Knows nothing of what is
awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.server.http import connection
from holdfast.server.http.accept import allow_connections
from holdfast.server.http.errors import UNAVAILABLE, json_response
from holdfast.server.http.middleware import RootPath
from holdfast.server.run import HttpServer

PROBED = frozenset({"/health", "/ping"})
RETRY_AFTER_S = 2
FLUSH_S = 1
"""For the last of these answers to reach their clients."""
MAX_CONNECTIONS = 256


@contextlib.contextmanager
def answering(
    listener: socket.socket, reason: str, *, root_path: str = "", tls: ssl.SSLContext | None = None
) -> Iterator[None]:
    """Until it is left, a thread answers whoever connects; the listener is as it was afterwards, and who has connected
    and was not heard yet is heard by whoever listens next."""
    told: ASGIApp = _Told(f"starting: {reason}")
    config = uvicorn.Config(
        RootPath(told, prefix=root_path) if root_path else told,
        http=connection.Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,
    )
    server = HttpServer(config, allow_connections(MAX_CONNECTIONS), tls)
    own = listener.dup()  # It is closed with the server.
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([own])), name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class _Told:
    """As an engine that loads is told of; there is no other answer, whoever asks."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        body: dict[str, object] = {"status": "loading", "reason": self._reason}
        if path not in PROBED:
            body = {"error": {"message": self._reason, "type": "service_unavailable_error", "code": "loading"}}
        # The next answer is another server's.
        return json_response(body, UNAVAILABLE, {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
