"""Tries a form out before any answer is held to it: some steps into it, within a bound of time. Knows a matcher of the
library and how long tokens are; what they spell, and who asked, is no matter here."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy
import numpy.typing
from llguidance import LLMatcher, LLParserLimits

LIMITS = LLParserLimits(
    max_lexer_states=4000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Of one grammar, and of one mask: see docs/structured-output.md for what they were measured on."""
WALK_CPU_S = 2.0
"""Of one thread, for all steps: far more than any form needs that an answer could be held to."""
TOO_SLOW = "too many steps of work for a few tokens"


class Walker:
    """`tokens` by id, `ends` among them. Holds a byte a token."""

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        self._lengths = numpy.array([min(len(token), 255) for token in tokens], dtype=numpy.uint8)
        self._lengths[list(ends)] = 0

    def why_not(self, matcher: LLMatcher, steps: int) -> str | None:
        """What the library says against it, with the first step or a later one. The matcher is of no use afterwards.

        By turns the longest token that may follow, which is the most work, and any other."""
        began_s = time.thread_time()
        for step in range(steps):
            bits = numpy.unpackbits(numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8), bitorder="little")
            if matcher.is_error():
                break
            if time.thread_time() - began_s > WALK_CPU_S:
                return TOO_SLOW
            lengths = self._lengths * bits[: len(self._lengths)]
            longest = int(lengths.argmax())
            others = numpy.flatnonzero(lengths)
            token = longest if step % 2 == 0 or not len(others) else int(others[(step * 7919) % len(others)])
            if not lengths[longest] or not matcher.consume_token(token) or matcher.is_stopped():
                break
        return matcher.get_error() or None
