"""An engine process that ends because of somebody else, a lost node say: one line with the cause, and no traceback."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest

from holdfast.engine.process import main, protocol
from holdfast.errors import EngineDiedError
from holdfast.observability.line_format import log_as

LOST = "rank 1 (node 1, big-machine, pid 7) has ended: node 1 is lost: it gave no sign for 15 s"


@pytest.fixture
def log(caplog):
    """As the process sets it up; what it was before is there again after."""
    root, own = logging.getLogger(), logging.getLogger("holdfast")
    before = root.handlers[:], root.level, own.level, own.propagate, own.handlers[:]
    root.handlers[:], own.propagate, own.handlers[:] = [], True, []  # Those that are replaced are closed.
    yield
    root.handlers[:], own.propagate, own.handlers[:] = before[0], before[3], before[4]
    root.setLevel(before[1])
    own.setLevel(before[2])


def serve_until_lost(monkeypatch) -> tuple[list[object], list[bool]]:
    said, closed = list[object](), list[bool]()

    def lose(*given: object) -> None:
        raise EngineDiedError(LOST)

    monkeypatch.setattr(main, "_serve", lose)
    socket = SimpleNamespace(send=lambda message: said.append(protocol.decode_from_engine(message)))
    core = SimpleNamespace(close=lambda: closed.append(sys.exc_info()[0] is EngineDiedError))
    with pytest.raises(EngineDiedError):
        main._serve_and_close(core, socket, None)
    return said, closed


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_lost_node_is_one_line(monkeypatch, capsys, level: int) -> None:
    log_as("engine 3", level)
    said, closed = serve_until_lost(monkeypatch)
    lines = capsys.readouterr().err.splitlines()
    assert isinstance(said[0], protocol.StepFailed)
    assert closed == [True]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING engine 3: " + re.escape(LOST)
        + r"; this engine ends, and another takes its place \[HF410\]",
        lines[0],
    )  # fmt: skip
    assert ("Traceback" in "".join(lines[1:])) == (level == logging.DEBUG)
    assert level == logging.DEBUG or len(lines) == 1


def test_the_front_tells_an_engine_whether_its_log_has_debug_lines() -> None:
    begin = protocol.Init({}, debug=True)
    assert protocol.decode_to_engine(protocol.encode(begin)).debug
