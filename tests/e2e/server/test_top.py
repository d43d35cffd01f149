"""`holdfast top`: once into a pipe, as JSON, again and again in a terminal; servers without a page, or with a key."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from pathlib import Path

import httpx
import msgspec
import pytest
from certificates import self_signed

from holdfast.cli.commands.running import top
from holdfast.cli.main import main
from holdfast.cli.servers.state_screen import ServerLook, screen_lines
from holdfast.engine.fake import FakeEngine
from holdfast.server.run import bind
from holdfast.server.ui.machine import Holder, MachineTier
from holdfast.server.ui.state import RequestsState, RequestState, UiState
from holdfast.units import GIB


def looked(server) -> UiState:
    return msgspec.json.decode(server.client().get("/ui/state").content, type=UiState)


def test_into_a_pipe_everything_is_said_once(launch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    server = launch(engine)
    server.call(engine.pause)
    body = {"prompt": "my secret", "stream": True, "max_tokens": 9}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body):
        server.until(lambda: engine.unfinished == 1)
        assert main(["top", server.url]) == 0
    said = capsys.readouterr().out
    assert said.startswith("● ready  fake, alias  http://127.0.0.1")
    assert all(words in said for words in ("running 1", "kv_pool", "of 1,024 pages", "tokens/s", "cmpl-"))
    assert "secret" not in said
    assert "\x1b" not in said


def test_for_programs_it_is_the_state_of_each(launch, capsys: pytest.CaptureFixture[str]) -> None:
    server = launch()
    assert main(["top", "--json", server.url, "http://127.0.0.1:1"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["status"], first["server"]["version"], first["requests"]["open"]) == ("ready", "9.9", 0)
    assert (second["status"], "server" in second) == ("unreachable", False)


def test_without_a_page_the_memory_is_told(launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", launch(ui=False).url]) == 0
    said = capsys.readouterr().out
    assert "it does not serve /ui/state" in said
    assert "kv_pool" in said


def test_a_key_is_taken_from_the_environment(
    launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = launch(api_key="secret")
    assert main(["top", server.url]) == 1
    assert "set HOLDFAST_API_KEY" in capsys.readouterr().out
    monkeypatch.setenv("HOLDFAST_API_KEY", "secret")
    assert main(["top", server.url]) == 0


def test_a_certificate_that_is_not_trusted_is_told_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                context.wrap_socket(connection, server_side=True).close()

        threading.Thread(target=greet, daemon=True).start()
        assert main(["top", f"https://127.0.0.1:{listener.getsockname()[1]}"]) == 1
    assert "SSL_CERT_FILE" in capsys.readouterr().out


def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "ftp://x"]) == 2
    assert main(["top", "--interval", "0"]) == 2
    assert "0.2 to 3600 seconds" in capsys.readouterr().err


def test_in_a_terminal_it_looks_again_until_it_is_left(
    launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, looks = launch(), []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", wait)
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("LINES", "40"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    with top.WatchedServers([server.url]) as watched:
        [look] = top._watch(watched, 0.5)
    assert (look.status, looks) == ("ready", [0.5] * 3)
    assert look.rates is not None
    said = capsys.readouterr().out
    assert said.count("of 1,024 pages") == 3
    assert said.endswith("\x1b[?25h\x1b[?1049l")  # Who leaves finds the terminal as it was.


def test_the_hour_is_gathered_and_begins_anew_with_another_server(launch) -> None:
    first = launch()
    watched = top.WatchedServer(top.ServerAddress(first.url))
    for samples in (1, 2):
        first.call(first._app.state.ui.history.take)
        state = watched.look().state
        assert state is not None
        assert len(state.history.samples) == samples
    first.stop()
    assert watched.look().status == "unreachable"
    launch(listener=bind("127.0.0.1", first.port))
    state = watched.look().state
    assert state is not None
    assert state.history.samples == []
    watched.close()


def test_servers_that_share_an_address_are_not_asked_without_end(launch) -> None:
    """As behind a proxy that hands each request to another of them."""
    servers = [launch(), launch()]
    watched = top.WatchedServer(top.ServerAddress(servers[0].url))
    for server in servers:
        server.call(server._app.state.ui.history.take)
    asked: list[str] = []

    def in_turn(request: httpx.Request) -> None:
        asked.append(request.url.query.decode())
        request.url = request.url.copy_with(port=servers[len(asked) % 2].port)

    watched._client.event_hooks = {"request": [in_turn]}
    assert [watched.look().status for _ in range(2)] == ["ready"] * 2
    assert asked == ["since=0", "since=1", "since=0"]
    watched.close()


def test_lines_fit_the_terminal_and_steer_nothing(launch) -> None:
    state = looked(launch())
    request = RequestState(
        id="\x1b[2Jx" * 9, model="m", state="decode", age_s=1.0, answers=1, prompt_tokens=1, cached_tokens=0,
        generated_tokens=2, max_tokens=3, ttft_s=0.1, tokens_per_s=5.0,
    )  # fmt: skip
    many = msgspec.structs.replace(state, requests=RequestsState(open=1000, shown=[request] * 100))
    look = ServerLook("http://x", "ready", "", state=many, memory=many.memory)
    lines = screen_lines(look, width=100, rows=24, blocks=False)
    assert len(lines) == 24
    assert "\x1b" not in "".join(line.plain for line in lines)
    assert "".join(line.plain for line in lines).isascii()
    whole = screen_lines(look, width=100)
    assert whole[-2].plain.strip() == "the oldest 100 of 1,000"


def test_devices_of_which_nothing_is_planned_are_shown_too(launch) -> None:
    state = looked(launch())
    gpu = MachineTier(
        tier="vram", name="GPU 0: L4", total_bytes=8 * GIB, free_bytes=2 * GIB, ours=False,
        holders=[Holder(name="comfy", pid=7, held_bytes=None)],
    )  # fmt: skip
    look = ServerLook("http://x", "ready", "", state=msgspec.structs.replace(state, machine=[gpu]), memory=state.memory)
    text = "\n".join(line.plain for line in screen_lines(look, width=100))
    assert "GPU 0: L4  0 B held; others 6.00 GiB, free 2.00 GiB of 8.00 GiB" in text
    assert "others: comfy (pid 7) -" in text
