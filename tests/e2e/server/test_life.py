"""Loading, disconnects, draining, signals: the life of a server and of its requests. Real processes, real signals."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine, say
from holdfast.errors import ConfigurationError
from holdfast.server.app import close_app, create_app
from holdfast.server.run import PORT_TAKEN, bind
from holdfast.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 1000}


def test_health_says_why_it_is_not_ready(launch):
    server = launch(FakeEngine(start_delay_s=3600), wait=False, retry_after_s=3)
    with server.client() as http:
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert http.get("/ping").status_code == 503
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["retry-after"] == "3"
        assert http.get("/v1/models").status_code == 503
        assert http.get("/version").json() == {"version": "9.9"}
        assert http.get("/metrics").status_code == 200


def test_health_of_a_dead_engine(launch):
    server = launch()
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ready"}
        server.call(lambda: server.engine.die("out of luck"))
        health = http.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["reason"]) == (503, "dead", "out of luck")
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_frees_its_request(launch, stream, prompts):
    server = launch()
    server.call(server.engine.pause)
    body = {"prompt": ["abc"] * prompts, "stream": stream}
    with server.client() as http:
        raw = socket.create_connection(("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        server.until(lambda: len(server.engine.received) == prompts)
        raw.close()
        server.until(lambda: len(server.engine.aborted) == prompts and server.engine.unfinished == 0)
        line = server.wait_for_lines(1)[0]
        assert (line["status"], line["completion_tokens"]) == (499, 0)
        server.call(server.engine.resume)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_disconnect_in_the_middle_of_a_stream(launch):
    server = launch()
    server.call(server.engine.pause)
    with server.client() as http:
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            server.call(lambda: server.engine.step(3))
            events = [next(lines) for _ in range(8)]
            assert [line[:5] for line in events[::2]] == ["data:"] * 4
        server.until(lambda: len(server.engine.aborted) == 1 and server.engine.unfinished == 0)
        line = server.wait_for_lines(1)[0]
        assert (line["status"], line["completion_tokens"], line["finish_reason"]) == (499, 3, None)
        assert 'finished_reason="abort",model_name="fake"} 1.0' in http.get("/metrics").text


def test_port_in_use_is_refused_at_once():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            bind("127.0.0.1", port)
    assert caught.value.code == PORT_TAKEN
    assert str(port) in caught.value.message
    assert "--port" in (caught.value.fix or "")


def test_connections_send_each_token_at_once():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        assert select.select([listener], [], [], PATIENCE_S)[0]
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


PROGRAM = """
import signal, sys
from holdfast.engine.fake import FakeEngine
from holdfast.errors import ConfigurationError, ModelError
from holdfast.observability.logs import json_lines, set_up_logging
from holdfast.server.app import create_app
from holdfast.server.run import bind, run
from holdfast.server.settings import ServerSettings
set_up_logging()
engine = {engine}
if {paused}:
    engine.pause()
    engine.step()  # Of the first answer its first token.
    signal.signal(signal.SIGUSR2, lambda *_: engine.resume())
