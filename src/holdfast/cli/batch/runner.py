"""Asks the application each line of a batch and shapes its answer, some lines at a time.

Owns what a line must say, OpenAI's shape of an answer, and how many are asked at once. The application is asked as a
server asks it, so that answers are a server's. Knows nothing of files, flags and terminals.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from holdfast.cli.batch.files import MOST_LINE_BYTES, InputLine
from holdfast.engine.interface import Engine
from holdfast.errors import EngineDiedError
from holdfast.units import shorten

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
MOST_COMPARED = 100_000
"""Lines of a run whose custom_id is compared with those before: a few megabytes."""
FULL_PAUSE_S = 0.05
"""Between two tries of a line that found the engine full of this batch's own work."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streaming(msgspec.Struct):
    stream: Any = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    """The id comes first: `batch/files.py` looks for it there."""

    id: str
    custom_id: str | None
    response: _Response
    error: dict[str, Any] | None


_MALFORMED = "invalid_line"


class _Refused(Exception):
    """A line that cannot be asked."""

    def __init__(self, problem: str, code: str, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(problem)
        self.status = status
        self.malformed = code == _MALFORMED
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "invalid_request_error"
        error = {"message": problem, "type": kind, "param": None, "code": code}
        self.body = msgspec.json.encode({"error": error})


@dataclass(slots=True)
class _Reply:
    """What the application said; `whole` is False when it was cut off."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""
    whole: bool = False


class BatchRunner:
    """One batch. `append` gets each answer as a line, and returns when it is kept."""

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        append: Callable[[bytes], Awaitable[None]],
        *,
        urls: tuple[str, ...] = URLS,
        on_answer: Callable[[bool], None] = lambda good: None,
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`urls`: those of them that the application has. `on_answer` is told of each that is kept, and whether it is
        one; `on_lost` of each line that the server itself could not answer now, which has none and can be asked
        again."""
        self._app = app
        self._engine = engine
        self._append = append
        self._urls = urls
        self._on_answer = on_answer
        self._on_lost = on_lost
        self.malformed = 0
        """Lines that are no requests at all."""
        self.repeated = 0
        """Lines that had the custom_id of another before them."""
        self._seen: set[int] = set()
        self._asking = 0
        self._full = asyncio.Lock()

    async def run(self, lines: Iterator[InputLine], concurrency: int) -> None:
        """Raises EngineDiedError when the engine was given up; what was asked then has no answer and can be asked
        again."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(lines))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, lines: Iterator[InputLine]) -> None:
        for line in lines:
            custom_id, reply = await self._reply(line)
            good = reply.status == HTTPStatus.OK
            if not good and _passing(reply.status):
                self._on_lost(_lost(line, custom_id, reply))
            else:
                await self._append(_answer(line, custom_id, reply))
                self._on_answer(good)
            # A file of lines that are all refused would keep the loop to itself.
            await asyncio.sleep(0)

    async def _reply(self, line: InputLine) -> tuple[str | None, _Reply]:
        custom_id: str | None = None
        try:
            request = read_line(line, self._urls)
            custom_id = request.custom_id
            self._compare(custom_id)
            return custom_id, await self._ask_until_room(request.url, bytes(request.body))
        except _Refused as refused:
            self.malformed += refused.malformed
            return custom_id or _custom_id_of(line), _Reply(refused.status, uuid.uuid4().hex, refused.body)

    def _compare(self, custom_id: str) -> None:
        if hash(custom_id) in self._seen:
            self.repeated += 1
        elif len(self._seen) < MOST_COMPARED:
            self._seen.add(hash(custom_id))

    async def _ask_until_room(self, url: str, body: bytes) -> _Reply:
        """Lines with many answers may fill the engine's queue: the others then wait for one another's end."""
        reply = await self._ask(url, body)
        if reply.status != HTTPStatus.TOO_MANY_REQUESTS:
            return reply
        async with self._full:
            while True:
                alone = self._asking == 0
                reply = await self._ask(url, body)
                if reply.status != HTTPStatus.TOO_MANY_REQUESTS or alone:
                    return reply
                await asyncio.sleep(FULL_PAUSE_S)

    async def _ask(self, url: str, body: bytes) -> _Reply:
        self._asking += 1
        try:
            reply = await _call(self._app, url, body)
        finally:
            self._asking -= 1
        if not reply.whole:
            raise asyncio.CancelledError
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR and self._engine.failure is not None:
            raise EngineDiedError(
                f"the engine failed for good: {self._engine.failure.message}",
                fix="fix what it names, then run the same command: it resumes where this run ended",
            )
        return reply


def _passing(status: int) -> bool:
    """Of the server's state and not of what was asked: the same line may be answered another time."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _answer(line: InputLine, custom_id: str | None, reply: _Reply) -> bytes:
    body, error = (reply.body, None) if reply.status == HTTPStatus.OK else _problem_of(reply.body, reply.status)
    response = _Response(reply.status, reply.request_id, msgspec.Raw(body))
    return msgspec.json.encode(_Answer(line.answer_id, custom_id, response, error)) + b"\n"


def _lost(line: InputLine, custom_id: str | None, reply: _Reply) -> str:
    problem = _problem_of(reply.body, reply.status)[1]
    said = shorten(f"{problem['message']} ({problem['code']})", 300)
    name = shorten(custom_id or "no custom_id", 60)
    return f"line {line.number} ({name!r}) has no response, status {reply.status}: {said}"


def read_line(line: InputLine, urls: tuple[str, ...]) -> _Line:
    if line.text is None:
        raise _Refused(
            f"line {line.number} is longer than {MOST_LINE_BYTES} bytes",
            "request_too_large",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
    try:
        request = msgspec.json.decode(line.text, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"line {line.number} is not a batch request: {error}", _MALFORMED) from None
    if request.method != "POST":
        raise _Refused(f"method: {shorten(request.method)!r} is not valid; a batch takes POST only", "invalid_method")
    if request.url not in urls:
        raise _Refused(f"url: {shorten(request.url)!r} is not one of {', '.join(urls)}", "invalid_url")
    if _streams(request.body):
        raise _Refused("body.stream: a batch cannot stream; leave it out", "unsupported_parameter")
    return request


def _streams(body: msgspec.Raw) -> bool:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body, type=_Streaming).stream is True
    return False  # What is wrong with it is the application's to say.


def _custom_id_of(line: InputLine) -> str | None:
    """Of a line that is wrong elsewhere: whoever wrote it finds it again."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(line.text or b"null")
        if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
            return str(found["custom_id"])
    return None


def _problem_of(body: bytes, status: int) -> tuple[bytes, dict[str, Any]]:
    """The body of a refusal, and its code and message once more, where OpenAI's batches have them, and where vLLM's do:
    an error in the error, whose code is the status."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        answer = msgspec.json.decode(body)
        said = answer["error"]
        problem = {"code": str(said["code"]), "message": str(said["message"])}
        vllms = {"message": problem["message"], "type": said["type"], "param": said["param"], "code": status}
        return msgspec.json.encode(answer), {**problem, "error": vllms}
    return b"null", {"code": "internal", "message": "the server failed on this request"}


async def _call(app: ASGIApp, path: str, body: bytes) -> _Reply:
    """One request to the application, without a network."""
    reply, sent, pieces = _Reply(), False, list[bytes]()
    ended = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await ended.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            reply.status, reply.request_id = message["status"], headers.get(b"x-request-id", b"").decode()
        else:
            pieces.append(message.get("body", b""))
            reply.whole = not message.get("more_body", False)

    headers = [(b"host", b"batch"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": None, "server": None, "state": {},
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    finally:
        ended.set()
    reply.body = b"".join(pieces)
    return reply
