"""Accepts connections in batches, up to --max-connections.

uvloop accepts one per turn of the event loop, and under hundreds of streams a turn is long: probes and clients would
wait for seconds. At the limit, the oldest connections without a request are closed to make room:

    below the limit     accepted
    at the limit        idle ones are closed, and it is accepted
    all carry requests  accepted on a reserve, where probes are answered and others get 503
    beyond that, too    503, and closed

Knows sockets, and nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

log = logging.getLogger("holdfast.server")

AT_ONCE = 128
"""Taken at a turn: what runs already must not wait for long either."""
RESERVE = 64
"""Connections beyond the bound that are still heard: probes are answered, and others told why they are not."""
OTHER_FILES = 128
"""That the process has open beside connections, those of an engine process that is started again among them."""
SPARE_FILES = 32
"""Of these, what stays free when the system has no file left for a connection."""
PAUSE_S, SHORT_PAUSE_S = 1.0, 0.05
"""Until the next try when the system has no room for another connection; the short one when others were closed."""
CLOSED_AT_ONCE = 32
"""One of so many of all that may be open is closed with the first that must be: finding the oldest means to look at
all of them."""
SAID_EVERY_S = 10.0
LEAST_CONNECTIONS = 16
"""However few files there are left: fewer are of use to nobody."""
RECOVER_S = 30.0
"""After the last time that files ran out, until as many connections as before are tried again."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 2\r\nconnection: close\r\n"
    b"content-length: 20\r\n\r\ntoo many connections"
)

Rank = tuple[int, float]
"""Of what may be closed for others: the lowest first. A kind, and since when it has been so."""


class Held(Protocol):
    """A connection that was taken."""

    @property
    def expendable(self) -> Rank | None:
        """None: it carries a request, or is being closed."""

    def drop(self) -> None:
        """Closes it at once."""


class _Opening:
    """One that was just taken, or whose TLS is not agreed on yet."""

    def __init__(self, taken: socket.socket, began_s: float) -> None:
        self._taken = taken
        self.protocol: object = None
        """What speaks over it, once there is one."""
        self.expendable: Rank | None = (0, began_s)

    def drop(self) -> None:
        """By whoever opens it, who finds it ended."""
        with contextlib.suppress(OSError):
            self._taken.shutdown(socket.SHUT_RDWR)


class Accepting:
    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[bool], asyncio.Protocol],
        connections: Collection[Held],
        most: int,
        *,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        """`make`: what speaks over a new one; it is told whether that one is beyond the bound. `connections`: those
        that are open, which may change at any time."""
        self._listener = listener
        self._make = make
        self._connections = connections
        self._most = self._configured = most
        self._tls = tls
        self._handshake_s = handshake_s
        self._opening: dict[asyncio.Task[object], _Opening] = {}
        self._dropped: set[Held] = set()
        """Those that are still among the open ones."""
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._possible = 0
        self._recovering: asyncio.TimerHandle | None = None
        """The most that there were when the system had no file for another one."""
        self._dropped_total = self._said_total = 0
        self._said_s = float("-inf")

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._take)

    def stop(self) -> None:
        """Before the listener is closed."""
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    @property
    def _open_count(self) -> int:
        return len(self._connections) + len(self._opening) - len(self._dropped)

    def _take(self) -> None:
        self._recount()
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
                self._wait_for_room(error)
                return
            taken.setblocking(False)
            if self._open_count >= self._most:
                self._make_room(1 + self._most // CLOSED_AT_ONCE)
            if self._open_count >= self._most + RESERVE:
                self._send_away(taken)
            else:
                self._open(taken, self._open_count >= self._most)

    def _recount(self) -> None:
        """What has become of those that were taken and dropped before this turn."""
        for task, one in list(self._opening.items()):
            if one.protocol in self._connections:
                del self._opening[task]
        if self._dropped:
            self._dropped.intersection_update({*self._connections, *self._opening.values()})

    def _make_room(self, wanted: int) -> int:
        """Closes so many of those that carry no request, if there are; how many it were."""
        ranked = ((rank, number, one) for number, (rank, one) in enumerate(self._expendable()))
        chosen = heapq.nsmallest(wanted, ranked)
        for _, _, one in chosen:
            self._dropped.add(one)
            one.drop()
        self._dropped_total += len(chosen)
        now_s = self._loop.time()
        if chosen and now_s - self._said_s >= SAID_EVERY_S:
            count, self._said_total, self._said_s = self._dropped_total - self._said_total, self._dropped_total, now_s
            said = "closed %d idle connections: the limit of %d connections was reached (--max-connections)"
            log.warning(said, count, self._most)
        return len(chosen)

    def _expendable(self) -> Iterator[tuple[Rank, Held]]:
        for one in (*self._connections, *self._opening.values()):
            rank = None if one in self._dropped else one.expendable
            if rank is not None:
                yield rank, one

    def _wait_for_room(self, error: OSError) -> None:
        """The system has no file or memory for another one. Files are kept free for the rest of the process from now
        on: an engine that dies could not be started again."""
        count = self._open_count
        if error.errno == errno.EMFILE:
            self._possible = max(self._possible, count)
            self._most = min(self._configured, max(LEAST_CONNECTIONS, self._possible - RESERVE - SPARE_FILES))
            if self._recovering is not None:
                self._recovering.cancel()
            self._recovering = self._loop.call_later(RECOVER_S, self._recover)
        closed = self._make_room(max(1, count - self._most))
        pause_s = SHORT_PAUSE_S if closed else PAUSE_S
        said = "accepting no new connections for %g s: %s; at most %d connections for the next %g s"
        log.error(said, pause_s, error.strerror, self._most, RECOVER_S)
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(pause_s, self.start)

    def _recover(self) -> None:
        """Who held the files may be gone: as many as before are tried again."""
        self._most, self._possible, self._recovering = self._configured, 0, None

    def _open(self, taken: socket.socket, full: bool) -> None:
        limit_s = None if self._tls is None else self._handshake_s
        opening = _Opening(taken, self._loop.time())

        def make() -> asyncio.Protocol:
            opening.protocol = protocol = self._make(full)
            return protocol

        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(make, taken, ssl=self._tls, ssl_handshake_timeout=limit_s)
        )
        self._opening[task] = opening
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        self._opening.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # Whoever speaks no TLS, or leaves before it is agreed on.
            log.info("a connection could not be established: %s", type(error).__name__)

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
    log.warning(
        "at most %d connections instead of %d: this process may open only %d files (ulimit -n)", fewer, wanted, soft
    )
    return fewer
