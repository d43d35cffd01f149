"""Two runs side by side: by how much the second differs, with an interval that says how sure that is.

    requests and seconds of each run, in blocks of neighbours ─► drawn anew many times ─► 99% of the differences

Neighbours in time are alike, so blocks of them are drawn and not single ones; 99% and not 95%, because several figures
are looked at. Where the interval holds 0 there is no difference that these runs can show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from holdfast.bench.measure.figures import Floats
from holdfast.bench.measure.objectives import limits
from holdfast.bench.measure.samples import prefix_hit_share
from holdfast.bench.result import BenchResult, RequestColumns

DRAWS, CONFIDENCE = 1000, 0.99
CACHED_APART = 0.05
"""Share of prompt tokens by which prefix caches may differ: what is found there is not computed."""
LEAST_BEYOND = 10
"""So many values must lie beyond a percentile for it to be compared: P99 needs 1,000."""

ONE_RUN_EACH = (
    "one run of each: the intervals do not cover what differs from run to run; repeat both, in turns (A B A B),"
    " before you believe a small difference"
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of B against A; shares of A."""

    name: str
    a: float
    b: float
    change: float
    low: float
    high: float
    higher_is_better: bool
    verdict: str
    """better, worse, or no difference."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    a: str
    b: str
    differences: list[Difference]
    alike: bool
    """No figure differs, and there were requests enough for medians."""
    left_out: list[str]
    """Figures with too few values."""
    warnings: list[str]


def compare(a: BenchResult, b: BenchResult, *, names: tuple[str, str] = ("A", "B"), seed: int = 0) -> Comparison:
    draw = np.random.default_rng(seed)
    found, left_out = list[Difference](), list[str]()
    promised = limits(tuple(a.slo)) if _same_slo(a, b) else None
    mine, theirs = _values(a, promised), _values(b, promised)
    for kind, ranks in _FIGURES.items():
        if kind not in mine:
            continue
        first, second = mine[kind], theirs[kind]
        fewest = min(len(first), len(second))
        if kind == _GOODPUT:  # Of bins of time there are enough however few requests are in them.
            fewest = min(fewest, len(mine[_ANSWERED]), len(theirs[_ANSWERED]))
        kept = [rank for rank in ranks if fewest * (100 - (rank or 50)) / 100 >= LEAST_BEYOND and first.any()]
        left_out += [_name(kind, rank) for rank in ranks if rank not in kept]
        if kept:
            drawn = [_drawn_anew(values, kept, draw) for values in (first, second)]
            found += [
                _difference(kind, rank, first, second, drawn[1][at] / np.maximum(drawn[0][at], 1e-12) - 1)
                for at, rank in enumerate(kept)
            ]
    return Comparison(
        a=names[0],
        b=names[1],
        differences=found,
        alike=_MEDIAN not in left_out and all(one.verdict == "no difference" for one in found),
        left_out=left_out,
        warnings=list(_warnings(a, b)),
    )


_ANSWERED, _GOODPUT = "answered", "good requests/s"
_FIGURES: dict[str, tuple[float | None, ...]] = {
    _ANSWERED: (None,),
    _GOODPUT: (None,),
    "output tokens/s": (None,),
    "ttft": (50, 99),
    "tpot": (50, 99),
    "e2e": (50, 99),
}
"""Percentiles of each kind of values; None: their mean, of which more is better."""
_MEDIAN = "e2e p50"


def _name(kind: str, rank: float | None) -> str:
    return kind if rank is None else f"{kind} p{rank:g}"


def _same_slo(a: BenchResult, b: BenchResult) -> bool:
    """In whatever order it was said."""
    return {*map(msgspec.structs.astuple, a.slo)} == {*map(msgspec.structs.astuple, b.slo)}


def _values(result: BenchResult, promised: dict[str, float] | None) -> dict[str, Floats]:
    """Of requests sent within what is judged, in their order; tokens and goodput by bins of time. `promised`: the most
    seconds of a request; None: there is no goodput that both runs have."""
    begin, end = result.window_s
    columns, line = result.requests, result.timeline
    asked = [at for at, due in enumerate(columns.intended_s) if begin <= due < end and not columns.cancelled[at]]
    chosen = [at for at in asked if not columns.error[at]]
    places = [
        place
        for place in range(len(line.output_tokens_per_s))
        if begin <= place * line.bin_s and (place + 1) * line.bin_s <= end
    ]
    found: dict[str, list[Any]] = {
        _ANSWERED: [float(not columns.error[at]) for at in asked],
        "output tokens/s": [line.output_tokens_per_s[place] for place in places],
        "ttft": [columns.ttft_s[at] for at in chosen],
        "tpot": [columns.tpot_s[at] for at in chosen],
        "e2e": [columns.end_s[at] - columns.sent_s[at] for at in chosen],
    }
    if promised is not None:
        ends = [columns.end_s[at] for at in range(len(columns.end_s)) if _good(columns, at, promised)]
        bins = (np.array(ends, dtype=np.float64) / line.bin_s).astype(np.int64)
        counts = np.bincount(bins, minlength=len(line.output_tokens_per_s))
        found[_GOODPUT] = [counts[place] / line.bin_s for place in places]
    return {name: np.array([value for value in values if value is not None]) for name, values in found.items()}


def _good(columns: RequestColumns, at: int, promised: dict[str, float]) -> bool:
    """As goodput is counted: from when the request was to be sent."""
    first = columns.ttft_s[at]
    if columns.error[at] or columns.cancelled[at] or first is None:
        return False
    waited = {
        "ttft": columns.sent_s[at] + first - columns.intended_s[at],
        "itl": columns.tpot_s[at] or 0.0,
        "e2e": columns.end_s[at] - columns.intended_s[at],
    }
    return all(waited[name] <= most for name, most in promised.items())


def _difference(kind: str, rank: float | None, first: Floats, second: Floats, changes: Floats) -> Difference:
    a, b = (float(values.mean() if rank is None else np.percentile(values, rank)) for values in (first, second))
    low, high = (float(edge) for edge in np.quantile(changes, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
    better = rank is None
    if low <= 0 <= high:
        verdict = "no difference"
    else:
        verdict = "better" if (low > 0) == better else "worse"
    change = b / max(a, 1e-12) - 1
    return Difference(
        name=_name(kind, rank), a=a, b=b, change=change, low=low, high=high, higher_is_better=better, verdict=verdict
    )


def _drawn_anew(values: Floats, ranks: Sequence[float | None], draw: np.random.Generator) -> list[Floats]:
    """Of each rank, its value in each of many samples of whole blocks. A sample is kept as how often each value is in
    it, so that values are sorted once."""
    count, size = len(values), max(1, int(len(values) ** 0.5))
    order = np.argsort(values)
    ordered = values[order]
    found = [np.empty(DRAWS) for _ in ranks]
    for at in range(DRAWS):
        starts = draw.integers(0, count - size + 1, -(-count // size))
        steps = np.bincount(starts, minlength=count + 1) - np.bincount(starts + size, minlength=count + 1)
        times = np.cumsum(steps)[:count]
        below = np.cumsum(times[order])
        for place, rank in zip(found, ranks, strict=True):
            if rank is None:
                place[at] = float((times * values).sum() / below[-1])
            else:
                place[at] = ordered[np.searchsorted(below, rank / 100 * below[-1])]
    return found


def _warnings(a: BenchResult, b: BenchResult) -> Iterator[str]:
    ignored = ("words_per_token", "template_tokens", "workers")
    for name in a.load.keys() & b.load.keys():  # A file of an earlier version has not all of them.
        if name not in ignored and a.load.get(name) != b.load.get(name):
            yield f"the loads differ: {name} is {_said(a.load.get(name))} and {_said(b.load.get(name))}"
    if not _same_slo(a, b):
        yield f"the SLOs differ, and goodput is not compared: {_slo(a)} and {_slo(b)}"
    yield from _cached_apart(a, b)
    for word, result in (("A", a), ("B", b)):
        client = next((check for check in result.verdict.checks if check.name == "client" and not check.passed), None)
        if client is not None:
            yield f"{word}: {client.reason}"
        if result.peak.failed:
            yield (
                f"{word}: {result.peak.failed:,} of {result.peak.requests:,} requests failed, and failures are in none"
                " of the latencies"
            )


def _cached_apart(a: BenchResult, b: BenchResult) -> Iterator[str]:
    """Where one cache was warm and the other cold, times tell of that and not of the servers."""
    first, second = _cached_share(a), _cached_share(b)
    if abs((first or 0.0) - (second or 0.0)) < CACHED_APART:
        return
    if first is None or second is None:
        word, share, other = ("A", first, "B") if second is None else ("B", second, "A")
        yield (
            f"prefix caches cannot be compared: of prompt tokens {word} had {share:.0%} cached, {other} does not"
            " tell; run both cold (a restart, or a --seed that neither server had before)"
        )
        return
    yield (
        f"the prefix caches differ: of prompt tokens A had {first:.0%} cached, B {second:.0%}; run both cold (a"
        " restart, or a --seed that neither server had before) or both warm"
    )


def _cached_share(result: BenchResult) -> float | None:
    """Of prompt tokens, as answers or else the server's counters tell; None: neither does."""
    if result.peak.cached_tokens is not None:
        return result.peak.cached_tokens / max(1, result.peak.prompt_tokens)
    return prefix_hit_share(result.samples)


