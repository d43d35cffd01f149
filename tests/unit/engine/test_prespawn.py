"""An engine process before it is asked for anything: it is there, it can be ended, and nothing of it stays."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.asyncio
from deadlines import PATIENCE_S
from held_signals import hears_no_interrupt

from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.process.handle import Child
from holdfast.engine.startup import prespawn
from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.errors import EngineDiedError, NoResourcesError


def test_it_is_ended_with_all_it_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    early = EarlyProcess()
    assert early.process.poll() is None
    assert hears_no_interrupt(early.pid)
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
    front = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    # Its standard output was the pipe too: that run() has returned means that nobody holds it any more.
    assert not Path(f"/proc/{int(front.stdout)}/fd/1").exists()


def test_no_room_for_a_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EngineDiedError, match="could not be started"):
        EarlyProcess(Path("/tmp/unused.sock"))


def test_one_that_cannot_be_told_what_to_load_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the server's end waits for it for ever."""

    def fails(message: object) -> bytes:
        raise TypeError("cannot be written")

    async def spawn(early: EarlyProcess) -> None:
        context = zmq.asyncio.Context()
        try:
            await Child.spawn(context, tmp_path / "unused.sock", EngineConfig(), early=early)
        finally:
            context.destroy(linger=0)

    monkeypatch.setattr(protocol, "encode", fails)
    early = EarlyProcess()
    with pytest.raises(TypeError, match="cannot be written"):
        asyncio.run(spawn(early))
    assert early.process.returncode is not None


def test_its_lines_are_read_to_the_end_though_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads would fill, and the process stand still."""

    def fails(line: str) -> None:
        raise OSError("the terminal is gone")

    monkeypatch.setattr("holdfast.observability.logs.write_log_line", fails)
    code = "import sys; sys.stderr.write(('x' * 1000 + '\\n') * 1000 + 'y' * 200_000)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as writer:
        assert writer.stderr is not None
        prespawn._pass_on(writer.stderr)
        assert writer.wait(PATIENCE_S) == 0
        assert writer.stderr.closed


class _Terminal:
    def isatty(self) -> bool:
        return True


def test_no_thread_for_its_lines_is_a_shortage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(prespawn.sys, "stderr", _Terminal())
    monkeypatch.setattr(prespawn.threading.Thread, "start", no_thread)
    monkeypatch.setattr(prespawn.subprocess, "Popen", noted)
    with pytest.raises(NoResourcesError, match="could not be started"):
        EarlyProcess(tmp_path / "0.sock")
    assert started[0].returncode is not None
