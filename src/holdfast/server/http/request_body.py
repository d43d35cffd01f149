"""Bodies of requests, read with a bound on their size, on their time, and on all that are on their way at once.

Knows nothing of what is in them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope

from holdfast.footprint.cpu import READING_BYTES
from holdfast.server.http.errors import TIMED_OUT, TOO_LARGE, UNAVAILABLE, HttpFailure
from holdfast.server.response.streams import ClientGone

INTAKE = "holdfast.intake"
"""In a request's scope: the Intake of its server."""
LEAST_BYTES_PER_S = 16 << 10
"""A body may come as slowly, once its time limit is over: a byte now and then does not hold a connection."""
OWN_BYTES = 16 << 10
"""Of each body that are not counted: small requests are not refused for somebody's large ones."""


class Intake:
    """Bytes of bodies that have come so far, and are not whole; and whose turn it is to be read of those that are."""

    def __init__(self, most_bytes: int = READING_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def turn(self) -> None:
        """One request at each turn of the loop: reading it takes milliseconds, and fifty that come at once would keep
        every stream waiting for all of them."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Its client has not left.
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False

    @contextmanager
    def reading(self, limit_bytes: int) -> Iterator[BodyPart]:
        """`limit_bytes`: of this body; one at a time always has room."""
        part = BodyPart(self, max(self._most_bytes, limit_bytes))
        try:
            yield part
        finally:
            self._held_bytes -= part.held_bytes

    def take(self, more_bytes: int, most_bytes: int) -> None:
        if self._held_bytes + more_bytes > most_bytes:
            raise HttpFailure(
                UNAVAILABLE,
                "too many large request bodies at once; try again later",
                kind="service_unavailable_error",
                code="overloaded",
                retry=True,
            )
        self._held_bytes += more_bytes


class BodyPart:
    """Of one body."""

    def __init__(self, intake: Intake, most_bytes: int) -> None:
        self._intake = intake
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """It has so many bytes now. Raises where there is no room."""
        more_bytes = max(0, size_bytes - OWN_BYTES) - self.held_bytes
        self._intake.take(more_bytes, self._most_bytes)
        self.held_bytes += more_bytes


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """Raises HttpFailure for what is too large, too slow or too much at once, and ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
    intake: Intake = scope[INTAKE]
    with intake.reading(limit_bytes) as part:
        body = await _read(receive, part, limit_bytes, timeout_s)
    await intake.turn()
    return body


async def _read(receive: Receive, part: BodyPart, limit_bytes: int, timeout_s: float) -> bytes:
    chunks: list[bytes] = []
    size_bytes, clock = 0, asyncio.get_running_loop().time
    began_s = clock()
    while True:
        late_s = began_s + timeout_s + size_bytes / LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(min(late_s, clock() + timeout_s)):
                message = await receive()
        except TimeoutError:
            raise HttpFailure(
                TIMED_OUT,
                f"the request body was too slow: nothing for {timeout_s:g} s, or less than {LEAST_BYTES_PER_S} bytes/s",
                kind="invalid_request_error",
                code="request_timeout",
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return b"".join((*chunks, chunk))
        part.grow(size_bytes)
        chunks.append(chunk)


def _too_large(limit_bytes: int) -> HttpFailure:
    return HttpFailure(
        TOO_LARGE,
        f"the request body is larger than the limit of {limit_bytes} bytes (--max-body-size)",
        kind="invalid_request_error",
        code="request_too_large",
    )
