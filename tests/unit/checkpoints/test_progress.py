"""Progress goes to stderr alone: a bar at a terminal, a few lines in a log, nothing when nobody asked."""

from __future__ import annotations

import io

import pytest

from holdfast.checkpoints.sources.download_progress import byte_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with byte_progress("Model", 2048, progress=True) as update:
        update(1024)
        update(4096)
    assert "Model" in terminal.getvalue()
    assert "2.0/2.0 KiB" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("Model", 1000, progress=True) as update:
        for done in (0, 100, 260, 270, 999, 1000, 1200):
            update(done)
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"Model: {part}% of 1000 B" for part in (25, 75, 100)]
    assert said.out == ""


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("Model", 1000, progress=False) as update:
        update(1000)
    assert capsys.readouterr().err == ""
