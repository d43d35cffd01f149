"""Sockets between ranks of different machines, by which a stage hands its numbers on: one for each pair, in one
direction. Knows neither layers nor plans.

    sender      copies its numbers; a thread sends them while it goes on, and it waits only where the last are not sent
    receiver    reads them when it comes to that step

Each block has its number and its size before it: where two ranks do not do the same, that is said and not computed.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.segment import LOOK_NS, Watch
from holdfast.execution.parallel.sockets.listen import listen_at

LOOK_S = LOOK_NS / 1e9
JOIN_S = 60.0
"""For ranks to find one another."""
CONNECT_S = 5.0
"""For one attempt to reach another."""
SAID_S = 2.0
"""For whoever has connected to say who they are."""
MOST_CALLERS = 32
"""That have not yet said it; the first of more is hung up on."""
ASK_S = 0.02
KEY_BYTES = 32
HEAD = struct.Struct("<QQ")
WHO = struct.Struct("<I")


class LineOut:
    """To another rank. `watch`: called while it is awaited."""

    def __init__(self, line: socket.socket, name: str, watch: Watch) -> None:
        self._line, self._name, self._watch, self._count = line, name, watch, 0
        self._pending, self._failed = b"", ""
        self._turn = threading.Condition()
        threading.Thread(target=self._send, name=f"to-{name}", daemon=True).start()

    def put(self, numbers: torch.Tensor) -> None:
        """Once the last were sent. Contiguous."""
        waited_s = 0.0
        with self._turn:
            while self._pending and not self._failed:
                if not self._turn.wait(LOOK_S):
                    waited_s += LOOK_S
                    self._watch(waited_s)
            if self._failed:
                raise EngineDiedError(f"the connection to {self._name} is lost: {self._failed}")
            self._count += 1
            body = _bytes_of(numbers).tobytes()
            self._pending = HEAD.pack(self._count, len(body)) + body
            self._turn.notify_all()

    def close(self) -> None:
        """The thread ends; what is not sent yet is nobody's."""
        with self._turn:
            self._failed = self._failed or "it was closed here"
            self._turn.notify_all()
        _close(self._line)

    def _send(self) -> None:
        while True:
            with self._turn:
                while not self._pending and not self._failed:
                    self._turn.wait()
                if self._failed:
                    return
                pending = self._pending
            try:
                self._line.sendall(pending)
                failed = ""
            except OSError as error:
                failed = str(error)
            with self._turn:
                self._pending, self._failed = b"", self._failed or failed
                self._turn.notify_all()
            if failed:
                return


class LineIn:
    """From another rank."""

    def __init__(self, line: socket.socket, name: str, watch: Watch) -> None:
        self._line, self._name, self._watch, self._count = line, name, watch, 0
        self._comes = select.poll()  # Not select, which knows no descriptor from 1024 on.
        self._comes.register(line, select.POLLIN)

    def close(self) -> None:
        _close(self._line)

    def take(self, out: torch.Tensor) -> None:
        """The next numbers, however long that takes. Contiguous."""
        self._expect(out.nbytes, out.nbytes)
        self._read(_bytes_of(out))

    def take_some(self, place: torch.Tensor) -> None:
        """The next numbers, as many as they are: to the beginning of this place (uint8)."""
        self._read(_bytes_of(place)[: self._expect(1, place.nbytes)])

    def _expect(self, least: int, most: int) -> int:
        """Bytes of the next block."""
        head, self._count = bytearray(HEAD.size), self._count + 1
        self._read(memoryview(head))
        count, nbytes = HEAD.unpack(head)
        if count != self._count or not least <= nbytes <= most:
            raise EngineError(
                f"{self._name} has sent something else than is expected of it",
                needed=f"block {self._count} of {'' if least == most else 'up to '}{most:,} bytes",
                found=f"block {count} of {nbytes:,} bytes",
            )
        return int(nbytes)

    def _read(self, place: memoryview) -> None:
        done, waited_s = 0, 0.0
        while done < len(place):
            if not self._comes.poll(LOOK_S * 1000):
                waited_s += LOOK_S
                self._watch(waited_s)
                continue
            try:
                got = self._line.recv_into(place[done:])
            except OSError as error:
                raise EngineDiedError(f"the connection from {self._name} is lost: {error}") from error
            if got == 0:
                raise EngineDiedError(f"the connection from {self._name} is closed")
            done, waited_s = done + got, 0.0


