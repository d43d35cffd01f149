"""Answers that must have a form: grammars compiled for those who come, a form for each that runs, and how it goes on
with each token.

Grammars are compiled, and masks filled, by threads of their own while the model runs. No more forms are held at once
than there are bytes for; whoever comes beyond waits in line. What a grammar means is `text.matching`'s; who is
scheduled when is the scheduler's. A form that fails ends its own answer and no other.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy

from holdfast.engine.masks import BEYOND_LIMITS, Form, MaskThreads, StepMasks, Words
from holdfast.engine.threads import step_back
from holdfast.errors import EngineError, HoldfastError
from holdfast.planner.form_sizes import form_bytes, held_bytes
from holdfast.planner.sampling_sizes import mask_words
from holdfast.records import Failure, Request, StepPlan, StepResult
from holdfast.records.steps import Verdict
from holdfast.records.structured import LARGE_BYTES, Vocabulary

if TYPE_CHECKING:
    from holdfast.engine.core import EngineCore
    from holdfast.models import ModelSpec
    from holdfast.text import Tokenizer
    from holdfast.text.matching import Grammars

log = logging.getLogger("holdfast")

COMPILING_THREADS = 2
FORMS_AHEAD = 4
"""Compiled for requests that still wait to run."""


def hold_forms(core: EngineCore, spec: ModelSpec, tokenizer: Tokenizer | None = None) -> None:
    """From now on this engine takes requests for answers that must have a form. Without a tokenizer it must be taught
    what tokens are."""
    limits = core.scheduler.limits
    core.forms = Forms(
        rows=limits.max_num_seqs, vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids,
        by_priority=limits.policy == "priority",
    )  # fmt: skip
    if tokenizer is not None:
        core.forms.teach(partial(_vocabulary_of, tokenizer))


def _vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    from holdfast.text.matching import vocabulary_of

    return vocabulary_of(tokenizer)


class _Sampled(NamedTuple):
    """Of one plan."""

    held: dict[int, Form]
    """By slot: rows whose answers must have a form."""
    slots: list[int]
    """Of all rows that sample, in their order."""


class Forms:
    """`rows`: most that sample in a step; `eos_ids`: the model's own ends; `by_priority`: who is compiled for first."""

    def __init__(self, *, rows: int, vocab_size: int, eos_ids: Sequence[int], by_priority: bool = False) -> None:
        self._rows, self._vocab_size, self._eos_ids = rows, vocab_size, tuple(eos_ids)
        self._by_priority = by_priority
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._grammars: Grammars | None = None
        self._making = threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-grammar", initializer=step_back)
        self._masks = MaskThreads()
        self._line: list[tuple[int, float, int, Request]] = []
        self._came_total = 0
        self._compiling: dict[str, tuple[Request, Future[Form]]] = {}
        self._forms: dict[str, Form] = {}
        self._slots: dict[int, str] = {}
        self._newest = _Sampled({}, [])
        self._bytes: dict[str, int] = {}
        """Of every request whose form is compiled or being compiled."""

    def teach(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What tokens stand for: asked for, by a thread, when the first answer must have a form."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary

    def prepare(self) -> None:
        """Begins to make ready for the first answer that must have a form: it would wait for it."""
        self._pool.submit(self._compiler)

    # --- requests come and go ---

    @property
    def compiling(self) -> bool:
        return bool(self._compiling or self._line)

    def begin(self, request: Request) -> None:
        """Compiles what the request asks for, when there is room for it; `formed` hands it on."""
        self._came_total += 1
        priority = request.priority if self._by_priority else 0
        heapq.heappush(self._line, (priority, request.arrival_s, self._came_total, request))
        self._advance()

    def _advance(self) -> None:
        """As many of the first in line as there is room for; one at least."""
        most_bytes = held_bytes(self._rows)
        while self._line and len(self._bytes) < self._rows + FORMS_AHEAD:
            request = self._line[0][-1]
            written = len(msgspec.json.encode(request.params.structured_outputs))
            needed = form_bytes(written)
            if self._bytes and sum(self._bytes.values()) + needed > most_bytes:
                return
            heapq.heappop(self._line)
            self._bytes[request.request_id] = needed
            pool = self._large if written > LARGE_BYTES else self._pool
            self._compiling[request.request_id] = (request, pool.submit(self._compile, request))

    def formed(self, wait_s: float = 0.0) -> list[tuple[Request, HoldfastError | None]]:
        """Requests that can be scheduled now, or why one cannot be; waits so long for the first of them."""
        if not self._compiling:
            return []
        done, _ = wait([future for _, future in self._compiling.values()], wait_s, FIRST_COMPLETED)
        ready = [entry for entry in self._compiling.values() if entry[1] in done]
        return [(request, self._enter(request, future)) for request, future in ready]

    def _enter(self, request: Request, future: Future[Form]) -> HoldfastError | None:
        del self._compiling[request.request_id]
        try:
            self._forms[request.request_id] = future.result()
            return None
        except HoldfastError as error:
            problem = error
        except Exception as error:  # A library's own: this request's end, and nobody else's business.
            log.exception("request %s is ended: the form of its answer could not be compiled", request.request_id)
            problem = EngineError(f"the form of the answer could not be compiled: {type(error).__name__}")
        self.forget(request.request_id)
        return problem

    def _allowed(self, request: Request) -> Words | None:
        ids = request.params.allowed_token_ids
        if ids is None:
            return None
        bits = numpy.zeros(mask_words(self._vocab_size) * 32, dtype=bool)
        bits[ids] = True
        return numpy.packbits(bits, bitorder="little").view(numpy.int32)

    def _compile(self, request: Request) -> Form:
        """With its first mask: nobody waits for that in a step."""
        params = request.params.structured_outputs
        assert params is not None
        matcher = self._compiler().matcher(params)
        if not matcher.consume_all(request.output_token_ids):
            raise matcher.error or EngineError("the answer so far does not have its form")
        words = numpy.zeros(mask_words(self._vocab_size), dtype=numpy.int32)
        form = Form(request, matcher, words, self._allowed(request))
        form.fill()
        form.filled = True
        return form

    def _compiler(self) -> Grammars:
        with self._making:
            if self._grammars is None:
                if self._vocabulary is None or not self._eos_ids:
                    missing = "vocabulary" if self._vocabulary is None else "end of text"
                    raise EngineError(f"answers cannot be held to a form: the engine knows no {missing}")
                began_s = time.monotonic()
                from holdfast.text.matching import Grammars  # Its library is large, and most engines never need it.

                self._grammars = Grammars(self._vocabulary(), self._eos_ids, self._vocab_size)
                self._vocabulary = None
                log.info("ready to hold answers to a form, after %.1f s", time.monotonic() - began_s)
            return self._grammars

    def forget(self, request_id: str) -> None:
        _, future = self._compiling.pop(request_id, (None, None))
        if future is not None:
            future.cancel()
        self._forms.pop(request_id, None)
        if self._bytes.pop(request_id, None) is None and self._line:
            self._line = [entry for entry in self._line if entry[-1].request_id != request_id]
            heapq.heapify(self._line)
        self._advance()

    def clear(self) -> None:
        self._line.clear()
        for _, future in self._compiling.values():
            future.cancel()
        self._compiling.clear()
        self._forms.clear()
        self._slots.clear()
        self._newest = _Sampled({}, [])
        self._bytes.clear()

    def close(self) -> None:
        self.clear()
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
        self._masks.close()

    # --- steps ---

    def held(self, *, ahead: bool) -> frozenset[str]:
        """Requests that no step should wait for: their masks were late before, and are not filled; or cannot be yet,
        because a step is planned `ahead` of what they are to go on from."""
        sampling = set(self._newest.held.values()) if ahead else set[Form]()
        return frozenset(
            name for name, form in self._forms.items() if form.slow and (not form.filled or form in sampling)
        )

    def wait_for_masks(self, timeout_s: float) -> None:
        """Of those that are held, for the first."""
        self._masks.wait_for_any([form for form in self._forms.values() if form.slow and not form.filled], timeout_s)

    def masks(self, plan: StepPlan, before: Callable[[], StepResult] | None = None) -> StepMasks | None:
        """Those of a plan's rows; None: no row needs one. `before`: the tokens of the plan before this one, if they are
        not judged yet."""
        for start in plan.starts:
            self._slots.pop(start.slot, None)
            if start.params.structured_outputs is not None:
                self._slots[start.slot] = start.request_id
        # An answer that was aborted since may still have its slot here.
        held = {
            row.slot: self._forms[self._slots[row.slot]] for row in plan.rows
            if row.samples and self._slots.get(row.slot) in self._forms
        }  # fmt: skip
        newest = _Sampled(held, [row.slot for row in plan.rows if row.samples])
        last, self._newest = self._newest, newest
        if not held:
            return None
        return StepMasks(held, self._masks, None if before is None else partial(self._foresee, last, newest, before))

    def _foresee(self, last: _Sampled, newest: _Sampled, before: Callable[[], StepResult]) -> bool:
        """Judges what the last step has sampled for those that go on in the newest, so that their masks can be filled.
        After a failure it does not: which of these tokens still count is for the scheduler to say. May be asked again:
        a step may be done in parts."""
        going_on = set(last.held.values()) & set(newest.held.values())
        result = before() if going_on else None
        if result is None or result.failures:
            return result is None
        for slot, token in zip(last.slots, result.token_ids, strict=True):
            form = last.held.get(slot)
            if form in going_on and form is not None and form.foreseen is None:
                form.foreseen = self._judge(form, token)
        return True

    def judge(self, request_id: str, token: int) -> Verdict | Failure:
        """What a sampled token means for its answer, which has it from now on. Begins the mask of what may follow."""
        form = self._forms[request_id]
        verdict, form.foreseen = form.foreseen, None
        return self._judge(form, token) if verdict is None else verdict

    def _judge(self, form: Form, token: int) -> Verdict | Failure:
        if form.failure is not None:
            return form.failure
        form.output.append(token)
        began_s = time.thread_time()
        taken = form.matcher.consume(token)
        form.count(began_s)
        if not taken:
            error: HoldfastError | None = form.matcher.error
            if error is None or error.code != BEYOND_LIMITS:
                error = EngineError("a token was sampled that the form of the answer does not allow")
            return Failure.of(error)
        if not form.matcher.complete:
            if len(form.output) < form.request.max_tokens:
                self._masks.begin(form)
            return Verdict.GOES_ON
        return Verdict.ENDED if token in self._eos_ids else Verdict.COMPLETE
