"""Connections under attack, byte by byte: one request stays one, and nothing that strangers send is held or waited for
without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from certificates import self_signed
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine, say
from holdfast.engine.requests.stream import Stream, Waiting
from holdfast.server.http import accept as accepting
from holdfast.server.http import connection, middleware, request_body

SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"


@pytest.fixture
def guarded(launch):
    """A server with a key, which strangers do not have."""
    return launch(api_key="good")


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def everything(client: socket.socket) -> bytes:
    """Until the server closes. A reset behind what was said is a close too."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(1 << 16):
            answer += more
    return answer


def one_answer(client: socket.socket, file: BinaryIO | None = None) -> tuple[bytes, bytes]:
    """Head and body, by its Content-Length. `file`: of the client, where several may come at once."""
    file = file or client.makefile("rb")
    head = b""
    while (line := file.readline()) not in (b"\r\n", b""):
        head += line.lower()
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length:"))
    return head, file.read(length)


def flood(client: socket.socket, piece: bytes, most_bytes: int) -> int:
    """Bytes that the server let us send before it was closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most_bytes:
            client.sendall(piece)
            sent += len(piece)
    return sent


def post(path: str, *headers: str, body: bytes | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    lines += [] if body is None else [f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(server) -> None:
    """Or their next request is sent just when it is closed. httpx keeps one for 5 s, as uvicorn does by itself."""
    with connect(server) as client:
        for _ in range(2):
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one_answer(client)[0].startswith(b"http/1.1 200")
            assert select.select([client], [], [], 5.5)[0] == [], "the server closed it"


UPGRADES = [
    ("Connection: Upgrade", "Upgrade: h2c"),
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    ("Connection: keep-alive, upgrade", "Upgrade: websocket"),
]


@pytest.mark.parametrize("offer", UPGRADES)
def test_the_body_of_an_offered_upgrade_is_its_body(server, offer):
    """curl --http2 and Java's client offer h2c with every POST; a body is never the next request."""
    with connect(server) as client:
        for body, status in ((SMUGGLED, b"400"), (b'{"prompt":"hi"}', b"200")):
            request = post("/tokenize", *offer, body=body)
            split = len(request) - len(body)
            for part in (request[:split], request[split:]):
                client.sendall(part)
            head, answer = one_answer(client)
            assert head.split()[1] == status
            assert b"smuggled" not in head
        assert json.loads(answer)["count"] == 2
        client.sendall(post("/tokenize", *offer, "Connection: close", body=b'{"prompt":"hi"}') + SMUGGLED)
        assert everything(client).count(b"HTTP/1.1 ") == 1
    assert [line["path"] for line in server.wait_for_lines(3)] == ["/tokenize"] * 3


def test_trailers_are_no_headers(guarded):
    body = b'f\r\n{"prompt":"hi"}\r\n0\r\nAuthorization: Bearer good\r\nX-Request-Id: trailer\r\n\r\n'
    with connect(guarded) as client:
        client.sendall(post("/tokenize", "Transfer-Encoding: chunked", "Connection: close") + body)
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"trailer" not in answer


