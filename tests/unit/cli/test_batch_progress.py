"""How far a batch is: a bar at a terminal, a line now and then elsewhere, and always the end."""

from __future__ import annotations

import io
import sys

import pytest

from holdfast.cli.batch import progress as batch_progress
from holdfast.cli.batch.progress import BatchProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def progress() -> BatchProgress:
    return BatchProgress(total=5, done=2, refused=1, generated=lambda: 100)


def test_a_terminal_gets_a_bar(monkeypatch, progress) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress:
        progress.answered(True)
    assert "3/5" in sys.stderr.getvalue()
    assert "tok/s" in sys.stderr.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch, progress, capsys) -> None:
    with progress:
        progress.answered(True)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(batch_progress, "LINE_EVERY_S", 0.0)
        progress.answered(False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("holdfast: 4 of 5 lines answered, 2 of them errors; ")


def test_the_end_says_what_is_left(progress) -> None:
    assert progress.story().startswith("2 of 5 lines answered, 1 of them errors; ")


def test_lines_without_an_answer_are_named_up_to_a_bound(progress, capsys) -> None:
    for number in range(30):
        progress.lose(f"line {number}\x1b[2J")
    said = capsys.readouterr().err.splitlines()
    assert (progress.lost, len(said)) == (30, batch_progress.LOST_SAID)
    assert said[0] == r"holdfast: line 0\x1b[2J"
