"""A server for the length of a benchmark: started on a free port, waited for, stopped at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.bench.target import NOT_READY
from holdfast.doctor.probe.metrics_page import OK, client_for, get
from holdfast.errors import EngineError, printable
from holdfast.rescue.orphans import Guard

POLL_S = 0.1
STOP_S = 20.0
LINES_SHOWN = 12


class LaunchedServer:
    """A process that serves, or is to. `log`: what it says, until it is stopped."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_until_ready(self, limit_s: float = float("inf")) -> None:
        """Raises where it ends before, or takes longer."""
        until_s = time.monotonic() + limit_s
        with client_for(os.environ.get("HOLDFAST_API_KEY")) as client:
            while get(client, f"{self.url}/health").status != OK:
                if self.ended:
                    raise self._not_ready("the server ended before it was ready")
                if time.monotonic() > until_s:
                    raise self._not_ready(f"the server was not ready within {limit_s:.0f} s")
                time.sleep(POLL_S)

    def _not_ready(self, what: str) -> EngineError:
        said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        begins = [at for at, line in enumerate(said) if line.startswith("holdfast: ")]
        shown = said[begins[-1] :] if begins else said[-LINES_SHOWN:]
        return EngineError(
            what,
            code=NOT_READY,
            found="\n          ".join(printable(line) for line in shown),
            fix=f"its log: {self.log}",
        )


@contextlib.contextmanager
def launched(words: Sequence[str], port: int, *, kept: bool) -> Iterator[LaunchedServer]:
    """Not ready yet. Its log is gone with it, unless it failed and is `kept`."""
    descriptor, name = tempfile.mkstemp(prefix="holdfast-bench-", suffix=".log")
    failed = False
    with os.fdopen(descriptor, "wb") as log:
        # A group of its own: what it started ends with it, and Ctrl-C is for this process, which ends them in order.
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            with Guard(process.pid):
                yield LaunchedServer(process, f"http://127.0.0.1:{port}", Path(name))
        except Exception:
            failed = True
            raise
        finally:
            _stop(process)
            if not (failed and kept):
                Path(name).unlink()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def own_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server of ours, once it is ready. Its log is kept where it fails."""
    port = free_port()
    words = [sys.executable, "-m", "holdfast", "serve", model, "--port", str(port), "--disable-access-log", *flags]
    with launched(words, port, kept=True) as server:
        server.wait_until_ready()
        yield server.url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
