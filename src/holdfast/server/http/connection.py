"""One HTTP/1.1 connection with limits on size and time, safe against request smuggling.

uvicorn's parser by itself takes heads and trailers of any size, keeps reading after a response, and takes the body of a
request that offers an upgrade for the next request. Here

    head      request line and headers have a size limit and a deadline
    upgrade   an offer, as RFC 9110 has it: not taken up, and the request is read as any other
    trailers  skipped, never headers; whatever is neither head nor body has a limit of its own
    early     a response before the end of the body is the connection's last: the rest is discarded for a short while,
              so that the client comes to read it
    behind    further requests may arrive before the first response: few of them wait, and reading continues, so that a
              client that disconnects is noticed
    invalid   bytes behind a whole request, that are no request: those before it are answered, and the connection ends
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger("holdfast.server")

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and all headers. Proxies send some 8 KiB at most."""
HEAD_TIMEOUT_S = 30.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
FULL_TIMEOUT_S = 2.0
"""The same for a connection beyond the bound: the few places there are for probes."""
MAX_BEHIND = 16
"""Requests that wait behind the one that is answered."""
LINGER_BYTES, LINGER_S = 32 << 20, 5.0
"""What is still read, and for how long, of a body that nobody wants: a client that were cut off at once would lose the
answer together with what it was sending. Twice the largest body that is taken by default."""

FULL = "holdfast.full"
"""In a request's scope: its connection is one too many."""

_BAD = (400, "Bad Request", "not a valid HTTP/1.1 request")
_TOO_LARGE = (431, "Request Header Fields Too Large", "the headers are too large")
_TOO_SLOW = (408, "Request Timeout", "the request headers were not received in time")
_CLOSE = (b"connection", b"close")

_IDLE, _LINGERING, _HALF_ASKED, _UNREAD = range(4)
"""What may be closed for others, in this order: nothing was asked, or not all of a head has come; refused, and only
being read to its end; a body has not come yet; an answer is complete and its client has not taken all of it."""


class _Refused(Exception):
    """Raised out of the parser, which then stops where it is."""


