"""Tries a grammar out before any answer follows it: some steps into it, within a bound of time. Knows a matcher of the
library and how long tokens are; what they spell, and which request it is for, does not matter here."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
"""Of one grammar, and of one mask: see docs/measurements/structured-output.md for what they were measured on."""
PROBE_CPU_S = 1.0
"""Of all steps: far more than any grammar needs that an answer could follow."""
ENOUGH_CPU_S = 0.05
"""After so much, more steps would tell little: masks of this grammar are slow, and that is known."""
TOO_SLOW = "too many steps for a few tokens"


@dataclass(frozen=True, slots=True)
class Probed:
    error: str | None
    """What the library says against it."""
    slowest_s: float
    """Of its masks, of processor time."""


class GrammarProbe:
    """`tokens` by id, `ends` among them."""

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        spelled = [token for token in range(len(tokens)) if tokens[token] and token not in ends]
        self._longest_first = sorted(spelled, key=lambda token: len(tokens[token]), reverse=True)

    def probe(self, matcher: LLMatcher, steps: int) -> Probed:
        """The matcher is of no use afterwards. By turns the longest token that may follow, which is the most work, and
        any other."""
        began_s, slowest_s = time.thread_time(), 0.0
        for step in range(steps):
            before_s = time.thread_time()
            mask = matcher.compute_bitmask()
            now_s = time.thread_time()
            slowest_s = max(slowest_s, now_s - before_s)
            if matcher.is_error():
                break
            if now_s - began_s > PROBE_CPU_S:
                return Probed(TOO_SLOW, slowest_s)
            if now_s - began_s > ENOUGH_CPU_S and step >= 4:
                break
            token = self._next(mask, 0 if step % 2 == 0 else step * 7919)
            if token is None or not matcher.consume_token(token) or matcher.is_stopped():
                break
        return Probed(matcher.get_error() or None, slowest_s)

    def _next(self, mask: bytes, start: int) -> int | None:
        order = self._longest_first
        start %= max(len(order), 1)
        for tokens in (order[start:], order[:start]):
            for token in tokens:
                if mask[token >> 3] >> (token & 7) & 1:
                    return token
        return None
