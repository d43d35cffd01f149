"""A histogram for what is observed at every token: a bisection and two additions. Shows the series of the library's
own; knows nothing of what is observed. Observe on one thread only: nothing is locked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    def __init__(self, name: str, help_text: str, buckets: Iterable[float], labels: Mapping[str, str]) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = [*buckets]
        if self._bounds[-1] != inf:
            self._bounds.append(inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family
