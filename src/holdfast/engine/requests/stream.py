"""The async iterator of a request's deltas. Closing it early aborts the request; unread deltas are bounded over all
streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from holdfast.errors import EngineError, HoldfastError, OverloadedError
from holdfast.footprint.cpu import WAITING_ENTRIES
from holdfast.records import AnswerDelta, FinishReason

OWN_ENTRIES = 128
"""That every stream may let wait, whatever others do: who reads at all is never ended for somebody else's slowness."""
OF_A_DELTA = 2
"""Entries that it counts for, beside one for each log-probability."""


class Waiting:
    """Room for what waits in all streams of an engine, beside what each has of its own. In entries."""

    def __init__(self, entries: int = WAITING_ENTRIES) -> None:
        self.free = entries


class Stream(AsyncIterator[AnswerDelta]):
    """The deltas of one request's answers. A class, because a generator that was never begun cannot clean up."""

    def __init__(self, request_ids: list[str], on_close: Callable[[list[str]], None], room: Waiting) -> None:
        self._request_ids = request_ids
        self.engine = self.saved_tokens = 0
        """Which of several engines it is of, and how much of its prompt is taken to be cached there: whoever routed it
        says so."""
        self._on_close = on_close
        self._room = room
        self._running = len(request_ids)
        self._items: deque[AnswerDelta | HoldfastError] = deque()
        self._entries = 0
        self._taken = 0
        """Entries taken from the shared limit."""
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, item: AnswerDelta | HoldfastError) -> None:
        if self._closed:
            return
        self._items.append(item)
        if isinstance(item, AnswerDelta):
            self._entries += _entries(item)
            if self._entries > OWN_ENTRIES and not self._take_room():
                self._give_up()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def __anext__(self) -> AnswerDelta:
        while not self._items:
            if self._closed or self._running == 0:
                await self.aclose()
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, HoldfastError):
            await self.aclose()
            raise item
        self._entries -= _entries(item)
        if self._taken:
            self._take_room()
        if item.finish_reason is not None:
            self._running -= 1
            if self._running == 0:
                await self.aclose()
        if item.finish_reason is FinishReason.ERROR:
            raise EngineError("the request ended in an error")
        return item

    async def aclose(self) -> None:
        self._items.clear()
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._entries = 0
            self._take_room()
            self._on_close(self._request_ids)

    def _take_room(self) -> bool:
        """As much as is waiting now; False: there is not so much."""
        more = max(0, self._entries - OWN_ENTRIES) - self._taken
        if more > self._room.free:
            return False
        self._room.free -= more
        self._taken += more
        return True

    def _give_up(self) -> None:
        """What waits is dropped and the engine works on nothing that nobody reads. The reader finds the reason."""
        waiting = len(self._items)
        self._items.clear()
        self._items.append(
            OverloadedError(
                f"the output is read more slowly than it is generated: the buffer is full, {waiting} chunks wait",
                needed=f"room for {self._entries} tokens and logprobs",
                found=f"{OWN_ENTRIES} for each request, and {self._room.free + self._taken} left for all",
                fix="read faster, request fewer logprobs, or lower max_tokens",
            )
        )
        self._close()


def _entries(delta: AnswerDelta) -> int:
    return OF_A_DELTA if delta.logprobs is None else OF_A_DELTA + sum(map(len, delta.logprobs))
