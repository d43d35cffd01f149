"""The bar over the tensors of a load: on a terminal, and closed however the load ends."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from holdfast.engine.startup import progress
from holdfast.engine.startup.progress import LoadProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("end", ["ready", "stopped", "profile_run"])
def test_the_cursor_is_shown_again(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "APPEARS_AFTER_S", -1.0)
    shown = LoadProgress()
    shown("load", 1, 10)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    shown(end, 0, 0)
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_pinned_memory_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "APPEARS_AFTER_S", -1.0)
    shown = LoadProgress()
    shown("pin", 100 << 20, 400 << 20)
    shown("load", 1, 10)
    shown("ready", 0, 0)
    assert "pinning MiB of RAM" in terminal.getvalue()
    assert "100/400" in terminal.getvalue()
    assert "loading tensors" in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[?25h") == 2


def test_a_bar_ends_with_its_load_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "APPEARS_AFTER_S", -1.0)
    with LoadProgress() as shown:
        shown("load", 1, 10)
        assert terminal.getvalue().count("\x1b[?25h") == 0
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_a_long_load_has_lines_in_a_log_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    shown = LoadProgress()
    for done in range(40):
        shown("load", done, 2000)
        now_s += 1.0
    assert caplog.messages == ["loading tensors: 16 of 2,000", "loading tensors: 32 of 2,000"]
