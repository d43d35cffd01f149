"""Connections between machines whose packets are dropped without a word: the system is asked to drop what comes to both
ends of a real one. One whose other side only takes its time is kept."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
import torch
from deadlines import PATIENCE_S

from holdfast.engine.ranks.nodes.wire import GONE, Wire
from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.sockets import silence
from holdfast.execution.parallel.sockets.guards import Guards
from holdfast.execution.parallel.sockets.silence import end_when_silent
from holdfast.execution.parallel.sockets.stage_lines import LineIn, LineOut

ATTACH_FILTER = 26
"""SO_ATTACH_FILTER."""
SOON_S = 2
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"QUIET_S": 1, "ASK_S": 1, "UNANSWERED": 1, "LOST_S": SOON_S}.items():
        monkeypatch.setattr(silence, name, seconds)


def connected() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def lines() -> Pair:
    pair = connected()
    for one in pair:
        end_when_silent(one, sends=False)
    return pair


def drop_all(pair: Pair) -> None:
    """The system takes no packet for them any more, and answers none."""
    returns_zero = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    for one in pair:
        one.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(returns_zero)))


def no_watch(waited_s: float) -> None: ...


def guarded(guards: Guards) -> None:
    while True:
        guards.check()
        time.sleep(0.02)


def test_what_drops_packets_ends_a_connection_and_a_busy_process_does_not(soon: None) -> None:
    pairs, unread = [connected(), lines(), lines()], connected()
    (head, agent), (first, second), (one, another) = pairs
    hears, signs, tells = Wire(head), Wire(agent), Wire(unread[0])
    ended = dict[str, tuple[float, BaseException]]()

    def ends(name: str, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except (OSError, EngineDiedError) as error:
                ended[name] = time.monotonic() - began_s, error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    busy = lines()
    to_busy, from_idle = LineOut(busy[0], "busy", no_watch), LineIn(busy[1], "idle", no_watch)
    much = torch.arange(8 << 20, dtype=torch.uint8)
    to_busy.put(much)  # More than the system takes while nobody reads.
    for pair in pairs:
        drop_all(pair)
    began_s = time.monotonic()
    signs.send(b"a sign, which nobody acknowledges")
    threads = [
        ends("head", hears.receive),
        ends("agent", signs.receive),
        ends("stage", lambda: LineIn(second, "rank 0", no_watch).take(torch.zeros(4))),
        ends("guard", lambda: guarded(Guards({2: another}))),
        ends("unread", lambda: tells.send(bytes(32 << 20))),  # Its machine answers, its process stands still.
    ]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {name: SOON_S / 2 < after_s < SOON_S + 3 for name, (after_s, _) in ended.items()} == dict.fromkeys(
        ("head", "agent", "stage", "guard", "unread"), True
    )
    assert {str(ended[name][1]) for name in ("head", "agent", "unread")} == {GONE}
    assert "or its process has not read what was sent" in GONE
    assert "the connection from rank 0 is lost" in str(ended["stage"][1])
    assert "the connection to rank 2 is lost" in str(ended["guard"][1])
    taken = torch.zeros_like(much)
    from_idle.take(taken)
    assert torch.equal(taken, much)
    for line in (to_busy, from_idle, hears, signs, tells):
        line.close()
    for rest in (first, one, unread[1]):
        rest.close()
