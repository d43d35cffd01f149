"""Memory limit for log-probabilities.

Those of prompts are reserved in advance (wait, or refuse if over the limit); those of outputs are taken as they grow,
and a request that exceeds the limit is ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from holdfast.errors import OverloadedError, RequestError
from holdfast.footprint.cpu import KEPT_ENTRIES, TOLD_ENTRIES, WHOLE_VOCABULARY_ENTRIES
from holdfast.records.sampling import MAX_LOGPROBS, WHOLE_VOCABULARY

OF_A_TOKEN = 2
"""Entries that a kept token counts for beside its log-probabilities."""


def prompt_logprob_entries(prompt_lengths: list[int], likeliest: int, copies: int) -> int:
    """Log-probabilities that are held for a request. Answers to the same prompt share them."""
    return sum(prompt_lengths) * (likeliest + 1) * copies


def told_entries(max_logprobs: int) -> int:
    """Of prompts, at a time. `max_logprobs`: of the server."""
    return WHOLE_VOCABULARY_ENTRIES if max_logprobs == WHOLE_VOCABULARY else TOLD_ENTRIES


def check_told(prompt_lengths: list[int], likeliest: int, copies: int, field: str, limit: int = TOLD_ENTRIES) -> int:
    """prompt_logprob_entries, unless they are more than the plan has memory for: `limit`. Whoever asks for the whole
    vocabulary takes all of it, so that a step has one such row."""
    entries = prompt_logprob_entries(prompt_lengths, likeliest, copies)
    if likeliest > MAX_LOGPROBS and len(prompt_lengths) > 1:
        raise RequestError(
            f"{field} of the whole vocabulary is told of one prompt at a time; there are {len(prompt_lengths)}",
            needed="one prompt",
            fix="a request for each prompt",
            field=field,
        )
    if entries <= limit:
        return limit if likeliest > MAX_LOGPROBS else entries
    tokens, shapes = sum(prompt_lengths), " in two formats" if copies == 2 else ""
    most = limit // (tokens * copies) - 1
    fewer = f"{field} of at most {most}, " if most >= 0 else ""
    raise RequestError(
        f"{field} asks for {entries} logprobs ({tokens} prompt tokens, {likeliest} + 1 for each{shapes}); "
        f"the limit of this server is {limit} at a time",
        needed=f"{entries} logprobs",
        found=f"at most {limit}",
        fix=f"{fewer}shorter prompts, or fewer of them in one request",
        field=field,
    )


def check_kept(tokens: int, likeliest: int) -> None:
    """Of answers that are not streamed, if they become as long as was asked for."""
    entries = tokens * (likeliest + 1 + OF_A_TOKEN)
    if entries <= KEPT_ENTRIES:
        return
    raise RequestError(
        f"without streaming, logprobs of {tokens} output tokens, {likeliest} + 1 for each, are buffered until the end; "
        f"the limit of this server is {KEPT_ENTRIES} at a time",
        needed=f"{entries} logprobs",
        found=f"at most {KEPT_ENTRIES}",
        fix=f"stream: true, or max_tokens of at most {KEPT_ENTRIES // (likeliest + 1 + OF_A_TOKEN)} in total",
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
                "the memory for the logprobs of non-streaming requests is in use",
                needed=f"{self.entries + more} logprobs",
                found=f"{self.entries} held and {self._room.kept_free} free",
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
                f"{len(self._waiting)} requests are already waiting for memory for prompt logprobs",
                needed=f"{entries} logprobs",
                found=f"{self.free} free",
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
