"""The engine's numbers as `LLM.get_metrics` gives them: vLLM's names and shapes, without a registry behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.records import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: int = 0


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A kind that vLLM has; an engine's own numbers are of the two others. /metrics has histograms."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """The same: of speculative decoding, there."""

    values: list[int] = field(default_factory=list)


def snapshot(stats: EngineStats, model_name: str) -> list[Metric]:
    labels = {"model_name": model_name, "engine": "0"}
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    return [
        Gauge("vllm:num_requests_running", labels, stats.running),
        Gauge("vllm:num_requests_waiting", labels, stats.waiting),
        Gauge("vllm:kv_cache_usage_perc", labels, usage),
        Counter("vllm:num_preemptions", labels, stats.preemptions_total),
        Counter("vllm:prefix_cache_queries", labels, stats.prefix_queries_total),
        Counter("vllm:prefix_cache_hits", labels, stats.prefix_hits_total),
    ]
