"""One HTTP/1.1 connection that asks and times the answer: a timestamp for every event, none of them parsed here.

    data_received ─► clock ─► httptools ─► on_body: lines that begin with `data:` are counted, each gets the time

Of a stream the first and the last pieces are kept, for whoever reads what they mean (`answers`). One process reads more
than 40,000 events a second this way on one core. Knows no JSON.
"""

from __future__ import annotations

import asyncio
import ssl
from array import array
from collections import deque
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httptools

from holdfast.units import MIB

HEAD_PIECES, TAIL_PIECES = 8, 8
"""Enough for a role, a first token; a last token, a finish reason, usage and [DONE], each in a piece of its own."""
BODY_LIMIT_BYTES = 64 << 10
"""Of an answer that is no stream, which is an error or somebody else's."""
EVENT_LIMIT_BYTES = 16 * MIB
CONNECT_TIMEOUT_S = 20.0
FIRST_FINAL = 200
"""Statuses below announce an answer."""
STALE_S = 0.1
"""A kept connection that the server had given up already breaks within a round trip; one that breaks later had been
taken, and its request with it."""


class RawAnswer:
    """What came back for one request, as it came."""

    __slots__ = ("body", "end_s", "failure", "head", "keep_all", "pieces", "sent_s", "status", "tail", "times")

    def __init__(self, *, keep_all: bool = False) -> None:
        self.sent_s = 0.0
        self.end_s = 0.0
        self.status = 0
        self.times = array("d")
        """Of every event, on the monotonic clock."""
        self.head: list[bytes] = []
        self.tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self.keep_all = keep_all
        self.pieces: list[bytes] = []
        """The whole stream, for whoever needs its text."""
        self.body = b""
        """Where it was no stream."""
        self.failure = ""
        """Why there is no whole answer: connect, reset, timeout, protocol; or `cancelled`, by this client."""


class StreamConnection(asyncio.Protocol):
    """Asks one request at a time; kept for the next one where the server allows it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: RawAnswer | None = None
        self._done: asyncio.Future[None] | None = None
        self._cancel_after: int | None = None
        self._rest = b""
        self._now = 0.0
        self._streaming = self._framed = False
        self.closed = False
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    async def ask(self, message: bytes, answer: RawAnswer, *, timeout_s: float, cancel_after: int | None) -> None:
        """Fills `answer`; a failure stands in it and is not raised."""
        loop = asyncio.get_running_loop()
        self._answer, self._cancel_after, self._rest = answer, cancel_after, b""
        self._streaming = self._framed = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = loop.create_future()
        patience = loop.call_later(timeout_s, self._fail, "timeout")
        answer.sent_s = monotonic()
        if self.closed or self._transport is None:
            self._fail("reset")
        else:
            self._transport.write(message)
        try:
            await self._done
        finally:
            patience.cancel()
            self.used = True

    # From the loop

    def data_received(self, data: bytes) -> None:
        self._now = monotonic()
        if self._answer is None:
            self.close()  # Nobody asked.
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._transport = None
        if self._answer is not None:
            if exc is None and self._answer.status and not self._framed:
                self._now = monotonic()
                self._finish()  # An answer without a length ends with its connection.
            else:
                self._fail("reset")
        self._parser = None  # It holds this connection: a cycle, and nobody collects those during a run.

    # From the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type" and value.lower().startswith(b"text/event-stream"):
            self._streaming = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._fail(f"protocol: content-encoding {value[:20].decode('latin-1')}, and none was accepted")
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:  # It was ended by an event before this one.
            return
        if not self._streaming:
            answer.body = (answer.body + body)[:BODY_LIMIT_BYTES]
            return
        if self._rest:
            body = self._rest + body
        whole = body.rfind(b"\n") + 1
        if whole == len(body):
            self._rest = b""
        else:
            body, self._rest = body[:whole], body[whole:]
            if len(self._rest) > EVENT_LIMIT_BYTES:
                self._fail("protocol")
                return
        # Within JSON a line's end is escaped: what begins a line begins an event.
        events = body.count(b"\ndata:") + body.startswith(b"data:")
        if not events:
            return
        times = answer.times
        if events == 1:
            times.append(self._now)
        else:
            times.extend([self._now] * events)
        if answer.keep_all:
            answer.pieces.append(body)
        if len(answer.head) < HEAD_PIECES:
            answer.head.append(body)
        answer.tail.append(body)
        if self._cancel_after is not None and len(times) >= self._cancel_after:
            self._fail("cancelled")

    def on_message_complete(self) -> None:
        if self._answer is None:
            return
        if self._answer.status < FIRST_FINAL:  # 100 Continue, 103 Early Hints: the answer comes behind it.
            self._answer.status = 0
            self._streaming = self._framed = False
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._finish()

    # Ends

    def _fail(self, why: str) -> None:
        if self._answer is not None:
            self._answer.failure = why
            self._now = monotonic()
            self._finish()
        self.close()

    def _finish(self) -> None:
        assert self._answer is not None
        self._answer.end_s = self._now
        self._answer = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()


class Connections:
    """To one server; as many as are asked for at once, each used again."""

    def __init__(self, url: str, path: str, headers: dict[str, str], certificate: str = "") -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        secure = parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._tls = trusted(certificate) if secure else None
        self._idle: list[StreamConnection] = []
        target = parts.path.rstrip("/").removesuffix("/v1") + path
        lines = [f"POST {target} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = ("\r\n".join(lines) + "\r\nContent-Length: ").encode()

    async def ask(
        self, body: bytes, *, timeout_s: float, cancel_after: int | None = None, keep_all: bool = False
    ) -> RawAnswer:
        message = self._head + b"%d\r\n\r\n" % len(body) + body
        first_s: float | None = None
        while True:
            answer = RawAnswer(keep_all=keep_all)
            began_s = monotonic()
            connection, why = await self._open()
            if connection is None:
                answer.sent_s, answer.end_s, answer.failure = first_s or began_s, monotonic(), why
                return answer
            kept = connection.used
            await connection.ask(message, answer, timeout_s=timeout_s, cancel_after=cancel_after)
            if not connection.closed:
                self._idle.append(connection)
            if not kept:
                answer.sent_s = began_s  # A new connection is a part of what a client waits for.
            if first_s is None:
                first_s = answer.sent_s
            # A server may close a kept connection just when it is used: that is asked again, as every client does.
            stale = kept and answer.failure == "reset" and not answer.status and answer.end_s - answer.sent_s < STALE_S
            if not stale:
                answer.sent_s = first_s
                return answer

    async def open_ahead(self, count: int) -> None:
        """So many before the run begins: that a client has its connections already is the usual case."""
        opened = await asyncio.gather(*(self._connect() for _ in range(count)))
        for connection, _ in opened:
            if connection is not None:
                connection.used = True
                self._idle.append(connection)

    async def _open(self) -> tuple[StreamConnection | None, str]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, ""
        return await self._connect()

    async def _connect(self) -> tuple[StreamConnection | None, str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(StreamConnection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            return None, "connect: timed out"
        except OSError as error:
            return None, f"connect: {error.strerror or error}"
        return connection, ""

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def trusted(certificate: str) -> ssl.SSLContext:
    """What the system trusts, and a certificate of the server's own; "insecure": anything."""
    if certificate != "insecure":
        context = ssl.create_default_context()
        if certificate:
            context.load_verify_locations(certificate)
        return context
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
