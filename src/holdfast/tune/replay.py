"""The part of a traffic file that trials replay: its busiest stretch, at a pace, repeated where the file is short.

Every trial of one pace gets the same requests at the same times, so that trials can be compared. A pace may climb
during a replay: at a constant one that is near what a server can do, a tenth of that decides over most requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from holdfast.bench.load.load import Arrival

LEVEL = 0.0625
"""Of a replay whose pace climbs, what goes at the pace that it climbs from."""


def busiest(arrivals: Sequence[Arrival], seconds: float) -> tuple[Arrival, ...]:
    """The stretch of so many seconds with the most tokens, its first request at 0; all where there is no more. The
    arrivals are in the order of their times."""
    tokens = [0, *itertools.accumulate(one.prompt_tokens + one.output_tokens for one in arrivals)]
    best, most, end = (0, 0), -1, 0
    for begin, first in enumerate(arrivals):
        while end < len(arrivals) and arrivals[end].at_s < first.at_s + seconds:
            end += 1
        if tokens[end] - tokens[begin] > most:
            best, most = (begin, end), tokens[end] - tokens[begin]
    chosen = arrivals[best[0] : best[1]]
    return tuple(Arrival(one.at_s - chosen[0].at_s, one.prompt_tokens, one.output_tokens) for one in chosen)


def replayed(arrivals: Sequence[Arrival], seconds: float, speed: float, climb: float = 1.0) -> tuple[Arrival, ...]:
    """What comes within so many seconds of a replay at that speed, which is kept for `LEVEL` of them and then climbs
    evenly to `climb` times that; a file that is shorter begins again."""
    level_s = LEVEL * seconds
    of_traffic_s = seconds * speed * _mean_pace(climb)
    found = busiest(arrivals, of_traffic_s)
    span = found[-1].at_s
    whole = span + span / max(1, len(found) - 1) if span else of_traffic_s  # With the pause before the first again.
    growth = (climb - 1) / (seconds - level_s)

    def reached_s(at_s: float) -> float:
        """When the replay is at that moment of the traffic: after the level part at_s = speed * (t + growth * t^2 / 2),
        solved for t."""
        beyond = at_s / speed - level_s
        return level_s + beyond if beyond <= 0 else level_s + 2 * beyond / (1 + math.sqrt(1 + 2 * growth * beyond))

    again = (
        Arrival(reached_s(one.at_s + turn * whole), one.prompt_tokens, one.output_tokens)
        for turn in itertools.count()
        for one in found
    )
    return tuple(itertools.takewhile(lambda one: one.at_s < seconds, again))


def _mean_pace(climb: float) -> float:
    """Of a whole replay, in units of the pace that it begins with."""
    return LEVEL + (1 - LEVEL) * (1 + climb) / 2 if climb != 1 else 1.0


def kept_per_s(in_time: float, requests: int, seconds: float, climb: float) -> float:
    """Requests a second that a server keeps up with, by how many of a replay's it answered in time: at a constant pace
    those themselves; at one that climbs, what it had climbed to when as many had come. There the number alone says
    too much: near the end a tenth more of the pace is a third more of the requests."""
    if not requests or climb == 1:
        return in_time / seconds
    begin_per_s = requests / (seconds * _mean_pace(climb))
    came = in_time / requests * _mean_pace(climb)
    if came <= LEVEL:
        return begin_per_s * came / LEVEL
    return begin_per_s * math.sqrt(1 + 2 * (climb - 1) * (came - LEVEL) / (1 - LEVEL))
