"""Runs the application and the engine together, from the bound socket to the last answer after SIGTERM.

Owns signals, start-up order, draining and exit codes; the application knows nothing of them.

    bind ─► listen (/health says loading) ─► engine ready ─► serve ─► signal ─► drain ─► exit 0
                                                             └► engine given up ─► last answers ─► exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from holdfast.engine.interface import Engine
from holdfast.errors import ConfigurationError, EngineError, HoldfastError
from holdfast.observability.logs import ThroughputLog
from holdfast.server.app import close_app, watched
from holdfast.server.http import connection
from holdfast.server.http.accept import Accepting, allow_connections
from holdfast.server.http.middleware import Tally
from holdfast.server.http.slow_clients import SlowClient, SlowClientMonitor
from holdfast.units import format_duration

log = logging.getLogger("holdfast.server")

EXIT_OK, EXIT_FAILED, EXIT_CONFIGURATION = 0, 1, 2
PORT_TAKEN, ADDRESS_REFUSED = "HF150", "HF151"
FLUSH_TIMEOUT_S = 5.0
"""After the engine is drained: time for the last bytes to reach slow clients."""
KEEP_ALIVE_S = 650
"""For connections without a request. Longer than clients and proxies keep theirs (httpx 5 s, aiohttp 15, nginx and AWS
60, Google 600): they must be the first to close, or a request that is just sent meets a closed connection. Where there
are too many, the oldest are closed for others all the same."""
FAREWELL_S = 0.5
"""At the end, for connections without a request: TLS waits for the peer's word, and a client's pool does not listen."""
STOP_TIMEOUT_S = 5.0
FAILURE_POLL_S = 0.1
LAST_ANSWERS_S = 2.0
"""After the engine was given up: time in which clients and probes are still told why."""


def bind(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A listening socket, before anything slow is done. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Inherited by every connection: without it a token waits up to 40 ms for the client's acknowledgement of the last.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Only lets us take a port whose old connections still linger; a port in use is still refused.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from error
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix domain socket. A file that a dead server left is replaced; one that answers is refused, and so
    is anything that is no socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise ConfigurationError(
            f"cannot listen on {path}: {'it is there already' if taken else error.strerror or error}",
            code=PORT_TAKEN if taken else ADDRESS_REFUSED,
            needed="a path of up to 107 bytes in a folder that this user may write to, with nothing there",
            fix="--uds /tmp/holdfast.sock",
            field="uds",
        ) from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _removed_at_end(listener: socket.socket) -> Iterator[None]:
    """The file of a Unix domain socket, unless another server has put its own there meanwhile."""
    path = Path(listener.getsockname()).absolute() if listener.family == socket.AF_UNIX else None
    ours = path.lstat() if path is not None and path.is_socket() else None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path is not None and ours is not None and os.path.samestat(path.lstat(), ours):
                path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _refused(host: str, port: int, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"port {port} on {host} is already in use",
            code=PORT_TAKEN,
            needed=f"a free port {port} on {host}",
            found="another program is listening on it",
            fix=f"--port {port + 1}, or stop the program that `ss -ltnp 'sport = :{port}'` shows",
            field="port",
        )
    return ConfigurationError(
        f"cannot listen on {host} port {port}: {error.strerror or error}",
        code=ADDRESS_REFUSED,
        needed="an address of this machine and a port that this user may open",
        fix="--host 127.0.0.1 --port 8000",
        field="host",
    )


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, ours drains first, and without its own way to take connections."""

    def __init__(self, config: uvicorn.Config, most: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._most = most
        self._tls = tls
        self._accepting: Accepting | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        (listener,) = sockets or []
        self._accepting = Accepting(
            listener,
            self._connection,
            cast("set[connection.Connection]", self.server_state.connections),
            self._most,
            tls=self._tls,
            handshake_s=connection.HEAD_TIMEOUT_S,
        )
        self._accepting.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.stop()
        unasked = [one for one in cast("set[connection.Connection]", self.server_state.connections) if one.idle]
        late = asyncio.get_running_loop().call_later(FAREWELL_S, _drop, unasked)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _connection(self, full: bool) -> asyncio.Protocol:
        return connection.Connection(config=self.config, server_state=self.server_state, app_state={}, full=full)


def _drop(connections: list[connection.Connection]) -> None:
    for one in connections:
        one.drop()


async def serve(
    app: Starlette,
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout_s: float = 30.0,
    write_timeout_s: float = 60.0,
    max_connections: int = 2048,
    listener: socket.socket | None = None,
    on_ready: Callable[[], None] | None = None,
    on_fatal: Callable[[BaseException], None] | None = None,
    throughput: ThroughputLog | None = None,
    on_reload: Callable[[], Awaitable[None]] | None = None,
    handle_signals: bool = True,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Serves an application of `create_app` until a signal or a failed start and returns the exit code; cancelling it
    ends it at once.

    `on_fatal` says the error that ends the server; without one its message is printed. `on_reload` is called at
    SIGUSR1. `listener` is from `bind`;
    without one it is bound here. Raises ConfigurationError when it cannot be. Off the main thread signals cannot be
    handled: pass handle_signals=False there.
    """
    listener = listener or bind(host, port)
    config = uvicorn.Config(
        app,
        http=connection.Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_TIMEOUT_S),
    )
    server = HttpServer(config, allow_connections(max_connections), tls)
    patience = SlowClientMonitor(lambda: cast("set[SlowClient]", server.server_state.connections), write_timeout_s)
    life = _Life(engine, server, drain_timeout_s, patience, on_fatal or _say, on_reload)
    with _removed_at_end(listener), life.hearing_signals() if handle_signals else contextlib.nullcontext():
        try:
            with watched(app) as watching:
                return await life.run(listener, on_ready, throughput, watching)
        finally:
            close_app(app)
            log.info("stopped: %s", life.story(app.state.tally))


class _Life:
    """One run of a server. The first thing that asks for its end decides the exit code."""

    def __init__(
        self,
        engine: Engine,
        server: HttpServer,
        drain_timeout_s: float,
        patience: SlowClientMonitor,
        on_fatal: Callable[[BaseException], None],
        on_reload: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._engine = engine
        self._on_fatal = on_fatal
        self._on_reload = on_reload
        self._reloads = asyncio.Queue[None](maxsize=1)
        self._server = server
        self._drain_timeout_s = drain_timeout_s
        self._patience = patience
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._signalled = False
        self._began_s = time.monotonic()
        self._drained_s: float | None = None
        self._abandoned = 0
        """Open at a second signal. Their own ends come after the last line, when the loop is torn down."""

    def story(self, tally: Tally) -> str:
        """What people look for after an end: was anybody cut off?"""
        ran = format_duration(time.monotonic() - self._began_s)
        drained = "" if self._drained_s is None else f"; drained in {format_duration(self._drained_s)}"
        return (
            f"{tally.answered} requests answered, {tally.failed} failed, {tally.left} aborted by clients, "
            f"{max(tally.cut, self._abandoned)} cut off{drained}; ran {ran}"
        )

    async def run(
        self,
        listener: socket.socket,
        on_ready: Callable[[], None] | None,
        throughput: ThroughputLog | None,
        watching: Coroutine[Any, Any, None] | None,
    ) -> int:
        listening = asyncio.create_task(self._server.serve(sockets=[listener]))
        beside = [asyncio.create_task(self._patience.run())]
        if throughput is not None:
            beside.append(asyncio.create_task(throughput.run()))
        if watching is not None:
            beside.append(asyncio.create_task(watching))
        if self._on_reload is not None:
            beside.append(asyncio.create_task(self._reload_when_told(self._on_reload)))
        try:
            return await self._live(listening, on_ready)
        finally:
            for task in beside:
                task.cancel()
            await self._end(listening)

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._on_sigusr1)  # Which ends a process that does not hear it.
        try:
            yield
        finally:
            for number in (*numbers, signal.SIGUSR1):
                loop.remove_signal_handler(number)

    def _on_sigusr1(self) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # One that is still to be heard will do.
            self._reloads.put_nowait(None)

    async def _reload_when_told(self, reload: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._reloads.get()
            try:
                await reload()
            except Exception:
                log.exception("reading the settings again failed; they stay as they are")

    def _on_signal(self, number: signal.Signals) -> None:
        # The second one must also be heard while the last bytes are being sent.
        self._server.force_exit = self._signalled
        self._signalled = True
        self._signals.put_nowait(number)

    async def _live(self, listening: asyncio.Task[None], on_ready: Callable[[], None] | None) -> int:
        first = asyncio.create_task(self._signals.get())
        starting = asyncio.create_task(self._engine.start())
        await _first_of(starting, first, listening)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            first.cancel()
            return EXIT_OK if first.done() and not first.cancelled() else EXIT_FAILED
        error = starting.exception()
        if error is not None:
            first.cancel()
            if not isinstance(error, HoldfastError):
                log.error("the engine could not start", exc_info=error)
            self._on_fatal(error)
            return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_FAILED
        if on_ready is not None:
            on_ready()
        failing = asyncio.create_task(self._engine_failed())
        await _first_of(first, listening, failing)
        failing.cancel()
        if first.done():
            return await self._drain(first.result())
        first.cancel()
        if listening.done():
            log.error("the HTTP server stopped unexpectedly")
        return EXIT_FAILED

    async def _engine_failed(self) -> None:
        """Returns when the engine was given up for good and the last clients were told."""
        while (failure := self._engine.failure) is None:
            await asyncio.sleep(FAILURE_POLL_S)
        await asyncio.sleep(LAST_ANSWERS_S)
        log.error("the engine failed permanently, shutting down")
        self._on_fatal(EngineError(failure.message, code=failure.code, found=failure.found, fix=failure.fix))

    async def _drain(self, number: signal.Signals) -> int:
        log.info(
            "%s: running requests: %d; they have %.0f s to finish; send the signal again to exit at once",
            number.name,
            self._engine.unfinished,
            self._drain_timeout_s,
        )
        began_s = time.monotonic()
        second = asyncio.create_task(self._signals.get())
        draining = asyncio.create_task(self._engine.drain(self._drain_timeout_s))
        await _first_of(draining, second)
        if draining.done():
            second.cancel()
            self._drained_s = time.monotonic() - began_s
            draining.result()
            return EXIT_OK
        self._abandoned = self._engine.unfinished
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        return 128 + second.result()

    async def _end(self, listening: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        await asyncio.gather(listening, return_exceptions=True)
        try:
            await asyncio.wait_for(self._engine.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("the engine did not stop within %.0f s", STOP_TIMEOUT_S)


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _say(error: BaseException) -> None:
    """Of an error that is not ours the traceback is in the log."""
    if isinstance(error, HoldfastError):
        print(f"holdfast: {error}", file=sys.stderr, flush=True)


def run(app: Starlette, engine: Engine, **options: Any) -> int:
    """`serve` on a loop of its own (uvloop where there is one)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(app, engine, **options))
    return uvloop.run(serve(app, engine, **options))
