"""Sockets between ranks of different machines, by which a stage hands its numbers on: one for each pair, in one
direction. Knows neither layers nor plans.

    sender      copies its numbers to one place; a thread sends them from there while it goes on, and it waits only
                where the last are not sent
    receiver    reads them where they belong when it comes to that step

Each block has its number and its size before it: where two ranks do not do the same, that is said and not computed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.segment import LOOK_NS, Watch
from holdfast.execution.parallel.sockets.connect_ranks import connect_ranks

LOOK_S = LOOK_NS / 1e9
HEAD = struct.Struct("<QQ")


def send_block(line: socket.socket, number: int, body: memoryview) -> None:
    """Returns when the system has all of it: the place may be filled anew."""
    parts = [memoryview(HEAD.pack(number, len(body))), body]
    while parts:
        sent = line.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]


class LineOut:
    """To another rank. `watch`: called while it is awaited."""

    def __init__(self, line: socket.socket, name: str, watch: Watch) -> None:
        self._line, self._name, self._watch, self._count = line, name, watch, 0
        self._copy, self._pending, self._failed = bytearray(), None, ""
        self._turn = threading.Condition()
        threading.Thread(target=self._send, name=f"to-{name}", daemon=True).start()

    _pending: int | None
    """Bytes of the copy that are not sent yet."""

    def put(self, numbers: torch.Tensor) -> None:
        """Once the last were sent. Contiguous. The copy takes as much as the most of them, and stays."""
        waited_s = 0.0
        with self._turn:
            while self._pending is not None and not self._failed:
                if not self._turn.wait(LOOK_S):
                    waited_s += LOOK_S
                    self._watch(waited_s)
            if self._failed:
                raise EngineDiedError(f"the connection to {self._name} is lost: {self._failed}")
            body, self._count = bytes_of(numbers), self._count + 1
            if len(body) > len(self._copy):
                self._copy = bytearray(len(body))
            memoryview(self._copy)[: len(body)] = body
            self._pending = len(body)
            self._turn.notify_all()

    def close(self) -> None:
        """The thread ends; what is not sent yet is nobody's."""
        with self._turn:
            self._failed = self._failed or "it was closed here"
            self._turn.notify_all()
        hang_up(self._line)

    def _send(self) -> None:
        while True:
            with self._turn:
                while self._pending is None and not self._failed:
                    self._turn.wait()
                if self._failed:
                    return
                number, nbytes = self._count, self._pending
            try:
                send_block(self._line, number, memoryview(self._copy)[:nbytes])
                failed = ""
            except OSError as error:
                failed = str(error)
            with self._turn:
                self._pending, self._failed = None, self._failed or failed
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
        hang_up(self._line)

    def take(self, out: torch.Tensor) -> None:
        """The next numbers, however long that takes. Contiguous."""
        self._expect(out.nbytes, out.nbytes)
        self._read(bytes_of(out))

    def take_some(self, place: torch.Tensor) -> None:
        """The next numbers, as many as they are: to the beginning of this place (uint8)."""
        self._read(bytes_of(place)[: self._expect(1, place.nbytes)])

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


def hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


def bytes_of(numbers: torch.Tensor) -> memoryview:
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
