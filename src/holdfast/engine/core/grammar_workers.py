"""The engine's grammar workers: which process follows which answer, what is said to them, and what happens when one
dies or takes too long. One thread, the loop's; nothing here blocks but `poll`, for as long as it is told.

    proven   grammars that have filled many masks quickly
    new      grammars that were cheap when they were checked
    slow     all others, at low priority

A worker that takes too long over one grammar, or needs too much memory for it, is killed. What it was doing is known
(`wire.Marker`): that answer moves to the slow lane, or is ended where it was there already. The others are opened again
in a new worker and go on after their last token.
"""

from __future__ import annotations

import enum
import logging
import select
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.engine.core.masks import BEYOND_LIMITS, GrammarState, Progress
from holdfast.errors import EngineError, GrammarError
from holdfast.footprint.structured_output import SLOW_LANE_BYTES, lane_workers, shared_lane_bytes
from holdfast.records import Failure, Request
from holdfast.records.structured import LARGE_BYTES
from holdfast.text.structured import wire
from holdfast.text.structured.client import WorkerConnection
from holdfast.units import MIB, format_bytes

log = logging.getLogger("holdfast")

PROVEN_MASKS, PROVEN_S = 64, 0.002
"""Of one grammar, and what they may take on average."""
GRAMMARS_REMEMBERED = 1024
MOVED_S = 0.05
"""Of processor time for one mask: a grammar that needs more has no place beside quick ones."""
SILENT_S = 30.0
"""That a worker may say nothing while it owes an answer, whatever its processor's clock says: it hangs, and is
replaced. A new one may have to wait for its service to start."""
ENOUGH_STATES = 4
"""For a worker of a lane that may have more."""
IDLE_KEPT_BYTES = 16 * MIB
"""Of an idle worker of the proven lane."""
DEATHS_IN_A_ROW = 3
"""Of workers that had nothing to do when they died, or could not be reached: then the answers they had are ended."""


class Lane(enum.Enum):
    PROVEN = enum.auto()
    NEW = enum.auto()
    SLOW = enum.auto()


@dataclass(frozen=True, slots=True)
class LaneLimits:
    niceness: int
    mask_s: float
    """Of processor time, for one mask or token; beyond it the worker is killed."""
    open_s: float
    """To compile, likewise."""


LIMITS = {
    Lane.PROVEN: LaneLimits(niceness=0, mask_s=0.25, open_s=1.0),
    Lane.NEW: LaneLimits(niceness=5, mask_s=0.25, open_s=1.0),
    Lane.SLOW: LaneLimits(niceness=15, mask_s=1.0, open_s=30.0),
}


