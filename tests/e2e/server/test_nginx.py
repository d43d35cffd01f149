"""Through a real nginx with default proxy settings events still come one by one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from holdfast.engine.fake import FakeEngine

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (scripts/install-test-tools.sh does it)")

CONFIGURATION = """
daemon off;
pid nginx.pid;
error_log error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    }}
}}
"""

TOKENS, PACE_S = 20, 0.03


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(upstream: int) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (tmp_path / "nginx.conf").write_text(CONFIGURATION.format(port=port, upstream=upstream))
        process = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", "nginx.conf", "-e", "error.log"])
        running.append(process)
        deadline_s = time.monotonic() + 20
        while True:
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            assert time.monotonic() < deadline_s
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.terminate()
        process.wait(20)


def test_each_event_passes_before_the_next_token_exists(launch, proxy):
    server = launch()
    url = proxy(server.port)
    server.call(server.engine.pause)
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(5):
            server.call(server.engine.step)
            assert next(lines).startswith("data: {")
        assert next(lines) == "data: [DONE]"


def test_arrival_times_are_spread_as_the_tokens_are(launch, proxy):
    server = launch(FakeEngine(token_delay_s=PACE_S))
    url = proxy(server.port)
    body = {"prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    arrivals_s = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        assert response.headers["cache-control"] == "no-cache"
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals_s.append(time.monotonic())
    assert len(arrivals_s) == TOKENS
    # The engine needs at least 19 pauses; a proxy that gathers the answer would hand over all events at once.
    spread_s = arrivals_s[-1] - arrivals_s[0]
    assert spread_s > 0.5 * (TOKENS - 1) * PACE_S, arrivals_s
