"""Room in this process for log-probabilities. Knows nothing of what they say.

Of prompts it is known beforehand how many there will be: who asks for more than is free waits, and for more than there
is, is refused. Of answers it is not: they take room as they grow, and one that finds none is ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from holdfast.errors import OverloadedError, RequestError
from holdfast.footprint.cpu import KEPT_ENTRIES, TOLD_ENTRIES

OF_A_TOKEN = 2
"""Entries that a kept token counts for beside its log-probabilities."""


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


def check_kept(tokens: int, likeliest: int) -> None:
    """Of answers that are not streamed, if they become as long as was asked for."""
    entries = tokens * (likeliest + 1 + OF_A_TOKEN)
    if entries <= KEPT_ENTRIES:
        return
    raise RequestError(
        f"logprobs of answers of {tokens} tokens in all, {likeliest} + 1 for each, are kept until they are whole; this "
        f"server keeps {KEPT_ENTRIES} at a time",
        needed=f"room for {entries} log-probabilities",
        found=f"room for {KEPT_ENTRIES}",
        fix=f"stream: true, or max_tokens of at most {KEPT_ENTRIES // (likeliest + 1 + OF_A_TOKEN)} over all answers",
        field="max_tokens",
    )


class LogprobReservation:
    """What one request holds of the room for answers; `give_back` when they have gone out."""

    def __init__(self, room: LogprobBudget) -> None:
        self._room = room
        self.entries = 0

    def take(self, tokens: int, logprobs: int) -> None:
        """Of so many further tokens, together so many log-probabilities. Raises where there is no room."""
        more = logprobs + OF_A_TOKEN * tokens
        if more > self._room.kept_free:
            raise OverloadedError(
                "the log-probabilities of answers that are not streamed take all the room there is for them",
                needed=f"room for {self.entries + more} log-probabilities",
                found=f"{self._room.kept_free} more beside {self.entries}",
                fix="stream: true, a smaller max_tokens, or try again later",
                field="logprobs",
            )
        self._room.kept_free -= more
        self.entries += more

    def give_back(self) -> None:
        self._room.kept_free += self.entries
        self.entries = 0


class LogprobBudget:
    """First come, first served: a large request is not overtaken by small ones for ever."""

    def __init__(self, entries: int = TOLD_ENTRIES, most_waiting: int | None = None) -> None:
        self.free = entries
        self.kept_free = KEPT_ENTRIES
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

    @contextmanager
    def keep(self) -> Iterator[LogprobReservation]:
        kept = LogprobReservation(self)
        try:
            yield kept
        finally:
            kept.give_back()

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
