"""Takes new connections from a listening socket, all that wait at each turn of the loop, up to a bound.

uvloop takes one at a turn, and under hundreds of streams a turn is long: probes and clients would wait for seconds
behind each other. Knows sockets, and nothing of what is said over them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sized

log = logging.getLogger("holdfast.server")

AT_ONCE = 128
"""Taken at a turn: what runs already must not wait for long either."""
RESERVE = 64
"""Connections beyond the bound that are still heard: probes are answered, and others told why they are not."""
OTHER_FILES = 128
"""That the process has open beside connections."""
PAUSE_S = 1.0
"""Until the next try when the system has no room for another connection."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 2\r\nconnection: close\r\n"
    b"content-length: 20\r\n\r\ntoo many connections"
)


class Accepting:
    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: Sized,
        most: int,
        *,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        """`connections`: those that are open, counted at each new one."""
        self._listener = listener
        self._make = make
        self._connections = connections
        self._most = most
        self._tls = tls
        self._handshake_s = handshake_s
        self._opening: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._take)

    def stop(self) -> None:
        """Before the listener is closed."""
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                taken, _ = self._listener.accept()
            except BlockingIOError:
                return
            except (InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                log.error("no new connection for %g s: %s", PAUSE_S, error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self.start)
                return
            taken.setblocking(False)
            if len(self._connections) + len(self._opening) >= self._most + RESERVE:
                self._send_away(taken)
            else:
                self._open(taken)

    def _open(self, taken: socket.socket) -> None:
        limit_s = None if self._tls is None else self._handshake_s
        opening = self._loop.connect_accepted_socket(self._make, taken, ssl=self._tls, ssl_handshake_timeout=limit_s)
        task: asyncio.Task[object] = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # Whoever speaks no TLS, or leaves before it is agreed on.
            log.info("a connection did not come about: %s", type(error).__name__)

    def _send_away(self, taken: socket.socket) -> None:
        with taken:
            if self._tls is None:
                try:
                    taken.send(_FULL)
                    taken.shutdown(socket.SHUT_WR)
                except OSError:
                    return  # It has left.


def allow_connections(wanted: int) -> int:
    """How many of them the system lets us have: its limit on open files is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVE + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fewer = max(1, soft - RESERVE - OTHER_FILES)
    log.warning("at most %d connections, not %d: this process may have %d files open (ulimit -n)", fewer, wanted, soft)
    return fewer
