"""Whether a grammar can be compiled and begun, found out in a worker process that is killed where it takes too long.

    quick lane   two at once, a fraction of a second and little memory: nearly every grammar is done here
    slow lane    one at a time, at the lowest priority, for what the quick lane gave up; few may wait for it

So whoever brings a grammar that explodes waits for others like it, and nobody else does. Blocking calls, safe to use
from several threads.
"""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from holdfast.errors import EngineError, GrammarError, OverloadedError
from holdfast.records import Failure
from holdfast.records.structured import LARGE_BYTES, StructuredOutputsParams
from holdfast.text.structured import wire
from holdfast.text.structured.client import GrammarService, WorkerConnection
from holdfast.units import MIB, format_bytes

KEPT = 256
"""Of what was found out."""
FIRST_WORD_S = 20.0
"""For a service to fork a worker; one that takes longer hangs, and is replaced."""
POLL_S, QUEUE_POLL_S = 0.02, 0.25
"""Between looks at a check that runs, and at whether somebody in the queue has left."""
CHEAP_CPU_S, CHEAP_MASK_S, CHEAP_BYTES = 0.1, 0.05, 4 * MIB
"""A grammar that needs no more than this to compile, and for a mask, shares a worker with others like it."""


@dataclass(frozen=True, slots=True)
class CheckLane:
    places: int
    cpu_s: float
    memory_bytes: int
    niceness: int
    wait_s: float
    """For a place, and to be done."""
    most_waiting: int


QUICK = CheckLane(places=2, cpu_s=0.25, memory_bytes=12 * MIB, niceness=5, wait_s=60.0, most_waiting=256)
SLOW = CheckLane(places=1, cpu_s=20.0, memory_bytes=48 * MIB, niceness=19, wait_s=60.0, most_waiting=16)


class _Beyond(Exception):
    """More processor time than a lane has for it."""


class _Died(Exception):
    """The worker, in the middle of it, or before it had begun."""

    def __init__(self, at_work: bool) -> None:
        self.at_work = at_work


class _Queue:
    """Places of a lane. Tenants take turns, so that one with a hundred grammars keeps nobody else waiting for more than
    the one that is at work."""

    def __init__(self, lane: CheckLane) -> None:
        self.lane = lane
        self._free = lane.places
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[threading.Event]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def place(self, tenant: str, check: Callable[[], None]) -> Iterator[None]:
        """`check`: raises when it is time to leave, looked at while it takes. Raises OverloadedError where too many
        wait."""
        admitted = threading.Event()
        with self._lock:
            if self.waiting >= self.lane.most_waiting:
                raise _too_many(self.lane, self.waiting)
            self._waiting.setdefault(tenant, deque()).append(admitted)
            self._admit()
        try:
            while not admitted.wait(QUEUE_POLL_S):
                check()
            yield
        finally:
            with self._lock:
                if admitted.is_set():
                    self._free += 1
                else:
                    self._leave(tenant, admitted)
                self._admit()

    def _admit(self) -> None:
        while self._free and self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            line.popleft().set()
            self._free -= 1
            if line:
                self._waiting[tenant] = line  # Behind all others.

    def _leave(self, tenant: str, admitted: threading.Event) -> None:
        line = self._waiting[tenant]
        line.remove(admitted)
        if not line:
            del self._waiting[tenant]


@dataclass(frozen=True, slots=True)
class _Known:
    cost: wire.GrammarCost | None
    refused: Failure | None


Gone = Callable[[], bool]


