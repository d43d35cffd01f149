"""An engine process before it is asked for anything: it is there, it can be ended, and nothing of it stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.errors import EngineDiedError


def test_it_is_ended_with_all_it_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    early = EarlyProcess()
    assert early.process.poll() is None
    assert early.address.startswith(f"ipc://{tmp_path}")
    early.end()
    assert early.process.returncode is not None
    assert list(tmp_path.iterdir()) == []
    early.end()  # As when somebody else has ended it before.


def test_it_ends_when_the_front_is_gone() -> None:
    code = """
from holdfast.engine.startup.prespawn import EarlyProcess
print(EarlyProcess().pid, flush=True)
import os
os._exit(0)
"""
    front = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=True)
    # Its standard output was the pipe too: that run() has returned means that nobody holds it any more.
    assert not Path(f"/proc/{int(front.stdout)}/fd/1").exists()


def test_no_room_for_a_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EngineDiedError, match="could not be started"):
        EarlyProcess(Path("/tmp/unused.sock"))
