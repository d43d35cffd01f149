"""What engines say of themselves, read at scrape time: vLLM's gauges and counters, each with the engine's number as
label, and how their processes do. Knows nothing of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.observability.metrics.kv_tiers import kv_tier_metrics
from holdfast.records import EngineInfo, EngineStats

LABELS = ("model_name", "engine")
"""Of every series of vLLM's. Engines are numbered from 0; most servers have one."""


@dataclass(frozen=True, slots=True)
class EngineSource:
    """How one engine is asked. `info`: None until it is ready. `restarts`: of processes that died, and of those that
    hung; `hung`: whether it does not answer now."""

    stats: Callable[[], EngineStats]
    info: Callable[[], EngineInfo | None]
    sleeping: Callable[[], bool] = lambda: False
    restarts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    hung: Callable[[], bool] = lambda: False


def joined(families: Iterable[Metric]) -> list[Metric]:
    """Those of one name as one, with the samples of all: a name may stand on a page only once."""
    found: dict[str, Metric] = {}
    for family in families:
        if family.name in found:
            found[family.name].samples.extend(family.samples)
        else:
            found[family.name] = family
    return list(found.values())


class EngineCollector(Collector):
    """What the newest snapshot of each says."""

    def __init__(self, model_name: str, engines: Sequence[EngineSource]) -> None:
        self._model_name = model_name
        several = len(engines) > 1
        self._engines = [
            _OneEngine(model_name, str(number), one, several=several) for number, one in enumerate(engines)
        ]

    def collect(self) -> Iterator[Metric]:
        yield from joined(family for one in self._engines for family in one.collect())


class _OneEngine:
    def __init__(self, model_name: str, number: str, source: EngineSource, *, several: bool) -> None:
        self._model_name, self._number, self._source, self._one_of_several = model_name, number, source, several

    def collect(self) -> Iterator[Metric]:
        stats = self._source.stats()
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        queries, hits = stats.prefix_queries_total, stats.prefix_hits_total
        yield self._gauge("num_requests_running", "Number of requests in the running batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be scheduled.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV cache usage: fraction of blocks in use, 0 to 1.", usage)
        yield self._gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", usage)
        rate = hits / queries if queries else 0.0
        yield self._gauge(
            "gpu_prefix_cache_hit_rate", "Prefix cache hit rate: fraction of looked-up tokens found, 0 to 1.", rate
        )
        yield self._gauge("prefix_cache_hit_rate", "Prefix cache hit rate, under its common name.", rate)
        # Of older boards. Who is swapped waits in line, and is counted there.
        yield self._gauge("num_requests_swapped", "Number of requests swapped to RAM: always 0, they wait.", 0)
        below = next((tier for tier in stats.kv_tiers if tier.tier == "ram" and tier.total_bytes), None)
        in_ram = 0.0 if below is None else below.held_bytes / below.total_bytes
        yield self._gauge("cpu_cache_usage_perc", "Fraction of RAM for KV blocks in use, 0 to 1.", in_ram)
        yield self._total(
            "num_preemptions", "Number of requests preempted for lack of KV blocks.", stats.preemptions_total
        )
        yield self._total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        yield self._total("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
        yield self._total("gpu_prefix_cache_queries", "Older name of prefix_cache_queries.", queries)
        yield self._total("gpu_prefix_cache_hits", "Older name of prefix_cache_hits.", hits)
        yield self._total(
            "kv_pool_resizes",
            "How often the KV pool has become smaller or larger while serving.",
            stats.pool_resizes_total,
            prefix="holdfast",
        )
        yield self._total(
            "kv_pool_resize_stall_seconds",
            "Seconds that no step ran because the KV pool was resized.",
            stats.stood_still_s_total,
            prefix="holdfast",
        )
        yield from kv_tier_metrics(stats, LABELS, [self._model_name, self._number])
        asleep = self._source.sleeping()
        # Weights are kept in RAM at neither of vLLM's levels.
        states = {"awake": not asleep, "weights_offloaded": False, "discard_all": asleep}
        yield self._several(
            "engine_sleep_state", "Engine sleep state: awake, or what was released.", states, label="sleep_state"
        )
        info = self._source.info()
        if info is not None:
            yield self._cache_config(info)
            if info.max_loras:
                yield self._lora_info(info, stats)
            else:  # How many wait for an adapter's place is not counted; without adapters, nobody does.
                reasons = {"capacity": stats.waiting, "deferred": 0}
                yield self._several(
                    "num_requests_waiting_by_reason", "Number of waiting requests by reason.", reasons, label="reason"
                )

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
        family.add_metric([self._model_name, self._number], value)
        return family

    def _several(self, name: str, help_text: str, values: Mapping[str, float], *, label: str) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=[*LABELS, label])
        for shown, value in values.items():
            family.add_metric([self._model_name, self._number, shown], value)
        return family

    def _total(self, name: str, help_text: str, value: float, *, prefix: str = "vllm") -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", help_text, labels=LABELS)
        family.add_metric([self._model_name, self._number], value)
        return family

    def _cache_config(self, info: EngineInfo) -> Metric:
        family = InfoMetricFamily("vllm:cache_config", "Configuration of the KV cache.", labels=LABELS)
        family.add_metric(
            [self._model_name, self._number],
            {
                "block_size": str(info.block_size),
                "cache_dtype": info.kv_dtype,
                "enable_prefix_caching": str(info.prefix_caching),
                "num_gpu_blocks": str(info.blocks),
            },
        )
        return family

    def _lora_info(self, info: EngineInfo, stats: EngineStats) -> Metric:
        """As vLLM has it: names in labels, and the time as its value. It has it for one engine only."""
        names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of running and waiting requests; the value is the time of the observation.",
            labels=[*names, "engine"] if self._one_of_several else names,
        )
        number = [self._number] if self._one_of_several else []
        adapters = [",".join(stats.waiting_adapters), ",".join(stats.running_adapters)]
        family.add_metric([str(info.max_loras), *adapters, *number], time.time())
        return family


class EngineProcessCollector(Collector):
    """How the process of each does."""

    def __init__(self, model_name: str, engines: Sequence[EngineSource]) -> None:
        self._model_name, self._engines = model_name, engines

    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "holdfast:engine_restarts", "Number of engine process restarts by reason.", labels=[*LABELS, "reason"]
        )
        for number, one in enumerate(self._engines):
            for reason, count in zip(("died", "hung"), one.restarts(), strict=True):
                total.add_metric([self._model_name, str(number), reason], count)
        yield total
        unresponsive = GaugeMetricFamily(
            "holdfast:engine_unresponsive", "1 while the engine process does not respond.", labels=LABELS
        )
        for number, one in enumerate(self._engines):
            unresponsive.add_metric([self._model_name, str(number)], float(one.hung()))
        yield unresponsive
