"""Connections between ranks of different machines: they find one another by a store that anybody can write to, and keep
what is there when both sides have shown that they have the key of their start. Knows nothing of what goes there later.

    caller      who it is, whom it calls, a nonce       ──►
                                                        ◄──     a nonce, and the proof of whom it has called
                its own proof                           ──►

One loop for all of them, which waits for none alone: two ranks may call each other, and strangers may call too.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

import torch.distributed

from holdfast.errors import EngineError
from holdfast.execution.parallel.segment import LOOK_NS, Watch
from holdfast.execution.parallel.sockets.key_proof import NONCE_BYTES, PROOF_BYTES, proof, proves
from holdfast.execution.parallel.sockets.listen import OPEN_PORTS, listen_at
from holdfast.execution.parallel.sockets.silence import end_when_silent

LOOK_S = LOOK_NS / 1e9
JOIN_S = 60.0
"""For ranks to find one another."""
CONNECT_S = 5.0
"""For one attempt to reach another."""
SAID_S = 5.0
"""For whoever has called to show who they are."""
MOST_CALLERS = 32
"""That have not yet shown it; the first of more is hung up on."""
ASK_S = 0.02
"""Between two looks at the store."""
CALLER, CALLED = b"holdfast rank calls", b"holdfast rank called"
WHO = struct.Struct("<II")
"""Caller and called."""
HELLO_BYTES = WHO.size + NONCE_BYTES


def connect_ranks(
    store: torch.distributed.Store,
    rank: int,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    host: str,
    key: bytes,
    watch: Watch,
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """From `sources` and to `targets`. `store`: where ranks find one another. `host`: of this rank for others. `key`:
    that all ranks of this start have, and nobody else. Waits until all of them are there, or `watch` raises."""
    calls = [_Call(store, rank, target, key) for target in targets]
    door, until_s = _Door(host, rank, sources, key), time.monotonic() + JOIN_S
    try:
        if sources:
            store.set(f"line/{rank}", f"{host} {door.port}")
        while True:
            waiting = [call for call in calls if not call.go_on()]
            door.go_on()
            if not waiting and not door.missing:
                break
            watch(0.0)  # How long this may take is known here.
            if time.monotonic() > until_s:
                raise waiting[0].error() if waiting else door.error()
            reached = [call.line for call in waiting if call.line is not None]
            _await_any([*door.lines, *reached], LOOK_S if len(reached) == len(waiting) else ASK_S)
    except BaseException:
        for line in (*door.found.values(), *(call.line for call in calls if call.line is not None)):
            line.close()
        raise
    finally:
        door.close()
    outgoing = {call.target: call.line for call in calls if call.line is not None}
    for line in (*door.found.values(), *outgoing.values()):
        _settle(line)
    return door.found, outgoing


def _settle(line: socket.socket) -> None:
    line.setblocking(True)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_silent(line, sends=False)


def _await_any(lines: Sequence[socket.socket], most_s: float) -> None:
    comes = select.poll()  # Not select, which knows no descriptor from 1024 on.
    for line in lines:
        comes.register(line, select.POLLIN)
    comes.poll(most_s * 1000)


def _has_come(line: socket.socket, heard: bytearray, nbytes: int) -> bool:
    """Whether so many have been heard by now, and none of what follows. Never waits."""
    try:
        more = line.recv(nbytes - len(heard))
    except BlockingIOError:
        return False
    if not more:
        raise ConnectionResetError("it has hung up")
    heard += more
    return len(heard) == nbytes


class _Call:
    """To another rank, until that has shown that it is the one."""

    def __init__(self, store: torch.distributed.Store, rank: int, target: int, key: bytes) -> None:
        self.target, self._store, self._rank, self._key = target, store, rank, key
        self._hello, self._heard = WHO.pack(rank, target) + os.urandom(NONCE_BYTES), bytearray()
        self._place, self._why = "", f"it has not said within {JOIN_S:g} s where it is"
        self.line, self._is_there = None, False

    line: socket.socket | None

    def error(self) -> EngineError:
        """Why it has not come about so far."""
        return EngineError(
            f"rank {self._rank} cannot reach rank {self.target}{self._place}: {self._why}",
            needed=f"an answer within {JOIN_S:g} s",
            fix=OPEN_PORTS,
        )

    def go_on(self) -> bool:
        """Whether it is there. Raises EngineError where it will not be."""
        try:
            if self.line is None:
                self._connect()
            if self.line is not None and not self._is_there:
                self._is_there = self._is_known(self.line)
        except (RuntimeError, ValueError, OSError) as error:
            self._why = str(error)
            raise self.error() from error
        return self._is_there

    def _connect(self) -> None:
        name = f"line/{self.target}"
        if not self._store.check([name]):
            return
        host, _, port = self._store.get(name).decode().partition(" ")
        self._place = f" at {host} port {port}"
        try:
            self.line = socket.create_connection((host, int(port)), CONNECT_S)
        except TimeoutError as error:  # It may have too much to do, and is called again.
            self._why = str(error)
            return
        self._why = f"nothing was heard within {JOIN_S:g} s"
        self.line.setblocking(False)
        self.line.sendall(self._hello)

    def _is_known(self, line: socket.socket) -> bool:
        if not _has_come(line, self._heard, NONCE_BYTES + PROOF_BYTES):
            return False
        nonce, shown = bytes(self._heard[:NONCE_BYTES]), bytes(self._heard[NONCE_BYTES:])
        if not proves(shown, self._key, CALLED, self._hello, nonce):
            raise OSError("what answers there is not that rank of this start")
        line.sendall(proof(self._key, CALLER, self._hello, nonce))
        return True


class _Door:
    """Where the ranks of these numbers call; `found` when they have shown who they are. Whoever calls and says nothing,
    or goes on calling, delays none of them."""

    def __init__(self, host: str, rank: int, sources: Sequence[int], key: bytes) -> None:
        self.found = dict[int, socket.socket]()
        self._host, self._rank, self._sources, self._key = host, rank, sources, key
        self._listener, self._callers = listen_at(host) if sources else None, list[_Caller]()
        if self._listener is not None:
            self._listener.setblocking(False)

    @property
    def port(self) -> int:
        assert self._listener is not None, "nobody is to call"
        return int(self._listener.getsockname()[1])

    @property
    def missing(self) -> list[int]:
        return [other for other in self._sources if other not in self.found]

    @property
    def lines(self) -> list[socket.socket]:
        """Where something may come."""
        if self._listener is None or not self.missing:
            return []
        return [self._listener, *(caller.line for caller in self._callers)]

    def error(self) -> EngineError:
        names = ", ".join(f"rank {other}" for other in self.missing)
        return EngineError(
            f"rank {self._rank} has not been reached by {names} at {self._host} port {self.port}",
            needed=f"within {JOIN_S:g} s",
            fix=OPEN_PORTS,
        )

    def go_on(self) -> None:
        if self._listener is None or not self.missing:
            return
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            self._callers.append(_Caller(self._listener.accept()[0], self._rank, self._key))
        for caller in [one for one in self._callers if one.is_done()]:
            self._callers.remove(caller)
            if caller.who is not None and caller.who in self.missing:
                self.found[caller.who] = caller.line
            else:
                caller.line.close()
        if len(self._callers) > MOST_CALLERS:
            self._callers.pop(0).line.close()

    def close(self) -> None:
        for caller in self._callers:
            caller.line.close()
        if self._listener is not None:
            self._listener.close()


class _Caller:
    """Somebody who has called, and has yet to show who they are. `rank`: that is called."""

    def __init__(self, line: socket.socket, rank: int, key: bytes) -> None:
        self.line, self._rank, self._key = line, rank, key
        self._heard, self._nonce, self._answered = bytearray(), os.urandom(NONCE_BYTES), False
        self._until_s, self.who = time.monotonic() + SAID_S, None
        line.setblocking(False)

    who: int | None
    """None: it is nobody of ours."""

    def is_done(self) -> bool:
        """Whether all is said, or nothing more is waited for."""
        try:
            return self._is_heard() or time.monotonic() > self._until_s
        except OSError:
            return True

    def _is_heard(self) -> bool:
        if not self._answered:
            if not _has_come(self.line, self._heard, HELLO_BYTES):
                return False
            self.line.sendall(self._nonce + proof(self._key, CALLED, bytes(self._heard), self._nonce))
            self._answered = True
        if not _has_come(self.line, self._heard, HELLO_BYTES + PROOF_BYTES):
            return False
        hello, shown = bytes(self._heard[:HELLO_BYTES]), bytes(self._heard[HELLO_BYTES:])
        caller, called = WHO.unpack_from(hello)
        if called == self._rank and proves(shown, self._key, CALLER, hello, self._nonce):
            self.who = caller
        return True
