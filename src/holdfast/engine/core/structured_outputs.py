"""Structured output: grammars compiled for new requests, a state for each answer that runs, advanced with each token.

Grammars are compiled, and masks filled, by worker processes while the model runs (`grammar_workers`). No more are held
at once than there are bytes for; whoever comes beyond waits in line. What a grammar means is `text.structured`'s; who
is scheduled when is the scheduler's. A grammar that fails ends its own answer and no other.
"""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy

from holdfast.engine.core.grammar_workers import GrammarWorkers
from holdfast.engine.core.masks import GrammarState, Progress, StepMasks, Words
from holdfast.errors import HoldfastError
from holdfast.footprint.sampling import mask_words
from holdfast.footprint.structured_output import FEW_CORES, FORM_BYTES, form_bytes, held_bytes
from holdfast.models import ModelSpec
from holdfast.records import Failure, Request, StepPlan, StepResult
from holdfast.records.steps import Verdict
from holdfast.scheduler.limits import SchedulerLimits

FORMS_AHEAD = 4
"""Compiled for requests that still wait to run."""
VERDICT_CPU_S, VERDICT_S, SLOW_VERDICT_S = 0.05, 1.0, 0.005
"""For a worker to take a token: of its processor's time, and in all, since a busy machine is nobody's fault; and in
all, of an answer that was late before or has a costly grammar. One that needs longer is busy with another answer's:
nobody is held up for it, the answer goes on, and where it should have ended, it does before its next token."""


def make_structured_outputs(
    limits: SchedulerLimits, spec: ModelSpec, address: Callable[[], str], *, on_device: bool
) -> StructuredOutputManager:
    """`address`: of the service that workers come from; asked for when the first is needed. `on_device`: the model is
    computed on a GPU, and the host's cores are free."""
    return StructuredOutputManager(
        address,
        rows=limits.max_num_seqs,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
        by_priority=limits.policy == "priority",
        cores=(os.cpu_count() or FEW_CORES) if on_device else FEW_CORES,
    )


class _Sampled(NamedTuple):
    """Of one plan."""

    by_slot: dict[int, GrammarState]
    """By slot: rows whose answers follow a grammar."""
    slots: list[int]
    """Of all rows that sample, in their order."""


