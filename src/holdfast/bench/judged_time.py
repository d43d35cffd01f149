"""Which time of a run the verdict is of, and how many requests at once are safe by it: one judgement, since moments
with so many under way may say otherwise than all of the time that was spent at them.

    by moments   points of load_points: safe up to some number at once
    as a whole   the peak, or the step of a search: it keeps its promises, or the safe number is lower
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import PEAK, span
from holdfast.bench.measure.figures import figures, mean_in_flight
from holdfast.bench.measure.load_points import LoadPoint, edge_of, safe_point
from holdfast.bench.measure.verdict import Allowed, promises_kept
from holdfast.units import counted

Span = tuple[float, float]


class JudgedTime(NamedTuple):
    level: float | None
    """Of a search for the knee: so many at once, or so many requests a second. None: this is no such search."""
    span_s: Span
    safe: LoadPoint | None
    """None: nothing is."""
    missed_at: float | None
    """At so many at once promises were missed as a whole."""


def judged_time(
    load: Load,
    allowed: Allowed,
    answers: Sequence[TimedAnswer],
    points: Sequence[LoadPoint],
    run_s: Span,
    *,
    steps: Sequence[int] = (),
    rate: float | None = None,
    interrupted_s: float | None = None,
) -> JudgedTime:
    """`answers`: those that `points` are of. `run_s`: its start and its last answer. `steps`, `rate`: of a search for
    the knee the levels, or the rate that is judged. Of levels the highest that is safe is, or else the lowest."""
    safe, missed_at = safe_point(points), None
    while True:
        most = 0 if safe is None else safe.at_once
        level = max((step for step in steps if step <= most), default=steps[0]) if steps else rate
        span_s = _span(load, level, run_s, interrupted_s)
        if rate is not None or not points:
            return JudgedTime(level, span_s, safe, None)
        kept = promises_kept(figures(answers, *span_s), allowed)
        at_once = float(level or mean_in_flight(answers, np.array(span_s))[0])
        if kept is False:
            # Where the load is not held at one level, what was missed may have been missed by its highest alone.
            missed_at = at_once if steps or _is_level(load) else points[-1].at_once
        safe = safe_point(points, kept_at=at_once if kept else None, missed_at=missed_at)
        if kept is not False or not steps or level == steps[0]:
            return JudgedTime(level, span_s, safe, missed_at)


def safe_reason(points: Sequence[LoadPoint], judged: JudgedTime, *, promised: bool) -> str:
    safe = judged.safe
    if not points:
        return "too few requests were answered to tell"
    if safe is None:
        return f"not even {points[0].at_once} at once {'kept the SLO' if promised else 'went without an error'}"
    failed = sum(point.failed for point in points if point.at_once <= safe.at_once)
    errors = f"with {counted(failed, 'error')}" if failed else "without an error"
    kept = f"kept the SLO {errors}" if promised else errors
    if safe is points[-1]:
        return f"the most that was tried, {kept}"
    after = points[points.index(safe) + 1]
    if after.failed:
        why = "had errors"
    elif after.meets_slo is False:
        why = "missed the SLO"
    elif judged.missed_at is not None and after.at_once >= edge_of(judged.missed_at):
        why = "missed the SLO as a whole" if promised else "had errors as a whole"
    else:
        why = "brought no more tokens/s"
    return f"{kept}; {after.at_once} at once {why}"


def _span(load: Load, level: float | None, run_s: Span, interrupted_s: float | None) -> Span:
    """The peak; of a search for the knee one level; else all of it."""
    start_s, last_s = run_s
    # The last answer is within.
    begin_s, end_s = start_s, math.nextafter(max(last_s, start_s + 1e-3), math.inf)
    if level is not None or _has_peak(load):
        begin_s, end_s = (start_s + at_s for at_s in span(load.phases, PEAK if level is None else f"{level:g}"))
    if interrupted_s is not None:
        end_s = min(end_s, interrupted_s)
        begin_s = begin_s if begin_s < last_s else start_s  # It did not get as far as what is judged.
    return begin_s, end_s


def _has_peak(load: Load) -> bool:
    """That ends by the clock."""
    peak = next((phase for phase in load.phases if phase.name == PEAK), None)
    return load.loop != "replay" and load.requests is None and peak is not None and math.isfinite(peak.seconds)


def _is_level(load: Load) -> bool:
    """As many are under way all the time that is judged."""
    return load.loop == "closed" and _has_peak(load)
