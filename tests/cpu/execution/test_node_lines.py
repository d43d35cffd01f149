"""Lines between ranks on GPUs of different nodes: what their threads move, in which turns, and how they end. What
kernels do at both ends is done by the host (support/node_line_ends.py)."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial

import pytest
import torch
from deadlines import PATIENCE_S
from node_line_ends import LineEnd
from simulated_copies import unpinned_memory

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.gpu import node_lines
from holdfast.execution.parallel.gpu.node_lines import NodeLineIn, NodeLineOut, pinned_line
from holdfast.execution.parallel.sockets.stage_lines import HEAD
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.gpu import line_memory_bytes

SLOT_BYTES, CPU = 1 << 20, torch.device("cpu")


def look(waited_s: float) -> None:
    assert waited_s < PATIENCE_S


def memory() -> PinnedMemory:
    return unpinned_memory([line_memory_bytes(SLOT_BYTES)])


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    out, into = NodeLineOut(memory(), CPU, ours, 7), NodeLineIn(memory(), CPU, theirs, 6)
    yield out, into
    out.close()
    into.close()


def test_all_of_a_thousand_steps_come_in_their_order(line) -> None:
    out, into = LineEnd(line[0], look), LineEnd(line[1], look)
    sizes = [1, 3, 4096, SLOT_BYTES // 4, 7]

    def send() -> None:
        for step in range(1000):
            out.put(torch.full((sizes[step % 5],), float(step)))

    thread = threading.Thread(target=send)
    thread.start()
    for step in range(1000):
        found = torch.zeros(sizes[step % 5])
        into.take(found)
        assert (found == step).all(), step
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    for one in line:
        one.check()


def test_nothing_is_overwritten_that_is_not_taken(line) -> None:
    """A sender may be ahead by its two slots, the two of the other side, and what the sockets hold, which is less than
    a slot here: not by more, because what is sent is not copied first."""
    ends, put = [LineEnd(one, look) for one in line], list[int]()

    def send() -> None:
        for step in range(40):
            ends[0].put(torch.full((SLOT_BYTES // 4,), float(step)))
            put.append(step)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.5)
    assert len(put) == 4
    for step in range(40):
        found = torch.zeros(SLOT_BYTES // 4)
        ends[1].take(found)
        assert (found == step).all(), step
    thread.join(PATIENCE_S)
    assert len(put) == 40


def test_the_end_of_the_other_side_is_told_at_once_and_names_it() -> None:
    ours, theirs = socket.socketpair()
    into, told = NodeLineIn(memory(), CPU, ours, 6), threading.Event()
    into.tell(told.set)
    into.check()
    theirs.close()
    assert told.wait(PATIENCE_S)
    with pytest.raises(EngineDiedError, match="from rank 6 is closed"):
        into.check()
    again = threading.Event()
    into.tell(again.set)
    assert again.is_set(), "also whoever asks later"
    into.close()
    into.check()


def test_a_block_that_is_larger_than_a_slot_is_not_taken() -> None:
    ours, theirs = socket.socketpair()
    into, told = NodeLineIn(memory(), CPU, ours, 6), threading.Event()
    into.tell(told.set)
    theirs.sendall(HEAD.pack(1, SLOT_BYTES + 1))
    assert told.wait(PATIENCE_S)
    with pytest.raises(EngineError, match="something else than is expected"):
        into.check()
    into.close()
    theirs.close()


def test_a_line_that_is_closed_here_is_no_failure_and_leaves_no_thread(line) -> None:
    """Of this side; the other hears that it is over."""
    told = threading.Event()
    line[0].tell(told.set)
    LineEnd(line[0], look).put(torch.zeros(8))
    LineEnd(line[1], look).take(torch.ones(8))
    line[0].close()
    line[0].check()
    assert not told.is_set()
    line[1].close()
    assert not any(one._thread.is_alive() for one in line)


def test_the_memory_of_a_line_is_what_was_planned_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered with the driver as it is, and not rounded up."""
    pinned, unpinned = list[tuple[int, int]](), list[int]()

    def pin(address: int, nbytes: int) -> int:
        pinned.append((address, nbytes))
        return 0

    monkeypatch.setattr(
        node_lines, "PinnedMemory", partial(PinnedMemory, pin=pin, unpin=lambda at, _: unpinned.extend(at))
    )
    slot_bytes, (ours, theirs) = 5 * 4096, socket.socketpair()
    line = NodeLineOut(pinned_line(slot_bytes, CPU), CPU, ours, 7)
    assert pinned == [(line.place, line_memory_bytes(slot_bytes))]
    assert line.slot_bytes == slot_bytes
    assert line.device_place == line.place, "a GPU may have another address for it"
    line.close()
    line.close()
    assert unpinned == [line.place]
    theirs.close()


def test_memory_that_is_not_pinned_is_said_to_be_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        node_lines, "PinnedMemory", partial(PinnedMemory, pin=lambda at, size: 2, unpin=lambda at, _: None)
    )
    with pytest.raises(EngineError, match="no pinned host memory for what stages hand on to one another") as refused:
        pinned_line(4096, CPU)
    assert (refused.value.code, refused.value.found) == ("HF444", "CUDA error 2")


def test_a_line_whose_other_side_has_ended_is_told_by_who_sends() -> None:
    ours, theirs = socket.socketpair()
    out, told = NodeLineOut(memory(), CPU, ours, 7), threading.Event()
    out.tell(told.set)
    theirs.close()
    LineEnd(out, look).put(torch.zeros(8))
    assert told.wait(PATIENCE_S)
    with pytest.raises(EngineDiedError, match="the connection to rank 7 is lost"):
        out.check()
    out.close()
