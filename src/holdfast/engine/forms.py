"""Answers that must have a form: a matcher for each, and the tokens that may follow, all rows of a step at once.

Grammars are compiled, and masks filled, by threads of their own while the model runs. What a grammar means is
`text.matching`'s; who is scheduled when is the scheduler's. A matcher that fails ends its own answer and no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy
import numpy.typing

from holdfast.errors import EngineError, GrammarError, HoldfastError
from holdfast.planner.sampling_sizes import mask_words
from holdfast.records import Failure, Request, StepPlan
from holdfast.records.sampling import MAX_BAD_WORD_TOKENS
from holdfast.records.steps import Verdict
from holdfast.records.structured import Vocabulary

if TYPE_CHECKING:
    from holdfast.engine.core import EngineCore
    from holdfast.models import ModelSpec
    from holdfast.text import Tokenizer
    from holdfast.text.matching import Grammars, MaskFiller, Matcher

log = logging.getLogger("holdfast")

Words = numpy.typing.NDArray[numpy.int32]

COMPILING_THREADS = 2
MASK_THREADS = 4
NOTHING_LEFT = "HF363"


@dataclass(slots=True, eq=False)
class _Form:
    request: Request
    matcher: Matcher
    allowed: Words | None
    """Bits of allowed_token_ids."""
    output: list[int] = field(init=False)
    failure: Failure | None = None

    def __post_init__(self) -> None:
        self.output = list(self.request.output_token_ids)

    def narrow(self, words: Words) -> None:
        """Takes away what the request's other wishes forbid at this place, and sees whether anything is left."""
        error = self.matcher.error
        params, request = self.request.params, self.request
        if self.allowed is not None:
            words &= self.allowed
        forbidden = list[int]()
        if len(self.output) < params.min_tokens:
            forbidden += [*request.eos_token_ids, *params.stop_ids]
        if request.bad_word_ids:
            from holdfast.execution.sampler import forbidden_after  # It needs torch, which an engine has by now.

            spellings = [(word[:-1], word[-1]) for word in request.bad_word_ids]
            forbidden += forbidden_after(self.output[-MAX_BAD_WORD_TOKENS:], spellings)
        bits = words.view(numpy.uint8)
        for token in forbidden:
            bits[token // 8] &= 0xFF ^ (1 << (token % 8))
        if error is None and not words.any():
            error = GrammarError(
                "the form of the answer allows no token here that its other parameters allow too",
                code=NOTHING_LEFT,
                fix="leave allowed_token_ids, bad_words or min_tokens out",
                field="structured_outputs",
            )
        if error is not None:
            self.failure = Failure.of(error)


class StepMasks:
    """Of the rows of one step whose answers must have a form: a bit for each token that may be sampled."""

    def __init__(self, slots: list[int], filled: Future[Words]) -> None:
        self.slots = slots
        self._filled = filled

    def words(self) -> Words:
        """[slots, vocabulary / 32], once they are there. Not written again before the next step but one is planned."""
        return self._filled.result()


def hold_forms(core: EngineCore, spec: ModelSpec, tokenizer: Tokenizer | None = None) -> None:
    """From now on this engine takes requests for answers that must have a form. Without a tokenizer it must be taught
    what tokens are."""
    rows = core.scheduler.limits.max_num_seqs
    core.forms = Forms(rows=rows, vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids)
    if tokenizer is not None:
        core.forms.teach(partial(_vocabulary_of, tokenizer))


def _vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    from holdfast.text.matching import vocabulary_of

    return vocabulary_of(tokenizer)


class Forms:
    """`rows`: most that sample in a step; `eos_ids`: the model's own ends."""

    def __init__(self, *, rows: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._rows, self._vocab_size, self._eos_ids = rows, vocab_size, tuple(eos_ids)
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._grammars: Grammars | None = None
        self._making = threading.Lock()
        self._filler: MaskFiller | None = None
        self._pool = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar")
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._buffers: list[Words] = []
        self._compiling: dict[str, tuple[Request, Future[Matcher]]] = {}
        self._forms: dict[str, _Form] = {}
        self._slots: dict[int, str] = {}

    def teach(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What tokens stand for: asked for, by a thread, when the first answer must have a form."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary

    # --- requests come and go ---

    @property
    def compiling(self) -> bool:
        return bool(self._compiling)

    def begin(self, request: Request) -> None:
        """Compiles what the request asks for; `formed` hands it on."""
        self._compiling[request.request_id] = (request, self._pool.submit(self._compile, request))

    def formed(self, wait_s: float = 0.0) -> list[tuple[Request, HoldfastError | None]]:
        """Requests that can be scheduled now, or why one cannot be; waits so long for the first of them."""
        if not self._compiling:
            return []
        done, _ = wait([future for _, future in self._compiling.values()], wait_s, FIRST_COMPLETED)
        ready = [entry for entry in self._compiling.values() if entry[1] in done]
        return [(request, self._enter(request, future)) for request, future in ready]

    def _enter(self, request: Request, future: Future[Matcher]) -> HoldfastError | None:
        del self._compiling[request.request_id]
        try:
            self._forms[request.request_id] = _Form(request, future.result(), self._allowed(request))
        except HoldfastError as error:
            return error
        except Exception as error:  # A library's own: this request's end, and nobody else's business.
            log.exception("request %s is ended: the form of its answer could not be compiled", request.request_id)
            return EngineError(f"the form of the answer could not be compiled: {type(error).__name__}")
        return None

    def _allowed(self, request: Request) -> Words | None:
        ids = request.params.allowed_token_ids
        if ids is None:
            return None
        bits = numpy.zeros(mask_words(self._vocab_size) * 32, dtype=bool)
        bits[ids] = True
        return numpy.packbits(bits, bitorder="little").view(numpy.int32)

    def _compile(self, request: Request) -> Matcher:
        params = request.params.structured_outputs
        assert params is not None
        matcher = self._compiler().matcher(params)
        if not matcher.consume_all(request.output_token_ids):
            raise matcher.error or EngineError("the answer so far does not have its form")
        return matcher

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
        self._compiling.pop(request_id, None)
        self._forms.pop(request_id, None)

    def clear(self) -> None:
        self._compiling.clear()
        self._forms.clear()
        self._slots.clear()

    def close(self) -> None:
        self.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._mask_thread.shutdown(wait=False, cancel_futures=True)

    # --- steps ---

    def masks(self, plan: StepPlan) -> StepMasks | None:
        """Begins to fill those of a plan's rows; None: no row needs one."""
        for start in plan.starts:
            self._slots.pop(start.slot, None)
            if start.params.structured_outputs is not None:
                self._slots[start.slot] = start.request_id
        if not self._slots:
            return None
        # An answer that was aborted since may still have its slot here.
        held = [
            (row.slot, self._forms[self._slots[row.slot]]) for row in plan.rows
            if row.samples and self._slots.get(row.slot) in self._forms
        ]  # fmt: skip
        if not held:
            return None
        slots, forms = [slot for slot, _ in held], [form for _, form in held]
        return StepMasks(slots, self._mask_thread.submit(self._fill, forms, self._buffer()))

    def _buffer(self) -> Words:
        """One is filled while the step before may still read the other."""
        if not self._buffers:
            shape = (self._rows, mask_words(self._vocab_size))
            self._buffers = [numpy.zeros(shape, dtype=numpy.int32) for _ in range(2)]
        self._buffers.reverse()
        return self._buffers[0]

    def _fill(self, forms: list[_Form], buffer: Words) -> Words:
        if self._filler is None:
            from holdfast.text.matching import MaskFiller

            self._filler = MaskFiller(MASK_THREADS)
        words = buffer[: len(forms)]
        self._filler.fill([form.matcher for form in forms], words)
        for form, row in zip(forms, words, strict=True):
            form.narrow(row)
        return words

    def judge(self, request_id: str, token: int) -> Verdict | Failure:
        """What a sampled token means for its answer, which has it from now on."""
        form = self._forms[request_id]
        if form.failure is not None:
            return form.failure
        form.output.append(token)
        if not form.matcher.consume(token):
            error = form.matcher.error or EngineError("a token was sampled that the form of the answer does not allow")
            return Failure.of(error)
        if not form.matcher.complete:
            return Verdict.GOES_ON
        return Verdict.ENDED if token in self._eos_ids else Verdict.COMPLETE
