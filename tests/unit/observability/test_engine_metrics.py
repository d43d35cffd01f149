"""What /metrics says of the KV pool and of RAM below it."""

from __future__ import annotations

from holdfast.observability.metrics.engines import EngineCollector, EngineSource
from holdfast.records import EngineStats, KVTierUse


def metrics_of(stats: EngineStats) -> dict[str, float]:
    collector = EngineCollector("tiny", [EngineSource(lambda: stats, lambda: None)])
    return {sample.name: sample.value for family in collector.collect() for sample in family.samples}


def test_how_long_steps_stood_still_for_pools_of_another_size_is_counted() -> None:
    found = metrics_of(EngineStats(pool_resizes_total=3, stood_still_s_total=0.25))
    assert found["holdfast:kv_pool_resizes_total"] == 3
    assert found["holdfast:kv_pool_resize_stall_seconds_total"] == 0.25


def test_ram_for_kv_blocks_in_use_has_the_name_that_older_boards_know() -> None:
    assert metrics_of(EngineStats())["vllm:cpu_cache_usage_perc"] == 0
    tier = KVTierUse(
        tier="ram", hit_tokens_total=0, loaded_bytes_total=0, stored_bytes_total=0, held_bytes=3, total_bytes=4
    )
    assert metrics_of(EngineStats(kv_tiers=[tier]))["vllm:cpu_cache_usage_perc"] == 0.75
    assert metrics_of(EngineStats(kv_tiers=[KVTierUse(tier="disk")]))["vllm:cpu_cache_usage_perc"] == 0
