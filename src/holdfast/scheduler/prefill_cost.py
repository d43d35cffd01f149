"""How long computing prompts takes, from the steps that were seen. A step costs something whatever is in it (weights
are read, or come over a link), each of its tokens costs the same, and attention costs by what each token sees:

    seconds = step + token x tokens + pair x pairs          pairs: of a token and a position before it, mean over layers

What steps that are alike cannot tell apart counts as the step's own: then nobody believes that leaving tokens out saves
time. But no more counts so than a step takes in which hardly anything is. And of steps with few tokens, in which
computing waits for weights, nobody concludes that many cost nothing. Knows neither clocks nor sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import median_low

from holdfast.kvcache import KVLayout

KEPT = 0.95
"""Of the weight of all steps before, with every new one."""
REMEMBERED = 32
"""Steps, with four fifths of all weight. The engine's thread sums them up in each step with prompts: no more."""
WEIGHTS = [KEPT ** (age / 2) for age in range(REMEMBERED)][::-1]
"""The root of that of each, the newest last: all sums are of products of two."""
DOUBT = 1e-4
"""Of what is seen, that speaks against each of the two others: the step's own has none."""
PARTS = 3
MANY_TIMES = 4
"""The tokens of the largest step that was seen: of such work only the best pace so far says anything, and no fit."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Of prompts, or of a step."""

    steps: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0

    def __add__(self, other: PromptWork) -> PromptWork:
        return PromptWork(self.steps + other.steps, self.tokens + other.tokens, self.pairs + other.pairs)

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.steps, self.tokens, self.pairs


def pairs(layout: KVLayout, start: int, end: int) -> float:
    """Of tokens at these positions, and all that they see, in the mean over layers."""
    layers = sum(len(group.layers) for group in layout.groups)
    seen = sum(len(group.layers) * (_seen(end, group.window) - _seen(start, group.window)) for group in layout.groups)
    return seen / layers


def _seen(tokens: int, window: int | None) -> int:
    """By all of the first so many."""
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near


