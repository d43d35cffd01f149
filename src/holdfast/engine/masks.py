"""Masks of answers that must have a form: one form as its answer grows, threads that fill its masks, and what of a step
is there in time. Who comes and goes is `forms`'s; what a grammar means is `text.matching`'s.

    judged (or compiled) ─► being filled, quick ones together ─► filled ─► sampled from ─► judged ...
                              │ a step needs it: waited for, PATIENCE_S in all and REGAINED_S more with each token;
                              │ who wait together share what they cost, and nothing is paid while the device is busy
                              └ late: left out of steps until it is filled, by one thread for all such forms
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy
import numpy.typing

from holdfast.engine.threads import step_back
from holdfast.errors import EngineError, GrammarError
from holdfast.records import Failure, Request
from holdfast.records.sampling import MAX_BAD_WORD_TOKENS
from holdfast.records.steps import Verdict

if TYPE_CHECKING:
    from holdfast.text.matching import MaskPool, Matcher

log = logging.getLogger("holdfast")

Words = numpy.typing.NDArray[numpy.int32]

THREADS = 3
"""For forms that were never late and are not quick. Those that were late share one more, as quick ones do."""
QUICK_S, QUICK_IN_A_ROW = 0.002, 4
"""Of work for a mask, and of so many: the next are filled together with others, which wait for them."""
MOST_SHARE_S = 0.1
"""Of work, that is charged for a mask filled together: time that passed may have been another program's."""
TOGETHER = 64
"""Masks filled at once: so many quick ones hold nobody up for long."""
PATIENCE_S, REGAINED_S = 0.05, 0.001
"""How long one answer may hold up the others of its steps: in all, and for each token it has."""
STEP_PATIENCE_S = 0.05
"""How long one step is held up, whoever it waits for."""
BUSY_POLL_S = 0.0005
MASK_CPU_S, MASK_CPU_S_A_TOKEN = 10.0, 0.05
"""Of one thread, that the masks of one answer may take: in all, and for each token it has."""
NOTHING_LEFT, BEYOND_LIMITS = "HF363", "HF362"


@dataclass(slots=True, eq=False)
class Form:
    request: Request
    matcher: Matcher
    words: Words
    """Bits of the tokens that may follow, once filled."""
    allowed: Words | None
    """Bits of allowed_token_ids."""
    output: list[int] = field(init=False)
    failure: Failure | None = None
    filled: bool = False
    foreseen: Verdict | Failure | None = None
    """Of its newest token, where the next step was launched before that was applied."""
    patience_s: float = PATIENCE_S
    """What is left of it; nothing: the form is slow."""
    spent_s: float = 0.0
    quick_in_a_row: int = QUICK_IN_A_ROW - 1
    """Masks; the first is known when others may wait for it."""

    def __post_init__(self) -> None:
        self.output = list(self.request.output_token_ids)

    @property
    def slow(self) -> bool:
        return self.patience_s <= 0

    @property
    def quick(self) -> bool:
        """Others may wait for it."""
        return self.quick_in_a_row >= QUICK_IN_A_ROW

    def fill(self) -> None:
        """Whatever goes wrong is this answer's end and nobody else's business."""
        began_s, before_s = time.thread_time(), self.spent_s
        try:
            self.matcher.fill(self.words)
            self._narrow()
        except BaseException as error:  # The library may panic.
            self._fail(error)
        self.count(began_s)
        self.quick_in_a_row = self.quick_in_a_row + 1 if self.spent_s - before_s <= QUICK_S else 0
        self._judge_work()

    def take(self, words: Words, spent_s: float) -> None:
        """A mask that was filled for it together with others, and its share of the work."""
        self.words[:] = words
        try:
            self._narrow()
        except Exception as error:
            self._fail(error)
        self.spent_s += spent_s
        self._judge_work()

    def _fail(self, error: BaseException) -> None:
        log.exception("request %s is ended: its mask could not be filled", self.request.request_id)
        self.failure = Failure.of(EngineError(f"the form of the answer failed: {type(error).__name__}"))

    def _judge_work(self) -> None:
        if self.spent_s > MASK_CPU_S + MASK_CPU_S_A_TOKEN * len(self.output) and self.failure is None:
            too_slow = GrammarError(
                f"the form of the answer took {self.spent_s:.0f} s of work for {len(self.output)} tokens",
                code=BEYOND_LIMITS, fix="a simpler one", field="structured_outputs",
            )  # fmt: skip
            self.failure = Failure.of(too_slow)
        if self.failure is not None:
            self.words[:] = -1  # Something must be sampled before it can be told.

    def count(self, began_s: float) -> None:
        """Time of this thread since then, for the form."""
        self.spent_s += time.thread_time() - began_s

    def _narrow(self) -> None:
        """Takes away what the request's other wishes forbid at this place, and sees whether anything is left."""
        error, words = self.matcher.error, self.words
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


