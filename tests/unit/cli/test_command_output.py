"""What commands print: to readers that leave early, about faults of their own, and of strangers' words."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from typing import Any

import pytest
from deadlines import PATIENCE_S

from holdfast.cli.commands import plan
from holdfast.cli.commands.running import ps
from holdfast.cli.commands.stored import models
from holdfast.cli.main import main
from holdfast.cli.output import say, unforeseen
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.units import shorten

EVIL = "a\x1b[2J\x1b]0;pwned\x07b\x9b31m\u202ec\r\x7f\ud800"


def to_nobody(*words: str) -> subprocess.CompletedProcess[bytes]:
    """The command with a standard output that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "holdfast", *words], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=120
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan", "llama-3.1-8b", "--gpu", "rtx4090"), 0),
        (("plan", "llama-3.1-70b", "--gpu", "rtx4090", "--json"), 1),
        (("explain",), 0),
        (("models", "--json"), 0),
        (("plan", "--help"), 0),
    ],
    ids=["fits", "does not fit", "explain", "models", "help"],
)
def test_a_reader_that_left_changes_no_exit_code(words: tuple[str, ...], code: int) -> None:
    done = to_nobody(*words)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_an_interrupted_write_loses_nothing(unbuffered: str) -> None:
    """Of a process that is stopped while it waits for its reader."""
    code = "from holdfast.cli.output import say_json; say_json(list(range(100_000)))"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        deadline_s, before = time.monotonic() + PATIENCE_S, -1
        while (now := waiting_bytes(process.stdout.fileno())) != before or not now:  # Until the pipe is full.
            assert time.monotonic() < deadline_s
            before = now
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(signal.SIGCONT)
        assert json.loads(process.stdout.read()) == list(range(100_000))


def waiting_bytes(reader: int) -> int:
    return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "plan", "llama-3.1-8b", "--gpu", "rtx4090"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )
    assert done.returncode == 70
    assert b"[HF001]" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_our_own_is_not_a_model_that_does_not_fit(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: Any) -> Any:
        raise ZeroDivisionError("by\x1bnothing")

    monkeypatch.setattr(plan, "_answers", fails)
    assert main(["plan", "llama-3.1-8b", *(["--json"] if as_json else [])]) == 70
    said = capsys.readouterr()
    if as_json:
        assert json.loads(said.out)["error"]["code"] == "HF001"
    else:
        assert "[HF001]" in said.err
        assert "ZeroDivisionError" in said.err
        assert "cli/commands/plan.py:" in said.err
        assert "\x1b" not in said.err


def test_a_fault_of_another_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "run", lambda arguments: int("x"))
    assert main(["models"]) == 70
    assert "[HF001]" in capsys.readouterr().err


# Strangers' words


def is_plain(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_errors_spell_out_what_would_steer_a_terminal() -> None:
    error = ConfigurationError(EVIL, needed=EVIL, found=EVIL, fix=EVIL)
    assert is_plain(str(error))
    assert str(error).count("\n") == 3
    assert r"\x1b[2J" in str(error)
    assert is_plain(shorten(EVIL))
    assert is_plain(shorten([EVIL], 30))
    assert is_plain(str(unforeseen(ValueError(EVIL))))
    assert isinstance(error, HoldfastError)


@pytest.mark.parametrize("limit", [1, 5, 10])
def test_what_is_shortened_stays_short(limit: int) -> None:
    assert len(shorten("\x1b" * 1000, limit)) <= limit + 3
    assert shorten("x" * limit, limit) == "x" * limit


def test_colours_are_kept_only_where_they_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    say(["\x1b[1mbold\x1b[0m \x1b[2J"], colour=True)
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m \\x1b[2J\n"
    say(["\x1b[1mbold\x1b[0m"])
    assert is_plain(capsys.readouterr().out)


@pytest.mark.parametrize("as_json", [False, True])
def test_ps_spells_out_what_a_server_says(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"version": EVIL, "model": EVIL}
    monkeypatch.setattr(ps, "ask", lambda *given: {"url": "u", "status": EVIL, "reason": EVIL, "memory": memory})
    assert main(["ps", *(["--json"] if as_json else [])]) == 1
    assert is_plain(capsys.readouterr().out)


def test_ps_does_not_blame_an_option_that_it_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "ftp://x"]) == 2
    said = capsys.readouterr().err
    assert "--url" not in said
    assert "fix:" in said