class PrefillCost:
    """Fitted by relative errors: a step that took ten times as long for once (a kernel was compiled) counts as one. One
    that seems to have taken no time (the host was busy elsewhere, and saw its end with the next) would count as
    thousands: no error is taken relative to less than what the fit before says, at the pace of most steps, and no pace
    is better than that. So neither decides for long, not even as the first that is seen. `step_tokens`: the most in a
    step."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._seen = deque[tuple[tuple[float, float, float], float]](maxlen=REMEMBERED)
        """What was in each step, and how long it took."""
        self._weighed = self._current = False
        """Whether the sums, and the fit, are of all that was seen."""
        self._products = [[0.0] * PARTS for _ in range(PARTS)]
        self._sums = [0.0] * PARTS
        self._fit: tuple[float, ...] = (0.0,) * PARTS
        self._most_step_s: float | None = None

    def note_small(self, seconds: float) -> None:
        """So long take steps of late in which hardly anything is: a step's own part is no more."""
        if seconds > 0 and seconds != self._most_step_s:
            self._most_step_s, self._current = seconds, False

    def note(self, work: PromptWork, seconds: float) -> None:
        """A step took so long."""
        if seconds > 0 and work.tokens > 0:
            self._seen.append((work.parts, seconds))
            self._weighed = self._current = False

    def seconds(self, work: PromptWork) -> float | None:
        """None: nothing was seen yet."""
        if not self._seen:
            return None
        if not self._weighed:
            self._weigh()
        if not self._current:
            self._fit, self._current = self._fitted(), True
        if min(work.tokens, self._step_tokens) > MANY_TIMES * max(tokens for (_, tokens, _), _ in self._seen):
            took_least = self._took_least(self._fit)
            return work.tokens * min(
                took / tokens for ((_, tokens, _), _), took in zip(self._seen, took_least, strict=True)
            )
        return _of(self._fit, work.parts)

    def _weigh(self) -> None:
        """Sums over all that was seen, the newest most."""
        fit = self._fit if any(self._fit) else (0.0, 1.0, 0.0)  # Before the first: by tokens.
        took_least = self._took_least(fit)
        factors = [weight / took for weight, took in zip(WEIGHTS[-len(took_least) :], took_least, strict=True)]
        # By columns: the engine's thread does it in each step with prompts, and number by number it takes longer.
        columns = [list(map(mul, factors, column)) for column in zip(*(parts for parts, _ in self._seen), strict=True)]
        target = list(map(mul, factors, (took for _, took in self._seen)))
        self._products = [[sum(map(mul, first, second)) for second in columns] for first in columns]
        self._sums = [sum(map(mul, column, target)) for column in columns]
        self._weighed = True

    def _took_least(self, fit: tuple[float, ...]) -> list[float]:
        """Of each that was seen: how long it took, or what this fit says at the pace of most where that is more."""
        expected = [_of(fit, parts) for parts, _ in self._seen]
        ratios = [took / by_fit for (_, took), by_fit in zip(self._seen, expected, strict=True) if by_fit > 0]
        pace = median_low(ratios) if ratios else 0.0
        return [max(took, by_fit * pace) for (_, took), by_fit in zip(self._seen, expected, strict=True)]

    def _fitted(self) -> tuple[float, ...]:
        """Least squares, no part below 0, and the step's own not above what is known: the best of all solutions in
        which some parts are 0, or the step's own is the most that it can be. None is better than the one with all parts
        free, which most often is one of these already."""
        most_s = self._most_step_s
        free = self._solved(tuple(range(PARTS)), 0.0)
        if free is not None and min(free) >= 0 and (most_s is None or free[0] <= most_s):
            return free
        solutions = [self._solved(kept, 0.0) for kept in _choices(range(PARTS)) if kept]
        if most_s is not None:
            solutions += [self._solved(kept, most_s) for kept in _choices(range(1, PARTS))]
        best, least = (0.0,) * PARTS, float("inf")
        for found in solutions:
            if found is None or min(found) < 0 or (most_s is not None and found[0] > most_s):
                continue
            if (error := self._error(found)) < least:
                best, least = found, error
        return best

    def _product(self, first: int, second: int) -> float:
        return self._products[first][second] * (1 + DOUBT if first == second and first > 0 else 1)

    def _error(self, costs: tuple[float, ...]) -> float:
        """Up to what is the same for all."""
        squares = sum(
            costs[first] * costs[second] * self._product(first, second)
            for first in range(PARTS)
            for second in range(PARTS)
        )
        return squares - 2 * sum(cost * part for cost, part in zip(costs, self._sums, strict=True))

    def _solved(self, kept: tuple[int, ...], step_s: float) -> tuple[float, ...] | None:
        """By elimination, in numbers of like size; None: it has no one answer. `step_s`: the step's own part, where it
        is not one of those that are looked for."""
        sizes = [self._product(one, one) ** 0.5 for one in kept]
        if not all(sizes):
            return None
        rows = [
            [self._product(one, other) / (size * across) for other, across in zip(kept, sizes, strict=True)]
            + [(self._sums[one] - step_s * self._product(one, 0)) / size]
            for one, size in zip(kept, sizes, strict=True)
        ]
        for at in range(len(kept)):
            pivot = max(range(at, len(kept)), key=lambda one: abs(rows[one][at]))
            rows[at], rows[pivot] = rows[pivot], rows[at]
            if abs(rows[at][at]) < 1e-9:
                return None
            for below in range(len(kept)):
                if below != at:
                    share = rows[below][at] / rows[at][at]
                    rows[below] = [one - share * other for one, other in zip(rows[below], rows[at], strict=True)]
        found = [step_s] + [0.0] * (PARTS - 1)
        for at, (one, size) in enumerate(zip(kept, sizes, strict=True)):
            found[one] = rows[at][-1] / rows[at][at] / size
        return tuple(found)


def _of(fit: tuple[float, ...], parts: tuple[float, ...]) -> float:
    return fit[0] * parts[0] + fit[1] * parts[1] + fit[2] * parts[2]


def _choices(parts: Iterable[int]) -> list[tuple[int, ...]]:
    """Of these, any number."""
    found = list(parts)
    return [kept for count in range(len(found) + 1) for kept in combinations(found, count)]
