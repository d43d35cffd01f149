"""The bar over the tensors of a load: on a terminal, and closed however the load ends."""

from __future__ import annotations

import io
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
