"""ASGI middleware around the application: request ids, API key, engine state (loading, draining, dead), access log.

Pure ASGI, so that requests that never reach an endpoint are logged too.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.engine.interface import Engine
from holdfast.errors import DrainingError, EngineDiedError, SleepingError
from holdfast.server.http.api_keys import Keys
from holdfast.server.http.connection import FULL, MAX_HEAD_BYTES, head_bytes
from holdfast.server.http.errors import (
    BAD_REQUEST,
    HEAD_TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    WRONG_MEDIA,
    HttpFailure,
    describe,
    failure_response,
    is_anthropic,
)
from holdfast.server.http.paths import COMPUTING, NEEDS_ENGINE, UI_OPEN, UI_QUIET
from holdfast.server.http.rebinding import check_host
from holdfast.server.http.request_body import INTAKE, Intake
from holdfast.server.schema.ignored import HEADER, IGNORED, IgnoredFieldLog, IgnoredFields
from holdfast.server.settings import AccessLog, ServerSettings
from holdfast.units import shorten

CLIENT_GONE = 499
"""nginx's number for a client that closed the connection before the answer was there; never sent, only logged."""

CUT_OFF = "draining"
"""The OpenAI code of a request that the server's own end has ended."""

PROBES = frozenset({"/health", "/ping", "/metrics", "/version"})
"""Asked every few seconds by machines; lines about them would bury those about requests. /version asks whether the
front end itself is alive, whatever the engine does: one that is full of requests is."""

OPEN = frozenset({"/health", "/ping", "/version"})
"""Whoever keeps a server alive has no key, and a version tells of nobody. vLLM asks for a key under /v1 only; here also
where an answer would tell of other users' requests, or would change the server."""
METRICS = frozenset({"/metrics", "/metrics/"})
"""Without a key only where that was asked for: they tell how much is asked of which model and adapter."""

FITTING_KEY = "holdfast.key"
"""In the scope of a request: the key that let it in."""

METRICS_NEED_KEY = (
    "Prometheus needs it too (authorization: {credentials: KEY} in its scrape_configs), or serve with --public-metrics"
)

LOGGED_PATH_CHARS = 200
"""Of a path in the log: strangers may ask for long ones, and they are logged too."""

