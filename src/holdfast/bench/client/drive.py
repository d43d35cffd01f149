"""Drives a load: a closed loop of so many at once, or an open one that sends at its own times and never waits.

An open loop makes each request before its time, and notes when it was to be sent and when it was: what it was late by
is said, not hidden (coordinated omission). Knows nothing of percentiles.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import resource
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic

from holdfast.bench.client.answers import TimedAnswer, read_answer, text_of
from holdfast.bench.client.wire import Connections
from holdfast.bench.load.load import Arrival, Load, WorkerShare
from holdfast.bench.load.profile import arrival_times, level_at, next_time_above, total_seconds
from holdfast.bench.load.prompts import BenchConversation, RequestMaker

Keep = Callable[[TimedAnswer], None]
RESTOCK_S = 0.01
"""Between two looks at how many requests are ready."""
FIXED_PAUSE_S = 0.05
"""After a failure in a closed loop: a server that refuses everything is not asked a million times."""


class PreparedRequests:
    """Conversations of a closed loop whose first request is made before it is wanted: in the midst of a loop that reads
    two thousand streams it would be made in the time of their events. As many as may begin at once are kept ready."""

    def __init__(self, load: Load, share: WorkerShare) -> None:
        self._load, self._maker = load, RequestMaker(load)
        self._numbers = itertools.count(share.index, share.count)
        self._wanted = _part(load.concurrency or 1, share) if load.loop == "closed" else 0
        self._ready: deque[BenchConversation] = deque()

    def fill(self) -> None:
        while self._make_one():
            pass

    async def keep_full(self) -> None:
        """One at a time, with everything else that waits in between."""
        while True:
            await asyncio.sleep(0 if self._make_one() else RESTOCK_S)

    def take(self) -> BenchConversation | None:
        """None: no more were asked for."""
        if not self._ready and (made := self._next()) is not None:
            self._ready.append(made)
        return self._ready.popleft() if self._ready else None

    def _make_one(self) -> bool:
        made = self._next() if len(self._ready) < self._wanted else None
        if made is not None:
            self._ready.append(made)
        return made is not None

    def _next(self) -> BenchConversation | None:
        number = next(self._numbers)
        if self._load.requests is not None and number >= self._load.requests:
            return None
        made = self._maker.conversation(number)
        made.prepare()
        return made


async def open_connections(load: Load, share: WorkerShare) -> Connections:
    """Those of a closed loop are opened: two thousand take longer than there is between ready and begun."""
    allow_many_files()
    connections = Connections(load.url, load.path, dict(load.headers), load.certificate)
    if load.loop == "closed":
        await connections.open_ahead(_part(load.concurrency or 1, share))
    return connections


async def drive(
    load: Load, share: WorkerShare, keep: Keep, *, connections: Connections, prepared: PreparedRequests
) -> None:
    """Until everything sent was answered or given up; then its connections are closed."""
    run = _Run(load, share, keep, connections, prepared)
    gc.collect()
    gc.freeze()
    gc.disable()  # A collection in the midst of a run would stand in the figures.
    try:
        await _until(share.start_s)
        await (run.closed() if load.loop == "closed" else run.open())
    finally:
        gc.enable()
        connections.close()


class _Run:
    def __init__(
        self, load: Load, share: WorkerShare, keep: Keep, connections: Connections, prepared: PreparedRequests
    ) -> None:
        self._load, self._share, self._keep, self._connections = load, share, keep, connections
        self._prepared = prepared
        self._room = None if load.concurrency is None else asyncio.Semaphore(_part(load.concurrency, share))

    async def closed(self) -> None:
        whole = self._load.concurrency or 1
        restocking = asyncio.create_task(self._prepared.keep_full())
        async with asyncio.TaskGroup() as slots:
            for slot in range(self._share.index, whole, self._share.count):
                slots.create_task(self._slot(slot / whole))
        restocking.cancel()

    async def _slot(self, share: float) -> None:
        """One of those at once, while the level is above its own."""
        load, start_s = self._load, self._share.start_s
        while True:
            due = next_time_above(load.phases, share, monotonic() - start_s)
            if due is None:
                return
            await _until(start_s + due)
            conversation = self._prepared.take()
            if conversation is None:
                return
            if not await self._converse(conversation, None):
                await asyncio.sleep(FIXED_PAUSE_S)

    async def open(self) -> None:
        under_way: set[asyncio.Task[bool]] = set()
        maker = RequestMaker(self._load)
        for number, arrival in self._arrivals():
            lengths = (arrival.prompt_tokens, arrival.output_tokens) if arrival.output_tokens else None
            conversation = maker.conversation(number, lengths=lengths)
            conversation.prepare()
            intended_s = self._share.start_s + arrival.at_s
            await _until(intended_s)
            task = asyncio.create_task(self._converse(conversation, intended_s))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way:
            await asyncio.wait(under_way)

    def _arrivals(self) -> Iterator[tuple[int, Arrival]]:
        """Those of this process. `output_tokens` 0: lengths are the load's own."""
        load, share = self._load, self._share
        if load.replay:
            every: Iterator[Arrival] = iter(load.replay)
        elif load.rate is not None and math.isinf(load.rate):
            every = (Arrival(0.0, 0, 0) for _ in range(load.requests or 1))
        else:
            times = arrival_times(
                load.phases,
                load.rate or 1.0,
                arrivals=load.arrivals,
                burst=load.burst,
                burstiness=load.burstiness,
                seed=load.seed + load.first_request,
            )
            every = (Arrival(at_s, 0, 0) for at_s in times)
        numbered = enumerate(itertools.islice(every, load.requests), load.first_request)
        return itertools.islice(numbered, share.index, None, share.count)

    async def _converse(self, conversation: BenchConversation, intended_s: float | None) -> bool:
        """All turns, unless one fails or its client leaves; False: one failed."""
        for turn in range(conversation.turns):
            if turn:
                await asyncio.sleep(self._load.think_s)
                intended_s = monotonic()
                if not level_at(self._load.phases, intended_s - self._share.start_s) and not self._load.replay:
                    break
            answer = await self._one(conversation, intended_s, last=turn + 1 == conversation.turns)
            if not answer.good:
                return answer.cancelled
        return True

    async def _one(self, conversation: BenchConversation, intended_s: float | None, *, last: bool) -> TimedAnswer:
        load, request = self._load, conversation.ask()
        # What a limit of this client makes wait is late, and counted so.
        async with self._room if self._room is not None and load.loop != "closed" else contextlib.nullcontext():
            raw = await self._connections.ask(
                request.body, timeout_s=load.timeout_s, cancel_after=request.cancel_after, keep_all=not last
            )
        answer = read_answer(raw, request, intended_s=raw.sent_s if intended_s is None else intended_s)
        self._keep(answer)
        if not last and answer.good:
            conversation.answered(text_of(raw))
        return answer


def _part(whole: int, share: WorkerShare) -> int:
    return max(1, len(range(share.index, whole, share.count)))


async def _until(moment_s: float) -> None:
    """Lets the loop read in any case: one that is behind would else never hear of an answer. Not before that moment,
    as a loop that counts in milliseconds would have it."""
    await asyncio.sleep(max(0.0, moment_s - monotonic()))
    while monotonic() < moment_s:
        await asyncio.sleep(0)


def allow_many_files() -> None:
    """As many connections as the system lets this user have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_seconds(load: Load) -> float:
    """How long sending takes, as far as it is known; inf: until the last request of a count."""
    if load.replay:
        return load.replay[-1].at_s
    if load.rate is not None and math.isinf(load.rate):
        return 0.0
    return total_seconds(load.phases)
