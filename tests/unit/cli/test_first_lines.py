"""The first lines of the command: which of them begin an engine process, and that none is left behind."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from holdfast import __main__ as entry
from holdfast.engine.startup import prespawn
from holdfast.errors import EngineDiedError


class Begun:
    """In place of a process."""

    ends = 0

    def end(self) -> None:
        Begun.ends += 1


@pytest.mark.parametrize(
    ("words", "begins"),
    [("serve", True), ("serve smollm2 --port 0", True), ("serve -h", False), ("serve --help", False), ("plan", False)],
)
def test_what_begins_an_engine_process(monkeypatch: pytest.MonkeyPatch, words: str, begins: bool) -> None:
    monkeypatch.setattr(prespawn, "EarlyProcess", Begun)
    assert isinstance(entry.begin_engine(words.split()), Begun) is begins
    assert entry.begin_engine([]) is None


def test_one_that_cannot_be_had_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise EngineDiedError("no process is left")

    monkeypatch.setattr(prespawn, "EarlyProcess", none_left)
    assert entry.begin_engine(["serve"]) is None


def test_it_ends_with_a_command_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prespawn, "EarlyProcess", Begun)
    monkeypatch.setattr(Begun, "ends", 0)
    monkeypatch.setattr(sys, "argv", ["holdfast", "serve", "--no-such-flag"])
    assert entry.main() == 2
    assert "--no-such-flag" in capsys.readouterr().err
    assert Begun.ends == 1


def test_ctrl_c_before_there_is_a_command_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is imported: a program that has just been started."""

    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(entry, "begin_engine", lambda words: SimpleNamespace(end=lambda: ended.append(words)))
    monkeypatch.setitem(sys.modules, "holdfast.cli.main", Interrupted("holdfast.cli.main"))
    monkeypatch.setattr(sys, "argv", ["holdfast", "serve"])
    assert entry.main() == 130
    assert ended == [["serve"]]
