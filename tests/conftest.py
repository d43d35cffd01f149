"""Shared by all tests: real servers in processes of their own, the built-in model, and small models in real shapes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from holdfast.hardware.nvidia import probe

if not probe().gpus:
    # Before anything imports Triton: kernels are tested in its interpreter where there is no GPU.
    os.environ["TRITON_INTERPRET"] = "1"

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
"""The built-in model's vocabulary, so that its tokenizer goes with it; small enough to step in about a millisecond."""


class RunningServer:
    """`holdfast serve` as a user starts it. Everything it says is in `log`."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        words = [*arguments]
        key = words[words.index("--api-key") + 1] if "--api-key" in words else None
        self._key = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._log_path = folder / f"server-{self.port}.log"
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "serve", *arguments, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def engine_pid(self) -> int:
        """The child that holds the model."""
        for child in psutil.Process(self.process.pid).children():
            if "holdfast.engine.begin" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError("there is no engine process")

    def wait_ready(self, timeout_s: float = 120) -> RunningServer:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready in {timeout_s} s:\n{self.log}")

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        found = 0.0
        page = httpx.get(f"{self.url}/metrics", headers=self._key)
        assert page.status_code == 200, page.text
        for line in page.text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")):
                found += float(line.rsplit(" ", 1)[1])
        return found

    def wait_metric(self, name: str, good: Callable[[float], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not good(found := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} stayed at {found}"
            time.sleep(0.05)

    def stop(self, timeout_s: float = 60) -> int:
        """Ends it in order and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and no weights, for load_format=dummy."""
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_arguments(tiny_model: Path) -> list[str]:
    """Dummy weights, a real tokenizer, one thread: for tests of the house, not of the model."""
    return [
        str(tiny_model), "--load-format", "dummy", "--tokenizer", "smollm2", "--threads", "1", "--dtype", "float32",
        "--kv-cache-memory-bytes", "64MiB", "--served-model-name", "tiny",
    ]  # fmt: skip


def _starter(folder: Path) -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> RunningServer:
        servers.append(RunningServer(folder, *arguments, environment=environment))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with the given flags and ends them when the test does."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """The same, for servers that the tests of one file share."""
    yield from _starter(tmp_path_factory.mktemp("servers"))
