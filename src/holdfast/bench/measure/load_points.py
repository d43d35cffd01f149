"""What the server did at each number of requests at once, and where more of them bring no more: the knee.

    tokens/s ┤      ●──●──●    beyond the knee requests only wait
             │    ●╱            a point: the moments of the run with about so many under way,
             │  ●╱              and the requests that were sent in them
             └──┴──┴──┴──┴──    requests at once

Reads one run, whether its load rose in steps or in a line.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.measure.figures import latencies, mean_in_flight, tokens_between
from holdfast.bench.measure.objectives import Objective

BINS = 120
LONGEST_BIN_S = 1.0
LEAST_REQUESTS = 5
FULL_SHARE = 0.9
"""Of the highest throughput: from there on it counts as reached."""
EDGES = sorted({round(base * (1 << power)) for power in range(15) for base in (1, 1.5)})


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    at_once: int
    """At most so many, and more than the point before."""
    seconds: float
    requests: int
    failed: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    meets_slo: bool | None
    """None: nothing is promised."""


def load_points(answers: Sequence[TimedAnswer], objectives: tuple[Objective, ...] = ()) -> list[LoadPoint]:
    if not answers:
        return []
    begin, end = min(answer.sent_s for answer in answers), max(answer.sent_s for answer in answers)
    width = min(LONGEST_BIN_S, max(1e-3, (end - begin) / BINS))
    edges = np.arange(begin, end + width, width)
    at_once = mean_in_flight(answers, edges)
    tokens = tokens_between(answers, edges)
    classes = [bisect.bisect_left(EDGES, round(count)) for count in at_once]
    by_class: dict[int, list[int]] = {}
    for place, found in enumerate(classes):
        by_class.setdefault(found, []).append(place)
    asked: dict[int, list[TimedAnswer]] = {}
    for answer in answers:
        place = min(len(classes) - 1, int((answer.sent_s - begin) / width))
        asked.setdefault(classes[place], []).append(answer)
    points = []
    for found, places in sorted(by_class.items()):
        sent = asked.get(found, [])
        if len(sent) < LEAST_REQUESTS:
            continue
        points.append(_point(EDGES[found], len(places) * width, float(tokens[places].sum()), sent, objectives))
    return points


def until_it_ended(answers: Sequence[TimedAnswer]) -> Sequence[TimedAnswer]:
    """Without requests to a server that was not there any more: they say nothing of how many at once are too many."""
    last_s = max((answer.end_s for answer in answers if answer.good), default=0.0)
    return [answer for answer in answers if answer.sent_s <= last_s]


def _point(
    at_once: int, seconds: float, tokens: float, sent: list[TimedAnswer], objectives: tuple[Objective, ...]
) -> LoadPoint:
    waits = latencies([answer for answer in sent if answer.good])
    ttft, itl = waits["ttft"], waits["itl"]
    failed = sum(bool(answer.error) for answer in sent)
    met = all(
        (found := waits[judged_as(objective.metric)]) is not None
        and found.at(objective.percentile) <= objective.seconds
        for objective in objectives
    )
    return LoadPoint(
        at_once=at_once,
        seconds=seconds,
        requests=len(sent),
        failed=failed,
        output_tokens_per_s=tokens / seconds,
        ttft_p50_s=ttft.p50 if ttft else None,
        ttft_p99_s=ttft.p99 if ttft else None,
        itl_p50_s=itl.p50 if itl else None,
        itl_p99_s=itl.p99 if itl else None,
        meets_slo=met and not failed if objectives else None,
    )


def judged_as(metric: str) -> str:
    """What a user waits for counts from when the request was to be sent."""
    return {"ttft": "ttft_intended", "e2e": "e2e_intended"}.get(metric, metric)


def knee(points: Sequence[LoadPoint]) -> LoadPoint | None:
    """The first that reaches nearly all of the throughput, where there are points well beyond it; None: the load never
    got there."""
    if len(points) < 2:
        return None
    most = max(point.output_tokens_per_s for point in points)
    first = next(point for point in points if point.output_tokens_per_s >= FULL_SHARE * most)
    return first if points[-1].at_once >= 1.5 * first.at_once else None


def safe_point(
    points: Sequence[LoadPoint], *, kept_at: float | None = None, missed_at: float | None = None
) -> LoadPoint | None:
    """The highest that counts as safe: where all up to it kept every promise without an error and all beyond it did
    not, with the fewest requests that say otherwise, since a moment of other work proves nothing. Without promises it
    is not beyond the knee. None: not even the lowest.

    `kept_at`, `missed_at`: requests at once of the time that the verdict is of, which kept its promises or missed them:
    whatever moments say, so do all points up to there, or from there on."""
    kept_up_to = 0.0 if kept_at is None else edge_of(kept_at)
    missed_from = math.inf if missed_at is None else edge_of(missed_at)
    bad = [
        point.at_once >= missed_from
        or ((bool(point.failed) or point.meets_slo is False) and point.at_once > kept_up_to)
        for point in points
    ]
    doubt = sum(point.requests for point, missed in zip(points, bad, strict=True) if not missed)
    least, safe = doubt, None
    for point, missed in zip(points, bad, strict=True):
        doubt += point.requests if missed else -point.requests
        if doubt < least:
            least, safe = doubt, point
    turn = knee(points)
    promised = any(point.meets_slo is not None for point in points)
    return turn if safe and turn and not promised and turn.at_once < safe.at_once else safe


def edge_of(at_once: float) -> float:
    """Of the point that so many at once are in."""
    return EDGES[bisect.bisect_left(EDGES, round(at_once))]
