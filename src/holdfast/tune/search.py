"""Which configuration to measure next: a Gaussian process over the ladders of settings, and the largest expected
improvement. Pure: values come in, places go out.

    measured ● ─► mean and deviation of every place ─► expected improvement over the best ─► next ●

Neighbours on a ladder are alike, so that a few runs tell something of many places; each value is taken as noisy. A
server that died says nothing of how fast its neighbours are, only that they may die too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Point = tuple[int, ...]
ALIKE_STEPS = 1.6
"""On a ladder: values so many steps apart have little to do with each other."""
NOISE = 0.03
"""Share of a value that two runs of the same differ by."""
MOST_NOISE = 2.0
"""Of all that values differ by: where equal runs differ by more, no run says anything."""
LEAST_SPREAD = 0.1
"""Share of the mean that places which were not tried may differ by, even where all that were tried are alike."""
WORTH = 0.001
"""Share of the best: less expected improvement is not worth a run."""
OF_ITS_OWN = 0.5
"""Share of what a place that was measured differs by, which its neighbours know nothing of: or what was measured there
often would still be taken for what they are."""
SURE, LEAST_CHANCE = 0.1, 0.05
"""Of a server that died, how far it is taken for chance; and of any that was not tried, that it lives."""
FIRST_STEPS = 2
"""Before anything is modelled, each axis is looked at so many steps up and down from the default."""
LEADERS = 2
"""Best values, around which each axis is looked at as well before a search ends: one of them may be luck."""
FEWEST = 5
"""Runs before it may be said that no other is worth one."""


def search(
    points: Sequence[Point],
    same_as: Mapping[Point, int],
    measure: Callable[[int], float | None],
    more: Callable[[], bool],
    *,
    known: Mapping[int, float | None],
    scatter: Callable[[], float] = lambda: 0.0,
    cannot_beat: Callable[[int, float], bool] = lambda place, best: False,
) -> str:
    """`measure`: the value of a place, None: the server died; `more`: there is time for another; `known`: what was
    measured already, the default, place 0, among it; `scatter`: the standard deviation of a value, as far as it is
    known. Returns why it ended."""
    values = dict(known)
    ruled_out: set[int] = set()
    waiting = _around(points, same_as, points[0])
    while True:
        left = [place for place in range(len(points)) if place not in values and place not in ruled_out]
        best = max((value for value in values.values() if value is not None), default=0.0)
        slow = {place for place in left if cannot_beat(place, best)}
        ruled_out |= slow
        left = [place for place in left if place not in slow]
        if not left:
            return "every configuration that was left had been measured"
        if not more():
            return "the time for the search was up"
        waiting = [place for place in waiting if place in left]
        if waiting:
            place = waiting.pop(0)
        else:
            place, improvement = _most_promising(points, values, left, scatter())
            if best > 0 and improvement < WORTH * best and len(values) >= FEWEST:
                # What is worse beside the default may be better beside these: neighbours do not tell.
                leaders = sorted(values, key=lambda one: values[one] or 0.0, reverse=True)[:LEADERS]
                near = dict.fromkeys(one for leader in leaders for one in _around(points, same_as, points[leader]))
                waiting = [one for one in near if one in left]
                if not waiting:
                    return f"no other was expected to be {WORTH:.1%} better"
                place = waiting.pop(0)
        values[place] = measure(place)


def _around(points: Sequence[Point], same_as: Mapping[Point, int], start: Point) -> list[int]:
    """On each axis alone, some steps below and above this one."""
    found = list[int]()
    for axis in range(len(start)):
        for step in (-FIRST_STEPS, FIRST_STEPS):
            nearest = range(step, 0, 1 if step < 0 else -1)
            tried = ((*start[:axis], start[axis] + away, *start[axis + 1 :]) for away in nearest)
            place = next((same_as[point] for point in tried if point in same_as), None)
            if place is not None and place not in found and points[place] != start:
                found.append(place)
    return found


def smoothed(
    points: Sequence[Point], measured: Sequence[tuple[int, float | None]], scatter: float = 0.0
) -> dict[int, float]:
    """Of each place that was measured and lived, perhaps several times, what its neighbours make of it: the highest of
    many noisy values is high by luck too."""
    alive = [(place, value) for place, value in measured if value is not None]
    if not alive:
        return {}
    scale = _Scale([value for _, value in alive], scatter)
    at = np.array([points[place] for place, _ in alive], dtype=np.float64)
    means, _ = posterior(at, scale.heights, at, noise=scale.noise, own=OF_ITS_OWN)
    return {place: scale.value(float(mean)) for (place, _), mean in zip(alive, means, strict=True)}


def spread_of_repeats(measured: Sequence[tuple[Hashable, float]]) -> float:
    """The standard deviation of values of the same place, over all places; 0 where none was measured twice."""
    by_place: dict[Hashable, list[float]] = {}
    for place, value in measured:
        by_place.setdefault(place, []).append(value)
    freedom = len(measured) - len(by_place)
    squares = sum((value - sum(values) / len(values)) ** 2 for values in by_place.values() for value in values)
    return math.sqrt(squares / freedom) if freedom else 0.0


class _Scale:
    """Values as deviations from their mean."""

    def __init__(self, values: Sequence[float], scatter: float) -> None:
        self._mean = float(np.mean(values))
        self.spread = max(float(np.std(values)), LEAST_SPREAD * abs(self._mean), 1e-9)
        usual = min(0.5, max(0.05, NOISE * abs(self._mean) / self.spread))
        self.noise = max(usual, min(MOST_NOISE, scatter / self.spread))
        self.heights = (np.array(values) - self._mean) / self.spread

    def value(self, height: float) -> float:
        return self._mean + height * self.spread


def _most_promising(
    points: Sequence[Point], values: Mapping[int, float | None], left: Sequence[int], scatter: float
) -> tuple[int, float]:
    tried = np.array([points[place] for place in values], dtype=np.float64)
    asked = np.array([points[place] for place in left], dtype=np.float64)
    died = np.array([float(value is None) for value in values.values()])
    if died.all():  # As far as can be from all that died.
        apart = [min(math.dist(points[place], points[other]) for other in values) for place in left]
        return left[int(np.argmax(apart))], math.inf
    lives = np.clip(1.0 - posterior(tried, died, asked, noise=SURE)[0], LEAST_CHANCE, 1.0)
    scale = _Scale([value for value in values.values() if value is not None], scatter)
    measured = tried[died == 0]
    means, deviations = posterior(measured, scale.heights, asked, noise=scale.noise)
    best = float(np.max(posterior(measured, scale.heights, measured, noise=scale.noise)[0]))
    improvement = lives * _expected_improvement(means, deviations, best)
    place = int(np.argmax(improvement))
    return left[place], float(improvement[place]) * scale.spread


def posterior(
    measured: Floats, heights: Floats, asked: Floats, *, noise: float, own: float = 0.0
) -> tuple[Floats, Floats]:
    """Mean and standard deviation of a Gaussian process with unit variance."""
    among = _alike(measured, measured, own) + noise**2 * np.eye(len(measured))
    across = _alike(asked, measured, own)
    solved = np.linalg.solve(among, across.T)
    means = heights @ solved
    variances = 1.0 - np.einsum("ij,ji->i", across, solved)
    return means, np.sqrt(np.maximum(variances, 1e-12))


def _alike(some: Floats, others: Floats, own: float) -> Floats:
    squares = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    return np.asarray((1 - own) * np.exp(-squares / (2 * ALIKE_STEPS**2)) + own * (squares == 0))


def _expected_improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    away = (means - best) / deviations
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in away])
    density = np.exp(-(away**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(deviations * (away * below + density))
