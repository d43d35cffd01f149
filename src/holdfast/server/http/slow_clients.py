"""Closes connections whose client has stopped reading; their requests are aborted. Finds them by their unsent bytes."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Protocol

log = logging.getLogger("holdfast.server")

LOOKS = 4
"""Within one time limit; so a client is given up after at least the limit, and at most a quarter more."""


RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""Linger for 0 s: the kernel too forgets what it could not send."""


class Flow(Protocol):
    write_paused: bool


class SlowClient(Protocol):
    """Of uvicorn's protocols, what is looked at."""

    transport: asyncio.Transport | None
    flow: Flow | None


class SlowClientMonitor:
    """Remembers what each connection had not yet taken at the last look."""

    def __init__(self, connections: Callable[[], Iterable[SlowClient]], limit_s: float) -> None:
        self._connections = connections
        self._limit_s = limit_s
        self._unsent: dict[SlowClient, tuple[int, int]] = {}
        """Bytes, and for how many looks they have not become fewer."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._limit_s / LOOKS)
            self.look()

    def look(self) -> None:
        seen: dict[SlowClient, tuple[int, int]] = {}
        for connection in list(self._connections()):
            transport, flow = connection.transport, connection.flow
            if transport is None or flow is None:
                continue
            # While bytes may still be added, their number says nothing about the client: they are not added to a
            # paused connection, nor to one that is being closed.
            if not (flow.write_paused or transport.is_closing()):
                continue
            unsent = transport.get_write_buffer_size()
            before, looks = self._unsent.get(connection, (unsent + 1, 0))
            looks = looks + 1 if unsent and unsent >= before else 0
            if looks >= LOOKS:
                peer = transport.get_extra_info("peername")
                log.warning("client %s read nothing for %g s; its connection was dropped", peer, self._limit_s)
                _tear(transport)
            else:
                seen[connection] = (unsent, looks)
        self._unsent = seen


def _tear(transport: asyncio.Transport) -> None:
    connected = transport.get_extra_info("socket")
    if connected is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    transport.abort()
