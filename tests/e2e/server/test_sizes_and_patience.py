"""What is too large is refused before it costs anything, and clients that stand still do not hold what others need."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine, say
from holdfast.server.http import slow_clients
from holdfast.server.settings import ServerSettings, body_limit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text[:1000]
    return response.json()["error"]


@pytest.fixture
def texts(launch):
    """A server with a context of 50 tokens, and the lengths of all texts it tokenizes."""
    server = launch(FakeEngine(max_model_len=50), max_body_bytes=16 << 20)
    tokenizer, lengths = server.engine.tokenizer, []
    encode = tokenizer.encode

    def watched(text, add_special_tokens=True):
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    tokenizer.encode = watched
    return server, lengths


@pytest.mark.parametrize(
    ("context", "given", "most"),
    [(50, None, 4 << 20), (8192, None, 4 << 20), (65_536, None, 8 << 20), (1 << 20, None, 16 << 20), (50, 99, 99)],
)
def test_a_body_may_be_as_large_as_prompts_of_the_context_are(context, given, most):
    assert body_limit(ServerSettings(served_model_names=("x",), max_body_bytes=given), context) == most


def test_ten_megabytes_of_ids_for_a_small_context_are_refused_unread(launch):
    server = launch(FakeEngine(max_model_len=50))
    with server.client() as http:
        error = error_of(http.post(COMPLETIONS, content=b'{"prompt": [' + b"12345, " * 1_450_000 + b"1]}"), 413)
        assert error["code"] == "request_too_large"
        assert "4194304 bytes" in error["message"]
        assert "--max-body-size" in error["message"]


@pytest.mark.parametrize("size", [1_000, 8_000_000])
def test_a_fat_text_is_refused_before_it_is_tokenized(texts, size):
    server, lengths = texts
    with server.client() as http:
        for path, body in (
            (COMPLETIONS, {"prompt": "x" * size}),
            (COMPLETIONS, {"prompt": ["fine", "x" * size]}),
            (CHAT, {"messages": [{"role": "user", "content": "x" * size}]}),
        ):
            error = error_of(http.post(path, json=body), 400)
            assert error["code"] == "context_length_exceeded"
            assert "50 tokens" in error["message"]
            assert str(size)[0] in error["message"]
    # Of 50 tokens of up to 11 characters nothing longer than 550 can be made; every token is one byte here.
    assert max(lengths, default=0) <= 50 * 16
    assert not server.engine.received


def test_too_many_ids_are_refused_unseen(texts):
    server, _ = texts
    with server.client() as http:
        for prompt in ([5] * 51, [[5], [5] * 51], ["x"] * 51 + [5], [5] * 50 + ["not looked at"]):
            response = http.post(COMPLETIONS, json={"prompt": prompt})
            error = error_of(response, 400)
            if prompt[0] != "x":
                assert error["code"] == "context_length_exceeded"
                assert "51 tokens" in error["message"]


def test_more_answers_than_there_are_places_is_the_requests_own_fault(launch):
    server = launch(FakeEngine(max_num_seqs=2, max_queued_requests=3), max_queued_requests=3)
    with server.client() as http:
        error = error_of(http.post(COMPLETIONS, json={"prompt": ["a"] * 3, "n": 2}), 400)
        assert error["param"] == "prompt"
        assert "6 completions" in error["message"]
        error = error_of(http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], "n": 6}), 400)
        assert error["param"] == "n"
        assert not server.engine.received
        assert http.post(COMPLETIONS, json={"prompt": ["a"] * 5}).status_code == 200


def test_what_is_said_back_is_short(launch):
    with launch(max_body_bytes=16 << 20).client() as http:
        for extra in (
            {"stop": ["s" * 1000] * 5000},
            {"stop": "s" * 100_000},
            {"model": "m" * 100_000},
            {"u" * 9999: 1},
        ):
            response = http.post(COMPLETIONS, json={"prompt": "x", **extra})
            assert (
                response.status_code in (400, 404) or response.headers["x-holdfast-ignored-fields"] == "u" * 64 + "..."
            )
            assert len(response.content) < 5000


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_deep_bodies_are_no_500(launch, depth):
    deep = "[" * depth + "]" * depth
    with launch().client() as http:
        messages = '"messages": [{"role": "user", "content": "hi"%s}]'
        for body in (
            "{" + messages % "" + ', "chat_template_kwargs": {"a": ' + deep + "}}",
            "{" + messages % f', "x": {deep}' + "}",
            '{"prompt": ' + deep + "}",
        ):
            path = COMPLETIONS if "prompt" in body else CHAT
            assert http.post(path, content=body).status_code in (200, 400)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_id_of_ones_own(launch, path):
    body = {"request_id": "mine-1", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": ["a", "b"]}
    server = launch()
    with server.client() as http:
        for _ in range(2):
            assert http.post(path, json=body).json()["id"] == ("chatcmpl-mine-1" if path == CHAT else "cmpl-mine-1")
        streamed = http.post(path, json={**body, "stream": True}).text
        assert json.loads(streamed.split("\n")[0].removeprefix("data: "))["id"].endswith("-mine-1")
    # The same id twice must not be one to the engine.
    assert len(set(server.engine.finished)) == len(server.engine.finished)


def test_priority_under_its_policy(launch):
    with launch(scheduling_policy="priority").client() as http:
        assert http.post(COMPLETIONS, json={"prompt": "x", "priority": -3}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_models_own_defaults_give_way(launch, path):
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 500}
    server = launch(FakeEngine(say("x" * 1000), max_model_len=200), default_sampling=defaults)
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    with server.client() as http:
        silent = http.post(path, json=base).json()
        # 500 were never asked for: the answer gets what is left of the context.
        assert silent["usage"]["total_tokens"] == 200
        http.post(path, json={**base, "temperature": 0.1, "top_k": 3, "max_tokens": 7})
        assert error_of(http.post(path, json={**base, "max_tokens": 500}), 400)["code"] == "context_length_exceeded"
    first, second = (params for _, params in server.engine.received)
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.9, 20)
    assert (second.temperature, second.top_p, second.top_k, second.max_tokens) == (0.1, 0.9, 3, 7)


def test_logprobs_tell_the_bytes_of_half_characters(launch):
    body = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 1}
    with launch().client() as http:
        content = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:2]] == [[byte] for byte in "é".encode()]
    assert content[0]["top_logprobs"][0]["bytes"] == content[0]["bytes"]


def test_a_body_that_never_comes_is_given_up(launch):
    server = launch(body_timeout_s=0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def ask_and_read_nothing(server, body: dict) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def read_to_the_end(client: socket.socket) -> None:
    while client.recv(1 << 20):
        pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_broken_off(launch, stream, monkeypatch):
    """A stream is aborted; a whole answer has already freed its request. In either case the socket does not linger."""
    broken_off, tear = threading.Event(), slow_clients._tear
    monkeypatch.setattr(slow_clients, "_tear", lambda transport: (tear(transport), broken_off.set()))
    engine = FakeEngine(say("x" * 2_000_000 if stream else "x"), max_model_len=5_000_000)
    server = launch(engine, write_timeout_s=0.3)
    # Both are larger than what the kernel holds between the two, some megabytes.
    endless = {"prompt": "x" * 1000, "max_tokens": 1_000_000, "stream": True, "logprobs": 5}
    whole = {"prompt": ["\x01" * 6_000] * 2, "max_tokens": 1, "n": 128, "echo": True}
    body = endless if stream else whole
    with ask_and_read_nothing(server, body) as client:
        assert broken_off.wait(PATIENCE_S)
        line = server.wait_for_lines(1)[0]
        # What the kernel holds may still be read, and then the connection is torn, not ended.
        with pytest.raises(ConnectionResetError):
            read_to_the_end(client)
    assert (engine.unfinished, len(engine.aborted)) == (0, int(stream))
    assert line["status"] == 499


class Unsent:
    """A connection with so many unsent bytes at each look."""

    def __init__(self, sizes: list[int], *, paused: bool = True, closing: bool = False) -> None:
        self.sizes, self.closing, self.aborted = sizes, closing, False
        self.transport, self.flow = self, self
        self.write_paused = paused

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def get_extra_info(self, name: str) -> None:
        """Neither a peer nor a socket."""

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("connection", "given_up"),
    [
        (Unsent([70_000] * 5), True),
        (Unsent([500] * 5, paused=False, closing=True), True),
        (Unsent([500] * 5, paused=False), False),  # Others may write to it: whether it reads cannot be told.
        (Unsent([70_000, 69_000, 68_000, 67_000, 66_999]), False),  # Slow, but it reads.
        (Unsent([70_000, 70_000, 70_000, 70_000, 69_999]), False),
        (Unsent([0] * 5, paused=False, closing=True), False),
    ],
)
def test_only_who_takes_nothing_is_given_up(connection, given_up):
    watch = slow_clients.SlowClientMonitor(lambda: [connection], 1.0)
    for _ in range(5):
        assert not connection.aborted
        watch.look()
    assert connection.aborted is given_up


def test_a_folder_that_does_not_answer_holds_up_no_other_adapter(launch, monkeypatch, tiny_model):
    """A file server may be gone: its adapter is given up, and what comes of it later changes nothing."""
    from holdfast.config import EngineConfig
    from holdfast.engine.requests.adapters import Adapters, Loaded
    from holdfast.engine.startup.build import find_model
    from holdfast.records import AdapterRef
    from holdfast.server.endpoints import lora

    answers = threading.Event()
    ended = threading.Semaphore(0)

    def examine(self, name, path, **_):
        if "hung" in path:
            answers.wait(PATIENCE_S)
            ended.release()
        return Loaded(AdapterRef(name, 0, path, ""), "base", None, 0)

    monkeypatch.setattr(Adapters, "examine", examine)
    monkeypatch.setattr(lora, "EXAMINE_LIMIT_S", 0.3)
    config = EngineConfig(model=str(tiny_model), load_format="dummy", enable_lora=True)
    adapters = Adapters(find_model(config).spec, "fake", config)
    server = launch(adapters=adapters)
    with server.client() as http:
        for _ in range(3):
            asked = {"lora_name": "slow", "lora_path": "/mnt/hung"}
            error = error_of(http.post("/v1/load_lora_adapter", json=asked), 400)
            assert error["holdfast"]["code"] == "HF378"
        monkeypatch.setattr(lora, "EXAMINE_LIMIT_S", PATIENCE_S)
        asked = {"lora_name": "quick", "lora_path": "/mnt/good"}
        assert http.post("/v1/load_lora_adapter", json=asked).status_code == 200
        answers.set()
        for _ in range(3):
            assert ended.acquire(timeout=PATIENCE_S)
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "slow"}).status_code == 404
        assert [one.ref.name for one in adapters.listed] == ["quick"]
