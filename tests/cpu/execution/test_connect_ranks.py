"""Ranks of different machines that call one another: who is listened to, what strangers hear, and what is said of ranks
that are not reached."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed
from deadlines import PATIENCE_S
from free_ports import free_port

from holdfast.errors import EngineError
from holdfast.execution.parallel.sockets import connect_ranks as connecting
from holdfast.execution.parallel.sockets import gloo
from holdfast.execution.parallel.sockets.connect_ranks import (
    CALLED,
    CALLER,
    HELLO_BYTES,
    SAID_S,
    WHO,
    connect_ranks,
)
from holdfast.execution.parallel.sockets.gloo import open_store
from holdfast.execution.parallel.sockets.key_proof import KEY_BYTES, NONCE_BYTES, PROOF_BYTES, proof, proves
from holdfast.execution.parallel.sockets.listen import OPEN_PORTS
from holdfast.execution.parallel.sockets.silence import ASK_S, QUIET_S, UNANSWERED

KEY, ANOTHER = b"k" * KEY_BYTES, b"x" * KEY_BYTES
Lines = tuple[dict[int, socket.socket], dict[int, socket.socket]]


def watch(waited_s: float) -> None:
    assert waited_s < PATIENCE_S


def connect(
    store: torch.distributed.Store, rank: int, sources: list[int], targets: list[int], look: Callable[[float], None]
) -> Lines:
    return connect_ranks(store, rank, sources, targets, host="127.0.0.1", key=KEY, watch=look)


def place_of(store: torch.distributed.Store, rank: int) -> tuple[str, int]:
    until_s = time.monotonic() + PATIENCE_S
    while not store.check([f"line/{rank}"]):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    host, port = store.get(f"line/{rank}").decode().split()
    return host, int(port)


@contextmanager
def called(*sources: int) -> Iterator[tuple[torch.distributed.Store, dict[int, socket.socket]]]:
    """Rank 0 while it waits for these; whom it has found is known afterwards."""
    store, found = torch.distributed.HashStore(), dict[int, socket.socket]()

    def wait() -> None:
        found.update(connect(store, 0, list(sources), [], watch)[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield store, found
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Stranger:
    """Says what a caller says, as whoever and with whatever key."""

    def __init__(self, place: tuple[str, int], rank: int, target: int, key: bytes) -> None:
        self.line = socket.create_connection(place)
        self.hello = WHO.pack(rank, target) + os.urandom(NONCE_BYTES)
        self.line.sendall(self.hello)
        self.heard = self.line.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        self.line.sendall(proof(key, CALLER, self.hello, self.heard[:NONCE_BYTES]))

    def is_hung_up_on(self) -> bool:
        self.line.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError), self.line:
            return self.line.recv(1) == b""
        return True


def test_who_has_not_the_key_or_is_not_awaited_is_not_listened_to() -> None:
    with called(1) as (store, found):
        place = place_of(store, 0)
        strangers = [Stranger(place, 1, 0, ANOTHER), Stranger(place, 2, 0, KEY), Stranger(place, 1, 5, KEY)]
        for stranger in strangers:
            assert stranger.is_hung_up_on()
        _, targets = connect(store, 1, [], [0], watch)
        targets[0].sendall(b"it is me")
    assert list(found) == [1]
    assert found[1].recv(8) == b"it is me"
    targets[0].close()
    found[1].close()


def test_a_rank_that_is_called_shows_that_it_is_the_one_and_never_says_the_key() -> None:
    with called(1) as (store, found):
        stranger = Stranger(place_of(store, 0), 1, 0, KEY)
        nonce, shown = stranger.heard[:NONCE_BYTES], stranger.heard[NONCE_BYTES:]
        assert proves(shown, KEY, CALLED, stranger.hello, nonce)
        assert KEY not in stranger.heard
    stranger.line.close()
    found[1].close()


def test_whoever_writes_into_the_store_learns_nothing_and_is_no_rank() -> None:
    """The address of a rank is the word of whoever has set it."""
    listener, store, heard = socket.create_server(("127.0.0.1", 0)), torch.distributed.HashStore(), bytearray()
    port = listener.getsockname()[1]
    store.set("line/0", f"127.0.0.1 {port}")

    def pretend() -> None:
        line, _ = listener.accept()
        heard.extend(line.recv(HELLO_BYTES, socket.MSG_WAITALL))
        nonce = os.urandom(NONCE_BYTES)
        line.sendall(nonce + proof(ANOTHER, CALLED, bytes(heard), nonce))
        with contextlib.suppress(ConnectionResetError):
            heard.extend(line.recv(1024))
        line.close()

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    with pytest.raises(EngineError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1 port {port}: what answers there"):
        connect(store, 1, [], [0], watch)
    thread.join(PATIENCE_S)
    listener.close()
    assert len(heard) == HELLO_BYTES
    assert KEY not in heard


def test_callers_who_say_nothing_delay_no_rank() -> None:
    with called(1) as (store, found):
        place = place_of(store, 0)
        mute = [socket.create_connection(place) for _ in range(6)]
        began_s = time.monotonic()
        _, targets = connect(store, 1, [], [0], watch)
    assert time.monotonic() - began_s < SAID_S
    assert list(found) == [1]
    for one in (*mute, *targets.values(), *found.values()):
        one.close()


def test_whoever_goes_on_calling_does_not_hold_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "JOIN_S", 0.5)
    store, over, looks = torch.distributed.HashStore(), threading.Event(), list[float]()

    def call() -> None:
        place = place_of(store, 0)
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                socket.create_connection(place).close()

    prober = threading.Thread(target=call)
    prober.start()
    limit = threading.Timer(8.0, over.set)
    limit.start()
    try:
        with pytest.raises(EngineError, match=r"rank 0 has not been reached by rank 1 at 127.0.0.1 port") as told:
            connect(store, 0, [1], [], looks.append)
        assert told.value.fix == OPEN_PORTS
        assert not over.is_set()
        assert looks
    finally:
        limit.cancel()
        over.set()
        prober.join(PATIENCE_S)


def test_a_rank_that_is_not_reached_is_told_of_with_its_place_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = torch.distributed.HashStore(), free_port()
    store.set("line/1", f"127.0.0.1 {port}")
    with pytest.raises(EngineError, match=f"rank 0 cannot reach rank 1 at 127.0.0.1 port {port}: .*refused") as told:
        connect(store, 0, [], [1], watch)
    assert told.value.fix == OPEN_PORTS
    assert "net.ipv4.ip_local_port_range" in OPEN_PORTS
    monkeypatch.setattr(connecting, "JOIN_S", 0.2)
    with pytest.raises(EngineError, match=r"rank 0 cannot reach rank 2: it has not said within 0\.2 s where it is"):
        connect(store, 0, [3], [2], watch)


def test_one_that_is_reached_and_says_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "JOIN_S", 0.3)
    store = torch.distributed.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store.set("line/1", f"127.0.0.1 {mute.getsockname()[1]}")
        with pytest.raises(EngineError, match=r"cannot reach rank 1 at 127.* port .*: nothing was heard within 0.3"):
            connect(store, 0, [], [1], watch)


def test_a_machine_that_falls_silent_is_asked_for_a_sign_at_both_ends() -> None:
    """Nothing of the other side is ever heard where this one only waits, or is done with sending."""
    with called(1) as (store, found):
        _, targets = connect(store, 1, [], [0], watch)
    wanted = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": QUIET_S, "TCP_KEEPINTVL": ASK_S, "TCP_KEEPCNT": UNANSWERED}
    for line in (targets[0], found[1]):
        for name, value in wanted.items():
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            assert line.getsockopt(level, getattr(socket, name)) == value, name
        assert line.getblocking()
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0, "a receiver may be at a long step"
    targets[0].close()
    found[1].close()


def test_a_store_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "TIMEOUT_S", 1.0)
    port = free_port()
    with pytest.raises(EngineError, match=f"rank 0 is not reached at 127.0.0.1 port {port}") as told:
        open_store(port, 2)
    assert told.value.fix == OPEN_PORTS
    assert told.value.found
