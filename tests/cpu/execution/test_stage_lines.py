"""Sockets by which stages of different machines hand numbers on: who is listened to, and what is left of them."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import threading
import time

import pytest
import torch
from deadlines import PATIENCE_S

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.sockets import stage_lines
from holdfast.execution.parallel.sockets.stage_lines import HEAD, KEY_BYTES, SAID_S, WHO, LineIn, LineOut, _accept

KEY = b"k" * KEY_BYTES


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


def test_who_has_not_the_key_or_is_not_awaited_is_not_listened_to() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    said = (b"x" * KEY_BYTES + WHO.pack(1), KEY + WHO.pack(2), KEY + WHO.pack(1))
    callers = []
    for words in said:
        callers.append(socket.create_connection(listener.getsockname()))
        callers[-1].sendall(words)
    found = _accept(listener, 0, [1], KEY, watch)
    assert list(found) == [1]
    assert found[1].getpeername() == callers[-1].getsockname()
    for one in (*callers, *found.values()):
        one.close()


def test_callers_who_say_nothing_delay_no_rank() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    mute = [socket.create_connection(listener.getsockname()) for _ in range(6)]
    caller = socket.create_connection(listener.getsockname())
    caller.sendall(KEY + WHO.pack(1))
    began_s = time.monotonic()
    found = _accept(listener, 0, [1], KEY, watch)
    assert time.monotonic() - began_s < 3 * SAID_S  # Those before it may take twice as long.
    assert found[1].getblocking()
    for one in (*mute, caller, *found.values()):
        one.close()


def test_whoever_goes_on_calling_does_not_hold_a_start(monkeypatch) -> None:
    monkeypatch.setattr(stage_lines, "JOIN_S", 0.5)
    listener, over, looks = socket.create_server(("127.0.0.1", 0)), threading.Event(), []
    place = listener.getsockname()

    def call() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                socket.create_connection(place).close()

    prober = threading.Thread(target=call)
    prober.start()
    limit = threading.Timer(8.0, over.set)
    limit.start()
    try:
        with pytest.raises(EngineError, match="rank 0 has not been reached by rank 1"):
            _accept(listener, 0, [1], KEY, looks.append)
        assert not over.is_set()
        assert looks
    finally:
        limit.cancel()
        over.set()
        prober.join(PATIENCE_S)
