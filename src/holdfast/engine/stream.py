"""What a reader of a request holds: its deltas as they come, and the way to leave early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from holdfast.errors import EngineError, HoldfastError
from holdfast.records import AnswerDelta, FinishReason


class Stream(AsyncIterator[AnswerDelta]):
    """The deltas of one request's answers. A class, because a generator that was never begun cannot clean up."""

    def __init__(self, request_ids: list[str], on_close: Callable[[list[str]], None]) -> None:
        self._request_ids = request_ids
        self._on_close = on_close
        self._running = len(request_ids)
        self._queue: asyncio.Queue[AnswerDelta | HoldfastError] = asyncio.Queue()
        self._closed = False

    def put(self, item: AnswerDelta | HoldfastError) -> None:
        self._queue.put_nowait(item)

    async def __anext__(self) -> AnswerDelta:
        if self._closed or self._running == 0:
            await self.aclose()
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, HoldfastError):
            await self.aclose()
            raise item
        if item.finish_reason is not None:
            self._running -= 1
            if self._running == 0:
                await self.aclose()
        if item.finish_reason is FinishReason.ERROR:
            raise EngineError("the request ended in an error")
        return item

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self._request_ids)
