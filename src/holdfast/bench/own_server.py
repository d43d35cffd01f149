"""A server of ours for the length of a benchmark: started on a free port, waited for, stopped at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.doctor.probe.metrics_page import OK, client_for, get
from holdfast.errors import EngineError, printable

NOT_READY = "HF166"
POLL_S = 0.1
STOP_S = 20.0
LINES_SHOWN = 12


@contextlib.contextmanager
def own_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """Its address, once it is ready. Its log is kept where it fails."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "holdfast", "serve", model, "--port", str(port), "--disable-access-log", *flags]
    descriptor, name = tempfile.mkstemp(prefix="holdfast-bench-", suffix=".log")
    with os.fdopen(descriptor, "wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_ready(process, url, Path(name))
            yield url
        except KeyboardInterrupt:
            Path(name).unlink()
            raise
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    Path(name).unlink(missing_ok=True)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    with client_for(os.environ.get("HOLDFAST_API_KEY")) as client:
        while get(client, f"{url}/health").status != OK:
            if process.poll() is not None:
                said = log.read_text(encoding="utf-8", errors="replace").splitlines()
                begins = [at for at, line in enumerate(said) if line.startswith("holdfast: ")]
                shown = said[begins[-1] :] if begins else said[-LINES_SHOWN:]
                raise EngineError(
                    "the server ended before it was ready",
                    code=NOT_READY,
                    found="\n          ".join(printable(line) for line in shown),
                    fix=f"its log: {log}",
                )
            time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
