"""Nobody reads what the server says: it goes on serving, and ends in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
from deadlines import PATIENCE_S
from free_ports import free_port

REQUESTS, PATH = 2500, "/" + 199 * "x"
"""An access line each, of half a kilobyte: more than a pipe and the backlog of a mebibyte behind it hold."""


def _ask_for_nothing(port: int) -> None:
    """By the standard library's client, which computes less for a request than httpx."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    for _ in range(REQUESTS):
        connection.request("GET", PATH)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 404
    connection.close()


def test_a_log_that_nobody_reads_holds_up_nothing(tiny_arguments: list[str], tmp_path: Path) -> None:
    port = free_port()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "holdfast", "serve", *tiny_arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.05)
            _ask_for_nothing(port)
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    with open(reading, "rb") as log:
        told = log.read()
    assert b"Ready: http" in told
    assert 0 < told.count(PATH.encode()) < REQUESTS  # The pipe was full indeed.