def _close(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


def _bytes_of(numbers: torch.Tensor) -> memoryview:
    return numbers.view(-1).view(torch.uint8).numpy().data


def open_lines(
    store: torch.distributed.Store,
    rank: int,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    host: str,
    key: bytes,
    watch: Watch,
) -> tuple[Mapping[int, LineIn], Mapping[int, LineOut]]:
    """By the numbers of the other ranks, as `connect_ranks` finds them."""
    incoming, outgoing = connect_ranks(store, rank, sources, targets, host=host, key=key, watch=watch)
    return (
        {other: LineIn(line, f"rank {other}", watch) for other, line in incoming.items()},
        {other: LineOut(line, f"rank {other}", watch) for other, line in outgoing.items()},
    )


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
    listener = listen_at(host) if sources else None
    if listener is not None:
        port = listener.getsockname()[1]
        store.set(f"line/{rank}", f"{host} {port}")
    outgoing = {target: _connect(store, rank, target, key, watch) for target in targets}
    return {} if listener is None else _accept(listener, rank, sources, key, watch), outgoing


def _connect(store: torch.distributed.Store, rank: int, target: int, key: bytes, watch: Watch) -> socket.socket:
    until_s = time.monotonic() + JOIN_S
    try:
        host, _, port = _address(store, target, until_s, watch).partition(" ")
        while True:
            try:
                line = socket.create_connection((host, int(port)), CONNECT_S)
                break
            except TimeoutError:
                if time.monotonic() > until_s:
                    raise
            watch(0.0)  # How long this may take is known here.
        line.settimeout(JOIN_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(key + WHO.pack(rank))
        line.settimeout(None)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"rank {rank} cannot reach rank {target}: {error}") from error
    return line


def _address(store: torch.distributed.Store, target: int, until_s: float, watch: Watch) -> str:
    name = f"line/{target}"
    while not store.check([name]):
        if time.monotonic() > until_s:
            raise TimeoutError(f"it has not said within {JOIN_S:g} s where it is")
        watch(0.0)
        time.sleep(ASK_S)
    return str(store.get(name).decode())


def _accept(
    listener: socket.socket, rank: int, sources: Sequence[int], key: bytes, watch: Watch
) -> dict[int, socket.socket]:
    """From each of these. Whoever calls and says nothing, or goes on calling, delays neither them nor the end of the
    time."""
    found, callers, until_s = dict[int, socket.socket](), list[_Caller](), time.monotonic() + JOIN_S
    listener.setblocking(False)
    try:
        while missing := [other for other in sources if other not in found]:
            watch(0.0)  # How long this may take is known here.
            if time.monotonic() > until_s:
                names = ", ".join(f"rank {other}" for other in missing)
                raise EngineError(f"rank {rank} has not been reached by {names}", needed=f"within {JOIN_S:g} s")
            _await_any([listener, *(caller.line for caller in callers)])
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                callers.append(_Caller(listener.accept()[0]))
            for caller in [one for one in callers if one.is_done()]:
                callers.remove(caller)
                who = caller.who(key)
                if who in missing and who not in found:
                    found[who] = caller.line
                else:
                    caller.line.close()
            if len(callers) > MOST_CALLERS:
                callers.pop(0).line.close()
    finally:
        for one in (listener, *(caller.line for caller in callers)):
            one.close()
    for line in found.values():
        line.setblocking(True)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _await_any(lines: Sequence[socket.socket]) -> None:
    comes = select.poll()
    for line in lines:
        comes.register(line, select.POLLIN)
    comes.poll(LOOK_S * 1000)


class _Caller:
    """Somebody who has yet to say who they are."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self._said, self._until_s = line, b"", time.monotonic() + SAID_S
        line.setblocking(False)

    def is_done(self) -> bool:
        """Whether all is said, or nothing more is waited for."""
        missing = KEY_BYTES + WHO.size - len(self._said)
        try:
            more = self.line.recv(missing)
        except BlockingIOError:
            return time.monotonic() > self._until_s
        except OSError:
            return True
        self._said += more
        return len(more) in (0, missing)

    def who(self, key: bytes) -> int | None:
        """None: it is nobody of ours."""
        if len(self._said) < KEY_BYTES + WHO.size or not hmac.compare_digest(self._said[:KEY_BYTES], key):
            return None
        return int(WHO.unpack(self._said[KEY_BYTES:])[0])
