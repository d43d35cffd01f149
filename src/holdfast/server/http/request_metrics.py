"""Counts every request by path and status, including those that `middleware` refuses. Changes nothing.

Probes are left out, as in vLLM: they would bury everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.observability.metrics.http import OTHER, HttpMetrics
from holdfast.server.http.errors import INTERNAL
from holdfast.server.http.middleware import Record
from holdfast.server.http.paths import UI_QUIET

UNCOUNTED = frozenset({"/metrics", "/metrics/", "/health", "/ping", "/load", "/version"}) | UI_QUIET
_PARAMETER = "/{"


class Counting:
    def __init__(self, app: ASGIApp, *, paths: Iterable[str], metrics: HttpMetrics) -> None:
        """`paths`: of the application, with their parameters in braces."""
        self._app = app
        self._metrics = metrics
        self._paths = {path for path in paths if _PARAMETER not in path}
        self._patterns = [(compile_path(path)[0], path) for path in paths if _PARAMETER in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            # What the door has noted: to look at every event of a stream once more would cost each of them.
            record: Record | None = scope.get("holdfast.record")
            status = (record.status if record is not None else 0) or INTERNAL
            self._metrics.count(
                scope["method"],
                self._handler(scope["path"]),
                status,
                time.monotonic() - began_s,
                taken_bytes=_length(scope),
            )

    def _handler(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((whole for pattern, whole in self._patterns if pattern.match(path)), OTHER)


def _length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 16:
            return int(value)
    return 0
