"""A fake server with the OpenAI API and known latencies, in a process of its own: it replays bytes, no model is in it.

    python fake_completions.py '{"itl_s": [0.004, 0.006]}'     prints its port; ends when standard input closes, and
                                                               prints when it sent what, as one line of JSON

It notes the time of each send on the monotonic clock, which all processes of a machine share. What may be wrong with a
server can be wrong with it: see FakeSettings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_LEAKED_BYTES = 1 << 30


@dataclass(frozen=True)
class FakeSettings:
    ttft_s: tuple[float, float] = (0.005, 0.005)
    """Drawn evenly between the two, as is what follows."""
    itl_s: tuple[float, float] = (0.002, 0.002)
    slots: int = 0
    """So many are served at once, the others wait; 0: all."""
    error_every: int = 0
    stall_at_s: float = 0.0
    stall_s: float = 0.0
    """Nothing is sent for so long, from that many seconds after the first streamed request on."""
    ends_after_s: float = 0.0
    """After the first streamed request; 0: it stays."""
    leak_bytes_per_s: float = 0.0
    """Until MOST_LEAKED_BYTES: on a busy machine a run may take many times its seconds."""
    slower_per_s: float = 0.0
    """Time between tokens grows by this share of itself with every second."""
    line_end: str = "\n"
    role_event: bool = True
    usage: bool = True


@dataclass
class Sent:
    received_s: float
    times: list[float] = field(default_factory=list)


class FakeServer:
    def __init__(self, settings: FakeSettings) -> None:
        self.settings = settings
        self.sent: list[Sent] = []
        self.asked: list[dict[str, Any]] = []
        self.began_s = 0.0
        self.ended = asyncio.Event()
        self.leaked = bytearray()
        self.count = 0
        self.room = asyncio.Semaphore(settings.slots or 1 << 30)
        self.running = self.waiting = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                received_s = time.monotonic()
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line[15:])
                body = await reader.readexactly(length)
                path = head.split()[1]
                if path == b"/metrics":
                    self._page(writer, self._metrics(), b"text/plain")
                elif path == b"/health":
                    self._page(writer, b"", b"text/plain")
                elif path == b"/v1/models":
                    self._page(writer, json.dumps({"data": [{"id": "fake"}]}).encode(), b"application/json")
                elif body:
                    await self._answer(json.loads(body), writer, received_s)
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    def _page(self, writer: asyncio.StreamWriter, body: bytes, kind: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 " + status + b"\r\nContent-Type: " + kind + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)

    def _metrics(self) -> bytes:
        lived = time.monotonic() - self.began_s if self.began_s else 0.0
        wanted = min(int(self.settings.leak_bytes_per_s * lived), MOST_LEAKED_BYTES)
        self.leaked.extend(b"x" * (wanted - len(self.leaked)))
        return (
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting {self.waiting}\n"
            "vllm:kv_cache_usage_perc 0.5\n"
            f'vllm:request_queue_time_seconds_sum{{model="fake"}} {0.25 * self.count}\n'
            f'vllm:request_queue_time_seconds_count{{model="fake"}} {self.count}\n'
        ).encode()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter, received_s: float) -> None:
        self.asked.append(asked)
        if not asked.get("stream"):
            usage = {"prompt_tokens": _prompt_tokens(asked), "completion_tokens": 1}
            self._page(writer, json.dumps({"choices": [], "usage": usage}).encode(), b"application/json")
            return
        if not self.began_s:  # The load begins, however long after what was asked to prepare it.
            self.began_s = received_s
            if self.settings.ends_after_s:
                asyncio.get_running_loop().call_later(self.settings.ends_after_s, self.ended.set)
        self.count += 1
        number = self.count
        if self.settings.error_every and number % self.settings.error_every == 0:
            refusal = json.dumps({"error": {"message": "out of luck", "type": "server_error"}}).encode()
            self._page(writer, refusal, b"application/json", b"500 Internal Server Error")
            return
        self.waiting += 1
        async with self.room:
            self.waiting -= 1
            self.running += 1
            try:
                await self._stream(asked, writer, received_s, random.Random(number))
            finally:
                self.running -= 1

    async def _stream(
        self, asked: dict[str, Any], writer: asyncio.StreamWriter, received_s: float, draw: random.Random
    ) -> None:
        settings, sent = self.settings, Sent(received_s)
        tokens = int(str(asked["max_tokens"]))
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
        if settings.role_event:
            writer.write(self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        await self._pause(draw.uniform(*settings.ttft_s))
        for at in range(tokens):
            if at:
                await self._pause(draw.uniform(*settings.itl_s))
            finish = "length" if at + 1 == tokens else None
            event = self._event({"choices": [{"delta": {"content": f" {at}"}, "finish_reason": finish}]})
            sent.times.append(time.monotonic())
            writer.write(event)
            if writer.is_closing():
                return
        if settings.usage:
            usage = {"prompt_tokens": _prompt_tokens(asked), "completion_tokens": tokens}
            writer.write(self._event({"choices": [], "usage": usage}))
        writer.write(_chunk(b"data: [DONE]" + 2 * settings.line_end.encode()) + b"0\r\n\r\n")
        self.sent.append(sent)

    async def _pause(self, seconds: float) -> None:
        settings, lived = self.settings, time.monotonic() - self.began_s
        await asyncio.sleep(seconds * (1 + settings.slower_per_s * lived))
        left = settings.stall_at_s + settings.stall_s - (time.monotonic() - self.began_s)
        if 0 < left <= settings.stall_s:
            await asyncio.sleep(left)

    def _event(self, document: dict[str, object]) -> bytes:
        return _chunk(b"data: " + json.dumps(document).encode() + 2 * self.settings.line_end.encode())


def _prompt_tokens(asked: dict[str, Any]) -> int:
    """Two tokens for three letters, and seven of a template."""
    said = asked["prompt"] if "prompt" in asked else "".join(str(one["content"]) for one in asked["messages"])
    return len(said) if isinstance(said, list) else 7 + 2 * len(said) // 3


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main(settings: FakeSettings) -> None:
    fake, loop = FakeServer(settings), asyncio.get_running_loop()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(fake.ended.set)),  # type: ignore[func-returns-value]
        daemon=True,
    ).start()
    await fake.ended.wait()
    # Where it ends by itself nobody reads yet, and more than a pipe holds would keep it alive.
    noted = [] if settings.ends_after_s else [asdict(sent) for sent in fake.sent]
    told = memoryview(json.dumps({"sent": noted, "asked": [] if settings.ends_after_s else fake.asked}).encode())
    while told:  # Where output has no buffer, print() drops what one write does not take.
        told = told[os.write(1, told) :]


class RunningFake:
    """In a process of its own; `close` gives what it noted."""

    def __init__(self, settings: FakeSettings) -> None:
        words = [sys.executable, __file__, json.dumps(asdict(settings))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._noted: dict[str, list[dict[str, Any]]] | None = None

    def close(self) -> dict[str, list[dict[str, Any]]]:
        if self._noted is None:
            said, _ = self._process.communicate("", timeout=60)
            self._noted = json.loads(said)
        return self._noted


@contextlib.contextmanager
def running_fake(settings: FakeSettings | None = None) -> Iterator[RunningFake]:
    fake = RunningFake(settings or FakeSettings())
    try:
        yield fake
    finally:
        fake.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given |= {name: tuple(given[name]) for name in ("ttft_s", "itl_s") if name in given}
    asyncio.run(main(FakeSettings(**given)))