class MaskThreads:
    """Fill masks in the order in which they are asked for, several at once. A form is theirs until it is filled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together, self._alone, self._slow = (queue.SimpleQueue[Form | None]() for _ in range(3))
        self._threads: list[threading.Thread] = []

    def begin(self, form: Form) -> None:
        if not self._threads:
            self._start()
        form.filled = False
        line = self._slow if form.slow else self._together if form.quick else self._alone
        form.patience_s = min(max(form.patience_s, 0.0) + REGAINED_S, PATIENCE_S)
        line.put(form)

    def _lines(self) -> list[queue.SimpleQueue[Form | None]]:
        """Of each thread."""
        return [self._together, *[self._alone] * THREADS, self._slow]

    def _start(self) -> None:
        for number, line in enumerate(self._lines()):
            work = self._work_together if line is self._together else partial(self._work, line)
            thread = threading.Thread(target=work, name=f"masks-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, line: queue.SimpleQueue[Form | None]) -> None:
        if line is self._slow:
            step_back()
        while (form := line.get()) is not None:
            form.fill()
            self._tell([form])
            del form  # Its answer may be over.

    def _work_together(self) -> None:
        from holdfast.text.matching import MASK_THREADS, MaskPool  # Large; at hand since the first form was compiled.

        pool, room = MaskPool(), numpy.empty((0, 0), dtype=numpy.int32)
        while forms := self._next_together():
            if len(room) == 0:
                room = numpy.empty((TOGETHER, len(forms[0].words)), dtype=numpy.int32)
            fill_together(forms, pool, room[: len(forms)], MASK_THREADS)
            self._tell(forms)
            del forms

    def _next_together(self) -> list[Form]:
        """All that wait, up to TOGETHER of them; none: it is over."""
        forms, form = list[Form](), self._together.get()
        while form is not None:
            forms.append(form)
            if len(forms) == TOGETHER or self._together.empty():
                return forms
            form = self._together.get()
        if forms:
            self._together.put(None)
        return forms

    def _tell(self, forms: Sequence[Form]) -> None:
        with self._changed:
            for form in forms:
                form.filled = True
            self._changed.notify_all()

    def wait(self, forms: Sequence[Form], busy: Callable[[], bool]) -> None:
        """Until each is filled, or has used up its patience, or the step's is over. `busy`: the device still computes
        what they are needed for, and nobody is held up."""
        left_s = STEP_PATIENCE_S
        with self._changed:
            while left_s > 0 and (waiting := [form for form in forms if not form.filled and not form.slow]):
                if busy():
                    self._changed.wait(BUSY_POLL_S)
                    continue
                began_s = time.monotonic()
                self._changed.wait(min(left_s, len(waiting) * min(form.patience_s for form in waiting)))
                waited_s = time.monotonic() - began_s
                left_s -= waited_s
                for form in waiting:
                    form.patience_s -= waited_s / len(waiting)

    def wait_for_any(self, forms: Sequence[Form], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not forms or any(form.filled for form in forms), timeout_s)

    def close(self) -> None:
        for line in self._lines() if self._threads else []:
            line.put(None)
        self._threads.clear()


def fill_together(forms: Sequence[Form], pool: MaskPool, room: Words, threads: int) -> None:
    """`room` [forms, words of a mask]. What has become slow among them is not known: each is looked at alone then."""
    began_s = time.monotonic()
    try:
        pool.fill([form.matcher for form in forms], room)
    except BaseException:  # The library may panic: whoever's fault it was will see it again.
        for form in forms:
            form.fill()
        return
    took_s = time.monotonic() - began_s
    for form, words in zip(forms, room, strict=True):
        form.take(words, min(took_s * min(threads, len(forms)) / len(forms), MOST_SHARE_S))
    if took_s > 2 * QUICK_S * (1 + len(forms) / threads):
        for form in forms:
            form.quick_in_a_row = 0


class StepMasks:
    """Of the rows of one step whose answers must have a form, by slot. `foresee`: judges the tokens of the step before,
    where that is still in flight, and says whether it could."""

    def __init__(self, held: dict[int, Form], threads: MaskThreads, foresee: Callable[[], bool] | None = None) -> None:
        self.slots = list(held)
        self._held, self._threads, self._foresee = held, threads, foresee

    def rows(self, busy: Callable[[], bool] = lambda: False) -> dict[int, Words]:
        if self._foresee is not None and not self._foresee():
            return {}
        self._threads.wait(list(self._held.values()), busy)
        return {slot: form.words for slot, form in self._held.items() if form.filled}
