"""The quick histogram shows what the library's own shows."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from holdfast.observability.metrics.fast_histogram import QuickHistogram

BUCKETS = (0.001, 0.01, 0.1, 1, 10)


def test_it_shows_the_same_series_as_the_librarys_own() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    known = Histogram("some:seconds", "Some.", ["model_name"], buckets=BUCKETS, registry=theirs).labels("m")
    quick = QuickHistogram("some:seconds", "Some.", BUCKETS, {"model_name": "m"})
    ours.register(quick)
    chance = random.Random(1)
    for value in (*BUCKETS, 0.0, 11.0, *(chance.lognormvariate(-3, 3) for _ in range(500))):
        known.observe(value)
        quick.observe(value)
    shown = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == shown
