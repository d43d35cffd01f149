"""What the server did at each arrival rate of a search, and the highest that it kept: the knee, in requests a second.

    seconds   ┤            ╱   beyond the knee each request waits longer than the one before:
    that a    │          ╱     answered/s = offered/s / (1 + the slope of this line)
    request   │ ●●●●●●●╱
    takes     └──────────────  when it was to be sent

The slope and not answers counted by the clock: those come later than what they answer, and lengths differ. Reads one
step of a search, of which everything was answered; sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.measure.figures import LATE_S, LATE_SHARE, Figures, Percentiles, figures, latencies
from holdfast.bench.measure.load_points import judged_as
from holdfast.bench.measure.objectives import Objective

SETTLING_SHARE = 0.2
"""Of a step, at its beginning: the server was idle, and its first requests have it for themselves."""
BLOCKS, FEWEST_BLOCKS = 8, 4
"""Neighbours that waited behind the same burst are alike, so that means of blocks of them are looked at."""
KEPT_SHARE = 0.95
"""Of what was offered: a server that answers less falls behind."""
CHANCE = 3
"""Standard errors by which the slope must be above 0: lengths and arrivals are random."""


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    rate: float
    """Requests a second, as asked."""
    seconds: float
    requests: int
    failed: int
    offered_per_s: float
    """As drawn."""
    answered_per_s: float | None
    """None: of too few."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    meets_slo: bool | None
    """None: nothing is promised."""
    missed: str
    """Why the server did not keep this rate; empty: it did."""


def rate_point(
    answers: Sequence[TimedAnswer],
    rate: float,
    span_s: tuple[float, float],
    *,
    objectives: tuple[Objective, ...] = (),
    error_share: float = 0.0,
    limited_client: bool = False,
) -> RatePoint:
    """`span_s`: in which requests were sent; what came after it is of them too. `limited_client`: it was told to send
    no more than so many at once, and is late for that reason."""
    begin_s, end_s = span_s
    sent = [answer for answer in answers if begin_s <= answer.intended_s <= end_s]
    found = figures(answers, begin_s, math.nextafter(end_s, math.inf))
    offered = len(sent) / (end_s - begin_s)
    slope = _slope([one for one in sent if one.good and one.intended_s >= begin_s + SETTLING_SHARE * (end_s - begin_s)])
    answered = None if slope is None else offered / (1 + slope)
    late = _missed_objective(latencies([one for one in sent if one.good]), objectives)
    missed = ""
    if found.failed > error_share * found.requests:
        missed = f"{found.failed:,} of {found.requests:,} requests failed"
    elif late:
        missed = f"missed the SLO, {late}"
    elif answered is not None and answered < KEPT_SHARE * offered:
        missed = f"the backlog grew, {answered:.3g} of {offered:.3g} requests/s were answered"
    if missed and not limited_client and _client_was_late(found):
        missed += ", but the client itself was late, so that the knee may be higher: more --workers, or cores free"
    return RatePoint(
        rate=rate,
        seconds=end_s - begin_s,
        requests=found.requests,
        failed=found.failed,
        offered_per_s=offered,
        answered_per_s=answered,
        output_tokens_per_s=found.output_tokens_per_s,
        ttft_p50_s=found.ttft.p50 if found.ttft else None,
        ttft_p99_s=found.ttft.p99 if found.ttft else None,
        itl_p50_s=found.itl.p50 if found.itl else None,
        itl_p99_s=found.itl.p99 if found.itl else None,
        meets_slo=not late and not found.failed if objectives else None,
        missed=missed,
    )


def _slope(good: Sequence[TimedAnswer]) -> float | None:
    """By how many seconds a request takes longer than one that was to be sent a second before it; 0: not surely."""
    blocks = min(BLOCKS, len(good) // 2)
    if blocks < FEWEST_BLOCKS:
        return None
    ordered = sorted((answer.intended_s, answer.end_s - answer.intended_s) for answer in good)
    due, took = np.array([block.mean(axis=0) for block in np.array_split(np.array(ordered), blocks)]).T
    due = due - due.mean()
    spread = float((due * due).sum())
    if not spread:
        return None
    slope = float((due * took).sum()) / spread
    rest = took - took.mean() - slope * due
    error = math.sqrt(float((rest * rest).sum()) / (blocks - 2) / spread)
    return slope if slope > CHANCE * error else 0.0


def _client_was_late(found: Figures) -> bool:
    lag, ttft = found.lag, found.ttft
    return lag is not None and ttft is not None and lag.p99 > max(LATE_S, LATE_SHARE * ttft.p50)


def _missed_objective(waits: dict[str, Percentiles | None], objectives: tuple[Objective, ...]) -> str:
    for objective in objectives:
        found = waits[judged_as(objective.metric)]
        value = None if found is None else found.at(objective.percentile)
        if value is None or value > objective.seconds:
            measured = "nothing" if value is None else f"{1e3 * value:.1f} ms"
            return f"{objective.metric} {objective.percentile.replace('_', '.')} {measured}"
    return ""


def kept(points: Sequence[RatePoint]) -> RatePoint | None:
    """The highest before one that was missed; None: not even the lowest."""
    found = None
    for point in points:
        if point.missed:
            break
        found = point
    return found


def rate_knee(points: Sequence[RatePoint]) -> RatePoint | None:
    """The highest that was kept where the next was not; None: the search never got there, or began beyond it."""
    return kept(points) if points and points[-1].missed else None


def knee_words(points: Sequence[RatePoint]) -> str:
    """Empty where not even the lowest was kept, which is a check of its own."""
    safe = kept(points)
    if safe is None:
        return ""
    last = points[-1]
    if not last.missed:
        return f"no knee up to {last.rate:g} requests/s"
    return f"knee at {safe.rate:g} requests/s (at {last.rate:g}: {last.missed})"
