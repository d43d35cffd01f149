"""Nodes of an engine on several machines, on one machine: each is a process group of its own with its own working
directory and loopback address, which shares nothing with the others but sockets. A machine that is lost is such a group
that is killed; a network that loses packets is not tried.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from deadlines import PATIENCE_S
from free_ports import free_port

SECRET = "a secret of tests"


class Node:
    """`holdfast serve --headless` as a user starts it on another machine."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *arguments: str,
        secret: str | None = SECRET,
        program: tuple[str, ...] = ("-m", "holdfast"),
    ) -> None:
        self.rank, self.host = rank, f"127.0.0.{rank + 1}"
        self.home = folder / f"node-{rank}-{time.monotonic_ns()}"
        """Its working directory, and that of its ranks."""
        self.home.mkdir()
        self._log_path = self.home / "log"
        environment = dict(os.environ)
        if secret is not None:
            environment["HOLDFAST_NODE_SECRET"] = secret
        command = [sys.executable, *program, "serve", *arguments, "--headless"]
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--node-rank", str(rank), "--node-addr", self.host],
                stdout=log,
                stderr=log,
                cwd=self.home,
                env=environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [one for one in children if "holdfast.engine.ranks.entry" in " ".join(one.cmdline())]
        return []

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def lose(self) -> None:
        """The machine: all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def nodes(
    folder: Path, model: Path, sizes: tuple[int, int], count: int = 2
) -> Iterator[tuple[dict[str, Any], list[Node]]]:
    """All but the head, and the settings for it. `sizes`: -tp and -pp."""
    port = free_port()
    arguments = node_arguments(model, sizes, count, port)
    started = [Node(folder, rank, *arguments) for rank in range(1, count)]
    head = {
        "nnodes": count,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "node_secret": SECRET,
        "node_timeout": PATIENCE_S,
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
    }
    try:
        yield head, started
    finally:
        for node in started:
            node.lose()


def node_arguments(model: Path, sizes: tuple[int, int], count: int, port: int) -> list[str]:
    dummy = ["--load-format", "dummy", "--threads", "1"]
    return [str(model), *dummy, *node_flags(sizes, count, port)]


def node_flags(sizes: tuple[int, int], count: int, port: int, device: str = "cpu") -> list[str]:
    return [
        "--device", device, "-tp", str(sizes[0]), "-pp", str(sizes[1]), "--nnodes", str(count), "--master-addr",
        "127.0.0.1", "--master-port", str(port),
    ]  # fmt: skip
