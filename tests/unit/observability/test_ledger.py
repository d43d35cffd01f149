"""The memory ledger: sums that add up to what processes hold, in JSON, in metrics and in a table."""

from __future__ import annotations

import json

import msgspec

from holdfast.observability.ledger import (
    KVMemory,
    Ledger,
    LoadingMemory,
    ProcessMemory,
    asleep_ledger,
    ledger_lines,
    make_ledger,
    summary_lines,
    term_lines,
    use_lines,
)
from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import (
    EngineInfo,
    EngineStats,
    ExpertUse,
    KVStoreUse,
    KVTierUse,
    LinkUse,
    LowerTier,
    MemoryReport,
    MemoryTerm,
    RankMemory,
)

MIB = 1 << 20

REPORT = MemoryReport(
    total_bytes=1000 * MIB,
    free_bytes=900 * MIB,
    limited_by="control group",
    budget_bytes=800 * MIB,
    page_bytes=2 * MIB,
    given_back_bytes=10 * MIB,
    loading_bytes=400 * MIB,
    loading_peak_bytes=390 * MIB,
    terms=[
        MemoryTerm(tier="ram", term="front", planned_bytes=160 * MIB),
        MemoryTerm(tier="ram", term="weights", planned_bytes=100 * MIB, measured_bytes=100 * MIB),
        MemoryTerm(tier="ram", term="logits", planned_bytes=30 * MIB, measured_bytes=25 * MIB),
        MemoryTerm(tier="ram", term="kv_pool", planned_bytes=200 * MIB),
    ],
)
INFO = EngineInfo(
    model="m",
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    blocks=99,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefix_caching=True,
    parameters=1,
    weights_bytes=1,
    kv_pool_bytes=1,
    attention_backend="none",
    decisions=["budget = 800 MiB (set): asked for"],
    memory=REPORT,
)
PROCESSES = [
    ProcessMemory(name="engine", pid=7, resident_bytes=300 * MIB, peak_bytes=310 * MIB),
    ProcessMemory(name="front", pid=6, resident_bytes=90 * MIB, peak_bytes=95 * MIB),
]


def ledger() -> Ledger:
    made = make_ledger(INFO, EngineStats(blocks_touched=9, blocks_used=3), PROCESSES)
    assert made is not None
    return made


def test_the_terms_add_up_to_what_the_processes_hold() -> None:
    found = {term.term: term.measured_bytes for term in ledger().terms}
    assert found["front"] == 90 * MIB
    assert found["kv_pool"] == 20 * MIB  # nine blocks ever touched, and the null page
    assert found["given_back"] == -10 * MIB
    assert found["unaccounted"] == (300 + 90 - (90 + 100 + 25 + 20 - 10)) * MIB
    assert sum(value or 0 for value in found.values()) == 390 * MIB == ledger().tiers[0].measured_bytes


def test_what_the_store_holds_is_said_once_and_twice_the_same() -> None:
    tiers = [KVTierUse(tier="ram", held_bytes=1, total_bytes=2), KVTierUse(tier="disk", loaded_bytes_total=7)]
    stats = EngineStats(kv_tiers=tiers, kv_store=KVStoreUse(held_bytes=9, total_bytes=16))
    made = make_ledger(INFO, stats, PROCESSES)
    assert made is not None
    assert made.kv_tiers == [
        tiers[0], KVTierUse(tier="disk", loaded_bytes_total=7, held_bytes=9, total_bytes=16)
    ]  # fmt: skip
    assert "folder" not in json.loads(msgspec.json.encode(made))["kv_store"]


def test_a_peak_of_loading_is_a_peak() -> None:
    engine, front = ledger().processes
    assert engine.peak_bytes == 390 * MIB
    assert front.peak_bytes == 95 * MIB


def test_an_engine_without_books_has_no_ledger() -> None:
    assert make_ledger(msgspec.structs.replace(INFO, memory=None), EngineStats(), PROCESSES) is None