def _slo(result: BenchResult) -> str:
    said = [f"{one.metric}.{one.percentile.replace('_', '.')}={1e3 * one.seconds:g}ms" for one in result.slo]
    return ",".join(said) or "none"


def _said(value: object) -> str:
    return "not set" if value is None else str(value)


def compare_lines(found: Comparison) -> Iterator[str]:
    yield f"A  {found.a}"
    yield f"B  {found.b}"
    yield ""
    if found.differences:
        yield f"{'':<18}{'A':>14}{'B':>14}{'B against A':>14}   99% interval"
    for one in found.differences:
        scale, unit = (1.0, "") if one.higher_is_better else (1e3, " ms")
        values = "".join(
            f"{value:>14.2%}" if one.name == _ANSWERED else f"{value * scale:>{14 - len(unit)},.2f}{unit}"
            for value in (one.a, one.b)
        )
        yield f"{one.name:<18}{values}{one.change:>+14.1%}   {one.low:+.1%} to {one.high:+.1%}: {one.verdict}"
    if found.left_out:
        yield (
            "not compared, of too few requests (P99 needs 1,000, a median 20) or of none at all in A:"
            f" {', '.join(found.left_out)}"
        )
    for warning in sorted(found.warnings):
        yield f"note: {warning}"
    if found.differences:
        yield f"note: {ONE_RUN_EACH}"
    yield ""
    if not found.differences:
        yield "nothing to compare: both runs need at least 20 requests answered at peak"
    elif found.alike:
        yield "no difference: every interval holds 0; a longer run could show a smaller one"
    else:
        words = ", ".join(f"{one.name} {one.verdict}" for one in found.differences if one.verdict != "no difference")
        yield f"B differs from A: {words}"