_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_JSON = re.compile(rb"\s*application/(?:[\w.!#$&^-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


@dataclass(slots=True)
class Record:
    """What the access line will say; endpoints fill in what they learn."""

    request_id: str
    started_s: float
    finish: Callable[[Record], None]
    """Counts and logs one: this one, or another of the same request that ends later."""
    status: int = 0
    started: bool = False
    """Whether the response has begun: then no other can be sent."""
    model: str | None = None
    answer_id: str | None = None
    deferred: bool = False
    """Whether the client was answered before the engine was done: another record tells how that has ended."""
    stream: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    ttft_s: float | None = None
    error_code: str | None = None
    """Why it was refused, or what ended a stream whose status was already sent."""
    holdfast_code: str | None = None
    """The same as a code of ours (HF310), where the error has one."""

    def fail(self, body: dict[str, Any]) -> None:
        """`body`: OpenAI's error object, as the client is sent it."""
        self.error_code = body["code"]
        self.holdfast_code = body.get("holdfast", {}).get("code")


@dataclass(slots=True)
class Tally:
    """How the requests that were taken have ended; said when the server stops."""

    answered: int = 0
    left: int = 0
    """Disconnected by the client."""
    failed: int = 0
    cut: int = 0
    """Cut off by shutdown."""

    def count(self, record: Record) -> None:
        if record.answer_id is None or record.deferred:
            return  # Refused at the door or by what it asked for, or no question at all; or not ended.
        if record.error_code == CUT_OFF:
            self.cut += 1
        elif record.status == CLIENT_GONE:
            self.left += 1
        elif record.error_code is not None:
            self.failed += 1
        else:
            self.answered += 1


class AccessMiddleware:
    def __init__(
        self, app: ASGIApp, *, engine: Engine, settings: ServerSettings, log: AccessLog | None, tally: Tally
    ) -> None:
        self._app = app
        self._tally = tally
        self._engine = engine
        self._settings = settings
        self._log = log
        given = (settings.api_key,) if isinstance(settings.api_key, str) else settings.api_key or ()
        self._intake = Intake()
        self._ignored = IgnoredFieldLog()
        self._keys = Keys(given, settings.api_key_file)
        self._unlogged = PROBES | settings.unlogged_paths
        self._open = OPEN | (METRICS if settings.public_metrics else frozenset())
        self._open |= UI_OPEN if settings.ui else frozenset()
        self._quiet = UI_QUIET if settings.ui else frozenset[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        size_bytes = head_bytes(scope["headers"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
        # Without the scope, which has the record: what refers to itself is kept until the garbage collector comes.
        about = {name: scope.get(name) for name in ("client", "method", "path")}
        record = Record(_request_id(headers.get(b"x-request-id")), time.monotonic(), partial(self._finish, about))
        scope["holdfast.record"] = record
        scope[INTAKE] = self._intake
        ignored = IgnoredFields(strict=self._settings.strict_fields, log=self._ignored)
        IGNORED.set(ignored)

        speaks_anthropic = is_anthropic(scope)

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status, record.started = message["status"], True
                told = MutableHeaders(scope=message)
                told["X-Request-Id"] = record.request_id
                if speaks_anthropic:
                    told["Request-Id"] = record.request_id
                if ignored.header is not None:
                    told[HEADER] = ignored.header
            await send(message)

        try:
            if size_bytes > MAX_HEAD_BYTES:
                raise _head_too_large(size_bytes)
            self._check_key(scope, headers)
            if self._settings.loopback_only and not self._keys.asked_for:
                check_host(scope["method"], headers, self._settings.allowed_origins)
            self._check_engine(scope["path"])
            if scope.get(FULL) and scope["path"] not in PROBES:
                raise _full()
            if scope["method"] == "POST" and scope["path"] not in OPEN:
                _check_media(headers)
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            # The server leaves at once and cancels what runs. Nobody is told more by a traceback.
            record.status, record.error_code = record.status or CLIENT_GONE, CUT_OFF
        except Exception as error:
            if record.started:
                # uvicorn closes the connection, which is all that can still be said.
                raise
            status, body = describe(error)
            record.fail(body)
            await failure_response(scope, error, status, body, self._settings.retry_after_s)(scope, receive, note)
        finally:
            record.finish(record)

    def _finish(self, about: dict[str, Any], record: Record) -> None:
        self._tally.count(record)
        path = about["path"]
        unlogged = path in self._unlogged or (path in self._quiet and record.status < BAD_REQUEST)
        if self._log is not None and not unlogged:
            self._log(_line(about, record))

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """One that fits is enough: clients send a placeholder where they have no key for the other header."""
        path = scope["path"]
        if path in self._open or not self._keys.asked_for:
            return
        fitting = [key for key in _keys(headers) if self._keys.fit(key)]
        if not fitting:
            message = "the API key is missing or wrong"
            if path in METRICS:
                message += f"; {METRICS_NEED_KEY}"
            raise HttpFailure(UNAUTHORIZED, message, kind="authentication_error", code="invalid_api_key")
        scope[FITTING_KEY] = fitting[0]

    def _check_engine(self, path: str) -> None:
        if not path.startswith(NEEDS_ENGINE):
            return
        engine = self._engine
        if engine.failure is not None:
            raise EngineDiedError(f"the engine is dead: {engine.failure.message}")
        if engine.draining:
            raise DrainingError("the server is shutting down and does not accept new requests")
        if engine.sleeping and path in COMPUTING:
            raise SleepingError("the engine is sleeping", fix="POST /wake_up")
        # An engine that is being restarted, or does not answer, keeps new requests waiting; one that was never there
        # cannot even say what its tokenizer is.
        if not (engine.ready or engine.restarts or engine.sleeping or engine.unresponsive):
            raise HttpFailure(
                UNAVAILABLE, "the model is loading", kind="service_unavailable_error", code="loading", retry=True
            )


class WrittenPath:
    """A path with a slash too many, as a base URL with one at its end leaves it, is the path without it: of `paths`,
    before anything looks at it."""

    def __init__(self, app: ASGIApp, *, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._paths:
            path = "/" + scope["path"].strip("/")
            if path in self._paths:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class RootPath:
    """Takes the prefix off that a proxy in front has left on, before anything looks at a path."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._prefix + "/"):
            raw: bytes = scope.get("raw_path") or b""
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self._prefix),
                "raw_path": raw.removeprefix(self._prefix.encode()),
            }
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> str:
    """Whose request it is: that of the key that fits, where none is asked for of any that is sent, or where there is
    none of an address."""
    sent = [scope[FITTING_KEY]] if FITTING_KEY in scope else _keys(dict(scope["headers"]))
    client = scope.get("client")
    return hashlib.sha256(sent[0]).hexdigest() if sent else str(client[0] if client else "")


def _keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """OpenAI's clients send one as a bearer's, Anthropic's in a header of its own, some both."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    sent = (bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
    return [key.strip() for key in sent if key.strip()]


def _check_media(headers: dict[bytes, bytes]) -> None:
    """JSON is what is read here, and a body that says it is something else is none of ours. A browser sends forms and
    plain text for any web page without asking first: so what says nothing is taken only from whoever is no browser."""
    packed = headers.get(b"content-encoding", b"").strip().lower()
    if packed not in (b"", b"identity"):
        raise HttpFailure(
            WRONG_MEDIA,
            f"a body with Content-Encoding {shorten(packed.decode('latin-1'))!r} is not supported: send it as it is",
            kind="invalid_request_error",
            code="unsupported_media_type",
        )
    given = headers.get(b"content-type")
    if given is None:
        if b"origin" not in headers and b"sec-fetch-site" not in headers:
            return
    elif _JSON.match(given):
        return
    found = "none was given" if given is None else f"not {shorten(given.decode('latin-1'))!r}"
    raise HttpFailure(
        WRONG_MEDIA,
        f"the Content-Type of the body must be application/json, {found} (curl: -H 'Content-Type: application/json')",
        kind="invalid_request_error",
        code="unsupported_media_type",
    )


def _full() -> HttpFailure:
    return HttpFailure(
        UNAVAILABLE,
        "too many connections are open (--max-connections); try again later",
        kind="service_unavailable_error",
        code="too_many_connections",
        retry=True,
    )


def _head_too_large(size_bytes: int) -> HttpFailure:
    return HttpFailure(
        HEAD_TOO_LARGE,
        f"the request line and headers have {size_bytes} bytes; the limit is {MAX_HEAD_BYTES}",
        kind="invalid_request_error",
        code="headers_too_large",
    )


def _request_id(given: bytes | None) -> str:
    """The client's own id where it is harmless to print; a new one otherwise."""
    text = (given or b"").decode("latin-1")
    return text if _ID.fullmatch(text) else uuid.uuid4().hex


def _line(about: dict[str, Any], record: Record) -> dict[str, Any]:
    """`about`: of the scope what is told of it."""
    client = about["client"]
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": about["method"],
        "path": shorten(about["path"], LOGGED_PATH_CHARS),
        "status": record.status,
        "request_id": record.request_id,
        "id": record.answer_id,
        "model": record.model,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error_code": record.error_code,
        "holdfast_code": record.holdfast_code,
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
        "duration_s": round(time.monotonic() - record.started_s, 6),
    }
