"""Errors as HTTP: which status and which OpenAI code each of ours becomes. Never shows a traceback to a client."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from holdfast.checkpoints.lora import adapter as lora
from holdfast.errors import (
    ContextLengthError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineHungError,
    HoldfastError,
    OverloadedError,
    RequestError,
    SleepingError,
    StepMemoryError,
    UnknownModelError,
    UnsupportedOptionError,
)
from holdfast.server.http.error_text import format_message
from holdfast.server.http.paths import VLLM_WORDED
from holdfast.units import shorten

log = logging.getLogger("holdfast.server")

BAD_REQUEST, UNAUTHORIZED, NOT_FOUND, NOT_ALLOWED, TIMED_OUT, TOO_LARGE, TOO_MANY = 400, 401, 404, 405, 408, 413, 429
FORBIDDEN, WRONG_MEDIA, HEAD_TOO_LARGE = 403, 415, 431
INTERNAL, UNAVAILABLE = 500, 503
MAX_SAID_CHARS = 2000
"""Of one sentence of an answer: the last bound, whatever a message repeats of what it was given."""

# Absolute ones, of Unix and of Windows; not the paths of this API.
_API = r"(?:v1|health|metrics|memory|sleep|wake_up|tokenize|detokenize)\b"
_PATH = re.compile(rf"(?<![\w./-])(?:/(?!{_API})[\w.+@-]+(?:/[\w.+@ -]*[\w.+@-])*/?|[A-Za-z]:\\[^\s'\"]+)")

INVALID_REQUEST = "invalid_request_error"
_VLLM_TYPES = {BAD_REQUEST: "BadRequestError", NOT_FOUND: "NotFoundError"}
"""What vLLM says in place of it, by status, on the paths in `VLLM_WORDED`."""

# The most particular class first: the first that fits decides. Types of what a client can mend are vLLM's words, codes
# are OpenAI's: scripts look for either.
_SHAPES: tuple[tuple[type[HoldfastError], int, str, str], ...] = (
    (ContextLengthError, BAD_REQUEST, "BadRequestError", "context_length_exceeded"),
    (UnsupportedOptionError, BAD_REQUEST, "BadRequestError", "unsupported_parameter"),
    (UnknownModelError, NOT_FOUND, "NotFoundError", "model_not_found"),
    (OverloadedError, TOO_MANY, "rate_limit_error", "overloaded"),
    (RequestError, BAD_REQUEST, "BadRequestError", "invalid_value"),
    (DrainingError, UNAVAILABLE, "service_unavailable_error", "draining"),
    (SleepingError, UNAVAILABLE, "service_unavailable_error", "sleeping"),
    (EngineDiedError, UNAVAILABLE, "service_unavailable_error", "engine_dead"),
    (EngineHungError, UNAVAILABLE, "service_unavailable_error", "engine_hung"),
    (StepMemoryError, UNAVAILABLE, "service_unavailable_error", "out_of_memory"),
    (EngineError, INTERNAL, "server_error", "engine_error"),
)


_ABSENT = frozenset({lora.NOT_ALLOWED})
"""Codes of what is not there for a client, be it elsewhere or nowhere: 404, where others of their class are a 400."""


class HttpFailure(Exception):
    """A refusal that has no error class of its own because only HTTP knows it."""

    def __init__(
        self, status: int, message: str, *, kind: str, code: str, retry: bool = False, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.retry = retry
        self.param = param


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI's error object."""
    if isinstance(error, HttpFailure):
        openai_type = error.kind
        if openai_type == INVALID_REQUEST:
            openai_type = _VLLM_TYPES.get(error.status, openai_type)
        return error.status, _body(error.message, openai_type, error.param, error.code)
    if isinstance(error, HoldfastError):
        for kind, status, openai_type, code in _SHAPES:
            if isinstance(error, kind):
                if error.code in _ABSENT:
                    status, openai_type, code = NOT_FOUND, "NotFoundError", "not_found"
                body = _body(format_message(error), openai_type, error.field, code)
                extra = {"code": error.code, "needed": error.needed, "found": error.found, "fix": error.fix}
                if status >= INTERNAL:
                    body["message"] = without_paths(body["message"])
                    extra = {name: value and without_paths(value) for name, value in extra.items()}
                body["holdfast"] = {
                    name: shorten(value, MAX_SAID_CHARS) for name, value in extra.items() if value is not None
                }
                return status, body
    log.error("internal server error while handling a request", exc_info=error)
    return INTERNAL, _body("internal server error; see the server log", "server_error", None, "internal")


def without_paths(text: str) -> str:
    """A fault may quote files of this machine: what clients are told has none of them."""
    return _PATH.sub("(a file)", text)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"message": shorten(message, MAX_SAID_CHARS), "type": kind, "param": param, "code": code}


_ANTHROPIC_CODES = {
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "not_allowed": "invalid_request_error",
    "request_too_large": "request_too_large",
}
_ANTHROPIC_TYPES = {
    "BadRequestError": "invalid_request_error",
    "NotFoundError": "not_found_error",
    "service_unavailable_error": "overloaded_error",
    "server_error": "api_error",
}
"""Of Anthropic's errors, by OpenAI's code or type; others are called the same in both."""


def is_anthropic(scope: Scope) -> bool:
    """Whether a request speaks Anthropic's language, and is to be refused in it."""
    path = scope["path"]
    return (
        path == "/v1/messages"
        or path.startswith("/v1/messages/")
        or any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def anthropic_error(body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's error, of OpenAI's error object."""
    kind = _ANTHROPIC_CODES.get(body["code"]) or _ANTHROPIC_TYPES.get(body["type"], body["type"])
    message = body["message"]
    if body["code"] == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # By these words Claude Code knows that it must compact.
    told = {"type": kind, "message": message}
    if "holdfast" in body:
        told["holdfast"] = body["holdfast"]
    return {"type": "error", "error": told, "request_id": request_id}


def failure_response(scope: Scope, error: Exception, status: int, body: dict[str, Any], retry_after_s: int) -> Response:
    """`status` and `body` as `describe` has them."""
    headers = {}
    if status in (TOO_MANY, UNAVAILABLE) and not (isinstance(error, HttpFailure) and not error.retry):
        headers["Retry-After"] = str(retry_after_s)
    if status == HEAD_TOO_LARGE:
        headers["Connection"] = "close"  # Who sends such heads sends more of them.
    if status == UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(scope, status, body, headers)


def error_response(scope: Scope, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """OpenAI's error object in the shape of the API that was asked."""
    if is_anthropic(scope):
        return json_response(anthropic_error(body, scope["holdfast.record"].request_id), status, headers)
    if scope["path"] not in VLLM_WORDED and body["type"] in _VLLM_TYPES.values():
        body = body | {"type": INVALID_REQUEST}
    return json_response({"error": body}, status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
