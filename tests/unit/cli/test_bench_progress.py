"""Progress of `holdfast bench` where nobody looks at a terminal: a line now and then, none more often."""

from __future__ import annotations

import time

import pytest

from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import default_profile
from holdfast.cli.commands.bench import LOG_S, _StatusLine


def test_a_log_has_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = _StatusLine(Load(url="http://127.0.0.1:1"), terminal=False)
    for _ in range(61):
        progress(now[0] - 100, [])
        now[0] += 1
    progress.clear()
    said = capsys.readouterr().err
    assert LOG_S <= 30
    assert said.count("requests answered\n") == 2
    assert said.startswith("holdfast: 30")
    assert "\r" not in said


def test_past_its_end_a_run_waits_for_the_last_answers_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = _StatusLine(Load(url="http://127.0.0.1:1", phases=default_profile(1, 5, 1)), terminal=False)
    now[0] += LOG_S
    progress(LOG_S, [])
    assert capsys.readouterr().err == "holdfast: 30 s, 0 requests answered, waiting for the last since 7 s\n"
