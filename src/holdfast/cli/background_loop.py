"""An asyncio loop in a thread of its own, for a program whose main thread waits for a person.

So what lives on the loop goes on living at the prompt: an engine that dies is noticed then, and started again.
Knows nothing of chats.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs within its `with` block. `run` is for the main thread, where Ctrl-C is raised."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="loop", daemon=True)
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._leaving: asyncio.Event

    def __enter__(self) -> BackgroundLoop:
        self._thread.start()
        self._began.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    async def _live(self) -> None:
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        self._began.set()
        await self._leaving.wait()

    def run(
        self, work: Coroutine[Any, Any, T], *, discard: Callable[[T], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Its result. Ctrl-C cancels it, and is raised when it has ended. `discard`: what to do with a result that came
        all the same, as when it was done already."""
        running: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def begin() -> None:
            running.append(self._loop.create_task(work))
            running[0].add_done_callback(lambda _: ended.set())

        def cancel() -> None:
            if running:
                running[0].cancel()
            else:
                work.close()
                ended.set()

        try:
            self._loop.call_soon_threadsafe(begin)
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            ended.wait()
            late = running[0] if running and not running[0].cancelled() else None
            if discard is not None and late is not None and late.exception() is None:
                self.run(discard(late.result()))
            raise
        return running[0].result()
