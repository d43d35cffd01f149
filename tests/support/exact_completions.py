"""Streams made-up answers and notes to some microseconds when each request came and each token went: what a client's
timestamps are held against. It answers nothing else; `fake_completions.py` has faults and metrics.

    python exact_completions.py '{"ttft_s": [0.04, 0.1]}'     prints its port; ends when standard input closes, and
                                                              prints what it noted, as JSON

A request came when the kernel had it (SO_TIMESTAMPNS), not when this process got around to it; a token went when the
call that sends it began, on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import random
import re
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

SO_TIMESTAMPNS = 35
"""Of Linux; Python does not name it."""
TIMESPEC = struct.Struct("@qq")
LENGTH, TOKENS = re.compile(rb"content-length: *(\d+)", re.IGNORECASE), re.compile(rb'"max_tokens": *(\d+)')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class ExactSettings:
    ttft_s: tuple[float, float] = (0.04, 0.1)
    """Drawn evenly between the two, as is what follows."""
    itl_s: tuple[float, float] = (0.002, 0.02)


@dataclass
class Sent:
    received_s: float
    times: list[float] = field(default_factory=list)


@dataclass
class Stream:
    """One connection, and the answer that is under way."""

    link: socket.socket
    asked: bytes = b""
    arrived_s: float = 0.0
    left: int = 0
    draw: random.Random = field(default_factory=random.Random)
    sent: Sent = field(default_factory=lambda: Sent(0.0))


def chunk(document: dict[str, object] | None) -> bytes:
    data = b"data: " + (b"[DONE]" if document is None else json.dumps(document).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


ROLE = chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TOKEN = chunk({"choices": [{"delta": {"content": " token"}, "finish_reason": None}]})
LAST = chunk({"choices": [{"delta": {"content": " token"}, "finish_reason": "length"}]})


class ExactServer:
    def __init__(self, settings: ExactSettings) -> None:
        self.settings, self.sent = settings, list[Sent]()
        self._due: list[tuple[float, int, Stream]] = []
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self.port = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Until standard input closes."""
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            while self._due and self._due[0][0] <= time.monotonic():
                due_s, _, stream = heapq.heappop(self._due)
                self._send(stream, due_s)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(link, selectors.EVENT_READ, Stream(link))

    def _read(self, stream: Stream) -> None:
        data, notes, _, _ = stream.link.recvmsg(1 << 16, 128)
        now_s, walls_s = time.monotonic(), time.time()
        if not data:
            self._selector.unregister(stream.link)
            stream.link.close()
            return
        stream.arrived_s = now_s
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = TIMESPEC.unpack(note)
                stream.arrived_s -= max(0.0, walls_s - seconds - 1e-9 * nanoseconds)
        stream.asked += data
        head, blank, body = stream.asked.partition(b"\r\n\r\n")
        length, tokens = LENGTH.search(head), TOKENS.search(body)
        if blank and length is not None and len(body) == int(length[1]) and tokens is not None:
            stream.asked = b""
            stream.left, stream.sent = int(tokens[1]), Sent(stream.arrived_s)
            self._count += 1
            stream.draw.seed(self._count)
            stream.link.sendall(HEAD + ROLE)
            self._later(stream, stream.arrived_s + stream.draw.uniform(*self.settings.ttft_s))

    def _later(self, stream: Stream, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, id(stream), stream))

    def _send(self, stream: Stream, due_s: float) -> None:
        stream.left -= 1
        stream.sent.times.append(time.monotonic())
        stream.link.sendall(TOKEN if stream.left else LAST)
        if stream.left:
            self._later(stream, due_s + stream.draw.uniform(*self.settings.itl_s))
            return
        usage = {"prompt_tokens": 8, "completion_tokens": len(stream.sent.times)}
        self.sent.append(stream.sent)
        stream.link.sendall(chunk({"choices": [], "usage": usage}) + chunk(None) + b"0\r\n\r\n")


class RunningExact:
    """In a process of its own; `close` gives what it noted."""

    def __init__(self, settings: ExactSettings) -> None:
        words = [sys.executable, __file__, json.dumps(asdict(settings))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._noted: list[dict[str, Any]] | None = None

    def close(self) -> list[dict[str, Any]]:
        if self._noted is None:
            said, _ = self._process.communicate("", timeout=60)
            self._noted = json.loads(said)
        return self._noted


@contextlib.contextmanager
def running_exact(settings: ExactSettings | None = None) -> Iterator[RunningExact]:
    exact = RunningExact(settings or ExactSettings())
    try:
        yield exact
    finally:
        exact.close()


if __name__ == "__main__":
    gc.disable()
    server = ExactServer(ExactSettings(**{name: tuple(pair) for name, pair in json.loads(sys.argv[1]).items()}))
    print(server.port, flush=True)
    server.serve()
    print(json.dumps([asdict(sent) for sent in server.sent]), flush=True)
