"""/memory: the ledger as JSON, as it stands now, and another budget while the server runs. Counts nothing;
docs/memory.md says what the fields mean."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.config.setting import memory
from holdfast.engine.interface import Engine
from holdfast.errors import ConfigurationError, DoesNotFitError, HoldfastError, RequestError
from holdfast.observability.ledger import Ledger
from holdfast.server.http.errors import FORBIDDEN, UNAVAILABLE, HttpFailure, json_response
from holdfast.server.http.request_body import read_body
from holdfast.server.request.json_body import decode_object
from holdfast.server.settings import ServerSettings
from holdfast.units import shorten

MAX_BODY_BYTES = 4 << 10
MOST_BYTES = 1 << 62
"""What is more has no place in a message to the engine."""
TIERS = ("ram", "vram")


class MemoryBody(msgspec.Struct, kw_only=True):
    """One of them: a size as the flag of the same name takes it (8GiB), or bytes."""

    ram: str | int | None = None
    vram: str | int | None = None


class MemoryEndpoint:
    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self.routes = [
            Route("/memory", self.report, methods=["GET"]),
            Route("/memory", self.change, methods=["POST"]),
        ]

    async def report(self, request: Request) -> Response:
        return json_response(self._ledger())

    async def change(self, request: Request) -> Response:
        """The ledger once the budget holds; whoever may ask can take memory from others, or slow everybody down."""
        if not self._settings.may_change_memory:
            raise HttpFailure(
                FORBIDDEN,
                "the memory budget can be changed only where clients need a key or are on this machine: start the "
                "server with --api-key",
                kind="invalid_request_error",
                code="not_enabled",
            )
        body = await read_body(request.scope, request.receive, MAX_BODY_BYTES, self._settings.body_timeout_s)
        tier, size = _asked(decode_object(body) if body.strip() else {})
        try:
            await self._engine.set_memory_budget(tier, size)
        except (ConfigurationError, DoesNotFitError) as error:  # Of a start they end the server; here nothing changed.
            raise _refused(error, tier) from error
        return json_response(self._ledger())

    def _ledger(self) -> Ledger:
        ledger = self._engine.memory()
        if ledger is None:
            raise HttpFailure(
                UNAVAILABLE,
                "no memory report yet: the engine is not ready",
                kind="server_error",
                code="loading",
                retry=True,
            )
        return ledger


def _asked(body: dict[str, Any]) -> tuple[str, int]:
    for name in body:
        if name not in TIERS:
            shown = shorten(name)
            raise RequestError(f"unknown field {shown!r}", needed=" or ".join(TIERS), field=shown)
    asked = {name: size for name, size in body.items() if size is not None}
    if len(asked) != 1:
        raise RequestError(
            "POST /memory changes one budget, and this body has " + ("two" if asked else "none"),
            needed='{"vram": "20GiB"} on a GPU, or {"ram": "8GiB"}',
            found=", ".join(asked) or "no size",
            fix="name one size; GET /memory shows the budget in force",
        )
    ((tier, size),) = asked.items()
    try:
        if (nbytes := memory(tier, size)) <= MOST_BYTES:
            return tier, nbytes
    except ConfigurationError as error:
        raise RequestError(error.message, needed=error.needed, found=error.found, fix=error.fix, field=tier) from None
    raise RequestError(f"{tier}: no machine has so much memory", needed="8GiB, say", found=shorten(size), field=tier)


def _refused(error: HoldfastError, tier: str) -> RequestError:
    fix = error.fix
    if fix is not None and "POST /memory" not in fix:  # What a plan advises is for a start.
        fix = f"ask for another size; for a start: {fix}"
    return RequestError(
        f"the budget stays as it is: {error.message}",
        code=error.code,
        needed=error.needed,
        found=error.found,
        fix=fix,
        field=tier,
    )
