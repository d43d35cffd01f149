"""Sockets by which stages of different machines hand numbers on: what goes there, and what is left of them."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
import time
import tracemalloc

import pytest
import torch
from deadlines import PATIENCE_S

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.sockets.stage_lines import HEAD, LineIn, LineOut


def watch(waited_s: float) -> None:
    assert waited_s < PATIENCE_S


def lines() -> tuple[LineOut, LineIn]:
    ours, theirs = socket.socketpair()
    return LineOut(ours, "rank 7", watch), LineIn(theirs, "rank 6", watch)


def test_numbers_come_in_their_order_and_nothing_is_left_of_a_line_that_is_closed() -> None:
    out, into = lines()
    for number in (1.0, 2.0):
        out.put(torch.full((3, 2), number))
    for number in (1.0, 2.0):
        found = torch.zeros(3, 2)
        into.take(found)
        assert (found == number).all()
    [thread] = [one for one in threading.enumerate() if one.name == "to-rank 7"]
    out.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(EngineDiedError, match="rank 7 is lost: it was closed here"):
        out.put(torch.zeros(1))
    with pytest.raises(EngineDiedError, match="rank 6 is closed"):
        into.take(torch.zeros(1))
    into.close()


def test_a_line_that_is_closed_while_nobody_reads_ends_its_thread() -> None:
    out, into = lines()
    out.put(torch.zeros(8 << 20))
    [thread] = [one for one in threading.enumerate() if one.name == "to-rank 7"]
    time.sleep(0.05)  # It sends more than the system takes.
    assert thread.is_alive()
    out.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    into.close()


@pytest.mark.parametrize("head", [HEAD.pack(2, 8), HEAD.pack(1, 12)], ids=["another block", "another size"])
def test_what_is_not_expected_is_said_and_not_computed(head: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(head + bytes(12))
    with ours, theirs, pytest.raises(EngineError, match="rank 6 has sent something else"):
        LineIn(theirs, "rank 6", watch).take(torch.zeros(2))


def test_a_process_with_many_files_takes_numbers_too() -> None:
    """A descriptor beyond those that select(2) knows."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= 1100:
        pytest.skip("this machine allows a process no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(least, 1200), most))
    try:
        ours, theirs = socket.socketpair()
        high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100))
        out, into, found = LineOut(ours, "rank 7", watch), LineIn(high, "rank 6", watch), torch.zeros(2)
        out.put(torch.ones(2))
        into.take(found)
        assert (found == 1).all()
        out.close()
        into.close()
        theirs.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def test_a_block_that_is_empty_is_not_taken_where_numbers_are_expected() -> None:
    """As many as they are, but some."""
    ours, theirs = socket.socketpair()
    ours.sendall(HEAD.pack(1, 0))
    with ours, theirs, pytest.raises(EngineError, match="rank 6 has sent something else") as told:
        LineIn(theirs, "rank 6", watch).take_some(torch.zeros(8, dtype=torch.uint8))
    assert told.value.found == "block 1 of 0 bytes"


def test_numbers_that_are_sent_are_held_once() -> None:
    """Which the plan counts (exchange); and in the same place each time."""
    (out, into), numbers, found = lines(), torch.ones(2 << 20), torch.zeros(2 << 20)
    out.put(numbers)
    into.take(found)
    tracemalloc.start()
    try:
        for step in range(3):
            out.put(numbers.fill_(step))
            into.take(found)
            assert (found == step).all()
        again = tracemalloc.get_traced_memory()[1]
        out.put(torch.zeros(4 << 20))
        larger = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        out.close()
        into.close()
    assert again < 1 << 20
    assert larger < (16 << 20) + (1 << 20)
