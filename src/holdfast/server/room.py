"""Room in this process for what is told of prompts: who asks for more than there is waits, or is refused. Knows nothing
of what is told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.errors import OverloadedError, RequestError
from holdfast.planner.footprint import TOLD_ENTRIES


def told_entries(prompt_lengths: list[int], likeliest: int, copies: int) -> int:
    """Log-probabilities that are held for a request. Answers to the same prompt share them."""
    return sum(prompt_lengths) * (likeliest + 1) * copies


def check_told(prompt_lengths: list[int], likeliest: int, copies: int, field: str) -> int:
    """told_entries, unless they are more than the plan has memory for."""
    entries = told_entries(prompt_lengths, likeliest, copies)
    if entries <= TOLD_ENTRIES:
        return entries
    tokens, shapes = sum(prompt_lengths), " in two shapes" if copies == 2 else ""
    most = TOLD_ENTRIES // (tokens * copies) - 1
    fewer = f"{field} of at most {most}, " if most >= 0 else ""
    raise RequestError(
        f"{field} asks for {entries} log-probabilities ({tokens} tokens of prompts, {likeliest} + 1 for each{shapes}); "
        f"this server holds {TOLD_ENTRIES} at a time",
        needed=f"room for {entries} log-probabilities",
        found=f"room for {TOLD_ENTRIES}",
        fix=f"{fewer}shorter prompts, or fewer of them in one request",
        field=field,
    )


class Room:
    """First come, first served: a large request is not overtaken by small ones for ever."""

    def __init__(self, entries: int = TOLD_ENTRIES, most_waiting: int | None = None) -> None:
        self.free = entries
        self._most_waiting = most_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, entries: int) -> AsyncIterator[None]:
        if entries:
            await self._enter(entries)
        try:
            yield
        finally:
            self._leave(entries)

    async def _enter(self, entries: int) -> None:
        if not self._waiting and entries <= self.free:
            self.free -= entries
            return
        if self._most_waiting is not None and len(self._waiting) >= self._most_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait for room for the log-probabilities of their prompts",
                needed=f"room for {entries} log-probabilities",
                found=f"room for {self.free}",
                fix="try again later, or serve with a larger --max-queued-requests",
                field="prompt_logprobs",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # Left while it waited, whoever stood behind may fit; left just when its turn had come, it gives that back.
            self._leave(0 if turn.cancelled() else entries)
            raise

    def _leave(self, entries: int) -> None:
        self.free += entries
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self.free):
            taken, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.free -= taken
                turn.set_result(None)