class Connection(HttpToolsProtocol):
    """One is made for each connection."""

    def __init__(self, *arguments: Any, full: bool = False, **named: Any) -> None:
        """`full`: it is one too many, and only told so."""
        super().__init__(*arguments, **named)
        self._full = full
        self._waits_since_s = 0.0
        self._head_bytes = 0
        self._in_head = True
        self._took_body = False
        self._bodiless_bytes = 0
        """Read since the last byte of a body, where one is due."""
        self._offer: tuple[bytes, str] | None = None
        """Method and HTTP version of a request that offers an upgrade."""
        self._answered: RequestResponseCycle | None = None
        """Whose turn it is; `cycle` is the one that came last."""
        self._timer: asyncio.TimerHandle | None = None
        self._linger_bytes: int | None = None
        """Left to be thrown away; None: the connection is in use."""
        self._unread_bytes: int | None = None
        """The same while answers are on their way, behind which nothing is read any more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.close()
            return
        if self._unread_bytes is not None:
            self._unread_bytes -= len(data)
            if self._unread_bytes < 0:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
            self._wait()
        self._took_body = False
        self._parse(data)
        self._check_sizes(len(data))

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            self._decline_upgrade(data[found.args[0] :])
        except httptools.HttpParserError as error:
            # What was sent is not repeated, it may be anything.
            log.info("invalid HTTP request from client %s; its connection is closed", _peer(self.client))
            mistaken = not isinstance(error, httptools.HttpParserCallbackError)  # Else refused here: it asks too much.
            if not (mistaken and self._answering and self._end_after_answers()):
                self._refuse(*_BAD)

    def _check_sizes(self, read_bytes: int) -> None:
        """One read may hold a whole head and much of a body; only a head that has not ended by then is counted."""
        if self._unread_bytes is not None:
            return
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_LARGE)
            return
        self._bodiless_bytes = 0 if self._took_body else self._bodiless_bytes + read_bytes
        if self._bodiless_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LARGE)

    def _decline_upgrade(self, rest: bytes) -> None:
        """The parser has taken what follows for another protocol: the request is read again without the offer."""
        if self._offer is None:
            return
        (method, version), self._offer = self._offer, None
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's own.
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if method == b"CONNECT" or hosts > 1 or (hosts == 0 and version == "1.1") or len(self.pipeline) >= MAX_BEHIND:
            raise _Refused
        if self.parser.should_upgrade():
            self._offer = (method, version)
            return
        self._in_head, self._head_bytes, self._bodiless_bytes = False, 0, 0
        self._stop_waiting()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[FULL] = self._full
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._took_body = True
        super().on_body(body)
        if self.pipeline and self.flow.read_paused:
            raise _Refused  # A large body behind a request that is answered: reading must go on, and this be held.

    def on_message_complete(self) -> None:
        if self._offer is None:
            super().on_message_complete()
            self._in_head = True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _Answering(app, self, cycle))

    @property
    def expendable(self) -> tuple[int, float] | None:
        """How soon it may be closed to make room for others, as `accept.py` asks. A byte now and then makes nothing
        younger: what counts is since when it has not carried a request."""
        if self.transport is None or self.transport.is_closing():
            return None
        since_s = self._waits_since_s
        if self._linger_bytes is not None:
            return _LINGERING, since_s
        if self._answering:
            unasked = self.cycle is self._answered and self.cycle.more_body and not self.cycle.response_started
            return (_HALF_ASKED, since_s) if unasked else None
        return (_UNREAD if self.transport.get_write_buffer_size() else _IDLE), since_s

    @property
    def idle(self) -> bool:
        """It is open, and carries no request."""
        rank = self.expendable
        return rank is not None and rank[0] == _IDLE

    def drop(self) -> None:
        self.transport.abort()

    def on_response_complete(self) -> None:
        self._waits_since_s = self.loop.time()
        if self._linger_bytes is None:
            super().on_response_complete()

    @property
    def full(self) -> bool:
        return self._full

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._timer is None:
            limit_s = FULL_TIMEOUT_S if self._full else HEAD_TIMEOUT_S
            self._timer = self.loop.call_later(limit_s, self._lose_patience)

    def _lose_patience(self) -> None:
        self._timer = None
        if self._answering:
            self._wait()  # What comes behind a request that is being answered is not due yet.
        else:
            self._refuse(*_TOO_SLOW)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        if self.transport.is_closing() or self._linger_bytes is not None:
            return
        if self._answering and not self.cycle.disconnected:
            self.transport.close()  # Into the middle of another answer nothing can be said.
            return
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain\r\ncontent-length: {len(message)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n{message}".encode())
        self.part()

    def _end_after_answers(self) -> bool:
        """What was asked in whole is answered before the connection ends. False: it is not that, and a request whose
        body cannot be read is free to be refused, if nothing of its answer is out."""
        last = self.cycle
        if not last.more_body:
            last.keep_alive = False
            last.transport = _Parting(self)  # type: ignore[assignment]
            self._unread_bytes = LINGER_BYTES
            self._stop_waiting()
            return True
        if last is self._answered and not last.response_started:
            last.disconnected = True  # Nothing of the application's goes out.
            last.message_event.set()
        return False

    def part(self) -> None:
        """All is said: closes once the client has read it and closes too, or at the limits."""
        self._stop_waiting()
        if self.transport.is_closing() or self._linger_bytes is not None:
            return
        self._linger_bytes = LINGER_BYTES
        if self.transport.can_write_eof():  # Under TLS there is no half of a connection to close.
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


class _Answering:
    """Around the application, for one request: how its answer goes out where the rule is not enough."""

    def __init__(self, app: Any, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._connection = connection
        self._cycle = cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, connection = self._cycle, self._connection
        until_close = scope["http_version"] == "1.0"  # Which has no chunks: the end of the connection ends an answer.

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                if cycle.more_body:
                    cycle.transport = _Parting(connection)  # type: ignore[assignment]
                if cycle.more_body or connection.full:
                    message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
                if until_close:
                    cycle.chunked_encoding = False
            elif until_close:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, sending)


class _Parting:
    """A transport whose end is the connection's parting."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.part()


def head_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) for name, value in headers)


def _peer(client: tuple[str, int] | None) -> str:
    return "unknown" if client is None else f"{client[0]}:{client[1]}"