@pytest.mark.parametrize("piece", [b"a: " + b"b" * 60 + b"\r\n", b"b"])
def test_trailers_without_end_are_cut_off(launch, piece):
    """Also one of a request that is let in, and whose answer waits for its end."""
    server = launch()
    with connect(server) as client:
        client.sendall(post("/tokenize", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\nx: ")
        sent = flood(client, piece * ((1 << 18) // len(piece)), 4 * connection.LINGER_BYTES)
        assert sent < 4 * connection.LINGER_BYTES
    assert server.wait_for_lines(1)[0]["status"] == 499


def test_who_was_refused_is_not_read_for_ever(guarded):
    with connect(guarded) as client:
        client.sendall(post("/tokenize", "Content-Length: 100000000000"))
        head, _ = one_answer(client)
        assert head.startswith(b"http/1.1 401")
        assert b"connection: close" in head
        assert flood(client, b"x" * (1 << 20), 4 * connection.LINGER_BYTES) < 4 * connection.LINGER_BYTES


def test_who_was_refused_gets_to_read_why(launch, monkeypatch):
    """It goes on sending for a while, and finds the answer whole and the connection ended in order."""
    monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)
    server = launch(max_body_bytes=1000)
    with connect(server) as client:
        client.sendall(post("/tokenize", body=b"x" * 1_000_000))
        answer = b""
        while more := client.recv(1 << 16):
            answer += more
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
    assert answer.endswith(b"}")


def test_a_client_that_pipelined_and_left_is_noticed(server):
    server.call(server.engine.pause)
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    with connect(server) as client:
        client.sendall(post("/v1/completions", body=body) + SMUGGLED)
        server.until(lambda: len(server.engine.received) == 1)
    server.until(lambda: len(server.engine.aborted) == 1)
    assert server.engine.unfinished == 0
    line = server.wait_for_lines(1)[0]
    assert (line["path"], line["status"]) == ("/v1/completions", 499)


@pytest.mark.parametrize("path", ["/invocations", "/tokenize"])
def test_who_leaves_in_the_middle_of_a_body_is_no_fault_of_the_server(server, caplog, path):
    with connect(server) as client:
        client.sendall(post(path, "Content-Length: 100") + b'{"prompt":')
    line = server.wait_for_lines(1)[0]
    assert (line["path"], line["status"], line["error_code"]) == (path, 499, None)
    assert "internal server error" not in caplog.text


def test_few_requests_may_wait_behind_another(server):
    with connect(server) as client:
        client.sendall(SMUGGLED * 3)
        file = client.makefile("rb")
        assert [one_answer(client, file)[0].split()[1] for _ in range(3)] == [b"200"] * 3
    server.call(server.engine.pause)
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    for behind in (SMUGGLED * (connection.MAX_BEHIND + 1), post("/tokenize", body=b"x" * 200_000)):
        with connect(server) as client:
            client.sendall(post("/v1/completions", body=body) + behind)
            assert everything(client) == b""
    server.until(lambda: len(server.engine.aborted) == len(server.engine.received))


def test_http_1_0_gets_no_chunks(server):
    body = json.dumps({"prompt": "abc", "stream": True}).encode()
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, told = everything(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert told.startswith(b"data: {")
    assert told.endswith(b"data: [DONE]\n\n")
    with connect(server) as client:
        client.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert everything(client).endswith(b'{"version":"9.9"}')


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /version HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_request_is_said_once_and_closed(server, request_bytes, caplog):
    with caplog.at_level("INFO", "holdfast.server"), connect(server) as client:
        client.sendall(request_bytes)
        client.shutdown(socket.SHUT_WR)
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 400") == 1
    assert [record.name for record in caplog.records if "invalid HTTP request" in record.message] == ["holdfast.server"]


@contextlib.contextmanager
def running_requests(server, count: int) -> Iterator[list[socket.socket]]:
    """Connections that carry requests, which end when the caller is done."""
    server.call(server.engine.pause)
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    with contextlib.ExitStack() as open_ones:
        clients = [open_ones.enter_context(connect(server)) for _ in range(count)]
        for client in clients:
            client.sendall(post("/v1/completions", body=body))
        server.until(lambda: len(server.engine.received) == count)
        yield clients
        server.call(server.engine.resume)
        assert [one_answer(client)[0].split()[1] for client in clients] == [b"200"] * count


def get(client: socket.socket, path: str) -> tuple[bytes, bytes]:
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return one_answer(client)


def test_one_request_too_many_is_told_so_and_probes_are_answered(launch, monkeypatch):
    monkeypatch.setattr(accepting, "RESERVE", 2)
    monkeypatch.setattr(connection, "FULL_TIMEOUT_S", PATIENCE_S)
    server = launch(max_connections=2)
    with running_requests(server, 2), contextlib.ExitStack() as open_ones:
        head, body = get(open_ones.enter_context(connect(server)), "/v1/models")
        assert (head.split()[1], json.loads(body)["error"]["code"]) == (b"503", "too_many_connections")
        assert b"retry-after: " in head
        assert b"connection: close" in head
        for probe in ("/health", "/version"):
            head, _ = get(open_ones.enter_context(connect(server)), probe)
            assert head.split()[1] == b"200"
            assert b"connection: close" in head


def test_beyond_the_reserve_nothing_is_read(launch, monkeypatch):
    monkeypatch.setattr(accepting, "RESERVE", 0)
    server = launch(max_connections=2)
    with running_requests(server, 2), connect(server) as client:
        assert everything(client).startswith(b"HTTP/1.1 503")


def test_the_reserve_cannot_be_taken_by_who_asks_for_nothing(launch, monkeypatch):
    monkeypatch.setattr(accepting, "RESERVE", 2)
    monkeypatch.setattr(connection, "FULL_TIMEOUT_S", PATIENCE_S)  # They make room without that, too.
    server = launch(max_connections=2)
    with running_requests(server, 2), contextlib.ExitStack() as open_ones:
        for _ in range(5):
            open_ones.enter_context(connect(server)).sendall(b"GET /health HTTP/1.1\r\n")  # And waits.
        assert get(open_ones.enter_context(connect(server)), "/health")[0].split()[1] == b"200"


def test_the_oldest_that_carries_no_request_makes_room(launch):
    """Also one that sends a byte now and then, one that was answered, and one that was only refused."""
    server = launch(max_connections=4)
    with running_requests(server, 1), contextlib.ExitStack() as open_ones:
        silent, dripping, answered = (open_ones.enter_context(connect(server)) for _ in range(3))
        dripping.sendall(b"GET /ver")
        assert get(answered, "/version")[0].split()[1] == b"200"
        dripping.sendall(b"s")
        for oldest in (silent, dripping, answered):
            newcomer = open_ones.enter_context(connect(server))
            assert get(newcomer, "/version")[0].split()[1] == b"200"
            assert everything(oldest) == b""
        for client in (newcomer, open_ones.enter_context(connect(server))):
            assert get(client, "/version")[0].split()[1] == b"200"


def test_a_body_that_does_not_come_makes_room_too(launch):
    server = launch(max_connections=2)
    with contextlib.ExitStack() as open_ones:
        waiting = [open_ones.enter_context(connect(server)) for _ in range(2)]
        for client in waiting:
            client.sendall(post("/tokenize", "Content-Length: 1000") + b"{")
        newcomer = open_ones.enter_context(connect(server))
        assert get(newcomer, "/version")[0].split()[1] == b"200"
        (closed,), _, _ = select.select(waiting, [], [], PATIENCE_S)  # Whichever was heard first.
        assert everything(closed) == b""
        (other,) = (client for client in waiting if client is not closed)
        other.sendall(b'"prompt": "hi"}' + b" " * 984)
        assert one_answer(other)[0].split()[1] == b"200"


def test_who_does_not_agree_on_tls_makes_room(launch, tmp_path):
    from holdfast.config import ServerConfig
    from holdfast.server.http.tls import tls_of

    key, certificate = self_signed(tmp_path)
    server = launch(max_connections=3, tls=tls_of(ServerConfig(ssl_keyfile=key, ssl_certfile=certificate)))
    with contextlib.ExitStack() as open_ones:
        silent = [open_ones.enter_context(connect(server)) for _ in range(3 + accepting.RESERVE)]
        trusted = ssl.create_default_context(cafile=certificate)
        plain = open_ones.enter_context(connect(server))
        with trusted.wrap_socket(plain, server_hostname="127.0.0.1") as client:
            assert get(client, "/health")[0].split()[1] == b"200"
        assert everything(silent[0]) == b""


def test_the_end_does_not_wait_for_who_asks_nothing(launch, tmp_path, caplog):
    """A pool of a client keeps its connection and does not read, so TLS would wait for an answer to its farewell."""
    from holdfast.config import ServerConfig
    from holdfast.server.http.tls import tls_of

    key, certificate = self_signed(tmp_path)
    server = launch(tls=tls_of(ServerConfig(ssl_keyfile=key, ssl_certfile=certificate)))
    trusted = ssl.create_default_context(cafile=certificate)
    with trusted.wrap_socket(connect(server), server_hostname="127.0.0.1") as client:
        assert get(client, "/health")[0].split()[1] == b"200"
        server.stop()
        assert "graceful shutdown exceeded" not in caplog.text


class Idle:
    """As `accepting` sees a connection."""

    def __init__(self, place: int, connections: list[Idle], *, busy: bool = False) -> None:
        self.expendable = None if busy else (0, float(place))
        self._connections = connections

    def drop(self) -> None:
        self._connections.remove(self)


class WithoutFiles(socket.socket):
    """A listening socket, while the system has no file for a connection."""

    refusals = 0
    refuses = True

    def accept(self):
        if self.refuses:
            self.refusals += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_a_system_without_files_is_not_asked_all_the_time_and_keeps_some_for_others(monkeypatch):
    """Those that carry no request are closed; from then on there are fewer, so that an engine can be started again."""
    monkeypatch.setattr(accepting, "PAUSE_S", 0.05)
    connections: list[Idle] = []
    connections += [Idle(place, connections, busy=place % 2 == 1) for place in range(200)]
    made: list[bool] = []

    def make(full: bool) -> asyncio.Protocol:
        made.append(full)
        return asyncio.Protocol()

    listener = WithoutFiles(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    listener.setblocking(False)
    with listener, socket.create_connection(listener.getsockname(), timeout=PATIENCE_S):
        taking = accepting.Accepting(listener, make, connections, 2048, tls=None, handshake_s=1.0)
        taking.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while listener.refusals < 3:
                    await asyncio.sleep(0)
                # One more at each further try: whoever waits outside needs a file too.
                assert len(connections) == 200 - accepting.RESERVE - accepting.SPARE_FILES - 2
                assert sum(one.expendable is None for one in connections) == 100
                listener.refuses = False
                while not made:
                    await asyncio.sleep(0)
        finally:
            taking.stop()
    assert listener.refusals == 3  # It was asked again after pauses only.
    assert made == [False]


def test_the_files_that_may_be_open_bound_the_connections(monkeypatch):
    import resource

    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert accepting.allow_connections(500) == 500
    assert accepting.allow_connections(5000) == 1000 - accepting.RESERVE - accepting.OTHER_FILES
    assert limits == [(500 + accepting.RESERVE + accepting.OTHER_FILES, 1000), (1000, 1000)]


def test_all_who_wait_are_taken_at_one_turn_of_the_loop(server, monkeypatch):
    """A turn serves every stream once: were one connection taken at each, probes would wait behind all the others."""
    turns, taken, take = [0], [], accepting.Accepting._open

    def opened(self, connected, full):
        taken.append(turns[0])
        take(self, connected, full)

    def turn() -> None:
        turns[0] += 1
        if len(taken) < 50:
            server.loop.call_soon(turn)

    monkeypatch.setattr(accepting.Accepting, "_open", opened)
    with contextlib.ExitStack() as open_ones:
        with server.loop_held():
            clients = [open_ones.enter_context(connect(server)) for _ in range(50)]
            server.loop.call_soon_threadsafe(turn)
        for client in clients:
            client.sendall(SMUGGLED)
            assert one_answer(client)[0].split()[1] == b"200"
    assert len(taken) == 50
    assert len(set(taken)) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=application/json"}, 415),
        ({"Content-Type": "application/jsonp"}, 415),
        ({"Origin": "https://evil.example"}, 415),
        ({"Sec-Fetch-Site": "cross-site"}, 415),
    ],
)
def test_a_web_page_cannot_ask_without_being_asked_first(http, headers, status):
    """Forms, plain text and nothing at all are what browsers send for any page without a preflight."""
    answer = http.post("/tokenize", content=b'{"prompt":"hi"}', headers=headers)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert "application/json" in error["message"]
        assert http.post("/reset_prefix_cache", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("evil.example:8000", "http://evil.example:8000", 403),
        ("evil.example", "null", 403),
        ("", "http://evil.example", 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("alias.of.mine", None, 200),  # A program, which sends no Origin.
        ("chat.mine", "https://chat.mine", 200),
    ],
)
def test_a_page_cannot_reach_a_server_of_this_machine_under_a_name_of_its_own(launch, host, origin, status):
    """DNS rebinding: its name means 127.0.0.1 by now, so that for the browser all of it is one origin."""
    server = launch(loopback_only=True, allowed_origins=("https://chat.mine",))
    headers = {"Host": host, "Content-Type": "application/json"} | ({"Origin": origin} if origin else {})
    with server.client() as client:
        answer = client.post("/tokenize", content=b'{"prompt":"hi"}', headers=headers)
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "unknown_host"
        assert "--allowed-origins" in answer.json()["error"]["message"]


def test_a_key_or_a_wider_address_is_not_asked_for_its_name(launch):
    headers = {"Host": "public.example", "Origin": "https://public.example", "Authorization": "Bearer k"}
    for settings in ({"loopback_only": True, "api_key": "k"}, {}):
        with launch(**settings).client() as client:
            assert client.post("/tokenize", json={"prompt": "hi"}, headers=headers).status_code == 200


def test_what_strangers_ask_for_is_logged_short_and_printable(guarded):
    with connect(guarded) as client:
        for path in ("%C2%9B31mred%7F%0A", "a" * 60_000):
            client.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert one_answer(client)[0].split()[1] == b"401"
    steering, long = (line["path"] for line in guarded.wait_for_lines(2))
    assert steering == "/\\x9b31mred\\x7f\\n"
    assert len(long) < 300


def test_a_body_that_drips_is_given_up(launch):
    """No second passes without a byte of it, and it is over all the same."""
    server = launch(body_timeout_s=1.0)
    with connect(server) as client:
        client.sendall(post("/tokenize", "Content-Length: 1000000") + b"{")
        client.settimeout(0.05)
        answer, deadline_s = b"", time.monotonic() + PATIENCE_S
        while not answer and time.monotonic() < deadline_s:
            with contextlib.suppress(ConnectionError):  # Where we were too slow, it is closed by now.
                client.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(1 << 16)
        client.settimeout(PATIENCE_S)
        answer += everything(client)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in answer


def test_very_many_parts_of_content_are_refused(http):
    part = {"type": "text", "text": ""}
    for messages in ([[part] * 9000], [[part] * 5000] * 2):
        body = {"messages": [{"role": "user", "content": content} for content in messages]}
        for path in ("/v1/chat/completions", "/tokenize"):
            error = http.post(path, json=body).json()["error"]
            assert (error["param"], "at most 8192" in error["message"]) == ("messages", True)


def test_bodies_on_their_way_have_a_bound_together(launch, monkeypatch):
    """Small ones pass meanwhile, and the room is free again when the large ones are gone."""
    monkeypatch.setattr(middleware, "Intake", lambda: request_body.Intake(1 << 20))
    monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)
    server = launch(max_body_bytes=1 << 20)
    half = 700_000

    def begun() -> socket.socket:
        client = connect(server)
        client.sendall(post("/tokenize", f"Content-Length: {half + 1}") + b" " * half)
        return client

    with begun() as first, begun() as second, server.client() as http:
        refused = one_answer(second if select.select([first, second], [], [], PATIENCE_S)[0] == [second] else first)
        assert refused[0].startswith(b"http/1.1 503")
        assert b"retry-after" in refused[0]
        assert json.loads(refused[1])["error"]["code"] == "overloaded"
        assert http.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    server.wait_for_lines(3)
    with begun() as again:
        again.sendall(b"x")
        assert one_answer(again)[0].startswith(b"http/1.1 400")


class Pushing(FakeEngine):
    """Makes tokens whether they are read or not, as an engine in a process of its own does."""

    def __init__(self, room: Waiting) -> None:
        super().__init__(say("x" * 200_000), max_model_len=300_000)
        self.room = room

    async def generate(self, *arguments: Any, request_id: str, **named: Any) -> Stream:
        made = await super().generate(*arguments, request_id=request_id, **named)

        async def push() -> None:
            try:
                async for delta in made:
                    stream.put(delta)
            finally:
                await made.aclose()

        stream = Stream([request_id], lambda names: pushing.cancel(), self.room)
        pushing = asyncio.create_task(push())
        return stream


def test_an_answer_that_is_not_read_holds_a_bounded_part_of_memory(launch):
    """It is ended with a reason, which its client finds behind what it had not read."""
    engine = Pushing(Waiting(2000))
    server = launch(engine)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": True, "top_logprobs": 20}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post("/v1/chat/completions", body=json.dumps({**body, "max_tokens": 200_000}).encode()))
        server.until(lambda: len(engine.aborted) == 1)
        assert server.call(lambda: (engine.unfinished, engine.room.free)) == (0, 2000)
        told = b""
        while not told.endswith(b"0\r\n\r\n"):
            told = (told + client.recv(1 << 16))[-5000:]
    assert b"read more slowly" in told
    assert b'"code":"HF340"' in told
    assert b"data: [DONE]" in told
    (line,) = server.wait_for_lines(1)
    assert (line["error_code"], line["holdfast_code"]) == ("overloaded", "HF340")
