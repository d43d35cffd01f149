"""Several engines, each a process with the whole model, as one `Engine`: data parallelism behind one front.

Owns which of them a request goes to, and asks all of them where the server is meant as a whole: start, drain, sleep,
budgets, memory. Each looks after its own process: one that dies is started again alone, and its open requests go on
there; the others do not notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from holdfast.config import EngineConfig
from holdfast.engine.data_parallel.router import EngineLoad, Route, Router
from holdfast.engine.data_parallel.sums import describe_starting, sum_info, sum_ledgers, sum_stats
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.requests.admission import check_room
from holdfast.engine.requests.front_parts import FrontParts
from holdfast.engine.requests.stream import Stream
from holdfast.engine.requests.structured_output import StructuredOutput
from holdfast.errors import EngineError, HoldfastError
from holdfast.observability.ledger import Ledger
from holdfast.records import AdapterRef, AnswerDelta, EngineInfo, EngineMemory, EngineStats, Failure, SamplingParams
from holdfast.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("holdfast")

COUNTED_ANEW, COUNTED_S = 256, 0.05
"""Open requests of an engine that are counted for every new one (0.5 us each); of more for so long only what has come
since: with thousands that wait, each would else cost the front milliseconds."""


class DataParallelEngine:
    """Implements `engine.interface.Engine`. Use on one asyncio loop."""

    def __init__(self, config: EngineConfig, engines: Sequence[ProcessEngine], parts: FrontParts) -> None:
        """`parts`: lent to `engines`, and closed with them. `config`: of the server; its queue is one for all."""
        self.members = tuple(engines)
        self.budgets: Mapping[str, int | None] = config.budgets
        self._parts, self._max_queued = parts, config.max_queued_requests
        self._router = Router(config.block_size, len(self.members))
        self._caching = config.enable_prefix_caching
        self._restarts_seen = [0] * len(self.members)
        self._started = False
        self._counted = [(0, 0, 0.0)] * len(self.members)
        """Of each engine: tokens that wait, tokens that run, and until when they are taken to be so many."""
        self._searches: dict[str, int] = {}
        """Engines of beam searches under way: all steps of one find their beams' prefixes there."""
        self._turning = asyncio.Lock()
        """Serializes sleep, wake_up and set_memory_budget over all: none of them finds half of another."""
        for one in self.members:
            one.all_pids = self._pids

    @property
    def info(self) -> EngineInfo:
        return sum_info([one.info for one in self.members])

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.members[0].tokenizer

    @property
    def structured(self) -> StructuredOutput | None:
        return self._parts.structured

    @property
    def ready(self) -> bool:
        """As long as one of them is, once all were: requests go to it."""
        return self._started and any(one.ready for one in self.members)

    @property
    def unresponsive(self) -> Failure | None:
        return None if self.ready else next((one.unresponsive for one in self.members if one.unresponsive), None)

    @property
    def starting(self) -> str:
        return describe_starting([(number, one.starting) for number, one in enumerate(self.members)])

    @property
    def failure(self) -> Failure | None:
        """One that was given up leaves the others to serve."""
        return self.members[0].failure if all(one.failure is not None for one in self.members) else None

    @property
    def draining(self) -> bool:
        return any(one.draining for one in self.members)

    @property
    def sleeping(self) -> bool:
        return all(one.sleeping or one.failure is not None for one in self.members) and self.failure is None

    @property
    def unfinished(self) -> int:
        return sum(one.unfinished for one in self.members)

    @property
    def restarts(self) -> int:
        return sum(one.restarts for one in self.members)

    @property
    def hangs(self) -> int:
        return sum(one.hangs for one in self.members)

    def stats(self) -> EngineStats:
        return sum_stats([one.stats() for one in self.members])

    def memory(self) -> Ledger | None:
        if not self._started:
            return None
        books: list[tuple[int, Ledger]] = []
        for number, one in enumerate(self.members):
            if (ledger := one.memory(with_front=not books)) is not None:
                books.append((number, ledger))
        return sum_ledgers(books, self._rows(), self.info)

    def on_step(self, listener: Callable[[EngineStats], None]) -> None:
        for one in self.members:
            one.on_step(listener)

    async def start(self) -> None:
        """All of them, at the same time: what keeps one from becoming ready ends the start of all."""
        await _all_or_none([one.start() for one in self.members])
        self._started = True

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        embed: bool = False,
        search_id: str | None = None,
        progress: bool = False,
    ) -> AsyncIterator[AnswerDelta]:
        number = self._searches.get(search_id or "")
        if number is None:
            self.check_room(params.n)
            route = self._route(prompt_token_ids, cache_salt, adapter)
        else:
            route = Route(number, 0)
        stream = await self.members[route.engine].generate(
            prompt_token_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter,
            embed=embed, search_id=search_id, progress=progress,
        )  # fmt: skip
        self._router.remember(route)
        waiting, running, until_s = self._counted[route.engine]
        self._counted[route.engine] = waiting + len(prompt_token_ids) - route.saved_tokens, running, until_s
        if isinstance(stream, Stream):
            stream.engine, stream.saved_tokens = route.engine, route.saved_tokens
        return stream

    def check_room(self, answers: int) -> None:
        """What was given up has no places."""
        living = self._living()
        taken, places = sum(one.taken_places for one in living), sum(one.places for one in living)
        check_room(answers, taken, places, self._max_queued)

    async def open_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        search_id: str,
        adapter: AdapterRef | None = None,
    ) -> int:
        if search_id in self._searches:  # On another engine: its places there would be nobody's to give back.
            raise EngineError(f"request id {search_id!r} is already in use", request_id=search_id)
        self.check_room(params.n)
        route = self._route(prompt_token_ids, "", adapter)
        await self.members[route.engine].open_search(prompt_token_ids, params, search_id=search_id, adapter=adapter)
        self._router.remember(route)
        self._searches[search_id] = route.engine
        return route.engine

    async def close_search(self, search_id: str) -> None:
        number = self._searches.pop(search_id, None)
        if number is not None:
            await self.members[number].close_search(search_id)

    async def reset_prefix_cache(self) -> None:
        for number, one in enumerate(self.members):
            await one.reset_prefix_cache()
            self._router.forget(number)

    async def set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        """For all together; where one of them cannot keep to its share, none is changed."""
        async with self._turning:
            await self._set_memory_budget(tier, budget_bytes)

    async def _set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        before, changed = self.budgets, list[ProcessEngine]()
        try:
            for one in self._living():
                await one.set_memory_budget(tier, budget_bytes)
                changed.append(one)
        except BaseException:
            for one in changed:
                try:
                    await one.set_memory_budget(tier, before.get(tier))
                except HoldfastError as error:
                    number = self.members.index(one)
                    log.error("engine %d keeps the new %s budget, which others refused: %s", number, tier, error)
            raise
        self.budgets = {**before, tier: budget_bytes}

    async def sleep(self, mode: str = "abort", level: int = 1) -> None:
        async with self._turning:
            waiting = [number for number, one in enumerate(self.members) if one.starting and one.failure is None]
            if waiting:
                said = f"engine {waiting[0]} is being started and cannot be put to sleep"
                raise EngineError(said, fix="try again later")
            await _all([one.sleep(mode, level) for one in self._living()])
            self._parts.stop()
            for number in range(len(self.members)) if level > 1 else ():
                self._router.forget(number)

    async def wake_up(self) -> None:
        async with self._turning:
            await _all([one.wake_up() for one in self._living()])

    async def drain(self, timeout_s: float) -> None:
        await _all([one.drain(timeout_s) for one in self.members])

    async def stop(self) -> None:
        try:
            await _all([one.stop() for one in self.members])
        finally:
            self._parts.close()

    def _living(self) -> list[ProcessEngine]:
        """All of them where none does: each says why."""
        return [one for one in self.members if one.failure is None] or [*self.members]

    def _pids(self) -> tuple[int, ...]:
        """Without that of one that was given up: it may be another process's by now."""
        return tuple(one.pid for one in self.members if one.pid is not None and one.failure is None)

    def _route(self, prompt: Sequence[int], cache_salt: str, adapter: AdapterRef | None) -> Route:
        """One that does not serve now is chosen only where none does: it says why, or the request waits there."""
        numbers = range(len(self.members))
        able = [number for number in numbers if self.members[number].ready]
        able = able or [number for number in numbers if self.members[number].failure is None] or list(numbers)
        shortest = min(able, key=lambda number: self._context(number))
        if len(prompt) >= self._context(shortest):
            able = [shortest]  # Which refuses it: what is too long does not depend on the engine.
        for number in able:
            self._look_at_cache(number)
        salt = f"{cache_salt}\0{'' if adapter is None else adapter.salt}"
        return self._router.choose(prompt, {number: self._load(number) for number in able}, salt)

    def _context(self, number: int) -> int:
        try:
            return self.members[number].info.max_model_len
        except EngineError:  # Not ready yet; it refuses everything.
            return 0

    def _load(self, number: int) -> EngineLoad:
        one, now_s = self.members[number], time.monotonic()
        waiting, running, until_s = self._counted[number]
        if len(one.open_requests) <= COUNTED_ANEW or now_s >= until_s:
            waiting, running = _tokens(one)
            self._counted[number] = waiting, running, now_s + COUNTED_S
        return EngineLoad(waiting_tokens=waiting, running_tokens=running, sequences=one.taken_places, places=one.places)

    def _look_at_cache(self, number: int) -> None:
        """A process that was started again has cached nothing, and a pool may have another size now."""
        one = self.members[number]
        if one.restarts != self._restarts_seen[number]:
            self._restarts_seen[number] = one.restarts
            self._router.forget(number)
        if self._caching and one.ready:
            self._router.set_cache(number, one.info.kv_tokens)

    def _rows(self) -> list[EngineMemory]:
        rows: list[EngineMemory] = []
        for number, one in enumerate(self.members):
            info, stats = one.info, one.stats()
            rows.append(
                EngineMemory(
                    engine=number,
                    pid=one.pid if one.failure is None else None,
                    status=_status(one),
                    device=info.device,
                    weights_bytes=info.weights_bytes,
                    kv_pool_bytes=info.kv_pool_bytes,
                    running=stats.running,
                    waiting=stats.waiting,
                    restarts=one.restarts,
                )
            )
        return rows


def _tokens(one: ProcessEngine) -> tuple[int, int]:
    """That wait, and that run."""
    waiting = running = 0
    for answer, stream in one.open_requests:
        prompt = len(answer.request.prompt_token_ids)
        if answer.token_ids:
            running += prompt + len(answer.token_ids)
        else:
            waiting += prompt - stream.saved_tokens
    return waiting, running


def _status(one: ProcessEngine) -> str:
    if one.failure is not None:
        return "dead"
    if one.sleeping:
        return "sleeping"
    if one.unresponsive is not None:
        return "hung"
    if one.ready:
        return "ready"
    return "draining" if one.draining else "restarting" if one.restarts else "loading"


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """To the end of each, whatever becomes of the others; then the first error, if there was one."""
    for ended in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


async def _all_or_none(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """The first error cancels what is not done yet."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
