"""/sleep, /wake_up and /is_sleeping, as vLLM has them. Only where --enable-sleep-mode was given: whoever may ask can
take the model away from everybody else. What sleeping is, is the engine's to say."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.engine.interface import Engine, check_wake_tags
from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.server.http.errors import FORBIDDEN, HttpFailure, json_response
from holdfast.server.settings import ServerSettings

LEVELS = ("1", "2")
"""At 1 cached prefixes stay in RAM, and at 2 nothing does. vLLM keeps the weights at 1; here they are loaded again."""
MODES = ("abort", "wait")


class Sleeping:
    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.routes = [
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping, methods=["GET"]),
        ]

    async def sleep(self, request: Request) -> Response:
        self._check(request, ("level", "mode"))
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in LEVELS:
            raise UnsupportedOptionError(
                f"level {level[:50]!r} is not supported: sleep always releases the weights",
                needed="1 or 2",
                field="level",
            )
        if mode not in MODES:
            raise UnsupportedOptionError(f"mode {mode[:50]!r} is not supported", needed="abort or wait", field="mode")
        await self._engine.sleep(mode, int(level))
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        self._check(request, ("tags",))
        if tags := request.query_params.getlist("tags"):
            check_wake_tags(tags)
        await self._engine.wake_up()
        return json_response({"status": "awake", "tags": None})

    async def is_sleeping(self, request: Request) -> Response:
        self._check(request, ())
        return json_response({"is_sleeping": self._engine.sleeping})

    def _check(self, request: Request, known: tuple[str, ...]) -> None:
        if not self._settings.enable_sleep_mode:
            raise HttpFailure(
                FORBIDDEN,
                "this server was not started with --enable-sleep-mode",
                kind="invalid_request_error",
                code="not_enabled",
            )
        for name in request.query_params:
            if name not in known:
                shown = name[:100]
                raise RequestError(f"unknown parameter {shown!r}", fix=f"leave {shown} out", field=shown)
