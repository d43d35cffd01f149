"""What clients send by mistake: each is answered, in words that name the mistake."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from deadlines import PATIENCE_S
from fake_server import FakeServer

from holdfast.engine.fake import FakeEngine

JSON = {"Content-Type": "application/json"}
ASKED = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def changeable() -> Iterator[httpx.Client]:
    """A server whose memory may be changed."""
    shared = FakeServer(FakeEngine(), {"may_change_memory": True}).start()
    with shared.client() as client:
        yield client
    shared.stop()


def exchange(server, sent: bytes) -> bytes:
    """Everything that comes back, until the server closes."""
    told = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        while more := client.recv(1 << 16):
            told += more
    return told


def post(*headers: str, body: bytes = b"") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_request_is_answered_whatever_comes_behind_it(server):
    """A Content-Length that is too small leaves the rest of the body behind its request."""
    whole = post(f"Content-Length: {len(ASKED)}", body=ASKED)
    told = exchange(server, whole + b"garbage\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200")
    assert told.count(b"HTTP/1.1") == 1
    short = exchange(server, post("Content-Length: 5", body=ASKED))
    assert short.startswith(b"HTTP/1.1 400")
    assert b"it ends before the object is closed (byte 5)" in short
    two = exchange(server, whole * 2 + b"garbage\r\n\r\n")
    assert two.count(b"HTTP/1.1 200") == 2


def test_a_body_that_is_not_in_chunks_is_refused(server):
    told = exchange(server, post("Transfer-Encoding: chunked", body=ASKED))
    assert told.startswith(b"HTTP/1.1 400")
    assert told.count(b"\r\n\r\n") == 1
    assert exchange(server, post("Connection: close", f"Content-Length: {len(ASKED)}", body=ASKED)).startswith(
        b"HTTP/1.1 200"
    )


def test_a_stream_goes_on_to_its_end_beside_bytes_that_are_no_request(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": True}).encode()
    server.call(server.engine.pause)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(post(f"Content-Length: {len(body)}", body=body))
        server.until(lambda: len(server.engine.received) == 1)
        client.sendall(b"\x00\x01garbage\r\n\r\n")
        client.sendall(b"and more of it")
        server.call(server.engine.resume)
        told = b""
        while more := client.recv(1 << 16):
            told += more
    assert b"data: [DONE]" in told


@pytest.mark.parametrize("behind", [b"\x00" * (1 << 20), b"x" * (8 << 20)])
def test_an_answer_is_read_to_its_end_whatever_is_still_being_sent(server, behind):
    """More than a head may have, and more than a socket holds, behind a request that is not answered yet."""
    server.call(server.engine.pause)
    before = len(server.engine.received)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(post(f"Content-Length: {len(ASKED)}", body=ASKED))
        server.until(lambda: len(server.engine.received) == before + 1)
        client.sendall(behind)
        server.call(server.engine.resume)
        client.sendall(behind)
        told = b""
        while more := client.recv(1 << 16):
            told += more
    assert told.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in told


def test_a_packed_body_is_told_as_one(http):
    told = http.post("/v1/completions", content=gzip.compress(ASKED), headers={**JSON, "Content-Encoding": "gzip"})
    assert told.status_code == 415
    assert "Content-Encoding 'gzip' is not supported" in told.json()["error"]["message"]
    assert http.post("/v1/completions", content=ASKED, headers={**JSON, "Content-Encoding": "identity"}).is_success


def test_a_byte_order_mark_is_passed_over(http):
    assert http.post("/v1/completions", content=b"\xef\xbb\xbf" + ASKED, headers=JSON).is_success


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "//v1/completions//"])
def test_a_slash_too_many_is_no_other_path(http, path):
    """`base_url` with a slash at its end."""
    at = str(http.base_url).rstrip("/")
    assert http.post(at + path, content=ASKED, headers=JSON).is_success
    assert http.get("/v1/models/").json()["object"] == "list"


def test_a_slash_too_many_opens_nothing(launch):
    guarded = launch(api_key="good")
    with guarded.client() as client:
        for path in ("//v1/models", "/v1/models/", "//memory", "//health", "/health/"):
            assert client.get(guarded.url + path).status_code == 401


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/api/chat", "Ollama's own API"),
        ("/generate", "SGLang or TGI"),
        ("/infill", "fill-in-the-middle"),
        ("/embedding", "/v1/embeddings"),
        ("/slots", "no slots"),
        ("/slots/0", "no slots"),
        ("/v1/moderations", "/classify"),
        ("/v1/responses/compact", "not compacted"),
        ("/v1/chat/completions/render", "/apply-template"),
    ],
)
def test_paths_of_other_engines_are_refused_by_name(http, path, word):
    told = http.post(path, json={})
    assert told.status_code == 404
    assert word in told.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "needed"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "ultra"}, "one of high, low, max"),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "function": {"name": "x"}}]}, "one of function"),
        ("/v1/chat/completions", {"tool_choice": "always"}, "one of auto, none, required"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "zip"}, "one of base64, bytes, bytes_only, float"),
    ],
)
def test_a_value_that_is_none_of_few_is_told_which_there_are(http, path, body, needed):
    chat = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    error = http.post(path, json={**chat, **body}).json()["error"]
    assert needed in error["message"]
    assert error["holdfast"]["needed"].startswith(needed)


def test_a_message_may_say_nothing(http):
    """As in vLLM."""
    assert http.post("/v1/chat/completions", json={"messages": [{"role": "user"}], "max_tokens": 2}).is_success


@pytest.mark.parametrize(("asked", "shown"), [(True, True), (False, False), ("1", True)])
def test_logprobs_of_a_completion_may_be_a_switch(http, asked, shown):
    told = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "logprobs": asked}).json()
    assert (told["choices"][0]["logprobs"] is not None) is shown


@pytest.mark.parametrize("size", ["2", 2, 0, "0", "x", "-4GiB", True, 1e30, [], "0.5"])
def test_a_budget_without_its_unit_is_refused_with_the_size_that_was_meant(changeable, size):
    told = changeable.post("/memory", json={"ram": size})
    assert told.status_code == 400
    error = told.json()["error"]
    assert error["param"] == "ram"
    if str(size) == "2":
        assert "'2' is not valid: 2 bytes?" in error["message"]
        assert error["holdfast"]["fix"] == "write 2GiB"


@pytest.mark.parametrize("size", [10**30, "9999999999TiB"])
def test_a_budget_that_no_machine_has_is_refused(changeable, size):
    """Nor could the engine be told of it: its messages have numbers of 64 bits."""
    told = changeable.post("/memory", json={"ram": size})
    assert told.status_code == 400
    assert told.json()["error"]["message"].startswith("ram: no machine has so much memory")
