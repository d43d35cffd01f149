"""A pytest plugin: llama.cpp's tests start `holdfast serve` where they would start llama-server.

Which flags of ours say what a test's server is given, and that tests with the same flags share one server. The default
model answers for every model; what it says is its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import requests

MODEL = os.environ.get("COMPAT_MODEL", "smollm2")
START_LIMIT_S = 120.0
running: dict[tuple[str, ...], tuple[int, subprocess.Popen[bytes]]] = {}
left_out: set[str] = set()
NO_FLAG = ("model_draft", "slot_save_path", "lora_files", "mmproj_url", "models_dir", "media_path", "server_tools",
           "mcp_servers_config", "mcp_servers_json", "sleep_idle_seconds", "gcp_compat", "models_preset")  # fmt: skip
"""What a test's server is given and ours cannot be: told at the end."""


def flags_of(server: Any) -> list[str]:
    flags: list[str] = []
    if server.model_alias and "," in server.model_alias:
        flags += ["--served-model-name", *server.model_alias.split(",")]
    else:
        # llama-server answers to any name, as ours does where none is chosen.
        server.model_alias = MODEL
    if server.api_key:
        flags += ["--api-key", server.api_key]
    if server.n_ctx:
        # Without kv_unified llama-server gives each slot its part of the context.
        slots = 1 if server.kv_unified else server.n_slots or 1
        flags += ["--max-model-len", str(server.n_ctx // slots)]
    if server.n_predict and server.n_predict > 0:
        flags += ["--override-generation-config", json.dumps({"max_new_tokens": server.n_predict})]
    if server.chat_template_file:
        flags += ["--chat-template", server.chat_template_file]
        # llama-server says it to every template; ours says what it is told to.
        thinks = {"enable_thinking": getattr(server, "reasoning", None) != "off"}
        flags += ["--default-chat-template-kwargs", json.dumps(thinks)]
    if server.lora_files:
        flags += ["--enable-lora"]
    left_out.update(name for name in NO_FLAG if getattr(server, name, None))
    return flags


def start(server: Any, timeout_seconds: float = 0.0) -> None:
    key = tuple(flags_of(server))
    if key in running and running[key][1].poll() is None:
        server.server_port = running[key][0]
        return
    while len(running) >= 3:  # Of memory and cores there are few.
        end(*next(iter(running.items())))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", MODEL, "--port", str(port), "--disable-access-log"]
    process = subprocess.Popen([*command, *key], stdout=sys.stderr, stderr=sys.stderr)
    server.server_port = port
    try:
        wait_ready(process, port, " ".join(key))
    except BaseException:  # A test's own time limit too.
        process.kill()
        process.wait()
        raise
    running[key] = (port, process)


def wait_ready(process: subprocess.Popen[bytes], port: int, flags: str) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"holdfast serve ended with {process.returncode}: {flags}")
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.25)
    raise TimeoutError("holdfast serve did not start")


def end(key: tuple[str, ...], entry: tuple[int, subprocess.Popen[bytes]]) -> None:
    del running[key]
    entry[1].terminate()
    try:
        entry[1].wait(20)
    except subprocess.TimeoutExpired:
        entry[1].kill()
        entry[1].wait()


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # Downloads models; there is one here.
    import utils  # type: ignore[import-not-found]

    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda server: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        said = crash.message.replace("\n", " ")[:200]
        print(f"\n{report.nodeid}: {os.path.basename(crash.path)}:{crash.lineno}: {said}", flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counted: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            of_file = counted.setdefault(report.nodeid.partition("::")[0], {})
            of_file[outcome] = of_file.get(outcome, 0) + 1
    for name, outcomes in sorted(counted.items()):
        terminalreporter.write_line(f"{name}: {', '.join(f'{count} {kind}' for kind, count in outcomes.items())}")
    if left_out:
        terminalreporter.write_line(f"asked of llama-server, and not of ours: {', '.join(sorted(left_out))}")


def pytest_unconfigure(config: pytest.Config) -> None:
    for key, entry in list(running.items()):
        end(key, entry)
