"""GET /memory: the ledger as JSON, as it stands now. Counts nothing; docs/memory.md says what the fields mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.interface import Engine
from holdfast.server.http.errors import UNAVAILABLE, HttpFailure, json_response


def memory_endpoint(engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        ledger = engine.memory()
        if ledger is None:
            raise HttpFailure(
                UNAVAILABLE,
                "no memory report yet: the engine is not ready",
                kind="server_error",
                code="loading",
                retry=True,
            )
        return json_response(ledger)

    return answer
