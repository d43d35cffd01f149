"""A real server on a free port with a fake engine behind it, in a thread, so that tests can look at the engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine
from holdfast.server.app import create_app
from holdfast.server.run import bind, serve
from holdfast.server.settings import ServerSettings


class FakeServer:
    def __init__(self, engine: FakeEngine, settings: dict[str, Any]) -> None:
        self.engine = engine
        self.lines: list[dict[str, Any]] = []
        self._line_written = threading.Condition()
        self._write_timeout_s = settings.pop("write_timeout_s", 60.0)
        self._max_connections = settings.pop("max_connections", 2048)
        self._tls = settings.pop("tls", None)
        self._listener = settings.pop("listener", None) or bind("127.0.0.1", 0)
        chosen = {"served_model_names": ("fake", "alias"), "access_log": self._log, "version": "9.9", **settings}
        self._app = create_app(engine, ServerSettings(**chosen))
        self.port: int = 0 if self._listener.family == socket.AF_UNIX else self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.exit_code: int | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _log(self, line: dict[str, Any]) -> None:
        with self._line_written:
            self.lines.append(line)
            self._line_written.notify_all()

    def wait_for_lines(self, count: int) -> list[dict[str, Any]]:
        with self._line_written:
            assert self._line_written.wait_for(lambda: len(self.lines) >= count, PATIENCE_S), self.lines
            return list(self.lines)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(
                serve(
                    self._app,
                    self.engine,
                    listener=self._listener,
                    on_ready=self._ready.set,
                    handle_signals=False,
                    write_timeout_s=self._write_timeout_s,
                    max_connections=self._max_connections,
                    tls=self._tls,
                )
            )
            self.exit_code = await self._task

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(main())

    def start(self, *, wait: bool = True) -> FakeServer:
        self._thread.start()
        if wait:
            assert self._ready.wait(PATIENCE_S)
        return self

    def call(self, work: Callable[[], Any]) -> Any:
        """On the engine's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    @contextlib.contextmanager
    def loop_held(self) -> Iterator[None]:
        """The server notices nothing meanwhile: what clients send now is all there when it looks again."""
        holds, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            holds.set()
            go_on.wait(PATIENCE_S)

        self.loop.call_soon_threadsafe(hold)
        assert holds.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()

    def until(self, happened: Callable[[], bool]) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.until(happened), self.loop).result(PATIENCE_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)
