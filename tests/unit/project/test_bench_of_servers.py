"""The driver of `holdfast bench` against servers, with a stand-in for a server: that none is left, whatever fails."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import bench_servers

# Answers that it is healthy, counts no tokens, and does not care for SIGTERM.
STUBBORN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_no_server_is_left_and_a_bench_that_failed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **settings: object) -> None:
            super().__init__(words, **settings)  # type: ignore[call-overload]
            started.append(self)

    def bench_without_a_file(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(bench_servers, "END_S", 0.3, raising=False)
    monkeypatch.setattr(
        bench_servers, "command_of", lambda server, folder, model, port, at_once: [
            sys.executable, "-c", STUBBORN, str(port),
        ],
    )  # fmt: skip
    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(subprocess, "run", bench_without_a_file)
    options = argparse.Namespace(folder=tmp_path, model="m.gguf", at_once=1, peak=1, prompt=8, output=4)
    try:
        with pytest.raises(SystemExit, match="exit code 3"):
            bench_servers.turn("llama.cpp", options)
        assert [process.poll() for process in started] == [-9]
    finally:
        for process in started:
            process.kill()
            process.wait()