def test_the_json_is_versioned_and_reads_back() -> None:
    written = msgspec.json.encode(ledger())
    assert list(json.loads(written)) == [
        "version",
        "model",
        "tiers",
        "terms",
        "processes",
        "kv",
        "loading",
        "decisions",
        "links",
        "experts",
        "kv_tiers",
        "kv_store",
        "ranks",
        "engines",
    ]
    assert json.loads(written)["version"] == 1
    assert json.loads(written)["kv"] == {
        "page_bytes": 2 * MIB,
        "blocks": 99,
        "blocks_touched": 9,
        "blocks_used": 3,
    }
    assert msgspec.json.decode(written, type=Ledger) == ledger()


def test_a_link_is_told_of() -> None:
    use = LinkUse(copied_bytes=50 * 10**9, busy_s=1.0, stalled_s=0.9, over_s=2.0, possible_bytes_per_s=55e9)
    found = make_ledger(INFO, EngineStats(links=[use]), PROCESSES)
    assert found is not None
    assert found.links == [use]
    assert "at 50.0 GB/s of 55.0; the GPU waited for it 45% of the time since the start" in summary_lines(found)[-1]
    text = (
        ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=lambda: found).render().decode()
    )
    assert 'holdfast:link_bytes_total{link="ram-vram",model_name="m"} 5e+10' in text
    assert 'holdfast:link_stalled_seconds_total{link="ram-vram",model_name="m"} 0.9' in text
    without = ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=ledger).render().decode()
    assert "holdfast:link_" not in without


def test_the_way_back_is_told_of_without_what_was_not_measured() -> None:
    back = LinkUse(link="vram-ram", copied_bytes=4 * 10**9, busy_s=0.1, over_s=2.0)
    found = make_ledger(INFO, EngineStats(links=[LinkUse(), back]), PROCESSES)
    assert found is not None
    assert summary_lines(found)[-1] == "link vram-ram: 3.73 GiB copied at 40.0 GB/s"
    text = (
        ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=lambda: found).render().decode()
    )
    assert 'holdfast:link_bytes_total{link="vram-ram",model_name="m"} 4e+09' in text
    assert 'holdfast:link_possible_bytes_per_second{link="vram-ram"' not in text


def test_the_disk_that_layers_come_from_is_told_of_as_a_link() -> None:
    disk = LinkUse(
        link="nvme-ram", copied_bytes=30 * 10**9, busy_s=12.0, stalled_s=5.0, over_s=20.0, possible_bytes_per_s=2.65e9
    )
    found = make_ledger(INFO, EngineStats(links=[LinkUse(), disk]), PROCESSES)
    assert found is not None
    said = "link nvme-ram: 27.94 GiB read at 2.5 GB/s of 2.6; steps waited for it 25% of the time since the start"
    assert summary_lines(found)[-1] == said
    text = (
        ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=lambda: found).render().decode()
    )
    assert 'holdfast:link_bytes_total{link="nvme-ram",model_name="m"} 3e+10' in text
    assert 'holdfast:link_stalled_seconds_total{link="nvme-ram",model_name="m"} 5.0' in text
    assert 'holdfast:link_possible_bytes_per_second{link="nvme-ram",model_name="m"} 2.65e+09' in text


def test_experts_over_vram_and_ram_are_told_of() -> None:
    use = ExpertUse(pairs=1000, hits=700, host_pairs=250, host_s=1.0, swaps=3)
    found = make_ledger(INFO, EngineStats(experts=use), PROCESSES)
    assert found is not None
    line = "experts: 70% of uses found in VRAM; 25% computed by the CPU; 3 changed places"
    assert summary_lines(found)[-1] == ledger_lines(found)[-1] == line
    text = (
        ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=lambda: found).render().decode()
    )
    for where, count in (("vram", 700), ("cpu", 250), ("link", 50)):
        assert f'holdfast:expert_uses_total{{model_name="m",where="{where}"}} {count}.0' in text
    assert 'holdfast:expert_swaps_total{model_name="m"} 3.0' in text
    unused = make_ledger(INFO, EngineStats(experts=ExpertUse()), PROCESSES)
    assert unused is not None
    assert "no step with few tokens" in summary_lines(unused)[-1]
    without = ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=ledger).render().decode()
    assert "holdfast:expert_" not in without


