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
from collections import OrderedDict
from collections.abc import Callable
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
POLL_S = 0.02
CHEAP_CPU_S, CHEAP_MASK_S, CHEAP_BYTES = 0.1, 0.01, 4 * MIB
"""A grammar that needs no more than this to compile, and for a mask, shares a worker with others like it."""


@dataclass(frozen=True, slots=True)
class Lane:
    places: int
    cpu_s: float
    memory_bytes: int
    niceness: int
    wait_s: float
    """For a place, and to be done."""
    most_waiting: int


QUICK = Lane(places=2, cpu_s=0.25, memory_bytes=12 * MIB, niceness=5, wait_s=60.0, most_waiting=256)
SLOW = Lane(places=1, cpu_s=20.0, memory_bytes=48 * MIB, niceness=19, wait_s=60.0, most_waiting=16)


class _Beyond(Exception):
    """More than a lane has for it."""


@dataclass(slots=True)
class _Queue:
    lane: Lane
    places: threading.Semaphore
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Known:
    cost: wire.GrammarCost | None
    refused: Failure | None


Gone = Callable[[], bool]


class GrammarChecker:
    def __init__(self, service: GrammarService, *, quick: Lane = QUICK, slow: Lane = SLOW) -> None:
        self._service = service
        self._quick, self._slow = (_Queue(lane, threading.Semaphore(lane.places)) for lane in (quick, slow))
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

    def check(self, params: StructuredOutputsParams, gone: Gone = lambda: False) -> wire.GrammarCost:
        """Raises GrammarError for what is invalid, unsupported or too large, and OverloadedError where too many wait.
        `gone`: whether nobody wants to know any more, looked at while it takes."""
        found = self.known(params)
        if found is not None:
            return found
        named = params.asked_as or params.kind
        large = len(msgspec.json.encode(params)) > LARGE_BYTES
        answer: wire.GrammarCost | wire.Refused
        try:
            try:
                if large:
                    raise _Beyond
                answer = self._in(self._quick, params, gone)
            except _Beyond:
                answer = self._in(self._slow, params, gone)
        except _Beyond:
            lane = self._slow.lane
            answer = wire.Refused(Failure.of(_too_much(named, lane)))
        refused = answer.failure if isinstance(answer, wire.Refused) else None
        self._keep(params, _Known(None if isinstance(answer, wire.Refused) else answer, refused))
        if isinstance(answer, wire.Refused):
            raise answer.failure.error()
        return answer

    def _keep(self, params: StructuredOutputsParams, known: _Known) -> None:
        with self._lock:
            key = _key(params)
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)

    def _in(self, queue: _Queue, params: StructuredOutputsParams, gone: Gone) -> wire.GrammarCost | wire.Refused:
        end_s = time.monotonic() + queue.lane.wait_s
        with self._lock:
            if queue.waiting >= queue.lane.most_waiting:
                raise OverloadedError(
                    f"{queue.waiting} grammars that take long to compile are waiting already",
                    needed="a place to compile it in",
                    found=f"{queue.lane.places} at once, {queue.lane.most_waiting} waiting at most",
                    fix="try again later, or send a simpler grammar",
                )
            queue.waiting += 1
        try:
            while not queue.places.acquire(timeout=POLL_S):
                _check_in_time(end_s, queue.lane, params, gone)
        finally:
            with self._lock:
                queue.waiting -= 1
        try:
            return self._ask(queue.lane, params, gone, end_s)
        finally:
            queue.places.release()

    def _ask(
        self, lane: Lane, params: StructuredOutputsParams, gone: Gone, end_s: float
    ) -> wire.GrammarCost | wire.Refused:
        worker = self._connect(lane)
        try:
            worker.send(wire.Check(params))
            first_word_s = time.monotonic() + FIRST_WORD_S
            while True:
                if select.select([worker.socket], [], [], POLL_S)[0]:
                    received = worker.receive()
                    if received is None:
                        raise _Beyond  # Its memory was used up, or it was killed.
                    for answer in received:
                        assert isinstance(answer, wire.GrammarCost | wire.Refused)
                        return answer
                elif not worker.met and time.monotonic() > first_word_s:
                    self._service.restart()
                    raise EngineError("structured output did not answer, and was restarted", fix="try again")
                if worker.cpu_s() > lane.cpu_s:
                    raise _Beyond
                _check_in_time(end_s, lane, params, gone)
        except OSError as error:
            raise EngineError(f"structured output is not available: {error}", fix="try again") from error
        finally:
            worker.kill()

    def _connect(self, lane: Lane) -> WorkerConnection:
        self._service.start()
        limits = wire.Limits(lane.memory_bytes, int(lane.cpu_s) + 1, lane.niceness)
        try:
            return WorkerConnection(self._service.address, limits)
        except OSError as error:
            raise EngineError(f"structured output is not available: {error}", fix="try again later") from error


class Abandoned(Exception):
    """Nobody wants to know any more."""


def is_cheap(cost: wire.GrammarCost) -> bool:
    return cost.cpu_s <= CHEAP_CPU_S and cost.slowest_mask_s <= CHEAP_MASK_S and cost.held_bytes <= CHEAP_BYTES


def _check_in_time(end_s: float, lane: Lane, params: StructuredOutputsParams, gone: Gone) -> None:
    if gone():
        raise Abandoned
    if time.monotonic() > end_s:
        named = params.asked_as or params.kind
        raise GrammarError(
            f"{named}: it could not be compiled in {lane.wait_s:g} s", code="HF362", fix="a simpler one", field=named
        )


def _too_much(named: str, lane: Lane) -> GrammarError:
    return GrammarError(
        f"{named}: compiling it takes too much",
        code="HF362",
        needed=f"more than {lane.cpu_s:g} s of one core, or {format_bytes(lane.memory_bytes)}",
        fix="a simpler one",
        field=named,
    )


def _key(params: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(msgspec.json.encode(params)).digest()
