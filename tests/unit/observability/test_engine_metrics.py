"""What /metrics says of the KV pool and of RAM below it."""

from __future__ import annotations

from holdfast.observability.metrics.engines import EngineCollector, EngineSource
from holdfast.records import EngineStats, KVStoreUse, KVTierUse


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


def test_pages_that_the_store_did_not_take_or_give_are_counted_by_reason() -> None:
    waited_s = {"read": 1.5, "write": 0.0}
    use = KVStoreUse(
        dropped_by_reason={"no room": 2}, missed_by_reason={"checksum": 1, "evicted": 0}, waited_s_by_use=waited_s
    )
    stats = EngineStats(kv_tiers=[KVTierUse(tier="disk")], kv_store=use)
    collector = EngineCollector("tiny", [EngineSource(lambda: stats, lambda: None)])
    found = {
        (sample.name, sample.labels.get("reason") or sample.labels["use"]): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name.startswith("holdfast:kv_store_") and sample.labels.keys() & {"reason", "use"}
    }
    assert found == {
        ("holdfast:kv_store_dropped_writes_total", "no room"): 2,
        ("holdfast:kv_store_missed_pages_total", "checksum"): 1,
        ("holdfast:kv_store_missed_pages_total", "evicted"): 0,
        ("holdfast:kv_store_waited_seconds_total", "read"): 1.5,
        ("holdfast:kv_store_waited_seconds_total", "write"): 0.0,
    }
