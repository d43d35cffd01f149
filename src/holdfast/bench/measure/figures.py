"""Figures of a run: percentiles of latencies, rates, errors by kind. Times come in on one clock; nothing is judged.

    ttft   from sending to the first token          tpot   of a request, its time after the first token, a token
    itl    between two events that carry tokens     e2e    from sending to the last token
    lag    what a request was sent later than it was to be

In an open loop `ttft_intended` and `e2e_intended` count from when the request was to be sent: what its user waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from holdfast.bench.client.answers import TimedAnswer

Floats = np.ndarray[Any, np.dtype[np.float64]]
Gaps = np.ndarray[Any, np.dtype[np.float32]]
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
GAP_BYTES = 4
BLOCK_EVENTS = 1 << 20
"""Of a run that may have tens of millions, so many are unfolded to a time and a weight each at once."""
LATE_S, LATE_SHARE = 0.02, 0.05
"""A generator is behind when its P99 is later than this, and than this share of the median time to a first token."""
NAMES = ("p50", "p90", "p95", "p99", "p99_9")


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float

    def at(self, name: str) -> float:
        return float(getattr(self, name))


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    count: int
    example: str
    """What the server said to the first of them."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that were to be sent within a span of time; rates are of what came within it."""

    seconds: float
    requests: int
    completed: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    counted_by: str
    """usage, events (the server gives no usage) or both."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests_per_s: float | None = None
    """Of those that met the SLO; None: there is none."""
    good_share: float | None = None
    peak_in_flight: int = 0
    ttft: Percentiles | None = None
    itl: Percentiles | None = None
    tpot: Percentiles | None = None
    e2e: Percentiles | None = None
    lag: Percentiles | None = None
    ttft_intended: Percentiles | None = None
    e2e_intended: Percentiles | None = None
    errors: list[ErrorKind] = []


def percentiles(values: Sequence[float] | Floats | Gaps) -> Percentiles | None:
    found = np.asarray(values)
    if not len(found):
        return None
    ranks = np.percentile(found, PERCENTILES)
    return Percentiles(
        count=len(found),
        mean=float(found.mean(dtype=np.float64)),
        std=float(found.std(dtype=np.float64)),
        max=float(found.max()),
        **{name: float(value) for name, value in zip(NAMES, ranks, strict=True)},
    )


def gaps_of(answers: Sequence[TimedAnswer]) -> Gaps:
    """Of all of them one after the other, in the four bytes that each has: those of a run are its largest array."""
    return np.frombuffer(b"".join(answer.gaps for answer in answers), dtype=np.float32)


def tpot_of(answer: TimedAnswer) -> float | None:
    if answer.first_s is None or answer.output_tokens < 2:
        return None
    return (answer.end_s - answer.first_s) / (answer.output_tokens - 1)


def token_times(answers: Sequence[TimedAnswer]) -> tuple[Floats, Floats]:
    """When events with tokens came, and how many tokens each stands for: a server may send several in one.

    All streams in one array: each begins with a gap of 0, gaps are summed up, and what stands at its begin is replaced
    by its first moment.
    """
    started = [(answer, answer.first_s) for answer in answers if answer.first_s is not None]
    events = np.array([1 + len(answer.gaps) // GAP_BYTES for answer, _ in started], dtype=np.int64)
    begins = np.cumsum(events) - events
    times = np.zeros(int(events.sum()))
    later = np.ones(len(times), dtype=bool)
    later[begins] = False
    times[later] = np.frombuffer(b"".join(answer.gaps for answer, _ in started), dtype=np.float32)
    np.cumsum(times, out=times)
    times += np.repeat(np.array([first_s for _, first_s in started]) - times[begins], events)
    tokens = np.array(
        [answer.output_tokens if answer.good else count for (answer, _), count in zip(started, events, strict=True)]
    )
    return times, np.repeat(tokens / events, events)


def token_blocks(answers: Sequence[TimedAnswer]) -> Iterator[tuple[Floats, Floats]]:
    """The same in parts, so that a long run takes little memory."""
    block, events = list[TimedAnswer](), 0
    for answer in answers:
        block.append(answer)
        events += 1 + len(answer.gaps) // GAP_BYTES
        if events >= BLOCK_EVENTS:
            yield token_times(block)
            block, events = [], 0
    if block:
        yield token_times(block)


def tokens_between(answers: Sequence[TimedAnswer], edges: Floats) -> Floats:
    """Tokens that came between each two edges."""
    found = np.zeros(len(edges) - 1)
    for times, weights in token_blocks(answers):
        found += np.histogram(times, edges, weights=weights)[0]
    return found


def figures(
    answers: Sequence[TimedAnswer], begin_s: float, end_s: float, *, slo: dict[str, float] | None = None
) -> Figures:
    """`slo`: most seconds of ttft, itl (a request's mean), e2e, counted from when a request was to be sent."""
    # Not by when they were sent: those that a late client sent after the span are those that waited longest.
    sent = [answer for answer in answers if begin_s <= answer.intended_s < end_s]
    good = [answer for answer in sent if answer.good]
    seconds = max(end_s - begin_s, 1e-9)
    tokens = sum(float(weights[(times >= begin_s) & (times < end_s)].sum()) for times, weights in token_blocks(answers))
    ended = [answer for answer in answers if answer.good and begin_s <= answer.end_s < end_s]
    prompts = sum(answer.prompt_tokens for answer in answers if begin_s <= (answer.first_s or 0.0) < end_s)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    within = None if slo is None else [answer for answer in ended if meets(answer, slo)]
    return Figures(
        seconds=seconds,
        requests=len(sent),
        completed=len(good),
        failed=sum(bool(answer.error) for answer in sent),
        cancelled=sum(answer.cancelled for answer in sent),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(answer.output_tokens for answer in good),
        counted_by=_counted_by(good),
        requests_per_s=len(ended) / seconds,
        output_tokens_per_s=tokens / seconds,
        total_tokens_per_s=(tokens + prompts) / seconds,
        good_requests_per_s=None if within is None else len(within) / seconds,
        good_share=None if slo is None or not sent else sum(meets(answer, slo) for answer in sent) / len(sent),
        peak_in_flight=peak_in_flight(answers, begin_s, end_s),
        errors=errors_of(sent),
        **latencies(good),
    )


def latencies(good: Sequence[TimedAnswer]) -> dict[str, Percentiles | None]:
    started = [answer for answer in good if answer.first_s is not None]
    first = np.array([answer.first_s for answer in started], dtype=np.float64)
    sent = np.array([answer.sent_s for answer in started])
    intended = np.array([answer.intended_s for answer in started])
    end = np.array([answer.end_s for answer in started])
    paced = [tpot for answer in started if (tpot := tpot_of(answer)) is not None]
    return {
        "ttft": percentiles(first - sent),
        "itl": percentiles(gaps_of(started)),
        "tpot": percentiles(paced),
        "e2e": percentiles(end - sent),
        "lag": percentiles(sent - intended),
        "ttft_intended": percentiles(first - intended),
        "e2e_intended": percentiles(end - intended),
    }


def meets(answer: TimedAnswer, slo: dict[str, float]) -> bool:
    """Whether a request was answered within it; one that its client left is not held against the server."""
    if answer.cancelled:
        return True
    if answer.error or answer.first_s is None:
        return False
    waited = {
        "ttft": answer.first_s - answer.intended_s,
        "itl": tpot_of(answer) or 0.0,
        "e2e": answer.end_s - answer.intended_s,
    }
    return all(waited[name] <= most for name, most in slo.items())


def errors_of(answers: Sequence[TimedAnswer]) -> list[ErrorKind]:
    counts = Counter(answer.error for answer in answers if answer.error)
    examples: dict[str, str] = {}
    for answer in answers:
        if answer.error and answer.said:
            examples.setdefault(answer.error, answer.said)
    return [ErrorKind(kind=kind, count=count, example=examples.get(kind, "")) for kind, count in counts.most_common()]


def peak_in_flight(answers: Sequence[TimedAnswer], begin_s: float = -math.inf, end_s: float = math.inf) -> int:
    """Over all processes, at any moment of that span."""
    here = [answer for answer in answers if answer.end_s >= begin_s and answer.sent_s < end_s]
    moments = [(max(answer.sent_s, begin_s), 1) for answer in here] + [(answer.end_s, -1) for answer in here]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


def mean_in_flight(answers: Sequence[TimedAnswer], edges: Floats) -> Floats:
    """Between each two edges, over its time: by the seconds that all had been under way until each edge."""
    until = np.zeros(len(edges))
    for sign, moments in ((1, [answer.sent_s for answer in answers]), (-1, [answer.end_s for answer in answers])):
        at = np.sort(np.array(moments) - edges[0])
        sums = np.concatenate(([0.0], np.cumsum(at)))
        before = np.searchsorted(at, edges - edges[0])
        until += sign * (before * (edges - edges[0]) - sums[before])
    return np.asarray(np.diff(until) / np.diff(edges))


def _counted_by(good: Sequence[TimedAnswer]) -> str:
    told = {answer.counted for answer in good}
    return "both" if len(told) == 2 else "events" if told == {False} else "usage"
