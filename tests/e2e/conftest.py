"""What end-to-end tests share: a real nginx."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import PATIENCE_S
from free_ports import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

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


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """A real nginx with default settings before a port; gives the URL to ask."""
    if NGINX is None:
        pytest.skip("nginx is not installed (scripts/install-test-tools.sh does it)")
    running: list[subprocess.Popen[bytes]] = []

    def start(upstream: int) -> str:
        port = free_port()
        (tmp_path / "nginx.conf").write_text(CONFIGURATION.format(port=port, upstream=upstream))
        process = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", "nginx.conf", "-e", "error.log"])
        running.append(process)
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            assert time.monotonic() < deadline_s
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.01)

    yield start
    for process in running:
        process.terminate()
        process.wait(PATIENCE_S)
