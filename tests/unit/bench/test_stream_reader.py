"""What the client reads of a stream: an event is an event however its bytes are cut, and a role is no token."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref

import pytest
from deadlines import PATIENCE_S

from holdfast.bench.client import wire
from holdfast.bench.client.answers import TimedAnswer, read_answer
from holdfast.bench.client.wire import STALE_S, Connections, RawAnswer, StreamConnection
from holdfast.bench.load.prompts import BenchRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        pass

    def close(self) -> None:
        self.closed = True


def stream(events: list[object], end: str = "\n") -> bytes:
    lines = [event if isinstance(event, str) else "data: " + json.dumps(event) for event in events]
    return "".join(line + 2 * end for line in lines).encode()


def token(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
ANSWER = [ROLE, token("a\ndata: {}"), ": ping", token("b"), token("c", "stop"), USAGE, "data: [DONE]"]


async def answered(pieces: list[bytes], *, cancel_after: int | None = None) -> tuple[RawAnswer, StreamConnection]:
    connection, raw = StreamConnection(), RawAnswer()
    connection.connection_made(FakeTransport())
    asking = asyncio.create_task(connection.ask(b"", raw, timeout_s=60, cancel_after=cancel_after))
    await asyncio.sleep(0)
    for piece in pieces:
        if not connection.closed:
            connection.data_received(piece)
    await asyncio.sleep(0)
    if not asking.done():
        connection.connection_lost(None)
    await asking
    return raw, connection


def read(raw: RawAnswer) -> TimedAnswer:
    return read_answer(raw, BenchRequest(0, b"", 5), intended_s=raw.sent_s)


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_events_are_counted_however_their_bytes_are_cut(size: int, end: str) -> None:
    whole = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(stream(ANSWER, end), size)
    for piece in (1, 13, len(whole)):
        raw, connection = await answered([whole[at : at + piece] for at in range(0, len(whole), piece)])
        assert len(raw.times) == 6
        found = read(raw)
        assert found.good
        assert not connection.closed
        assert (found.prompt_tokens, found.output_tokens, found.counted) == (9, 5, True)
        assert len(found.gaps) == 4 * 2  # Three events have tokens; the role, usage and the end have none.


@pytest.mark.parametrize("before", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"])
async def test_what_announces_an_answer_is_none(before: bytes) -> None:
    head = HEAD.replace(b"text/event-stream", b"Text/Event-Stream")
    whole = before + head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(stream(ANSWER), 64)
    for piece in (1, len(whole)):
        raw, connection = await answered([whole[at : at + piece] for at in range(0, len(whole), piece)])
        assert read(raw).good
        assert not connection.closed


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    raw, connection = await answered([HEAD + b"\r\n" + stream(ANSWER)])
    assert read(raw).good
    assert connection.closed


async def test_ids_without_text_are_tokens_the_last_one_too() -> None:
    events = [
        {"choices": [{"text": "", "token_ids": [at], "finish_reason": end}]} for at, end in ((7, None), (8, "length"))
    ]
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    raw, _ = await answered([HEAD + b"\r\n" + stream([*events, usage, "data: [DONE]"])])
    found = read(raw)
    assert (found.good, found.output_tokens, len(found.gaps)) == (True, 2, 4)


@pytest.mark.parametrize(
    ("events", "tokens", "counted"), [([token("a"), token("b", "stop")], 2, False), ([token("", "stop")], 0, True)]
)
async def test_a_usage_of_nothing_is_believed_where_nothing_came(
    events: list[object], tokens: int, counted: bool
) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}
    raw, _ = await answered([HEAD + b"\r\n" + stream([ROLE, *events, usage, "data: [DONE]"])])
    found = read(raw)
    assert (found.good, found.output_tokens, found.counted) == (True, tokens, counted)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_server_gave_up_is_an_error(reason: str) -> None:
    raw, _ = await answered([HEAD + b"\r\n" + stream([ROLE, token("a"), token("b", reason), USAGE, "data: [DONE]"])])
    found = read(raw)
    assert (found.good, found.error, found.said) == (False, "aborted", f"its finish_reason is {reason}")


async def test_without_usage_events_are_counted() -> None:
    raw, _ = await answered([HEAD + b"\r\n" + stream([token("a"), token("b", "length"), "data: [DONE]"])])
    found = read(raw)
    assert (found.output_tokens, found.counted) == (2, False)


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        (b'HTTP/1.1 503 No\r\nContent-Length: 28\r\n\r\n{"error":{"message":"full"}}', "HTTP 503", "full"),
        (HEAD + b"\r\n" + stream([token("a"), {"error": {"message": "died"}}]), "stream error", "died"),
        (HEAD + b"\r\n" + stream([token("a"), token("b")]), "incomplete", "finish_reason"),
        (HEAD + b"Content-Length: 500\r\n\r\n" + stream([token("a")]), "reset", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no stream", "{}"),
        (b"SMTP ready\r\n", "protocol", ""),
        (HEAD + b"Content-Encoding: gzip\r\n\r\nx", "protocol: content-encoding gzip, and none was accepted", ""),
    ],
)
async def test_failures_are_told_by_kind(message: bytes, kind: str, said: str) -> None:
    raw, _ = await answered([message])
    found = read(raw)
    assert found.error == kind
    assert said in found.said
    assert found.first_s is None


async def test_a_client_that_leaves_closes_its_connection_and_failed_nothing() -> None:
    raw, connection = await answered([HEAD + b"\r\n" + stream([ROLE]), stream(ANSWER[1:])], cancel_after=3)
    found = read(raw)
    assert connection.closed
    assert found.cancelled
    assert not found.error


async def test_patience_ends() -> None:
    connection, raw = StreamConnection(), RawAnswer()
    connection.connection_made(FakeTransport())
    await connection.ask(b"", raw, timeout_s=0.01, cancel_after=None)
    assert read(raw).error == "timeout"


@pytest.mark.parametrize(("after_s", "asked"), [(0.0, 2), (2 * STALE_S, 1)])
async def test_only_a_connection_that_was_given_up_before_is_asked_again(
    after_s: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that took a request and left it has failed it."""
    if not after_s:
        monkeypatch.setattr(wire, "STALE_S", PATIENCE_S)  # However long this process is kept from hearing of it.
    heads: list[bytes] = []
    heard_s: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"{}"))
        heard_s.append(time.monotonic())
        if len(heads) == 1:
            await asyncio.sleep(after_s)
        else:
            writer.write(HEAD + b"\r\n" + stream(ANSWER))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/v1/x", {})
        await connections.open_ahead(1)
        raw = await connections.ask(b"{}", timeout_s=PATIENCE_S)
    assert len(heads) == asked
    assert raw.failure == ("" if asked == 2 else "reset")
    assert raw.sent_s <= heard_s[0], "of the first time that it was asked"


async def test_a_connection_that_is_lost_is_freed_without_a_collection() -> None:
    """Collections are off during a run, which may make a hundred thousand connections."""
    gc.collect()
    gc.disable()
    try:
        _, connection = await answered([HEAD + b"\r\n" + stream(ANSWER)])
        gone = weakref.ref(connection)
        del connection
        assert gone() is None
    finally:
        gc.enable()