class GrammarChecker:
    def __init__(self, service: GrammarService, *, quick: CheckLane = QUICK, slow: CheckLane = SLOW) -> None:
        self._service = service
        self._quick, self._slow = _Queue(quick), _Queue(slow)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, params: StructuredOutputsParams) -> wire.GrammarCost | None:
        """Without asking anybody: None where it was not checked before. Raises what it was refused with."""
        with self._lock:
            found = self._known.get(_key(params))
        if found is None:
            return None
        if found.refused is not None:
            raise found.refused.error()
        return found.cost

    def check(self, params: StructuredOutputsParams, gone: Gone = lambda: False, tenant: str = "") -> wire.GrammarCost:
        """Raises GrammarError for what is invalid, unsupported or too large, and OverloadedError where too many wait.
        `gone`: whether nobody wants to know any more, looked at while it takes."""
        found = self.known(params)
        if found is not None:
            return found
        named = params.asked_as or params.kind
        large = len(msgspec.json.encode(params)) > LARGE_BYTES
        answer: wire.GrammarCost | wire.GrammarRefused
        # A worker that dies has used up its memory, or was killed by somebody else: the second time it is believed.
        at_work = False
        for queue in (() if large else (self._quick,)) + (self._slow, self._slow):
            try:
                answer = self._in(queue, params, gone, tenant)
                break
            except _Died as death:
                at_work = at_work or death.at_work
            except _Beyond:
                if queue is self._slow:
                    answer = wire.GrammarRefused(Failure.of(_too_much(named, f"{queue.lane.cpu_s:g} s of CPU time")))
                    break
        else:
            if not at_work:  # It is nobody's fault, and may be over when somebody asks again.
                raise EngineError(
                    "structured output is not available: its process could not be started", fix="try again later"
                )
            limit = f"{format_bytes(self._slow.lane.memory_bytes)} of memory"
            answer = wire.GrammarRefused(Failure.of(_too_much(named, limit)))
        refused = answer.failure if isinstance(answer, wire.GrammarRefused) else None
        self._keep(params, _Known(None if isinstance(answer, wire.GrammarRefused) else answer, refused))
        if isinstance(answer, wire.GrammarRefused):
            raise answer.failure.error()
        return answer

    def _keep(self, params: StructuredOutputsParams, known: _Known) -> None:
        with self._lock:
            key = _key(params)
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)

    def _in(
        self, queue: _Queue, params: StructuredOutputsParams, gone: Gone, tenant: str
    ) -> wire.GrammarCost | wire.GrammarRefused:
        end_s = time.monotonic() + queue.lane.wait_s

        def still_wanted() -> None:
            if gone():
                raise Abandoned
            if time.monotonic() > end_s:
                raise _too_many(queue.lane, queue.waiting)

        with queue.place(tenant, still_wanted):
            return self._ask(queue.lane, params, still_wanted)

    def _ask(
        self, lane: CheckLane, params: StructuredOutputsParams, still_wanted: Callable[[], None]
    ) -> wire.GrammarCost | wire.GrammarRefused:
        worker, pid = self._connect(lane), self._service.pid
        try:
            worker.send(wire.Check(params))
            first_word_s = time.monotonic() + FIRST_WORD_S
            while True:
                if readable(worker, POLL_S):
                    received = worker.receive()
                    if received is None:
                        raise _Died(worker.met)
                    for answer in received:
                        assert isinstance(answer, wire.GrammarCost | wire.GrammarRefused)
                        return answer
                elif not worker.met and time.monotonic() > first_word_s:
                    self._service.restart(pid)
                    raise EngineError("structured output did not respond and was restarted", fix="try again")
                if worker.cpu_s() > lane.cpu_s:
                    raise _Beyond
                still_wanted()
        except ConnectionError:
            raise _Died(worker.met) from None
        except OSError as error:
            raise EngineError(f"structured output is not available: {error}", fix="try again") from error
        finally:
            worker.kill()

    def _connect(self, lane: CheckLane) -> WorkerConnection:
        self._service.start()
        limits = wire.WorkerLimits(lane.memory_bytes, int(lane.cpu_s) + 1, lane.niceness)
        try:
            return WorkerConnection(self._service.address, limits)
        except ConnectionError:
            raise _Died(False) from None
        except OSError as error:
            raise EngineError(f"structured output is not available: {error}", fix="try again later") from error


class Abandoned(Exception):
    """Nobody wants to know any more."""


def readable(worker: WorkerConnection, timeout_s: float) -> bool:
    """Whether there is something to receive; for descriptors of any number, which select() is not."""
    poll = select.poll()
    poll.register(worker.socket, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def is_cheap(cost: wire.GrammarCost) -> bool:
    return cost.cpu_s <= CHEAP_CPU_S and cost.slowest_mask_s <= CHEAP_MASK_S and cost.held_bytes <= CHEAP_BYTES


def _too_many(lane: CheckLane, waiting: int) -> OverloadedError:
    return OverloadedError(
        f"{waiting} grammars are already waiting to be compiled",
        needed="a free slot to compile it",
        found=f"{lane.places} at once, {lane.most_waiting} waiting at most, for {lane.wait_s:g} s",
        fix="try again later, or send a simpler grammar",
    )


def _too_much(named: str, limit: str) -> GrammarError:
    return GrammarError(
        f"{named}: compiling it takes more than {limit}",
        code="HF362",
        needed=f"a grammar that compiles within {limit}",
        found="more",
        fix="use a simpler grammar: fewer alternatives, repetitions and overlapping patterns, no large multipleOf",
        field=named,
    )


def _key(params: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(msgspec.json.encode(params)).digest()
