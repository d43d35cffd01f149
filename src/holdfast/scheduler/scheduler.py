"""Who computes how many tokens in the next step. Pure: no torch, no clock, no I/O; it plans ahead of the runner.

One step, in this order, under one token budget and the pages that are there:

    1. sequences that decode, oldest first        pages run out: the youngest running sequence gives all of its
    2. running prefills, in chunks                pages back and waits at the front of the queue
    3. whoever waits, first in line first         only if the pages of its whole prompt could be had now

Beside sequences that decode, 2 and 3 share prompt_tokens_beside: who decodes waits for the whole step.

What holds, and why nobody waits for ever:
  - `order` is total, and pages are only ever taken from a sequence later in order than the one that needs them. So
    the first running sequence always goes on; a request that cannot run alone is refused when it is added.
  - a preempted sequence keeps its place: it is earlier in order than everybody who has not run yet (under the
    priority policy: of its priority). It runs again only when nothing of it is in flight, so that its tokens are known.
  - admission leaves a block in each group for every sequence that runs, and what running prefills still need, so
    that it does not lead straight to the next preemption. When nothing runs, the first in line is admitted anyway.

What a runner must know: table entries of pages that left a window are not rewritten, and may already be another's.
A row reads no position before `first_needed` of its own first position, group by group.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container

from holdfast.errors import EngineError, RequestError
from holdfast.kvcache import KVCache, Prefix
from holdfast.records import EngineOutput, EngineStats, Failure, FinishReason, Request, TokenLogprobs, Verdict
from holdfast.records.steps import AdapterArrival, StepFailure, StepPlan, StepResult, TableWrite
from holdfast.scheduler.audit import check_in_flight, check_lines
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.lora import LoraScheduler
from holdfast.scheduler.outputs import AdvanceGrammar, make_output, refused, told_of_prompt, validate
from holdfast.scheduler.queue import enter, leave
from holdfast.scheduler.sequence import Sequence, Status
from holdfast.scheduler.stats import blocks_wanted, figures
from holdfast.scheduler.step_builder import Draft, PlannedRow, StepInFlight, moving_plan


class Scheduler:
    """`schedule` may run ahead of `apply` by max_steps_in_flight; every plan is executed, strictly in order."""

    def __init__(self, limits: SchedulerLimits, kv: KVCache) -> None:
        self.limits = limits
        self.kv = kv
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._free_slots = list(range(limits.max_num_seqs))
        self._adapters = LoraScheduler(limits.max_loras)
        self._in_flight: deque[StepInFlight] = deque()
        self._added_total = 0
        self._steps_total = self._step_tokens = self._preemptions_total = 0
        # Looking up a long prompt costs time; one that had no room is not tried again before something has changed.
        self._worth_admitting = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    @property
    def steps_in_flight(self) -> int:
        """Plans given out and not applied yet."""
        return len(self._in_flight)

    def stats(self) -> EngineStats:
        return figures(
            self._running,
            self._waiting,
            self.kv,
            self._adapters,
            step_tokens=self._step_tokens,
            steps_total=self._steps_total,
            preemptions_total=self._preemptions_total,
        )

    # --- requests come and go ---

    def add(self, request: Request, now_s: float) -> EngineOutput | None:
        """Puts it in line. An output at once when it has already ended: refused, or resumed at its very end."""
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is already in use", field="request_id")
        refusal = validate(request, self.limits, self.kv)
        if refusal is not None:
            return refused(request, refusal, now_s)
        priority = request.priority if self.limits.policy == "priority" else 0
        self._added_total += 1
        sequence = Sequence(
            request=request,
            book=self.kv.open(request.cache_salt, request.adapter_salt),
            order=(priority, request.arrival_s, self._added_total),
            longest=min(len(request.prompt_token_ids) + request.max_tokens, self.limits.max_model_len),
        )
        self._sequences[request.request_id] = sequence
        enter(self._waiting, sequence)
        self._worth_admitting = True
        if request.output_token_ids:
            reason, stop_id = sequence.ending(sequence.tokens[-1], len(request.output_token_ids) - 1)
            if reason is not None:
                self._leave(sequence)
                return make_output(sequence, [], None, reason, stop_id, now_s)
        return None

    def abort(self, request_id: str) -> bool:
        """False when there is no such request (any more). Its pages are free at once, and nothing more comes of it."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._leave(sequence)
        return True

    # --- planning ---

    def schedule(self, now_s: float, awaiting_mask: Container[str] = ()) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before a result is applied or a request comes. It has
        no rows where everybody waits for adapters.
        `awaiting_mask`: ids of requests that cannot be sampled from yet; those that run are left out of the step."""
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "apply the oldest step before planning another"
        draft = Draft(self.limits.max_num_batched_tokens)
        self._make_room_for_urgent(draft)
        less_urgent = self._plan_running(draft, awaiting_mask)
        self._commit(draft)
        if draft.rows or not self._in_flight:
            draft.fetches = self._adapters.fetch_for(self._waiting)
        if not draft.preempted:
            self._admit(draft, now_s)
        for sequence in less_urgent:
            # Rows are committed by now, so nobody can be preempted any more.
            self._plan_row(draft, sequence, sequence.pending, may_preempt=False)
        self._commit(draft)
        if not draft.rows and (self._in_flight or not self._adapters.arriving):
            awaited = self._in_flight or any(one.request.request_id in awaiting_mask for one in self._running)
            assert awaited or not self._sequences, "requests wait, nothing is in flight, and no step was found"
            self._step_tokens = 0
            return None
        self._steps_total += 1
        self._step_tokens = self.limits.max_num_batched_tokens - draft.kept_back - draft.budget
        self._in_flight.append(StepInFlight(self._steps_total, list(draft.rows.values())))
        return draft.plan(self._steps_total)

    def _plan_running(self, draft: Draft, awaiting_mask: Container[str]) -> list[Sequence]:
        """Rows for whoever decodes, then prefill chunks. Returns prefills that shall wait for an admission."""
        prefills, less_urgent = list[Sequence](), list[Sequence]()
        for sequence in tuple(self._running):
            if sequence.status is Status.RUNNING and not (
                sequence.constrained and sequence.request.request_id in awaiting_mask
            ):
                pending = sequence.pending
                if pending == 1:
                    self._plan_row(draft, sequence, 1)
                elif pending > 1:
                    prefills.append(sequence)
        beside = self.limits.prompt_tokens_beside
        if draft.rows and beside is not None:
            draft.leave(beside)
        for sequence in prefills:
            if sequence.status is not Status.RUNNING:
                continue
            if less_urgent or self._goes_before(sequence, draft.budget):
                less_urgent.append(sequence)
            else:
                self._plan_row(draft, sequence, sequence.pending)
        return less_urgent

    def _goes_before(self, sequence: Sequence, budget: int) -> bool:
        """Whether the first in line is earlier in order than this running sequence, and can really be admitted now."""
        if not self._waiting or self._waiting[0].order > sequence.order:
            return False
        first = self._waiting[0]
        if not self._free_slots or not self._worth_admitting or first.rows_in_flight:
            return False
        if not self._adapters.has_room(first.request.adapter):
            return False
        return self._has_room(first, self.kv.find_prefix(first.book, first.cacheable), budget)

    def _plan_row(self, draft: Draft, sequence: Sequence, pending: int, *, may_preempt: bool = True) -> None:
        """As many of its pending tokens as budget and pages allow; maybe none."""
        kv, book, start = self.kv, sequence.book, sequence.scheduled
        count = min(pending, draft.budget, sequence.tokens_at_once(start))
        if count == 0:
            return
        if kv.release_outside_window(book, start):
            self._worth_admitting = True
        writes: list[TableWrite] = []
        if start + count > book.entries * kv.layout.block_tokens:
            count = min(count, self._find_pages(draft, sequence, may_preempt) - start)
            if count < 1:
                return
            first = book.entries
            kv.grow(book, start + count)
            writes = [TableWrite(sequence.slot, group, first, table[first:]) for group, table in enumerate(book.tables)]
        draft.add(PlannedRow(sequence, sequence.row(start, count, count == pending), writes))

    def _find_pages(self, draft: Draft, sequence: Sequence, may_preempt: bool) -> int:
        """The position up to which its pages can reach. Takes pages from the youngest while it could not even compute
        one token; when it is itself the youngest, it is the one that gives way."""
        while (reach := self.kv.reach(sequence.book)) <= sequence.scheduled and may_preempt:
            youngest = self._running[-1]
            self._preempt(draft, youngest)
            draft.preempted = True
            if youngest is sequence:
                return 0
        return reach

    def _commit(self, draft: Draft) -> None:
        """From here on these rows stand: their blocks may be hit by whoever is planned next."""
        note_scheduled = self.kv.note_scheduled
        for planned in draft.uncommitted:
            sequence, row = planned.sequence, planned.row
            sequence.in_flight += row.count
            sequence.rows_in_flight += 1
            sequence.sampling_in_flight += row.samples
            sequence.scored = max(sequence.scored, row.score_to)
            note_scheduled(sequence.book, row.start + row.count, sequence.tokens)
            if row.count > 1:
                self._worth_admitting = True
        draft.uncommitted.clear()

    def _preempt(self, draft: Draft, sequence: Sequence) -> None:
        draft.remove(sequence)
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        """In line again, to be computed anew."""
        self._stop_running(sequence)
        sequence.status = Status.PREEMPTED
        sequence.computed = sequence.in_flight = 0
        enter(self._waiting, sequence)
        self._preemptions_total += 1

    # --- admission ---

    def _admit(self, draft: Draft, now_s: float) -> None:
        while self._waiting and self._free_slots and draft.budget and self._worth_admitting:
            sequence = self._adapters.next_in_line(self._waiting, self._added_total)
            if sequence is None or sequence.rows_in_flight:
                self._worth_admitting = sequence is not None
                return
            prefix = self.kv.find_prefix(sequence.book, sequence.cacheable)
            if not self._has_room(sequence, prefix, draft.budget):
                # While there is somebody to preempt for it, every step is worth a try.
                self._worth_admitting = self._outranks_running(sequence)
                return
            self._start(draft, sequence, prefix, now_s)

    def _has_room(self, sequence: Sequence, prefix: Prefix, step_tokens: int) -> bool:
        """Whether its whole prompt could be computed with the pages there are, and everybody else go on."""
        if not self._running:
            return True
        wanted = prefix.idle + self.kv.blocks_owed(prefix.held, len(sequence.tokens), step_tokens)
        return wanted + self._set_aside(self._running) <= self.kv.blocks_available

    def _set_aside(self, running: list[Sequence]) -> int:
        """Pages to leave for these (and one more) when somebody is admitted: a block each to grow into, and what their
        prompts still need."""
        kv, step_tokens = self.kv, self.limits.max_num_batched_tokens
        prefills = (other for other in running if other.pending > 1)
        promised = sum(kv.blocks_owed(other.book.held, len(other.tokens), step_tokens) for other in prefills)
        return len(kv.layout.groups) * (len(running) + 1) + promised

    def _start(self, draft: Draft, sequence: Sequence, prefix: Prefix, now_s: float) -> None:
        """Gives it a slot, the cached prefix, and a first row."""
        kv, book = self.kv, sequence.book
        leave(self._waiting, sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
            sequence.cached_tokens = min(prefix.tokens, sequence.prompt_length)
        kv.adopt(book, prefix, len(sequence.cacheable))
        sequence.status = Status.RUNNING
        sequence.scored = sequence.prompt_logprobs_sent  # Nothing of it is in flight; what was void is scored again.
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.adapter_place = self._adapters.enter(sequence.request.adapter)
        sequence.computed = prefix.tokens
        enter(self._running, sequence)
        count = min(sequence.pending, draft.budget, kv.reach(book) - prefix.tokens)
        count = min(count, sequence.tokens_at_once(prefix.tokens))
        assert count > 0, f"{sequence.request.request_id} was admitted without a page to write to"
        kv.grow(book, prefix.tokens + count)
        writes = [TableWrite(sequence.slot, group, 0, list(table)) for group, table in enumerate(book.tables)]
        row = sequence.row(prefix.tokens, count, count == sequence.pending)
        draft.add(PlannedRow(sequence, row, writes, sequence.start()))
        self._commit(draft)

    def _outranks_running(self, sequence: Sequence) -> bool:
        """Under the priority policy: somebody of lesser priority runs."""
        return bool(self._running) and self._running[-1].order[0] > sequence.order[0]

    def _make_room_for_urgent(self, draft: Draft) -> None:
        """Preempts sequences of lesser priority than the first in line, if that gives it a slot and pages."""
        if not self._waiting or not self._worth_admitting:
            return
        urgent = self._waiting[0]
        if urgent.rows_in_flight or not self._outranks_running(urgent):
            return
        if not self._adapters.has_room(urgent.request.adapter):
            return
        others = [other for other in self._running if other.order[0] <= urgent.order[0]]
        if others:
            # At best: shared pages do not become available with the first who gives them back.
            available = self.kv.blocks_available + sum(other.book.held for other in self._running[len(others) :])
            wanted = self.kv.blocks_owed(0, len(urgent.tokens), self.limits.max_num_batched_tokens)
            if wanted + self._set_aside(others) > available:
                return
        while self._outranks_running(urgent):
            prefix = self.kv.find_prefix(urgent.book, urgent.cacheable)
            if self._free_slots and self._has_room(urgent, prefix, self.limits.max_num_batched_tokens):
                return
            self._preempt(draft, self._running[-1])

    # --- results ---

    def apply(
        self, result: StepResult, now_s: float, advance_grammar: AdvanceGrammar | None = None
    ) -> list[EngineOutput]:
        """Takes the result of the oldest step in flight: tokens become known, sequences end, pages are given back.
        `advance_grammar`: called for every token of an answer that must follow a grammar."""
        step = self._in_flight.popleft() if self._in_flight else None
        if step is None or step.step_id != result.step_id:
            raise EngineError(f"step {result.step_id} is not the one due", needed=f"step {step and step.step_id}")
        step.check(result)
        outputs = [output for failed in result.failures for output in self._fail(step, failed, now_s)]
        outputs += [output for arrival in result.adapters for output in self._note_adapter(arrival, now_s)]
        sampled, scores, late = 0, iter(result.prompt_logprobs), frozenset(result.late)
        for planned in step.rows:
            sequence, row = planned.sequence, planned.row
            sequence.rows_in_flight -= 1
            samples = row.samples and row.slot not in late
            if sequence.status is Status.RUNNING:
                sequence.computed += row.count
                sequence.in_flight -= row.count
                if row.samples and not samples:
                    self._compute_again(sequence)
            counts = sequence.status is not Status.FINISHED and sequence not in step.void
            prompt_logprobs = next(scores) if row.scored else None
            if prompt_logprobs is not None and counts:
                sequence.prompt_logprobs_sent += len(prompt_logprobs)
            if counts and not samples:
                outputs += told_of_prompt(sequence, prompt_logprobs)
            if row.samples:
                sequence.sampling_in_flight -= 1
                if counts and samples:
                    logprobs = result.logprobs[sampled] if result.logprobs else None
                    embedding = result.embeddings[sampled] if sequence.request.embed else None
                    token = result.token_ids[sampled]
                    verdict = None
                    if advance_grammar is not None and sequence.constrained:
                        verdict = advance_grammar(sequence.request.request_id, token)
                    outputs.append(self._take(sequence, token, logprobs, prompt_logprobs, now_s, embedding, verdict))
                sampled += 1
        return outputs

    def _note_adapter(self, arrival: AdapterArrival, now_s: float) -> list[EngineOutput]:
        """Those who wait for it may start; where it could not be had, they are ended, and nobody else."""
        self._worth_admitting = True
        adapter = self._adapters.arrive(arrival)
        if adapter is None or arrival.failure is None:
            return []
        ended = [sequence for sequence in self._waiting if sequence.request.adapter == adapter]
        for sequence in ended:
            self._leave(sequence)
        return [make_output(sequence, [], None, FinishReason.ERROR, None, now_s, arrival.failure) for sequence in ended]

    def _compute_again(self, sequence: Sequence) -> None:
        """The last token of a row that was not sampled from; in another page where others may read this one by now."""
        sequence.computed -= 1
        if not self.kv.take_back(sequence.book, sequence.computed):
            self._send_back(sequence)

    def _fail(self, step: StepInFlight, failed: StepFailure, now_s: float) -> list[EngineOutput]:
        """Ends the one request. Whoever has the same beginning may have found the pages it did not fill in the prefix
        cache, in this step or in one planned since: these start anew, and nothing of the rest is cached."""
        row = next(planned for planned in step.rows if planned.row.slot == failed.slot)
        ended, first = row.sequence, row.row.start // self.kv.layout.block_tokens
        in_flight = (step, *self._in_flight)
        for other in {planned.sequence for one in in_flight for planned in one.rows}:
            if other is not ended and not self.kv.begin_alike(other.book, ended.book, first):
                continue
            self.kv.forget(other.book, first)
            if other is not ended:
                for one in in_flight:
                    one.void.add(other)
                if other.status is Status.RUNNING:
                    self._send_back(other)
        if ended.status is Status.FINISHED:
            return []
        self._leave(ended)
        return [make_output(ended, [], None, FinishReason.ERROR, None, now_s, failed.failure)]

    def _take(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        now_s: float,
        embedding: bytes | None,
        verdict: Verdict | Failure | None,
    ) -> EngineOutput:
        """A token for a sequence that runs, or was preempted while it was sampled: it is valid all the same."""
        if isinstance(verdict, Failure):
            self._leave(sequence)
            return make_output(sequence, [], None, FinishReason.ERROR, None, now_s, verdict)
        first = sequence.first_token_s is None
        if first:
            sequence.first_token_s = now_s
        reason, stop_id = sequence.take(token)
        complete = verdict is Verdict.COMPLETE and reason is not FinishReason.STOP
        if complete or verdict is Verdict.ENDED:
            reason = FinishReason.STOP
        if sequence.status is Status.RUNNING:
            self.kv.note_known(sequence.book, sequence.tokens)
        token_logprobs = None if logprobs is None else [logprobs]
        if reason is not None:
            self._leave(sequence)
        # The first times go out at once: a stop string ends an answer in the front, and so may a death of this process.
        times_s = now_s if first or reason is not None else None
        if embedding is not None:  # The token is nobody's.
            return make_output(sequence, [], None, FinishReason.STOP, None, now_s, embedding=embedding)
        return make_output(
            sequence,
            [token],
            token_logprobs,
            reason,
            stop_id,
            times_s,
            prompt_logprobs=prompt_logprobs,
            complete=complete,
        )

    def _leave(self, sequence: Sequence) -> None:
        """Ended or aborted. Rows of it in flight are executed and their tokens dropped."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            leave(self._waiting, sequence)
        sequence.status = Status.FINISHED
        self.kv.close(sequence.book)
        del self._sequences[sequence.request.request_id]
        self._worth_admitting = True

    def _stop_running(self, sequence: Sequence) -> None:
        """Pages and slot are free for the very next plan: it is executed after those in flight."""
        leave(self._running, sequence)
        self.kv.free(sequence.book)
        heapq.heappush(self._free_slots, sequence.slot)
        self._adapters.leave(sequence.request.adapter)
        sequence.slot = sequence.adapter_place = -1
        self._worth_admitting = True

    # --- upkeep ---

    def emptied(self) -> Scheduler:
        """A new one with these limits and counters, and nothing else of this one: no request, no step in flight, and no
        cached block, because those of a step that was planned and never ran hold garbage. Needs no consistent state."""
        kv = KVCache(self.kv.layout, self.kv.blocks_total + 1, self.kv.prefix_caching)
        kv.follow(self.kv)
        fresh = Scheduler(self.limits, kv)
        fresh._steps_total, fresh._preemptions_total = self._steps_total, self._preemptions_total
        return fresh

    @property
    def least_blocks(self) -> int:
        """Pages, the null page included, that any request needs which was or will be taken."""
        return 1 + self.kv.layout.peak_blocks(self.limits.max_model_len, self.limits.max_num_batched_tokens)

    def blocks_wanted(self, ahead_tokens: int) -> int:
        """Pages, the null page included, with which all who may run at once have room for so many tokens more each."""
        return blocks_wanted((*self._running, *self._waiting), self.kv.layout, self.limits, ahead_tokens)

    def resize(self, blocks: int) -> StepPlan | None:
        """The pool has so many pages from now on, the null page included. A step without rows that moves what lies in
        pages that go, and tells runners of tables that still name such a page, because it left a window; None: there is
        nothing to do. Where there are too few pages for all who run, the youngest give theirs back and wait. Nothing
        may be in flight."""
        assert not self._in_flight, "apply what is in flight before the pool is resized"
        assert blocks >= self.least_blocks, f"{blocks} pages are too few for one sequence of full length"
        while self.kv.blocks_used >= blocks:
            self._send_back(self._running[-1])
        shrinks = blocks <= self.kv.blocks_total
        moved = self.kv.resize(blocks)
        self._worth_admitting = True
        if not moved and not (shrinks and any(any(sequence.book.released) for sequence in self._running)):
            return None
        self._steps_total += 1
        self._in_flight.append(StepInFlight(self._steps_total, []))
        return moving_plan(self._steps_total, moved, self._running)

    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        self._worth_admitting = True

    def check_invariants(self) -> None:
        """Recounts pages, slots, lines and what is in flight. For tests and debug runs."""
        self.kv.check_invariants()
        sequences = self._sequences.values()
        check_lines(sequences, self._running, self._waiting, self._free_slots, self.limits.max_num_seqs)
        check_in_flight(sequences, ((entry.sequence, entry.row) for step in self._in_flight for entry in step.rows))
