"""What becomes of a step's result: tokens become known, sequences end, pages come and go. Plans nothing."""

from __future__ import annotations

from holdfast.errors import EngineError
from holdfast.records import EngineOutput, Failure, FinishReason, TokenLogprobs, Verdict
from holdfast.records.steps import AdapterArrival, StepFailure, StepResult
from holdfast.scheduler.outputs import AdvanceGrammar, make_output, told_of_prompt
from holdfast.scheduler.sequence import Sequence, Status
from holdfast.scheduler.state import SchedulerState
from holdfast.scheduler.step_builder import StepInFlight


class Results(SchedulerState):
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
        self._note_copies(step, result, now_s)
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

    def _note_copies(self, step: StepInFlight, result: StepResult, now_s: float) -> None:
        """Pages have come, or have left: of those that did not come the sequence computes what it waited for."""
        self.kv.applied_step = result.step_id
        pinning = self.kv.tiers is not None and result.host_pages > self.kv.tiers.host.total
        if self.kv.end_copies(result.finished_copies, result.failed_copies, result.host_pages):
            self._worth_admitting = True
        rows = [planned.row for planned in step.rows]
        tells = not rows or any(row.samples or row.scored for row in rows)
        work = ((row.start, row.count) for row in rows)
        self._fetching.note_applied(work, step.planned_s, now_s, result.loading_s, tells=tells, pinning=pinning)

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
        cache, in this step or in one planned since: these start anew, and nothing of the rest is cached. Where pages
        filled before may be the cause, none of its prefix is found again, in any tier; who reads them already will see
        for themselves."""
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
        if failed.earlier_too:
            self.kv.forget(ended.book, 0, below=True)
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
        if verdict is Verdict.OVER:
            self._leave(sequence)
            stop = FinishReason.STOP
            return make_output(sequence, [], None, stop, None, now_s, prompt_logprobs=prompt_logprobs, complete=True)
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
