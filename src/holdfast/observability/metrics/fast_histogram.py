"""A histogram for what is observed at every token: a bisection and two additions. Shows the series of the library's
own; knows nothing of what is observed. Observe on one thread only: nothing is locked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    """`between`: edges that are counted by and not shown, so that `quantiles` are finer than the series is."""

    def __init__(
        self,
        name: str,
        help_text: str,
        buckets: Iterable[float],
        labels: Mapping[str, str],
        between: Iterable[float] = (),
    ) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._shown = {*buckets, inf}
        self._bounds = sorted({*self._shown, *between})
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> list[int]:
        """As they are now, to be given to `quantiles` later."""
        return self._counts.copy()

    def quantiles(
        self, before: Sequence[int], shares: Sequence[float], counts: Sequence[int] | None = None
    ) -> list[float | None]:
        """Of what was observed since `before`; None: nothing was. Between two edges values are taken to lie evenly.
        `counts`: as they are now where others are counted with it."""
        since = [now - then for now, then in zip(self._counts if counts is None else counts, before, strict=True)]
        reached = list(accumulate(since))
        if not reached[-1]:
            return [None] * len(shares)
        return [self._at(share * reached[-1], since, reached) for share in shares]

    def _at(self, rank: float, since: Sequence[int], reached: Sequence[int]) -> float:
        place = next(number for number, count in enumerate(reached) if count >= rank and since[number])
        low = self._bounds[place - 1] if place else 0.0
        high = self._bounds[place]
        if high == inf:
            return low
        return low + (high - low) * (rank - (reached[place] - since[place])) / since[place]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        reached = dict(zip(self._bounds, map(float, accumulate(self._counts)), strict=True))
        shown = sorted(self._shown)
        buckets = list(zip(map(floatToGoString, shown), map(reached.__getitem__, shown), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family


class JoinedHistograms(Collector):
    """One name for histograms that differ in their labels: a family with the series of all, quantiles over all."""

    def __init__(self, histograms: Sequence[QuickHistogram]) -> None:
        self._histograms = histograms

    def counts(self) -> list[int]:
        return [sum(at) for at in zip(*(one.counts() for one in self._histograms), strict=True)]

    def quantiles(self, before: Sequence[int], shares: Sequence[float]) -> list[float | None]:
        return self._histograms[0].quantiles(before, shares, self.counts())

    def collect(self) -> Iterator[Metric]:
        (family,) = self._histograms[0].collect()
        for other in self._histograms[1:]:
            family.samples += [sample for found in other.collect() for sample in found.samples]
        yield family
