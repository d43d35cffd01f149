"""How load rises and falls over a run: phases, and the moments at which an open loop sends.

    level
      1 ┤     ┌───────────┐        a phase goes from one level to another in a straight line
        │    ╱             ╲       closed loop: level x concurrency requests at once
      0 ┼───╯               ╰──    open loop:   level x rate requests a second
            up    peak    down

Knows no server and no clock: seconds are counted from the start of the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

Arrivals = Literal["constant", "poisson", "bursts", "gamma"]

UP, PEAK, DOWN = "up", "peak", "down"


class Phase(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    start: float = 1.0
    end: float = 1.0


def default_profile(up_s: float, peak_s: float, down_s: float) -> tuple[Phase, ...]:
    phases = (Phase(UP, up_s, 0.0, 1.0), Phase(PEAK, peak_s), Phase(DOWN, down_s, 1.0, 0.0))
    return tuple(phase for phase in phases if phase.seconds > 0)


def steps_profile(levels: Sequence[float], seconds: float) -> tuple[Phase, ...]:
    """One phase a level, each a share of the highest, which is the last."""
    return tuple(Phase(f"{level:g}", seconds, level / levels[-1], level / levels[-1]) for level in levels)


def total_seconds(phases: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def span(phases: Sequence[Phase], name: str) -> tuple[float, float]:
    """When a phase begins and ends."""
    at = 0.0
    for phase in phases:
        if phase.name == name:
            return at, at + phase.seconds
        at += phase.seconds
    raise KeyError(name)


def level_at(phases: Sequence[Phase], at_s: float) -> float:
    """0 before the first phase and from the end on."""
    if at_s < 0:
        return 0.0
    for phase in phases:
        if at_s < phase.seconds:
            return phase.start + (phase.end - phase.start) * at_s / phase.seconds
        at_s -= phase.seconds
    return 0.0


def next_time_above(phases: Sequence[Phase], share: float, at_s: float) -> float | None:
    """The first moment from `at_s` on at which the level is above `share`; None: never again."""
    began = 0.0
    for phase in phases:
        ends = began + phase.seconds
        if at_s < ends:
            here = level_at(phases, max(at_s, began))
            if here > share:
                return max(at_s, began)
            if phase.end > share:  # It rises within this phase.
                rise = (share - phase.start) / (phase.end - phase.start) * phase.seconds
                return max(at_s, math.nextafter(began + rise, math.inf))
        began = ends
    return None


def arrival_times(
    phases: Sequence[Phase],
    rate: float,
    *,
    arrivals: Arrivals = "poisson",
    burst: int = 8,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Iterator[float]:
    """When an open loop sends. `rate`: a second, at level 1. Whatever the level, each arrival stands where the number
    that was expected until then has grown by its own draw: 1, exponential, gamma, or a whole burst."""
    draw = random.Random(seed)
    began, expected, due = 0.0, 0.0, 0.0
    gaps = _gaps(draw, arrivals, burst, burstiness)
    due = next(gaps)
    for phase in phases:
        start, end, seconds = phase.start * rate, phase.end * rate, phase.seconds
        whole = (start + end) / 2 * seconds if math.isfinite(seconds) else math.inf
        while due <= expected + whole:
            yield began + _moment(due - expected, start, end, seconds)
            due += next(gaps)
        began, expected = began + seconds, expected + whole


def _gaps(draw: random.Random, arrivals: Arrivals, burst: int, burstiness: float) -> Iterator[float]:
    if arrivals == "bursts":
        while True:
            yield float(burst)
            yield from [0.0] * (burst - 1)
    while True:
        if arrivals == "constant":
            yield 1.0
        elif arrivals == "poisson":
            yield draw.expovariate(1.0)
        else:
            yield draw.gammavariate(burstiness, 1.0 / burstiness)


def _moment(count: float, start: float, end: float, seconds: float) -> float:
    """Seconds into a phase until `count` arrivals are expected: start t + (end - start) t^2 / 2 seconds = count."""
    if start == end or not math.isfinite(seconds):
        return count / start
    bend = (end - start) / (2 * seconds)
    root = math.sqrt(max(0.0, start * start + 4 * bend * count))
    return min(seconds, 2 * count / (start + root))  # The form that does not cancel, for a start of 0 too.
