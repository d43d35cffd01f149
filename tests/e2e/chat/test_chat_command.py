"""`holdfast chat` as people run it: in a pipe, and in a terminal with Ctrl-C, against a small server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from certificates import self_signed
from deadlines import PATIENCE_S
from forked_servers import take_terminal
from terminal_screen import shown

from holdfast.cli.background_loop import BackgroundLoop
from holdfast.cli.chat_backends import LocalBackend, UrlBackend, api_of
from holdfast.cli.commands.chat import ChatHistory, ChatScreen
from holdfast.cli.servers.registry import Registration, RunningServer
from holdfast.engine.fake import FakeEngine
from holdfast.engine.process.fault_injection import DIE_ON_TOKEN
from holdfast.errors import ConfigurationError, EngineError, RequestError

pytestmark = pytest.mark.usefixtures("forked_starts")


class Server(ThreadingHTTPServer):
    """Answers by what the last message says: `talk` until the client leaves, `refuse`, `break`, or an echo."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_left = threading.Event()
        self.finish = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        said = body["messages"][-1]["content"]
        if said == "refuse":
            self._json(400, {"error": {"message": "too long by far", "code": "HF310"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if said == "talk":
            self._talk()
        elif said == "break":
            self._event({"choices": [{"delta": {"content": "half"}}]})
            self._event({"error": {"message": "the engine died", "code": "HF410"}})
        else:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for piece in (f"{len(body['messages'])}:", said):
                self._event({"choices": [{"delta": {"content": piece}}]})
            asked = body["stream_options"]["include_usage"] and said == "count"
            self._event({"choices": [], "usage": {"completion_tokens": 7} if asked else {}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _talk(self) -> None:
        with contextlib.suppress(OSError):
            while not self.server.finish.is_set():
                self._event({"choices": [{"delta": {"content": "word "}}]})
                # A closed connection is readable; waiting for that paces the stream too.
                if select.select([self.connection], [], [], 0.01)[0]:
                    break
        self.server.client_left.set()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(server: Server, *flags: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", "chat", "--url", server.url, *flags]


def piped(server: Server, lines: str, *flags: str, environment: dict[str, str] | None = None) -> Any:
    return subprocess.run(
        command(server, *flags),
        input=lines.encode(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def test_each_line_of_a_pipe_is_a_message(server: Server) -> None:
    done = piped(server, "one\n\ntwo\u2028three\n/reset\nfour\n", "--system", "Be brief.", "--max-tokens", "5")
    assert done.stdout.decode() == "2:one\n4:two\u2028three\n2:four\n"
    assert b"conversation cleared" in done.stderr
    assert done.returncode == 0
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.bodies[0]["max_tokens"] == 5
    assert server.bodies[0]["model"] == "tiny"
    assert "temperature" not in server.bodies[0]
    assert server.bodies[1]["messages"][2] == {"role": "assistant", "content": "2:one"}


def test_commands_by_the_names_of_ollama(server: Server) -> None:
    done = piped(server, "one\n/clear\n/?\ntwo\n/bye\nthree\n")
    assert done.stdout.decode() == "1:one\n1:two\n"
    assert b"conversation cleared" in done.stderr
    assert b"/system TEXT" in done.stderr
    assert done.returncode == 0


def test_the_key_comes_from_flag_or_environment(server: Server) -> None:
    piped(server, "a\n", environment={"HOLDFAST_API_KEY": "from-environment"})
    piped(server, "a\n", "--api-key", "from-flag", environment={"HOLDFAST_API_KEY": "from-environment"})
    assert server.keys == ["Bearer from-environment", "Bearer from-flag"]


@pytest.mark.parametrize(
    ("said", "code", "words"), [("refuse", 2, b"too long by far"), ("break", 1, b"the engine died")]
)
def test_in_a_pipe_a_failure_ends_it(server: Server, said: str, code: int, words: bytes) -> None:
    done = piped(server, f"{said}\nnever\n")
    assert done.returncode == code
    assert words in done.stderr
    assert b"never" not in done.stdout


def test_no_server_is_a_plain_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "chat", "--url", "http://127.0.0.1:9"],
        input=b"",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert b"cannot be reached" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "written",
    ["host:80", "http://host:80", "http://host:80/", "http://host:80/v1", "host:80/v1/", " http://host:80//v1// "],
)
def test_addresses_as_people_write_them(written: str) -> None:
    assert api_of(written) == "http://host:80/v1/"


def test_addresses_of_other_kinds() -> None:
    assert api_of("https://host/behind/a/proxy/v1") == "https://host/behind/a/proxy/v1/"
    assert api_of("[::1]:8000") == "http://[::1]:8000/v1/"
    for wrong in ("", "http://", "ftp://host", "http://host:99999999", "http://host?x=1", "http://ho st"):
        with pytest.raises(ConfigurationError, match="--url"):
            api_of(wrong)


def test_a_url_needs_no_scheme(server: Server) -> None:
    address = server.url.removeprefix("http://")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "chat", "--url", address],
        input=b"one\n",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"1:one\n"), done.stderr


def test_engine_settings_do_not_go_with_a_url(server: Server) -> None:
    done = piped(server, "", "--max-model-len", "512")
    assert done.returncode == 2
    assert b"--max-model-len" in done.stderr


class Terminal:
    """The command in a pseudo-terminal of its own, so that a typed Ctrl-C becomes a signal as it does for people."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process = subprocess.Popen(
            arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", **environment},
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    @property
    def shows_keys(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def wait_until_it_reads(self) -> None:
        """Until the program sleeps: a prompt is written before its keys are listened for, and a signal that comes in
        between is only heard at the next key."""
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_for(self, words: str) -> str:
        """Everything up to and with the words. A model is loaded, and some of it is said, meanwhile."""
        while words not in self._seen:
            assert select.select([self._ours], [], [], PATIENCE_S)[0], self._seen
            self._seen += os.read(self._ours, 65536).decode()
        before, _, self._seen = self._seen.partition(words)
        return before + words

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    terminal = Terminal(command(server))
    try:
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.close()


def test_ctrl_c_stops_the_answer_not_the_program(server: Server, terminal: Terminal) -> None:
    terminal.type("talk\r")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    assert server.client_left.wait(PATIENCE_S), "the request was not aborted"
    terminal.wait_for("> ")
    terminal.type("next\r")
    terminal.wait_for("3:next")
    kept = server.bodies[-1]["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "user"]
    assert kept[1]["content"].startswith("word word word")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_keys_typed_during_an_answer_are_not_mixed_into_it(server: Server, terminal: Terminal) -> None:
    terminal.type("talk\r")
    terminal.wait_for("word word")
    terminal.type("/system typed ahead")
    answer = terminal.wait_for("word word word")
    server.finish.set()
    answer += terminal.wait_for("> ")
    assert "typed" not in answer
    # They were kept for the prompt.
    terminal.wait_for("/system typed ahead")
    terminal.type("\r")
    terminal.wait_for("system prompt set")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0
    assert terminal.shows_keys


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_in_the_middle_of_an_answer_leaves_the_terminal_as_it_was(terminal: Terminal, ending: int) -> None:
    terminal.type("talk\r")
    terminal.wait_for("word word")
    assert not terminal.shows_keys
    terminal.process.send_signal(ending)
    assert terminal.process.wait(PATIENCE_S) == -ending
    assert terminal.shows_keys


def test_a_failure_in_the_middle_of_an_answer_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.type("break\r")
    terminal.wait_for("HF410")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0
    assert terminal.shows_keys


def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal) -> None:
    terminal.wait_until_it_reads()
    terminal.type("\x03")
    terminal.wait_for("again to exit")
    terminal.wait_for("> ")
    terminal.wait_until_it_reads()
    terminal.type("\x03")
    assert terminal.process.wait(PATIENCE_S) == 130


def test_commands_and_failures_at_the_prompt(server: Server, terminal: Terminal) -> None:
    for typed, answer in [
        ("/help", "/reset"),
        ("/nothing", "there is no command /nothing"),
        ("/system You are a cat.", "system prompt set"),
        ("refuse", "too long by far"),
        ("hi", "2:hi"),
        ("/reset", "conversation cleared"),
        ("again", "2:again"),
    ]:
        terminal.type(typed + "\r")
        terminal.wait_for(answer)
        terminal.wait_for("> ")
    assert server.bodies[-1]["messages"][0] == {"role": "system", "content": "You are a cat."}
    terminal.type("/exit\r")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_a_models_text_cannot_steer_the_terminal(terminal: Terminal) -> None:
    # Typed with Ctrl-V first, which makes the terminal take the escape character as it is.
    terminal.type("\x16\x1b]52;x\r")
    shown = terminal.wait_for("]52;x\r\n> ")
    assert "1:\ufffd]52;x" in shown
    assert "\x1b]52" not in shown


def messages(server: Server) -> list[str]:
    """The last of each request."""
    return [body["messages"][-1]["content"] for body in server.bodies]


def test_messages_of_several_lines(server: Server, terminal: Terminal) -> None:
    terminal.type('"""first\r')
    terminal.wait_for("... ")
    terminal.type("\rthird\r")
    terminal.wait_for("... ")
    terminal.wait_for("... ")
    terminal.type('/last"""\r')
    terminal.wait_for("/last\r\n> ")
    terminal.type("one\\\r")
    terminal.wait_for("... ")
    terminal.type("two\r")
    terminal.wait_for("two\r\n> ")
    terminal.type('"""/in one line"""\r')
    terminal.wait_for("line\r\n> ")
    assert messages(server) == ["first\n\nthird\n/last", "one\ntwo", "/in one line"]
    terminal.type('/system """Be\r')
    terminal.wait_for("... ")
    terminal.type('brief."""\r')
    terminal.wait_for("system prompt set\r\n> ")
    # Ctrl-C leaves a block without sending it.
    terminal.type('"""lost\r')
    terminal.wait_for("... ")
    terminal.wait_until_it_reads()
    terminal.type("\x03")
    terminal.wait_for("again to exit")
    terminal.wait_for("> ")
    terminal.type("kept\r")
    terminal.wait_for("kept\r\n> ")
    assert messages(server)[-1] == "kept"
    assert server.bodies[-1]["messages"][0] == {"role": "system", "content": "Be\nbrief."}


def test_what_is_pasted_is_one_message(server: Server) -> None:
    terminal = Terminal(command(server), TERM="xterm")
    try:
        terminal.wait_for("\x1b[?2004h")  # The program asks the terminal to mark what is pasted.
        terminal.wait_for("> ")
        terminal.type("\x1b[200~one\rtwo\x1b[201~")
        terminal.type("\r")
        terminal.wait_for("1:one")
        terminal.wait_for("> ")
        assert messages(server) == ["one\ntwo"]
    finally:
        terminal.close()


def test_speed_is_told_to_people_until_they_say_no(server: Server, terminal: Terminal) -> None:
    terminal.type("count\r")
    assert "1:count\r\n[7 tokens, the first after " in terminal.wait_for("]\r\n> ")
    terminal.type("/set quiet\r")
    terminal.wait_for("quiet\r\n> ")
    terminal.type("count\r")
    terminal.wait_for("3:count\r\n> ")
    terminal.type("/set verbose\r")
    terminal.wait_for("verbose\r\n> ")
    terminal.type("count\r")
    assert "tokens" in terminal.wait_for("]\r\n> ")
    done = piped(server, "count\n")
    assert (done.stdout, b"tokens" in done.stderr) == (b"1:count\n", False)


def test_a_certificate_problem_is_told_as_one(server: Server, tmp_path: Path) -> None:
    key, cert = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def opened(url: str, certificate: str = "") -> str:
        backend = await UrlBackend.open(url, certificate=certificate)
        await backend.close()
        return backend.name

    with Server() as secure:
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        thread = threading.Thread(target=secure.serve_forever, daemon=True)
        thread.start()
        try:
            url = secure.url.replace("http:", "https:")
            with pytest.raises(EngineError, match="is not trusted: self") as untrusted:
                asyncio.run(opened(url))
            assert "SSL_CERT_FILE=" in (untrusted.value.fix or "")
            assert asyncio.run(opened(url, cert)) == "tiny"
            with pytest.raises(EngineError, match="does not speak HTTPS") as plain:
                asyncio.run(opened(server.url.replace("http:", "https:")))
            assert f"use {server.url}" in (plain.value.fix or "")
        finally:
            secure.shutdown()
            thread.join()


def test_run_chats_with_a_server_that_is_there(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    created_s = psutil.Process().create_time()
    entry = RunningServer(pid=os.getpid(), created_s=created_s, url=server.url, port=1, model="tiny", names=("tiny",))
    held = Registration(entry)
    terminal = Terminal([sys.executable, "-m", "holdfast", "run", "tiny", "--system", "Be brief."])
    try:
        assert "starting" not in terminal.wait_for("> ")
        terminal.type("hello\r")
        terminal.wait_for("2:hello\r\n> ")
        terminal.type("\x04")
        # `run` did not start it, so its name is not enough to end it.
        terminal.wait_for(f"tiny is still served at {server.url}; to end it: holdfast stop {os.getpid()}")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
        held.remove()


@pytest.mark.parametrize(("typed", "code"), [("\r", 1), ("y\r", 0)])
def test_rm_asks_before_it_removes(tmp_path: Path, typed: str, code: int) -> None:
    model = tmp_path / "models" / "mine.gguf"
    model.parent.mkdir()
    model.write_bytes(bytes(100))
    environment = {"HOLDFAST_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    terminal = Terminal([sys.executable, "-m", "holdfast", "rm", str(model)], **environment)
    try:
        terminal.wait_for("? [y/N] ")
        terminal.type(typed)
        terminal.wait_for("100 B freed" if code == 0 else "kept")
        assert terminal.process.wait(PATIENCE_S) == code
        assert model.exists() == bool(code)
    finally:
        terminal.close()


def test_an_engine_that_dies_at_the_prompt_is_noticed_there(tiny_arguments: list[str]) -> None:
    model = tiny_arguments[: tiny_arguments.index("--served-model-name")]
    terminal = Terminal([sys.executable, "-m", "holdfast", "chat", *model, "--max-tokens", "4", "--temperature", "0"])
    try:
        terminal.wait_for("> ")
        (engine,) = psutil.Process(terminal.process.pid).children()
        engine.kill()
        # Nothing was typed.
        assert "signal 9" in terminal.wait_for("[HF410]")
        terminal.wait_for("\r\n> ")  # Drawn again below that line.
        terminal.type("hi\r")
        assert "HF" not in terminal.wait_for("\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_lines_of_the_log_stand_above_the_prompt(tiny_arguments: list[str], term: str) -> None:
    """Those of the front, and those that the engine process writes itself."""
    model = tiny_arguments[: tiny_arguments.index("--served-model-name")]
    command = [sys.executable, "-m", "holdfast", "chat", *model, "--max-tokens", "4", "--temperature", "0"]
    terminal = Terminal(command, TERM=term, **{DIE_ON_TOKEN: "31999"})
    try:
        # The engine's lines come over a pipe of their own: before the prompt, or after it, which is then drawn again.
        written = terminal.wait_for("WARNING engine: ") + terminal.wait_for("> ")
        assert [line for line in shown(written) if " WARNING engine: " in line]
        if "Ctrl-D exits." not in written:
            terminal.wait_for("Ctrl-D exits.")
            terminal.wait_for("> ")
        terminal.type("hello")
        written = "> " + terminal.wait_for("hello")
        (engine,) = psutil.Process(terminal.process.pid).children()
        engine.kill()
        written += terminal.wait_for("[HF410]") + terminal.wait_for("> hello")
        written += terminal.wait_for("WARNING engine: ") + terminal.wait_for("> hello")
        *above, last = shown(written)
        assert last == "> hello"
        (died,) = [line for line in above if "[HF410]" in line]
        assert " ERROR holdfast: " in died
        assert [line for line in above if " WARNING engine: " in line]
        assert not [line for line in above if "hello" in line and line != "> hello"]
        assert above.count("> hello") == (2 if term == "dumb" else 0)
        terminal.type("\r")
        terminal.wait_for("> ")
    finally:
        terminal.close()


def test_lines_of_the_log_stand_above_a_bar() -> None:
    program = """
import logging, threading
from holdfast.checkpoints.sources.download_progress import byte_progress
from holdfast.observability.logs import json_lines, set_up_logging, write_log_line
set_up_logging()
with byte_progress("model.gguf", 1 << 20, progress=True) as update:
    access = json_lines()
    for done in range(1, 6):
        update(done << 16)
        logging.getLogger("holdfast").warning("line %d", done)
        thread = threading.Thread(target=write_log_line, args=[f"WARNING engine: line {done}"])
        thread.start()
        thread.join()
        access({"status": 200 + done})
    update(1 << 20)
print("done")
"""
    terminal = Terminal([sys.executable, "-c", program], TERM="xterm")
    try:
        lines = shown(terminal.wait_for("done\r\n"))
    finally:
        terminal.close()
    for done in range(1, 6):
        assert [line[-len(f"WARNING holdfast: line {done}") :] for line in lines].count(
            f"WARNING holdfast: line {done}"
        ) == 1, lines
        assert f"WARNING engine: line {done}" in lines
        assert f'{{"status":{200 + done}}}' in lines
    assert len([line for line in lines if "model.gguf" in line]) == 1


def test_ctrl_c_while_the_model_loads_leaves_nothing_behind(tiny_arguments: list[str]) -> None:
    model = tiny_arguments[: tiny_arguments.index("--served-model-name")]
    terminal = Terminal([sys.executable, "-m", "holdfast", "chat", *model])
    try:
        chat, deadline = psutil.Process(terminal.process.pid), time.monotonic() + PATIENCE_S
        while not (engines := chat.children()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        terminal.type("\x03")
        assert terminal.process.wait(PATIENCE_S) == 130
        assert not psutil.wait_procs(engines, timeout=PATIENCE_S)[1]
    finally:
        terminal.close()


class Silent(ChatScreen):
    """A person who types nothing but one line, during which the engine is given up."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.interactive = True
        self.said: list[str] = []
        self._meanwhile = meanwhile

    def read(self) -> str:
        self._meanwhile()
        return "are you there?"

    def show(self, text: str) -> None:
        self.said.append(text)

    say = show


def test_a_dead_engine_ends_the_chat_with_its_code() -> None:
    engine = FakeEngine()
    screen = Silent(lambda: engine.die("out of luck"))
    with BackgroundLoop() as loop:
        loop.run(engine.start())
        assert ChatHistory(LocalBackend(engine), {}, "", screen, loop).hold() == 1
        loop.run(engine.stop())
    assert "out of luck [HF410]" in "".join(screen.said)
    assert not engine.received


async def test_an_engine_in_process_answers_and_is_aborted() -> None:
    engine = FakeEngine()
    await engine.start()
    backend = LocalBackend(engine)
    pieces = [piece async for piece in backend.stream([{"role": "user", "content": "hi"}], {"max_tokens": 8})]
    assert "".join(pieces)
    stream = backend.stream([{"role": "user", "content": "hi"}], {"max_tokens": 8})
    await anext(stream)
    await stream.aclose()
    assert engine.unfinished == 0
    with pytest.raises(RequestError, match="temperature"):
        await anext(backend.stream([{"role": "user", "content": "hi"}], {"temperature": -1.0}))
    await backend.close()
