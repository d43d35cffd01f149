"""An engine process that ends because of somebody else, a lost node say: one line with the cause, and no traceback.
One that ends by its own fault says where."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest

from holdfast.engine.process import main, protocol
from holdfast.errors import EngineDiedError, EngineError, EngineHungError, HoldfastError
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


DISK = EngineError("a layer could not be read", code="HF443", found="Input/output error")


def serve_until(error: HoldfastError, monkeypatch) -> tuple[list[object], list[bool]]:
    said, closed = list[object](), list[bool]()

    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(main, "_serve", fail)
    socket = SimpleNamespace(send=lambda message: said.append(protocol.decode_from_engine(message)))
    core = SimpleNamespace(close=lambda: closed.append(sys.exc_info()[1] is error))
    with pytest.raises(type(error)):
        main._serve_and_close(core, socket, None)
    return said, closed


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
@pytest.mark.parametrize("error", [EngineDiedError(LOST), DISK], ids=["node", "disk"])
def test_what_others_have_done_is_one_line(monkeypatch, capsys, level: int, error: EngineError) -> None:
    log_as("engine 3", level)
    said, closed = serve_until(error, monkeypatch)
    lines = capsys.readouterr().err.splitlines()
    assert isinstance(said[0], protocol.StepFailed)
    assert closed == [True]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING engine 3: "
        + re.escape(f"{error.message}; this engine ends [{error.code}]"),
        lines[0],
    )  # fmt: skip
    assert ("Traceback" in "".join(lines[1:])) == (level == logging.DEBUG)
    assert level == logging.DEBUG or len(lines) == 1


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    "error",
    [EngineError("step 7 is not the one due", needed="step 6"), EngineHungError("rank 1 has not come")],
    ids=["invariant", "hung"],
)
def test_what_may_be_a_fault_of_the_engine_has_its_traceback(monkeypatch, capsys, error: EngineError) -> None:
    log_as("engine 3", logging.INFO)
    said, closed = serve_until(error, monkeypatch)
    first, *lines = capsys.readouterr().err.splitlines()
    assert isinstance(said[0], protocol.StepFailed)
    assert closed == [True]
    assert first.endswith(f" ERROR engine 3: {error.message}; this engine ends [{error.code}]")
    assert "Traceback" in "".join(lines)
    assert any("in fail" in line for line in lines)


def test_the_front_tells_an_engine_whether_its_log_has_debug_lines() -> None:
    begin = protocol.Init({}, debug=True)
    assert protocol.decode_to_engine(protocol.encode(begin)).debug