def test_what_waits_in_a_lower_tier_is_named() -> None:
    assert INFO.memory is not None
    names = ("experts", "experts_cpu")
    waits = [MemoryTerm(tier="nvme", term=name, planned_bytes=MIB, measured_bytes=MIB) for name in names]
    below = LowerTier(tier="nvme", total_bytes=9 * MIB, free_bytes=9 * MIB, limited_by="disk", terms=waits)
    report = msgspec.structs.replace(INFO.memory, below=[below])
    found = make_ledger(msgspec.structs.replace(INFO, memory=report), EngineStats(), PROCESSES)
    assert found is not None
    lower = summary_lines(found)[-5:]
    assert [line.split()[0] for line in lower] == ["nvme", "experts", "experts_cpu", "sum", "free"]


def test_the_metrics_tell_the_same() -> None:
    metrics = ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)], memory=ledger)
    text = metrics.render().decode()
    line = 'holdfast:memory_bytes{kind="measured",model_name="m",term="kv_pool",tier="ram"}'
    assert f"{line} {float(20 * MIB)}" in text.splitlines() or f"{line} 2.097152e+07" in text.splitlines()
    assert 'kind="planned",model_name="m",term="weights"' in text
    assert 'kind="measured",model_name="m",term="unaccounted"' in text
    before = ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)]).render().decode()
    assert "holdfast:memory_bytes{" not in before


def test_the_table_shows_what_is_not_accounted_for() -> None:
    lines = ledger_lines(ledger())
    assert "control group" in lines[0]
    (row,) = [line for line in lines if "unaccounted" in line]
    assert row.split()[-2:] == ["165.00", "MiB"]
    (total,) = [line for line in lines if line.split()[0] == "sum"]
    assert "390.00 MiB" in total
    assert "engine (pid 7): 300.00 MiB now, 390.00 MiB at its peak" in lines[-2]


def test_the_summary_adds_up_to_the_ledger() -> None:
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in summary_lines(ledger())[1:]}
    assert rows == {
        "weights": "100.00 MiB 100.00 MiB",
        "kv_pool": "200.00 MiB 20.00 MiB taken as it is used",
        "rest": "190.00 MiB 270.00 MiB",
        "sum": "490.00 MiB 390.00 MiB of a budget of 800.00 MiB",
        "free": "410.00 MiB 510.00 MiB of 900.00 MiB before loading (control group)",
    }


