"""Metrics of KV pages below the pool: vLLM's names where it has them, ours by tier; none without such tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.records import EngineStats


def kv_tier_metrics(stats: EngineStats, labels: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
    if not stats.kv_tiers:
        return

    def total(name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=labels)
        family.add_metric(values, value)
        return family

    hits = {tier.tier: tier.hit_tokens_total for tier in stats.kv_tiers}
    loaded = {tier.tier: tier.loaded_bytes_total for tier in stats.kv_tiers}
    stored = {tier.tier: tier.stored_bytes_total for tier in stats.kv_tiers}
    yield total(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that were not in the KV pool, looked up in the tiers below it.",
        stats.prefix_below_queries_total,
    )
    yield total(
        "vllm:external_prefix_cache_hits", "Prompt tokens that came from tiers below the KV pool.", sum(hits.values())
    )
    for name, help_text, moved in (
        ("vllm:kv_offload_load_bytes", "Bytes of KV pages that came to the pool.", loaded),
        ("vllm:kv_offload_store_bytes", "Bytes of KV pages that went to tiers below the pool.", stored),
    ):
        yield total(name, help_text, sum(moved.values()))
    by_tier: dict[str, tuple[str, Callable[[str], float]]] = {
        "holdfast:kv_tier_hit_tokens": ("Prompt tokens that came from each tier.", lambda tier: hits[tier]),
        "holdfast:kv_tier_loaded_bytes": (
            "Bytes of KV pages that came to the pool, by tier.",
            lambda tier: loaded[tier],
        ),
        "holdfast:kv_tier_stored_bytes": (
            "Bytes of KV pages that went to each tier.",
            lambda tier: stored[tier],
        ),
    }
    for name, (help_text, value) in by_tier.items():
        family = CounterMetricFamily(name, help_text, labels=[*labels, "tier"])
        for tier in hits:
            family.add_metric([*values, tier], value(tier))
        yield family
    yield total(
        "holdfast:kv_tier_failed_copies", "KV pages that did not come or go between tiers.", stats.failed_copies_total
    )
    yield total(
        "holdfast:kv_tier_fetches_not_worth",
        "Prefixes computed though a tier had them, because that was sooner.",
        stats.fetches_not_worth_total,
    )
    if stats.kv_store is not None:
        held = GaugeMetricFamily("holdfast:kv_store_bytes", "Bytes of KV pages in the store on disk.", labels=labels)
        held.add_metric(values, stats.kv_store.held_bytes)
        yield held
        for name, help_text, reasons in (
            (
                "holdfast:kv_store_dropped_writes",
                "KV pages that were not written to the store, by reason: queue full, write budget, no room.",
                stats.kv_store.dropped_by_reason,
            ),
            (
                "holdfast:kv_store_missed_pages",
                "KV pages that were not read from the store, by reason: checksum, truncated, I/O error, evicted.",
                stats.kv_store.missed_by_reason,
            ),
        ):
            family = CounterMetricFamily(name, help_text, labels=[*labels, "reason"])
            for reason, pages in reasons.items():
                family.add_metric([*values, reason], pages)
            yield family
        if stats.kv_store.waited_s_by_use:
            name, help_text = "holdfast:kv_store_waited_seconds", "Seconds that KV pages waited for layers to be read."
            family = CounterMetricFamily(name, help_text, labels=[*labels, "use"])
            for use, seconds in stats.kv_store.waited_s_by_use.items():
                family.add_metric([*values, use], seconds)
            yield family