class StructuredOutputManager:
    """`rows`: most that sample in a step; `eos_ids`: the model's own ends; `by_priority`: who is compiled for first."""

    def __init__(
        self,
        address: Callable[[], str],
        *,
        rows: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        by_priority: bool = False,
        cores: int = FEW_CORES,
    ) -> None:
        self._rows, self._vocab_size, self._eos_ids = rows, vocab_size, tuple(eos_ids)
        self._by_priority = by_priority
        self._workers = GrammarWorkers(address, rows, eos_ids, cores)
        self._line: list[tuple[int, float, int, Request]] = []
        self._came_total = 0
        self._numbers = itertools.count(1)
        self._compiling: dict[str, GrammarState] = {}
        self._states: dict[str, GrammarState] = {}
        self._slots: dict[int, str] = {}
        self._newest = _Sampled({}, [])
        self._doubtful = False
        self._bytes: dict[str, int] = {}
        """Of every request whose grammar is compiled or being compiled: what is expected of it, then what was seen."""

    # --- requests come and go ---

    @property
    def compiling(self) -> bool:
        return bool(self._compiling or self._line)

    def begin(self, request: Request) -> None:
        """Compiles what the request asks for, when there is room for it; `pop_compiled` hands it on."""
        self._came_total += 1
        priority = request.priority if self._by_priority else 0
        heapq.heappush(self._line, (priority, request.arrival_s, self._came_total, request))
        self._compile_next()

    def _compile_next(self) -> None:
        """As many of the first in line as there is room for; one at least."""
        for state in self._states.values():
            self._bytes[state.request.request_id] = max(state.held_bytes, FORM_BYTES)
        most_bytes, parked = held_bytes(self._rows), list[tuple[int, float, int, Request]]()
        while self._line and len(self._bytes) < self._rows + FORMS_AHEAD:
            request = self._line[0][-1]
            if not self._workers.has_room_for(request):
                parked.append(heapq.heappop(self._line))  # Others need not wait for costly ones.
                continue
            needed = form_bytes(len(msgspec.json.encode(request.params.structured_outputs)))
            if self._bytes and sum(self._bytes.values()) + needed > most_bytes:
                break
            heapq.heappop(self._line)
            self._bytes[request.request_id] = needed
            state = GrammarState(
                next(self._numbers), request, mask_words(self._vocab_size), self._allowed(request), self._eos_ids
            )
            self._compiling[request.request_id] = state
            self._workers.open(state)
        for entry in parked:
            heapq.heappush(self._line, entry)

    def pop_compiled(self, wait_s: float = 0.0) -> list[tuple[Request, HoldfastError | None]]:
        """Requests that can be scheduled now, or why one cannot be; waits so long for the first of them."""
        end_s = time.monotonic() + wait_s
        while self._compiling:
            self._workers.poll(max(end_s - time.monotonic(), 0.0))
            ready = [state for state in self._compiling.values() if state.filled]
            if ready or time.monotonic() >= end_s:
                return [(state.request, self._enter(state)) for state in ready]
        return []

    def _enter(self, state: GrammarState) -> HoldfastError | None:
        name = state.request.request_id
        del self._compiling[name]
        if state.failure is not None:
            self.forget(name)
            return state.failure.error()
        self._states[name] = state
        self._bytes[name] = max(state.held_bytes, FORM_BYTES)
        return None

    def _allowed(self, request: Request) -> Words | None:
        ids = request.params.allowed_token_ids
        if ids is None:
            return None
        bits = numpy.zeros(mask_words(self._vocab_size) * 32, dtype=bool)
        bits[ids] = True
        return numpy.packbits(bits, bitorder="little").view(numpy.int32)

    def forget(self, request_id: str) -> None:
        state = self._compiling.pop(request_id, None) or self._states.pop(request_id, None)
        if state is not None:
            self._workers.close(state)
        if self._bytes.pop(request_id, None) is None and self._line:
            self._line = [entry for entry in self._line if entry[-1].request_id != request_id]
            heapq.heapify(self._line)
        self._compile_next()

    def clear(self) -> None:
        self._line.clear()
        self._compiling.clear()
        self._states.clear()
        self._slots.clear()
        self._newest = _Sampled({}, [])
        self._bytes.clear()
        self._workers.clear()

    def close(self) -> None:
        self.clear()

    # --- steps ---

    def awaiting_mask(self, *, ahead: bool) -> frozenset[str]:
        """Requests that no step should wait for: their masks were late before, and are not filled; or cannot be yet,
        because a step is planned `ahead` of what they are to go on from."""
        if self._states:
            self._workers.poll(0.0)
        sampling = set(self._newest.by_slot.values()) if ahead else set[GrammarState]()
        return frozenset(
            name for name, state in self._states.items() if state.slow and (not state.filled or state in sampling)
        )

    def wait_for_masks(self, timeout_s: float) -> None:
        """Of those that are held, for the first."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0 and not any(
            state.filled for state in self._states.values() if state.slow
        ):
            self._workers.poll(left_s)

    def masks(self, plan: StepPlan, before: Callable[[], StepResult] | None = None) -> StepMasks | None:
        """Those of a plan's rows; None: no row needs one. `before`: the tokens of the plan before this one, if they are
        not known to the grammars yet."""
        for start in plan.starts:
            self._slots.pop(start.slot, None)
            if start.params.structured_outputs is not None:
                self._slots[start.slot] = start.request_id
        # An answer that was aborted since may still have its slot here.
        by_slot = {
            row.slot: self._states[self._slots[row.slot]]
            for row in plan.rows
            if row.samples and self._slots.get(row.slot) in self._states
        }
        newest = _Sampled(by_slot, [row.slot for row in plan.rows if row.samples])
        last, self._newest = self._newest, newest
        if not by_slot:
            return None
        advance = None if before is None else partial(self._advance_before, last, newest, before)
        return StepMasks(by_slot, self._workers.poll, advance)

    def _advance_before(self, last: _Sampled, newest: _Sampled, before: Callable[[], StepResult]) -> bool:
        """Judges what the last step has sampled for those that go on in the newest, so that their masks can be filled.
        After a failure it does not: which of these tokens still count is for the scheduler to say. May be asked again:
        a step may be done in parts."""
        going_on = set(last.by_slot.values()) & set(newest.by_slot.values())
        result = before() if going_on else None
        if result is None or result.failures:
            return result is None
        self._advance_all(last, result, going_on)
        return True

    def advance_early(self, result: StepResult, *, newest: bool) -> None:
        """Judges all tokens of a step together, before the scheduler asks for one after the other. `newest`: no other
        step is in flight. After a failure it does not, nor for the step that was in flight then: which of their tokens
        still count is for the scheduler to say."""
        doubtful, self._doubtful = self._doubtful, bool(result.failures)
        if newest and self._newest.by_slot and not (doubtful or result.failures):
            self._advance_all(self._newest, result, set(self._newest.by_slot.values()))

    def _advance_all(self, sampled: _Sampled, result: StepResult, wanted: set[GrammarState]) -> None:
        late, tokens = frozenset(result.late), list[tuple[GrammarState, int]]()
        for slot, token in zip(sampled.slots, result.token_ids, strict=True):
            state = sampled.by_slot.get(slot)
            if state is not None and state in wanted and state.early_verdict is None and slot not in late:
                tokens.append((state, token))
        for (state, _), verdict in zip(tokens, self._advance_and_wait(tokens), strict=True):
            state.early_verdict = verdict

    def advance_grammar(self, request_id: str, token: int) -> Verdict | Failure:
        """What a sampled token means for its answer, which has it from now on. Begins the mask of what may follow."""
        state = self._states[request_id]
        verdict, state.early_verdict = state.early_verdict, None
        return self._advance_and_wait([(state, token)])[0] if verdict is None else verdict

    def _advance_and_wait(self, tokens: Sequence[tuple[GrammarState, int]]) -> list[Verdict | Failure]:
        going_on = list[tuple[GrammarState, bool]]()
        over = {state for state, _ in tokens if state.progress is Progress.COMPLETE}
        for state, token in tokens:
            if state.failure is None and state not in over:
                state.advance(token)
                going_on.append((state, len(state.output) < state.request.max_tokens))
        self._workers.advance(going_on)
        self._wait_for_verdicts([state for state, _ in going_on])
        return [Verdict.OVER if state in over else self._verdict(state, token) for state, token in tokens]

    def _wait_for_verdicts(self, states: Sequence[GrammarState]) -> None:
        began_s, first_cpu_s = time.monotonic(), None
        while waiting := [state for state in states if state.progress is Progress.UNKNOWN and state.failure is None]:
            quick = [state for state in waiting if not self._workers.is_slow(state)]
            waited_s = time.monotonic() - began_s
            if waited_s < SLOW_VERDICT_S:
                self._workers.poll(SLOW_VERDICT_S - waited_s)
                continue
            cpu_s = self._workers.cpu_s(quick)
            first_cpu_s = cpu_s if first_cpu_s is None else first_cpu_s
            if not quick or waited_s > VERDICT_S or cpu_s - first_cpu_s > VERDICT_CPU_S:
                for state in quick:
                    state.patience_s = 0.0
                return
            self._workers.poll(SLOW_VERDICT_S)

    def _verdict(self, state: GrammarState, token: int) -> Verdict | Failure:
        if state.failure is not None:
            return state.failure
        if state.progress is not Progress.COMPLETE:
            return Verdict.GOES_ON
        return Verdict.ENDED if token in self._eos_ids else Verdict.COMPLETE