def test_less_than_was_measured_is_explained() -> None:
    few = [msgspec.structs.replace(process, resident_bytes=process.resident_bytes // 2) for process in PROCESSES]
    made = make_ledger(INFO, EngineStats(blocks_touched=9, blocks_used=3), few)
    assert made is not None
    assert [term.measured_bytes for term in made.terms if term.term == "unaccounted"] == [(195 - 180) * MIB]
    none = [msgspec.structs.replace(process, resident_bytes=process.resident_bytes // 4) for process in PROCESSES]
    fewer = make_ledger(INFO, EngineStats(blocks_touched=9, blocks_used=3), none)
    assert fewer is not None
    (row,) = [line for line in ledger_lines(fewer) if "unaccounted" in line]
    assert row.endswith("MiB  (expected: less is held now than when the terms were measured)")
    (row,) = [line for line in ledger_lines(made) if "unaccounted" in line]
    assert row.endswith("15.00 MiB")
    for shown in (fewer, made):
        (row,) = [line for line in ledger_lines(shown) if "given_back" in line]
        assert row.endswith("-10.00 MiB  (expected: held only during a step, so subtracted here)")


def test_a_plan_alone_has_no_measured_column() -> None:
    planned = [MemoryTerm(tier="ram", term="weights", planned_bytes=400 * MIB)]
    lines = term_lines(planned, 800 * MIB)
    assert "measured" not in lines[0]
    assert lines[1].split() == ["weights", "400.00", "MiB", "#" * 12]


def test_on_a_gpu_the_driver_says_what_is_held() -> None:
    terms = [
        MemoryTerm(tier="vram", term="weights", planned_bytes=100 * MIB, measured_bytes=101 * MIB),
        MemoryTerm(tier="vram", term="kv_pool", planned_bytes=600 * MIB, measured_bytes=600 * MIB),
    ]
    report = msgspec.structs.replace(REPORT, tier="vram", terms=terms, held_bytes=720 * MIB)
    info = msgspec.structs.replace(INFO, memory=report)
    for stats, held in ((EngineStats(), 720), (EngineStats(device_bytes=730 * MIB, blocks_touched=3), 730)):
        made = make_ledger(info, stats, PROCESSES)
        assert made is not None
        assert made.tiers[0].measured_bytes == held * MIB
        assert {term.term: term.measured_bytes for term in made.terms} == {
            "weights": 101 * MIB,
            "kv_pool": 600 * MIB,
            "unaccounted": (held - 701) * MIB,
        }


def test_pages_that_a_gpu_left_in_ram_for_its_sleep_are_told_of() -> None:
    """They are of no process: nothing else shows where that RAM is."""
    waits = [MemoryTerm(tier="ram", term=name, planned_bytes=50 * MIB) for name in ("weights", "kv_ram")]
    below = LowerTier(tier="ram", total_bytes=900 * MIB, free_bytes=900 * MIB, limited_by="host", terms=waits)
    info = msgspec.structs.replace(INFO, memory=msgspec.structs.replace(REPORT, tier="vram", below=[below]))
    for kept, told in ((30 * MIB, {"weights": 0, "kv_ram": 30 * MIB}), (0, {})):
        found = asleep_ledger(info, PROCESSES[1:], kept)
        assert found is not None
        assert {term.term: term.measured_bytes for term in found.terms if term.planned_bytes == 50 * MIB} == told
        assert [tier.measured_bytes for tier in found.tiers] == [0, *([kept] if kept else [])]


def test_of_kv_pages_in_ram_what_is_pinned_by_now_is_told() -> None:
    waits = [
        MemoryTerm(tier="ram", term="weights", planned_bytes=90 * MIB, measured_bytes=90 * MIB),
        MemoryTerm(tier="ram", term="kv_ram", planned_bytes=50 * MIB),
    ]
    below = LowerTier(tier="ram", total_bytes=900 * MIB, free_bytes=900 * MIB, limited_by="host", terms=waits)
    info = msgspec.structs.replace(INFO, memory=msgspec.structs.replace(REPORT, tier="vram", below=[below]))
    for pinned in (0, 20, 50):
        use = [KVTierUse(tier="disk", total_bytes=700 * MIB), KVTierUse(tier="ram", total_bytes=pinned * MIB)]
        found = make_ledger(info, EngineStats(kv_tiers=use), PROCESSES)
        assert found is not None
        assert [term.measured_bytes for term in found.terms[-2:]] == [90 * MIB, pinned * MIB]
        assert found.tiers[1].measured_bytes == (90 + pinned) * MIB


def test_ranks_of_several_nodes_are_told_apart_and_those_of_one_are_not() -> None:
    ranks = [
        RankMemory(rank=rank, pid=70 + rank, threads=1, heads=2, kv_heads=1, planned_weights_bytes=1, weights_bytes=1,
                   kv_pool_bytes=1, node=rank)
        for rank in range(2)
    ]  # fmt: skip
    (first, second) = _rank_rows(ranks)
    assert first.startswith("node 0 rank 0 (pid 70): ")
    assert second.startswith("node 1 rank 1 (pid 71): ")
    (alone,) = _rank_rows(ranks[:1])
    assert alone.startswith("rank 0 (pid 70): ")


def _rank_rows(ranks: list[RankMemory]) -> list[str]:
    kv = KVMemory(page_bytes=1, blocks=1, blocks_touched=0, blocks_used=0)
    loading = LoadingMemory(planned_bytes=0, peak_bytes=0)
    return use_lines(
        Ledger(model="m", tiers=[], terms=[], processes=[], kv=kv, loading=loading, decisions=[], ranks=ranks)
    )