listener = bind("127.0.0.1", 0)
app = create_app(engine, ServerSettings(served_model_names=("fake",), access_log=json_lines(sys.stderr)))
print(listener.getsockname()[1], flush=True)
code = run(app, engine, listener=listener, drain_timeout_s={drain_s}, on_ready=lambda: print("ready", flush=True))
print("torch" in sys.modules, flush=True)
sys.exit(code)
"""


class Program:
    def __init__(self, engine: str, drain_s: float = PATIENCE_S, paused: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(engine=engine, drain_s=drain_s, paused=paused)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a buffer would take two lines at once, and select() then waits for a third that never comes
        )
        self.url = f"http://127.0.0.1:{int(self.line())}"

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0]
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors.decode()


@pytest.fixture
def launch_program() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(engine: str, **options: Any) -> Program:
        programs.append(Program(engine, **options))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.kill()


def wait_for_status(http: httpx.Client, status: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while http.get("/health").json()["status"] != status:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_sigterm_lets_running_requests_finish_and_exits_0(launch_program):
    """They stand still until all that is asked meanwhile has been answered."""
    program = launch_program("FakeEngine()", paused=True)
    assert program.line() == "ready"
    with httpx.Client(base_url=program.url, timeout=PATIENCE_S) as http, ThreadPoolExecutor(9) as pool:
        body = {**LONG, "max_tokens": 60}
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            asked = f"{program.url}/v1/chat/completions"
            others = [pool.submit(httpx.post, asked, json=body, timeout=PATIENCE_S) for _ in range(8)]
            deadline_s = time.monotonic() + PATIENCE_S
            while 'num_requests_running{engine="0",model_name="fake"} 9.0' not in http.get("/metrics").text:
                assert time.monotonic() < deadline_s
            os.kill(program.process.pid, signal.SIGTERM)
            wait_for_status(http, "draining")
            refused = http.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
            os.kill(program.process.pid, signal.SIGUSR2)
            assert list(lines)[-2] == "data: [DONE]"
        for other in others:
            assert other.result().json()["usage"]["completion_tokens"] == 60
    code, said = program.end()
    assert code == 0
    assert "stopped: 9 requests answered, 0 failed, 0 aborted by clients, 0 cut off; drained in " in said


def test_a_drain_has_an_end(launch_program):
    program = launch_program("FakeEngine(token_delay_s=0.05)", drain_s=0.2)
    assert program.line() == "ready"
    asked = f"{program.url}/v1/chat/completions"
    with httpx.stream("POST", asked, json={**LONG, "stream": True}, timeout=PATIENCE_S) as open_:
        lines = open_.iter_lines()
        next(lines)
        os.kill(program.process.pid, signal.SIGTERM)
        *_, last, end = (line for line in lines if line)
        assert '"code":"draining"' in last
        assert end == "data: [DONE]"
    code, said = program.end()
    assert code == 0
    assert "stopped: 0 requests answered, 0 failed, 0 aborted by clients, 1 cut off; drained in " in said


def test_a_second_signal_leaves_at_once(launch_program):
    program = launch_program("FakeEngine(token_delay_s=3600)", drain_s=3600)
    assert program.line() == "ready"
    with (
        httpx.Client(base_url=program.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        os.kill(program.process.pid, signal.SIGINT)
        wait_for_status(http, "draining")
        os.kill(program.process.pid, signal.SIGINT)
        code, said = program.end()
        assert code == 128 + signal.SIGINT
        assert "1 cut off; ran " in said


def test_sigterm_while_loading_exits_0(launch_program):
    program = launch_program("FakeEngine(start_delay_s=3600)")
    with httpx.Client(base_url=program.url, timeout=PATIENCE_S) as http:
        wait_for_status(http, "loading")
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.end()[0] == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            'ConfigurationError("too big", fix="--max-model-len 1k")',
            2,
            "holdfast: too big [HF100]\n  fix:    --max-model-len",
        ),
        ('ModelError("torn file")', 1, "holdfast: torn file [HF200]"),
        ('RuntimeError("a bug")', 1, "RuntimeError: a bug"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server(launch_program, error, code, said):
    found, errors = launch_program(f"FakeEngine(start_error={error})").end()
    assert (found, said in errors) == (code, True), errors


def test_the_front_never_imports_torch(launch_program):
    program = launch_program("FakeEngine()")
    assert program.line() == "ready"
    with httpx.Client(base_url=program.url, timeout=PATIENCE_S) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.line() == "False"
    assert program.end()[0] == 0


def test_a_script_that_says_one_thing(launch):
    with launch(FakeEngine(say("tja"))).client() as http:
        answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["message"]["content"] == "tja"


async def test_threads_that_encode_end_with_their_server():
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(served_model_names=("fake",)))
    other = create_app(engine, ServerSettings(served_model_names=("fake",)))
    assert await app.state.tokenize_pool.run(lambda: 1) == 1
    close_app(app)
    with pytest.raises(RuntimeError, match="after shutdown"):
        await app.state.tokenize_pool.run(lambda: 1)
    assert await other.state.tokenize_pool.run(lambda: 2) == 2, "another application has its own"
    close_app(other)