class _Worker:
    """One process. `states`: those it follows, in the order in which they came."""

    def __init__(self, lane: Lane, connection: WorkerConnection) -> None:
        self.lane, self.connection = lane, connection
        self.states: dict[int, GrammarState] = {}
        self._asked_s: float | None = None
        """Since when it owes an answer, or when it last said something while it did; None: it owes none."""
        self.grown_bytes = 0
        self._outbox = bytearray()
        connection.socket.setblocking(False)

    def say(self, message: wire.ToWorker) -> None:
        """Never blocks: what the socket does not take now is sent by `flush`."""
        if isinstance(message, wire.Close):  # Is not answered.
            self._asked_s = self._asked_s if self._owes_answer else None
        elif self._asked_s is None:
            self._asked_s = time.monotonic()
        self._outbox += wire.pack(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self.connection.socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # It has died; its end of file says so.

    @property
    def flushed(self) -> bool:
        return not self._outbox

    @property
    def _owes_answer(self) -> bool:
        """A mask, or that a grammar is compiled."""
        return any(not state.filled for state in self.states.values())

    def heard(self) -> None:
        """It said something."""
        self._asked_s = time.monotonic() if self._owes_answer else None

    @property
    def silent(self) -> bool:
        """For too long, though it owes an answer."""
        return self._asked_s is not None and time.monotonic() - self._asked_s > SILENT_S and self._owes_answer

    def overdue(self) -> wire.Doing | None:
        """What it takes too long over, by its own processor's clock: a busy machine is nobody's fault."""
        assert self.connection.marker is not None
        doing = self.connection.marker.read()
        if doing is None:
            return None
        limits = LIMITS[self.lane]
        limit_s = limits.open_s if doing.opening else limits.mask_s
        if time.monotonic() - doing.began_s < limit_s or self.connection.cpu_s() - doing.cpu_s < limit_s:
            return None
        return doing


class GrammarWorkers:
    """`address`: of the service that workers are forked from; asked for when one is needed. `rows`: answers at most."""

    def __init__(self, address: Callable[[], str], rows: int, eos_ids: Sequence[int], cores: int) -> None:
        self._address, self._rows, self._eos_ids, self._cores = address, rows, tuple(eos_ids), cores
        self._workers: list[_Worker] = []
        proven, new = lane_workers(cores)
        self._most = {Lane.PROVEN: proven, Lane.NEW: new, Lane.SLOW: 1}
        self._most_slow = max(1, rows // 4)
        self._worker_of: dict[int, _Worker] = {}
        self._good_masks: OrderedDict[bytes, int] = OrderedDict()
        """By grammar: masks that it has filled quickly; -1 where one was not."""
        self._deaths_in_a_row = 0

    # --- answers come and go ---

    def open(self, state: GrammarState) -> None:
        """Compiles its grammar; the mask is filled when that is done, or has failed."""
        self._open_in(state, self._lane_of(state.request))

    def _lane_of(self, request: Request) -> Lane:
        params = request.params.structured_outputs
        assert params is not None
        written = msgspec.json.encode(params)
        good = self._good_masks.get(written, 0)
        if good < 0 or request.costly_grammar or len(written) > LARGE_BYTES:
            return Lane.SLOW
        return Lane.PROVEN if good >= PROVEN_MASKS else Lane.NEW

    def _open_in(self, state: GrammarState, lane: Lane) -> None:
        params = state.request.params.structured_outputs
        assert params is not None
        try:
            worker = self._place_in(lane)
        except (OSError, EngineError) as error:
            problem = EngineError(f"structured output is not available: {error}", fix="try again later")
            state.fail(Failure.of(problem))
            return
        worker.states[state.number] = state
        self._worker_of[state.number] = worker
        worker.say(wire.Open(state.number, params, state.output))

    def _place_in(self, lane: Lane) -> _Worker:
        """The worker that has least to do; another one where each has enough and there may be more."""
        workers = [worker for worker in self._workers if worker.lane is lane]
        least = min(workers, key=lambda worker: len(worker.states), default=None)
        if least is None or (len(least.states) >= ENOUGH_STATES and len(workers) < self._most[lane]):
            return self._start(lane)
        return least

    def _start(self, lane: Lane) -> _Worker:
        limits = LIMITS[lane]
        memory = SLOW_LANE_BYTES if lane is Lane.SLOW else shared_lane_bytes(self._rows, self._cores)
        wanted = wire.WorkerLimits(memory, int(limits.open_s) + 1, limits.niceness)
        worker = _Worker(lane, WorkerConnection(self._address(), wanted, marked=True))
        self._workers.append(worker)
        return worker

    def close(self, state: GrammarState) -> None:
        worker = self._worker_of.pop(state.number, None)
        if worker is None:
            return
        del worker.states[state.number]
        worker.say(wire.Close([state.number]))
        self._remember(state)
        if not worker.states and not self._is_kept(worker):
            self._dismiss(worker)  # The surest way to give back whatever its grammars took.

    def _is_kept(self, worker: _Worker) -> bool:
        """One of the proven lane, though idle: whoever comes next need not wait for a fork."""
        alike = [one for one in self._workers if one.lane is worker.lane]
        return worker.lane is Lane.PROVEN and len(alike) == 1 and worker.grown_bytes <= IDLE_KEPT_BYTES

    def _remember(self, state: GrammarState, *, costly: bool = False) -> None:
        params = state.request.params.structured_outputs
        assert params is not None
        key = msgspec.json.encode(params)
        good = self._good_masks.pop(key, 0)
        costly = costly or good < 0 or state.slowest_s > MOVED_S
        quick = state.masks if state.spent_s <= PROVEN_S * state.masks else 0
        self._good_masks[key] = -1 if costly else good + quick
        while len(self._good_masks) > GRAMMARS_REMEMBERED:
            self._good_masks.popitem(last=False)

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.kill()

    def clear(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker)
        self._worker_of.clear()

    # --- tokens and masks ---

    @property
    def slow(self) -> int:
        """Answers whose grammars are costly."""
        return sum(len(worker.states) for worker in self._workers if worker.lane is Lane.SLOW)

    def has_room_for(self, request: Request) -> bool:
        """Costly grammars are followed by one process, and hold rows meanwhile: others keep most of them."""
        return self._lane_of(request) is not Lane.SLOW or self.slow < self._most_slow

    def is_slow(self, state: GrammarState) -> bool:
        worker = self._worker_of.get(state.number)
        return state.slow or (worker is not None and worker.lane is Lane.SLOW)

    def cpu_s(self, states: Sequence[GrammarState]) -> float:
        """Of processor time, that the workers of these have used in all."""
        workers = {worker for state in states if (worker := self._worker_of.get(state.number)) is not None}
        return sum(worker.connection.cpu_s() for worker in workers)

    def advance(self, states: Sequence[tuple[GrammarState, bool]]) -> None:
        """Each has a new last token; and whether a mask of what may follow is wanted."""
        by_worker: dict[_Worker, list[tuple[int, int, bool]]] = {}
        for state, wanted in states:
            worker = self._worker_of.get(state.number)
            if worker is None:
                state.progress = Progress.GOES_ON  # Its request has gone, and nobody knows it any more.
            else:
                by_worker.setdefault(worker, []).append((state.number, state.output[-1], wanted))
        for worker, tokens in by_worker.items():
            worker.say(wire.Advance(tokens))

    def poll(self, timeout_s: float) -> None:
        """Takes in what workers have said, waiting so long for the first word; looks after those that say nothing."""
        workers = list(self._workers)
        poll = select.poll()
        by_descriptor = {worker.connection.socket.fileno(): worker for worker in workers}
        for descriptor, worker in by_descriptor.items():
            poll.register(descriptor, select.POLLIN | (0 if worker.flushed else select.POLLOUT))
        for descriptor, events in poll.poll(timeout_s * 1000):
            worker = by_descriptor[descriptor]
            if events & select.POLLOUT:
                worker.flush()
            if events & ~select.POLLOUT:
                self._listen(worker)
        for worker in workers:
            if worker not in self._workers:
                continue  # It was buried above.
            if worker.overdue() is not None:
                self._bury(worker, overdue=True)
            elif worker.silent:
                if not worker.connection.met:  # No service answers.
                    self._deaths_in_a_row = DEATHS_IN_A_ROW
                self._bury(worker)

    def _listen(self, worker: _Worker) -> None:
        received = worker.connection.receive()
        if received is None:
            self._bury(worker)
            return
        for message in received:
            self._take(worker, message)
        worker.heard()

    def _take(self, worker: _Worker, message: wire.FromWorker) -> None:
        self._deaths_in_a_row = 0
        if isinstance(message, wire.Advanced):
            for number, failure in message.failed.items():
                self._fail(worker, number, failure)
            for number in message.others:
                if (state := worker.states.get(number)) is not None:
                    state.progress = Progress.GOES_ON
            for number in message.complete:
                self._complete(worker.states.get(number))
        elif isinstance(message, wire.Filled):
            self._filled(worker, message)
        elif isinstance(message, wire.Opened):
            self._opened(worker, message)

    def _opened(self, worker: _Worker, message: wire.Opened) -> None:
        worker.grown_bytes += message.held_bytes
        state = worker.states.get(message.number)
        if message.failure is not None:
            self._fail(worker, message.number, message.failure)
        elif state is not None:
            state.held_bytes += message.held_bytes
            if message.length == len(state.output):
                state.progress = Progress.GOES_ON
                if message.complete:
                    self._complete(state)

    def _complete(self, state: GrammarState | None) -> None:
        """No mask will come: its answer ends with its newest token, also where it is too late to say so."""
        if state is not None:
            state.complete()

    def _fail(self, worker: _Worker, number: int, failure: Failure) -> None:
        state = worker.states.pop(number, None)
        if state is not None:
            del self._worker_of[number]
            state.fail(failure)

    def _filled(self, worker: _Worker, message: wire.Filled) -> None:
        worker.grown_bytes += message.grown_bytes
        state = worker.states.get(message.number)
        if message.failure is not None:
            self._fail(worker, message.number, message.failure)
            return
        if state is None or message.length != len(state.output):
            return
        state.held_bytes += message.grown_bytes
        state.take(message.mask, message.cpu_s)
        if message.cpu_s > MOVED_S and worker.lane is not Lane.SLOW and state.failure is None:
            self._move(worker, state)

    def _move(self, worker: _Worker, state: GrammarState) -> None:
        """To the slow lane, with the mask that it has. What it is asked for next waits until it is there."""
        self._remember(state, costly=True)
        del worker.states[state.number], self._worker_of[state.number]
        worker.say(wire.Close([state.number]))
        if self.slow < self._most_slow:
            self._open_in(state, Lane.SLOW)
        else:
            state.fail(Failure.of(_too_many_slow()))

    # --- deaths ---

    def _bury(self, worker: _Worker, *, overdue: bool = False) -> None:
        """It has died, or takes too long."""
        assert worker.connection.marker is not None
        cause = worker.states.get(worker.connection.marker.last())
        self._dismiss(worker)
        states = list(worker.states.values())
        for state in states:
            del self._worker_of[state.number]
        if cause is None:
            self._deaths_in_a_row += 1
        else:
            self._remember(cause, costly=True)
        log.warning(
            "a structured output worker (%s lane, %d requests) %s; its other requests continue in a new one",
            worker.lane.name.lower(),
            len(states),
            f"was killed: a grammar took more than {LIMITS[worker.lane].mask_s:g} s" if overdue else "died",
        )
        for state in states:
            if state is cause and worker.lane is Lane.SLOW:
                state.fail(Failure.of(_too_much(worker, overdue)))
            elif state is cause and self.slow >= self._most_slow:
                state.fail(Failure.of(_too_many_slow()))
            elif self._deaths_in_a_row >= DEATHS_IN_A_ROW:
                state.fail(
                    Failure.of(EngineError("structured output is not available: its processes keep dying", fix="retry"))
                )
            else:
                self._open_in(state, Lane.SLOW if state is cause else worker.lane)


def _too_many_slow() -> GrammarError:
    return GrammarError(
        "the grammar has become slow, and all slots for slow grammars are taken",
        code=BEYOND_LIMITS,
        fix="use a simpler grammar, or try again later",
        field="structured_outputs",
    )


def _too_much(worker: _Worker, overdue: bool) -> GrammarError:
    limits, memory = LIMITS[worker.lane], worker.connection.limits.memory_bytes
    needed = f"{limits.mask_s:g} s of CPU time for a token" if overdue else f"{format_bytes(memory)} of memory"
    return GrammarError(
        f"the grammar needs more than {needed}",
        code=BEYOND_LIMITS,
        fix="use a simpler grammar",
        field="structured_outputs",
    )
