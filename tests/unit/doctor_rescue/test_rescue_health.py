"""Where a command says that its server will listen, and whether somebody answers there."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from free_ports import free_port

from holdfast.doctor.command.parse import parse_command
from holdfast.rescue.health import Address, HealthPoll, address_of, answers


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("vllm serve m", "http://127.0.0.1:8000"),
        ("vllm serve m --host 0.0.0.0 --port 9001", "http://127.0.0.1:9001"),
        ("llama-server -m a.gguf", "http://127.0.0.1:8080"),
        ("python -m sglang.launch_server --model-path m", "http://127.0.0.1:30000"),
        ("holdfast serve --host 10.0.0.1 --ssl-certfile c.pem", "https://10.0.0.1:8000"),
        ("vllm serve m --uds /run/vllm.sock", None),
        ("vllm serve m --port many", None),
        ("docker run -p 9000:8000 vllm/vllm-openai:latest --model m", None),
    ],
)
def test_where_it_will_listen(command: str, where: str | None) -> None:
    address = address_of(parse_command(command))
    assert (None if address is None else address.text) == where


class _StandIn(BaseHTTPRequestHandler):
    """An engine without /health, as some are."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


def test_who_answers_before_anything_was_started_is_a_stranger() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StandIn)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        address = Address("127.0.0.1", server.server_address[1])
        assert answers(address)
        health = HealthPoll(address)
        health.start()
        health.stop()
        assert health.taken
        assert not health.ready
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nobody_answers_and_nobody_is_silent() -> None:
    address = Address("127.0.0.1", free_port())
    health = HealthPoll(address)
    assert not health.taken
    assert health.silent_s == 0.0
