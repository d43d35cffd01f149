"""What comes before a body, bounded in bytes and in time. Knows connections, and nothing of what is asked.

uvicorn's parser takes headers of any size and waits for their end for ever; a stranger could hold memory and sockets
with them. Here a connection whose request line and headers outgrow the limit, or do not end in time, is answered and
closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and all headers. Proxies send some 8 KiB at most."""
HEAD_TIMEOUT_S = 30.0
"""From the first byte of a request, or from the connection, to the end of its headers."""

_TOO_LARGE = (431, "Request Header Fields Too Large", b"the headers are too large")
_TOO_SLOW = (408, "Request Timeout", b"the headers did not end in time")


class HeadLimits(HttpToolsProtocol):
    """uvicorn makes one for each connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            self._wait()
        super().data_received(data)
        # One read may hold a whole head and much of a body; only a head that has not ended by then is counted.
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _wait(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._answering:
            self._wait()  # What comes behind a request that is being answered is not due yet.
        else:
            self._refuse(*_TOO_SLOW)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, status: int, phrase: str, message: bytes) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if not self._answering:  # Into the middle of another answer nothing can be said.
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain\r\ncontent-length: {len(message)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + message)
        self.transport.close()


def head_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) for name, value in headers)
