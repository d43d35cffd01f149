"""Grammar state and token mask of each constrained sequence, and which masks are ready for a step.

    advanced (or compiled) ─► being filled by a worker process ─► filled ─► sampled from ─► advanced ...
                              │ a step needs it: waited for, PATIENCE_S in all and REGAINED_S more with each token;
                              │ waiting time is shared by all that wait; time while the device is busy does not count
                              └ late: left out of steps until it is filled

Requests begin and end in `structured_outputs`; processes are in `grammar_workers`, grammars in `text.structured`.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy
import numpy.typing

from holdfast.errors import EngineError, GrammarError
from holdfast.records import Failure, Request
from holdfast.records.sampling import MAX_BAD_WORD_TOKENS
from holdfast.records.steps import Verdict

log = logging.getLogger("holdfast")

Words = numpy.typing.NDArray[numpy.int32]

PATIENCE_S, REGAINED_S = 0.05, 0.001
"""How long one answer may hold up the others of its steps: in all, and for each token it has."""
STEP_PATIENCE_S = 0.05
"""How long one step is held up, whoever it waits for."""
BUSY_POLL_S = 0.0005
MASK_CPU_S, MASK_CPU_S_A_TOKEN = 5.0, 0.05
"""Of one core, that the masks of one answer may take: in all, and for each token it has."""
NOTHING_LEFT, BEYOND_LIMITS = "HF363", "HF362"


class Progress(enum.Enum):
    """Of the newest token, as far as the worker has told."""

    UNKNOWN = enum.auto()
    GOES_ON = enum.auto()
    COMPLETE = enum.auto()


@dataclass(slots=True, eq=False)
class GrammarState:
    """An answer that follows a grammar."""

    number: int
    """Id at the workers."""
    request: Request
    mask_words: int
    allowed: Words | None
    """Bits of allowed_token_ids."""
    eos_ids: tuple[int, ...] = ()
    """The model's own ends, which a grammar allows where it may end, whatever the request says of them."""
    words: Words = field(init=False)
    """Bits of the tokens that may follow, once filled."""
    output: list[int] = field(init=False)
    failure: Failure | None = None
    filled: bool = False
    progress: Progress = Progress.GOES_ON
    early_verdict: Verdict | Failure | None = None
    """Of its newest token, where the grammar has it before it was applied."""
    patience_s: float = PATIENCE_S
    """What is left of it; nothing: the grammar is slow."""
    spent_s: float = 0.0
    slowest_s: float = 0.0
    masks: int = 0
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self.output = list(self.request.output_token_ids)
        self.words = numpy.zeros(self.mask_words, dtype=numpy.int32)

    @property
    def slow(self) -> bool:
        return self.patience_s <= 0

    def advance(self, token: int) -> None:
        """It has one token more, and waits for the mask of the next."""
        self.output.append(token)
        self.filled, self.progress = False, Progress.UNKNOWN
        self.patience_s = min(max(self.patience_s, 0.0) + REGAINED_S, PATIENCE_S)

    def take(self, mask: bytes, spent_s: float) -> None:
        """A mask, and the work it took. Whatever goes wrong is this answer's end and nobody else's business."""
        self.masks += 1
        self.spent_s += spent_s
        self.slowest_s = max(self.slowest_s, spent_s)
        try:
            self.words[:] = numpy.frombuffer(mask, dtype=numpy.int32)
            self._narrow()
        except Exception as error:
            log.exception("request %s failed: its token mask could not be applied", self.request.request_id)
            self.failure = Failure.of(EngineError(f"applying the token mask failed: {type(error).__name__}"))
        if self.spent_s > MASK_CPU_S + MASK_CPU_S_A_TOKEN * len(self.output) and self.failure is None:
            too_slow = GrammarError(
                f"the grammar took {self.spent_s:.0f} s of CPU time for {len(self.output)} tokens",
                code=BEYOND_LIMITS,
                fix="use a simpler grammar",
                field="structured_outputs",
            )
            self.failure = Failure.of(too_slow)
        self._settle()

    def complete(self) -> None:
        """Perhaps known too late to end it: then a step samples something more, whatever it is. It is nobody's, and a
        mask that leaves only ends would leave nothing where the request forbids them."""
        self.progress = Progress.COMPLETE
        self.words[:] = -1
        self.filled = True

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self._settle()

    def _settle(self) -> None:
        if self.failure is not None:
            self.words[:] = -1  # Something must be sampled before it can be ended.
        self.filled = True

    def _narrow(self) -> None:
        """Takes away what the request's other wishes forbid at this place, and sees whether anything is left."""
        words, params, request = self.words, self.request.params, self.request
        if self.allowed is not None:
            words &= self.allowed
        forbidden = list[int]()
        if len(self.output) < params.min_tokens:
            forbidden += [*self.eos_ids, *request.eos_token_ids, *params.stop_ids]
        if request.bad_word_ids:
            from holdfast.execution.sampling.sampler import (
                forbidden_after,  # It needs torch, which an engine has by now.
            )

            spellings = [(word[:-1], word[-1]) for word in request.bad_word_ids]
            forbidden += forbidden_after(self.output[-MAX_BAD_WORD_TOKENS:], spellings)
        bits = words.view(numpy.uint8)
        for token in forbidden:
            bits[token // 8] &= 0xFF ^ (1 << (token % 8))
        if not words.any():
            nothing_left = GrammarError(
                "no token is allowed by both the grammar and the other sampling parameters",
                code=NOTHING_LEFT,
                fix="leave allowed_token_ids, bad_words or min_tokens out",
                field="structured_outputs",
            )
            self.failure = Failure.of(nothing_left)


class Poll(Protocol):
    def __call__(self, timeout_s: float) -> object:
        """Takes in what workers have said, waiting so long for the first word."""


def wait_for_masks(states: Sequence[GrammarState], poll: Poll, busy: Callable[[], bool]) -> None:
    """Until each is filled, or has used up its patience, or the step's is over. `busy`: the device still computes what
    they are needed for, and nobody is held up."""
    left_s = STEP_PATIENCE_S
    poll(0.0)
    while left_s > 0 and (waiting := [state for state in states if not state.filled and not state.slow]):
        if busy():
            poll(BUSY_POLL_S)
            continue
        began_s = time.monotonic()
        poll(min(left_s, len(waiting) * min(state.patience_s for state in waiting)))
        waited_s = time.monotonic() - began_s
        left_s -= waited_s
        for state in waiting:
            state.patience_s -= waited_s / len(waiting)


class StepMasks:
    """Of the rows of one step whose answers follow a grammar, by slot. `advance`: gives the grammars the tokens of the
    step before, where that is still in flight, and says whether it could."""

    def __init__(self, states: dict[int, GrammarState], poll: Poll, advance: Callable[[], bool] | None = None) -> None:
        self.slots = list(states)
        self._states, self._poll, self._advance = states, poll, advance

    def rows(self, busy: Callable[[], bool] = lambda: False) -> dict[int, Words]:
        if self._advance is not None and not self._advance():
            return {}
        wait_for_masks(list(self._states.values()), self._poll, busy)
        return {slot: state.words for slot, state in self._states.items() if state.filled}
