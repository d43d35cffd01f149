"""Output that nobody reads is kept within a bound, and nobody waits for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from deadlines import PATIENCE_S

from holdfast.observability import nonblocking_output as unblocked
from holdfast.observability.nonblocking_output import Unblocked

LINE = "x" * 99 + "\n"


def pipe() -> tuple[int, int]:
    return os.pipe()


def pair() -> tuple[int, int]:
    """As a service manager's journal has it."""
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.fixture(params=[pipe, pair])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    reading, writing = request.param()
    yield reading, writing
    for one in (reading, writing):
        os.close(one)


def read_until(reading: int, end: bytes) -> bytes:
    told, deadline_s = b"", time.monotonic() + PATIENCE_S
    while end not in told and time.monotonic() < deadline_s:
        told += os.read(reading, 1 << 16)
    return told


def test_what_is_read_comes_at_once_and_in_order(ends: tuple[int, int]) -> None:
    stream = Unblocked(ends[1])
    for number in range(10):
        assert print(f"line {number}", file=stream) is None
        assert os.read(ends[0], 100) == f"line {number}\n".encode()


def test_what_is_not_read_is_kept_and_passed_on(ends: tuple[int, int]) -> None:
    stream = Unblocked(ends[1])
    for number in range(8000):
        stream.write(f"{number:06} {LINE}")
    told = read_until(ends[0], b"007999 " + LINE.encode())
    assert [int(line[:6]) for line in told.splitlines()] == list(range(8000))


@pytest.mark.parametrize("may_open", [True, False])
def test_beyond_a_bound_lines_are_left_out_and_counted(monkeypatch, ends: tuple[int, int], may_open: bool) -> None:
    """Also where the descriptor cannot be opened again, as in a process that has changed its user."""
    monkeypatch.setattr(unblocked, "BACKLOG_BYTES", 1 << 16)
    if not may_open:
        monkeypatch.setattr(unblocked, "_open_again", lambda descriptor: (os.dup(descriptor), True))
    stream = Unblocked(ends[1])
    for number in range(20_000):
        stream.write(f"{number:06} {LINE}")
    told = read_until(ends[0], b"nothing was reading the output\n")
    lines = told.splitlines()
    kept = [int(line[:6]) for line in lines[:-1]]
    assert kept == list(range(len(kept)))
    assert lines[-1] == f"... {20_000 - len(kept)} lines were dropped here: nothing was reading the output".encode()
    stream.write("and on\n")
    assert os.read(ends[0], 100) == b"and on\n"


def test_who_reads_may_leave(ends: tuple[int, int]) -> None:
    stream = Unblocked(ends[1])
    spare = os.dup(0)
    os.dup2(spare, ends[0])
    os.close(spare)
    for _ in range(20_000):
        stream.write(LINE)
    assert stream._backlog_bytes == 0


def test_a_process_ends_though_nobody_reads_and_what_is_read_is_whole() -> None:
    code = """
import sys
from holdfast.observability import nonblocking_output
if sys.argv[1:]:
    nonblocking_output.LAST_WORDS_S = float(sys.argv[1])
nonblocking_output.unblock_output()
for number in range(5000):
    print(f"{number:06}", "x" * 93, file=sys.stderr)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert process.wait(PATIENCE_S) == 0
    assert process.stderr is not None
    lines = process.stderr.read().splitlines()
    assert [int(line[:6]) for line in lines if len(line) == 100] == list(
        range(len([x for x in lines if len(x) == 100]))
    )
    assert len(lines) > 500
    words = [sys.executable, "-c", code, str(PATIENCE_S)]  # Whoever reads may be slow.
    done = subprocess.run(words, stderr=subprocess.PIPE, timeout=2 * PATIENCE_S)
    assert len(done.stderr.splitlines()) == 5000
