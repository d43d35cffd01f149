"""Whatever the API's own document allows, and much that it does not, asked of a real server with a real template."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.timeout(1800)
def test_nothing_that_can_be_asked_is_a_fault(client_environment, start_server, tiny_arguments, tmp_path: Path) -> None:
    """No 5xx, nothing that hangs, no answer that the document does not tell of."""
    # A short context: whoever asks for 128 answers gets them within the patience of a client.
    server = start_server(*tiny_arguments, "--max-model-len", "64").wait_ready()
    program = client_environment("schemathesis") / "bin" / "schemathesis"
    command = [
        str(program), "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--request-timeout", "120",
        "--max-examples", "30", "--generation-database", "none", "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/load", timeout=60).json() == {"server_load": 0}
