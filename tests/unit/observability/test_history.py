"""The last hour: what a sample says, that the ring is bounded, and quantiles finer than the series of /metrics."""

from __future__ import annotations

from itertools import count

import pytest

from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.fast_histogram import QuickHistogram
from holdfast.observability.metrics.history import FIELDS, SAMPLES, History
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta, EngineStats, FinishReason


def served(stats: EngineStats | None = None) -> tuple[ServingMetrics, History]:
    """By a clock that goes on by a second at each look."""
    found = stats or EngineStats(running=3, waiting=1, blocks_total=8, blocks_used=2)
    metrics = ServingMetrics("m", engines=[EngineSource(lambda: found, lambda: None)])
    ticks = count()
    return metrics, History(metrics, lambda: found, lambda: None, lambda: float(next(ticks)))


def test_a_sample_tells_rates_and_latencies_since_the_one_before() -> None:
    metrics, history = served()
    meter = metrics.open_request(prompt_tokens=7, max_tokens=9, n=1)
    meter.delta(AnswerDelta(token_ids=[1]))
    meter.delta(AnswerDelta(token_ids=[2], finish_reason=FinishReason.STOP))
    meter.close()
    history.take()
    history.take()
    first, second = history.last(60)
    assert (first["prompt_tokens_per_s"], first["generation_tokens_per_s"]) == (7, 2)
    assert (first["running"], first["waiting"], first["kv_share"], first["ended"]) == (3, 1, 0.25, 1)
    assert first["ttft_p50_s"] is not None
    assert (second["generation_tokens_per_s"], second["ended"], second["ttft_p50_s"]) == (0, 0, None)


def test_who_has_asked_before_gets_the_new_samples_only() -> None:
    history = served()[1]
    for _ in range(SAMPLES + 5):
        history.take()
    assert len(history.since(0)) == SAMPLES
    assert history.newest == SAMPLES + 5
    assert [len(sample) for sample in history.since(history.newest - 2)] == [len(FIELDS)] * 2
    assert history.since(history.newest) == history.since(history.newest + 9) == []


def test_requests_are_open_until_they_are_closed() -> None:
    metrics = served()[0]
    meters = [metrics.open_request(prompt_tokens=1, max_tokens=9, n=1, request_id=str(one)) for one in range(3)]
    meters[1].close()
    assert [meter.request_id for meter in metrics.open_meters] == ["0", "2"]
    assert metrics.ended_totals() == (1, 0)
    meters[0].close(FinishReason.ERROR)
    assert metrics.ended_totals() == (2, 1)


def test_quantiles_are_as_fine_as_the_edges_between() -> None:
    coarse = QuickHistogram("a", "A.", (1, 10, 100), {})
    fine = QuickHistogram("a", "A.", (1, 10, 100), {}, between=[float(edge) for edge in range(1, 100)])
    before = fine.counts()
    assert fine.quantiles(before, (0.5,)) == [None]
    for value in range(1, 101):
        coarse.observe(value)
        fine.observe(value)
    assert fine.quantiles(before, (0.5, 0.95)) == pytest.approx([50, 95], abs=1)
    assert [metric.samples for metric in fine.collect()] == [metric.samples for metric in coarse.collect()]
    fine.observe(1e9)
    assert fine.quantiles(before, (1.0,)) == [100.0]
