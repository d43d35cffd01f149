"""The part of a traffic file that trials replay: its busiest stretch, at a pace, repeated where the file is short.

Every trial of one pace gets the same requests at the same times, so that trials can be compared. A pace may climb
during a replay: at a constant one that is near what a server can do, a tenth of that decides over most requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from holdfast.bench.load.load import Arrival


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
    """What comes within so many seconds of a replay at that speed, which climbs evenly to `climb` times that; a file
    that is shorter begins again."""
    of_traffic_s = seconds * speed * (1 + climb) / 2
    found = busiest(arrivals, of_traffic_s)
    span = found[-1].at_s
    whole = span + span / max(1, len(found) - 1) if span else of_traffic_s  # With the pause before the first again.
    growth = (climb - 1) / seconds

    def reached_s(at_s: float) -> float:
        """When the replay is at that moment of the traffic: at_s = speed * (t + growth * t^2 / 2), solved for t."""
        return 2 * at_s / speed / (1 + math.sqrt(1 + 2 * growth * at_s / speed))

    again = (
        Arrival(reached_s(one.at_s + turn * whole), one.prompt_tokens, one.output_tokens)
        for turn in itertools.count()
        for one in found
    )
    return tuple(itertools.takewhile(lambda one: one.at_s < seconds, again))
