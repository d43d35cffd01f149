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
from collections.abc import Container, Iterable, Iterator

from holdfast.errors import RequestError
from holdfast.kvcache import FoundBelow, Prefix, SequenceBlocks
from holdfast.records import EngineOutput, Request
from holdfast.records.steps import StepPlan, TableWrite
from holdfast.scheduler.outputs import make_output, refused, validate
from holdfast.scheduler.results import Results
from holdfast.scheduler.sequence import Sequence, Status
from holdfast.scheduler.state import enter, leave
from holdfast.scheduler.stats import blocks_wanted, may_fetch, set_aside
from holdfast.scheduler.step_builder import Draft, PlannedRow, StepInFlight, moving_plan


class Scheduler(Results):
    """`schedule` may run ahead of `apply` by max_steps_in_flight; every plan is executed, strictly in order."""

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
        draft, self.kv.step = Draft(self.limits.max_num_batched_tokens), self._steps_total + 1
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
        step_tokens = self.limits.max_num_batched_tokens - draft.kept_back - draft.budget
        waited_for = self.limits.max_steps_in_flight > 1 and not self._in_flight
        draft.copies = self.kv.plan_copies(self._worth_saving(), step_tokens, awaited=waited_for)
        coming = bool(self._adapters.arriving) or (self.kv.tiers is not None and self.kv.tiers.copying)
        if not draft.rows and not draft.copies and (self._in_flight or not coming):
            awaited = self._in_flight or any(one.request.request_id in awaiting_mask for one in self._running)
            assert awaited or not self._sequences, "requests wait, nothing is in flight, and no step was found"
            self._step_tokens, self.kv.step = 0, self._steps_total
            return None
        self._steps_total += 1
        self._step_tokens = step_tokens
        self._in_flight.append(StepInFlight(self._steps_total, list(draft.rows.values()), now_s))
        self._fetching.note_planned(now_s)
        return draft.plan(self._steps_total)

    def _plan_running(self, draft: Draft, awaiting_mask: Container[str]) -> list[Sequence]:
        """Rows for whoever decodes, then prefill chunks. Returns prefills that shall wait for an admission."""
        prefills, less_urgent = list[Sequence](), list[Sequence]()
        most, apart = self._most_answers(), self.limits.apart
        for sequence in tuple(self._running):
            if sequence.status is Status.RUNNING and not (
                (sequence.constrained and sequence.request.request_id in awaiting_mask)
                or (apart and sequence.sampling_in_flight)
            ):
                pending = sequence.pending
                if pending == 1 and len(draft.rows) < most:
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

    def _most_answers(self) -> int:
        """That go on in one step: all, or of a pipeline as many as leave each of its steps some. Who is left out is the
        first of a step before anybody is again, since steps in flight have nobody in common."""
        if not self.limits.apart:
            return len(self._running)
        answers = sum(sequence.pending == 1 or sequence.sampling_in_flight > 0 for sequence in self._running)
        return -(-answers // self.limits.max_steps_in_flight)

    def _goes_before(self, sequence: Sequence, budget: int) -> bool:
        """Whether the first in line is earlier in order than this running sequence, and can really be admitted now."""
        if not self._waiting or self._waiting[0].order > sequence.order:
            return False
        first = self._waiting[0]
        if not self._free_slots or not self._worth_admitting or first.rows_in_flight or self._fetching.awaits(first):
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
        """The position up to which its pages can reach. While it could not compute one token, it takes those of who
        waits with pages, waits itself for pages that a copy is about to leave, and then takes those of the youngest;
        when it is itself the youngest, it is the one that gives way. Alone it waits for pages from a disk as well:
        giving way would gain it none."""
        while (reach := self.kv.reach(sequence.book)) <= sequence.scheduled and may_preempt:
            if self._fetching.drop_youngest():
                self._worth_admitting = True
                continue
            youngest = self._running[-1]
            if self._pages_coming(soon=youngest is not self._running[0]):
                return 0
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

    # --- admission ---

    def _admit(self, draft: Draft, now_s: float) -> None:
        begun = 0
        while self._waiting and self._free_slots and draft.budget and self._worth_admitting:
            line = self._fetching.line(self._waiting)
            sequence = self._adapters.next_in_line(line, self._added_total)
            if sequence is None or sequence.rows_in_flight:
                self._worth_admitting = sequence is not None
                return
            prefix = self.kv.find_prefix(sequence.book, sequence.cacheable)
            found = self._fetching.choose(sequence, prefix, self._running)
            if found is not None and self._start_whole(draft, sequence, now_s):
                continue
            if found is not None and self._may_fetch(sequence, found):
                self._fetching.begin(sequence, found, prefix)
                begun += sum(found.missing.values())
                if self.kv.tiers is not None and begun >= self.kv.tiers.limits.loads_a_plan:
                    return  # No more than these are planned now, and who decodes waits for this plan.
            elif (found is not None and self._busy) or not self._has_room(sequence, prefix, draft.budget):
                if self._fetching.drop_youngest(behind=sequence):
                    continue
                # While there is somebody to preempt for it, every step is worth a try.
                self._worth_admitting = self._outranks_running(sequence)
                return
            elif self._running or self._has_page(prefix):
                self._start(draft, sequence, prefix, now_s)
            elif not self._fetching.drop_youngest(but=sequence):
                if self._pages_coming(soon=False) or sequence.book.fetch is None:
                    self._worth_admitting = False
                    return
                self._fetching.drop(sequence)

    def _start_whole(self, draft: Draft, first: Sequence, now_s: float) -> bool:
        """Starts those behind the first in line who are in the pool, before pages for the first are taken from it. Says
        whether there was one."""
        started = False
        while draft.budget and len(self._fetching.sequences) < len(self._free_slots):
            line = self._fetching.line(self._waiting)
            found = self._fetching.whole_behind(first, line)
            if found is None:
                break
            sequence, prefix = found
            if not self._has_room(sequence, prefix, draft.budget) or not (self._running or self._has_page(prefix)):
                break
            for one in line:
                one.passed += one.order < sequence.order
            self._start(draft, sequence, prefix, now_s)
            started = True
        return started

    def _may_fetch(self, sequence: Sequence, found: FoundBelow) -> bool:
        fetching, step_tokens = self._fetching.sequences, self.limits.max_num_batched_tokens
        if len(fetching) >= len(self._free_slots):
            return False
        return may_fetch(self.kv, sequence, found, self._running, fetching, step_tokens)

    @property
    def _busy(self) -> bool:
        """Somebody will give pages back."""
        return bool(self._running or self._fetching.sequences or self._pages_coming(soon=True))

    def _has_room(self, sequence: Sequence, prefix: Prefix, step_tokens: int) -> bool:
        """Whether its whole prompt could be computed with the pages there are, and everybody else go on. Where nobody
        runs it need not: nobody waits for who waits."""
        if not self._running:
            return True
        wanted = prefix.idle + self.kv.blocks_owed(prefix.held, len(sequence.tokens), step_tokens)
        return wanted + self._set_aside(self._running, sequence) <= self.kv.blocks_available

    def _set_aside(self, running: list[Sequence], but: Sequence) -> int:
        others = (one for one in self._fetching.sequences if one is not but)
        return set_aside(self.kv, running, others, self.limits.max_num_batched_tokens)

    def _has_page(self, prefix: Prefix) -> bool:
        """Whether a token could be written behind this prefix, without pages that loads will take."""
        return self.kv.blocks_available - self.kv.blocks_promised - prefix.idle >= len(self.kv.layout.groups)

    def _pages_coming(self, *, soon: bool) -> bool:
        return self.kv.tiers is not None and self.kv.tiers.pages_coming(soon=soon)

    def _start(self, draft: Draft, sequence: Sequence, prefix: Prefix, now_s: float) -> None:
        """Gives it a slot, the cached prefix, and a first row."""
        kv, book = self.kv, sequence.book
        leave(self._waiting, sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
            sequence.cached_tokens = min(prefix.tokens, sequence.prompt_length)
            if book.fetch is not None:
                came = book.fetch.came(prefix.tokens, kv.layout.block_tokens)
                sequence.fetched_tokens = min(sequence.cached_tokens, sum(came.values()))
        if book.fetch is not None:
            kv.end_fetch(book)
            self._fetching.end(sequence)
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
        if urgent.rows_in_flight or self._fetching.awaits(urgent) or not self._outranks_running(urgent):
            return
        if not self._adapters.has_room(urgent.request.adapter):
            return
        others = [other for other in self._running if other.order[0] <= urgent.order[0]]
        if others:
            # At best: shared pages do not become available with the first who gives them back.
            losing = (*self._running[len(others) :], *self._fetching.sequences)
            available = self.kv.blocks_available + sum(other.book.held for other in losing)
            wanted = self.kv.blocks_owed(0, len(urgent.tokens), self.limits.max_num_batched_tokens)
            if wanted + self._set_aside(others, urgent) > available:
                return
        while self._outranks_running(urgent):
            prefix = self.kv.find_prefix(urgent.book, urgent.cacheable)
            if self._free_slots and self._has_room(urgent, prefix, self.limits.max_num_batched_tokens):
                return
            if not self._fetching.drop_youngest(behind=urgent):
                self._preempt(draft, self._running[-1])

    # --- upkeep ---

    def emptied(self) -> Scheduler:
        """A new one with these limits and counters, and nothing else of this one: no request, no step in flight, and no
        cached block, because those of a step that was planned and never ran hold garbage. Needs no consistent state."""
        fresh = Scheduler(self.limits, self.kv.emptied())
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
        assert self.kv.tiers is None or not self.kv.tiers.copying, "copies are over before the pool is resized"
        while self.kv.blocks_used >= blocks:
            if not self._fetching.drop_youngest():
                self._send_back(self._running[-1])
        shrinks = blocks <= self.kv.blocks_total
        moved = self.kv.resize(blocks)
        self._worth_admitting = True
        if not moved and not (shrinks and any(any(sequence.book.released) for sequence in self._running)):
            return None
        self._steps_total += 1
        self._in_flight.append(StepInFlight(self._steps_total, []))
        return moving_plan(self._steps_total, moved, self._running)

    def save_before(self, blocks: int) -> StepPlan | None:
        """A step without rows that brings to RAM what a pool of so many pages would lose: cached content of nobody, and
        what those hold who would be sent back. None: no more of it can be saved. Nothing may be in flight."""
        tiers = self.kv.tiers
        if tiers is None or not tiers.host.total:
            return None
        before, tiers.spare_wanted = tiers.spare_wanted, self.kv.blocks_total + 1 - blocks
        copies, over = self.kv.plan_copies(self._worth_saving(), saves_only=True), tiers.spared
        tiers.spare_wanted = before  # Somebody else may be saving for a smaller pool beside steps.
        if over and not copies:
            return None
        self._steps_total += 1
        self._in_flight.append(StepInFlight(self._steps_total, []))
        return StepPlan(step_id=self._steps_total, copies=copies)

    def _worth_saving(self) -> Iterator[tuple[SequenceBlocks, bool]]:
        """Who runs, the youngest first, and whether saving it is worth it."""
        return ((one.book, self._fetching.worth_saving(one)) for one in reversed(self._running))

    def give_up_copies(self, copies: Iterable[int]) -> None:
        """These will never be over: their pages are free, and who waits for them waits anew, or computes."""
        if self.kv.tiers is not None:
            self._fetching.drop_all()
            self.kv.tiers.give_up(copies)
            self._worth_admitting = True

    def wait_for_copies(self) -> StepPlan | None:
        """A step without rows and without new copies, for as long as pages are on their way; None: none is. Who waits
        for pages waits for them anew afterwards."""
        self._fetching.drop_all()
        if self.kv.tiers is None or not self.kv.tiers.copying:
            return None
        self._steps_total += 1
        self._in_flight.append(StepInFlight(self._steps_total, []))
        return StepPlan(step_id=self._steps_total)

    def reset_prefix_cache(self) -> None:
        self._fetching.drop_all()
        self.kv.reset_prefix_cache()
        self._worth_admitting = True
