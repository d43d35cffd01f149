"""The verdict on answers that were made up: each fault is found, and a sound server passes."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from made_up_answers import GAP_S, TTFT_S, answer

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.worker import ClientReport
from holdfast.bench.judged_time import judged_time, safe_reason
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import Phase, default_profile
from holdfast.bench.measure.figures import figures, mean_in_flight, percentiles, token_times
from holdfast.bench.measure.load_points import knee, load_points, safe_point, until_it_ended
from holdfast.bench.measure.objectives import limits, parse_slo
from holdfast.bench.measure.samples import ServerSample, gpu_reading, is_local, pools_of, restarted
from holdfast.bench.measure.steadiness import Stall, longest_stall, memory_drift, throughput_drift
from holdfast.bench.measure.verdict import Allowed, RunEvidence, checks, reason_of
from holdfast.errors import ConfigurationError
from holdfast.hardware import nvidia
from holdfast.hardware.nvidia import GpuProcess, NvidiaGpu, NvidiaMachine
from holdfast.units import GIB, MIB

STEADY = [answer(0.05 * at) for at in range(400)]
"""Twenty seconds."""


def judged(answers: list[TimedAnswer], samples: list[ServerSample] | None = None, **allowed: object) -> dict[str, bool]:
    """Names of checks, and whether each passed."""
    rules, held = Allowed(**allowed), samples or []  # type: ignore[arg-type]
    evidence = RunEvidence(
        peak=figures(answers, 0, 20, slo=limits(rules.objectives)),
        whole=figures(answers, 0, 60),
        loop="open",
        clients=[ClientReport(cpu_share=0.1, loop_lag_s=0.0)],
        stall=longest_stall(answers, 0),
        throughput=throughput_drift(answers, 0, 20),
        ram=memory_drift(held, 0, 20, vram=False),
        samples=held,
    )
    found = checks(evidence, rules)
    assert reason_of(found).startswith(f"{len(found)} checks passed") == all(check.passed for check in found)
    assert all(bool(check.reason) != check.passed for check in found)
    return {check.name: check.passed for check in found}


def failed(found: dict[str, bool]) -> list[str]:
    return [name for name, passed in found.items() if not passed]


def samples(bytes_per_s: float = 0.0, kv_per_s: float = 0.0, free: float = 0.5) -> list[ServerSample]:
    return [
        ServerSample(
            at_s=float(at),
            ram_bytes=int(1000 * MIB + (bytes_per_s + kv_per_s) * at),
            kv_touched_bytes=int(kv_per_s * at),
            ram_free_share=free,
        )
        for at in range(20)
    ]


def test_a_sound_server_passes() -> None:
    found = judged(STEADY, samples(), objectives=parse_slo("ttft=150ms,itl=30ms,tpot=30ms,e2e.p95=1s"))
    assert failed(found) == []
    assert len(found) == 11


def test_each_objective_is_judged_at_its_percentile() -> None:
    slow = [*STEADY[:390], *(answer(19.5 + 0.01 * at, ttft_s=2.0) for at in range(10))]
    assert failed(judged(slow, objectives=parse_slo("ttft=150ms"))) == ["ttft p99"]
    assert failed(judged(slow, objectives=parse_slo("ttft.p95=150ms"))) == []
    assert failed(judged(STEADY, objectives=parse_slo("itl=10ms"))) == ["itl p99"]
    assert figures(slow, 0, 20, slo={"ttft": 0.15}).good_share == pytest.approx(390 / 400)


def test_errors_beyond_what_is_allowed_are_named() -> None:
    broken = [*STEADY[:396], *(answer(19.9, error="HTTP 500", said="out", first_s=None) for _ in range(4))]
    assert failed(judged(broken)) == ["errors"]
    assert failed(judged(broken, error_share=0.02)) == []
    [kind] = figures(broken, 0, 20).errors
    assert (kind.kind, kind.count, kind.example) == ("HTTP 500", 4, "out")


def test_a_leak_is_found_and_a_kv_cache_that_fills_is_none() -> None:
    assert failed(judged(STEADY, samples(bytes_per_s=4 * MIB))) == ["RAM over time"]
    assert failed(judged(STEADY, samples(kv_per_s=4 * MIB))) == []
    assert failed(judged(STEADY, samples(bytes_per_s=0.5 * MIB))) == []


def test_pools_and_weights_hide_no_leak() -> None:
    """Of 120 GiB that were planned 2% were 2.4 GiB, and of what is held beside them 40 MiB."""

    def held(grows: int, taken_back: int = 0) -> list[ServerSample]:
        pools = [120 * GIB + (taken_back if at >= 10 else 0) for at in range(20)]
        return [
            ServerSample(at_s=float(at), vram_bytes=pool + 2 * GIB + grows * at // 20, vram_pools_bytes=pool)
            for at, pool in enumerate(pools)
        ]

    def passed(samples: list[ServerSample]) -> bool:
        evidence = RunEvidence(
            peak=figures(STEADY, 0, 20), loop="closed", vram=memory_drift(samples, 0, 20, vram=True), samples=samples
        )
        return next(check.passed for check in checks(evidence, Allowed()) if check.name == "VRAM over time")

    assert passed(held(32 * MIB))
    assert not passed(held(GIB))
    assert passed([msgspec.structs.replace(sample, vram_pools_bytes=0) for sample in held(GIB)])  # Nobody says.
    assert passed(held(32 * MIB, taken_back=20 * GIB)), "as after a pool was given up while nobody asked"
    assert not passed(held(GIB, taken_back=20 * GIB))
    assert not passed(held(GIB, taken_back=-20 * GIB)), "what a pool gave up hides none"
    told_late = [msgspec.structs.replace(one, vram_pools_bytes=0) for one in held(8 * GIB)[:10]] + held(8 * GIB)[10:]
    assert not passed(told_late)


def test_weights_and_pools_are_told_from_the_rest_by_tier() -> None:
    terms = [
        {"tier": "vram", "term": "weights", "measured_bytes": 16},
        {"tier": "vram", "term": "kv_pool", "measured_bytes": 100},
        {"tier": "vram", "term": "activations", "measured_bytes": 3},
        {"tier": "ram", "term": "kv_ram", "measured_bytes": 50},
        {"tier": "ram", "term": "front", "measured_bytes": None},
    ]
    assert pools_of(terms, touched=False) == {"vram_pools_bytes": 116, "ram_pools_bytes": 50}
    on_cpu = [{"tier": "ram", "term": name, "measured_bytes": 7} for name in ("weights", "kv_pool")]
    assert pools_of(on_cpu, touched=True) == {"ram_pools_bytes": 7}


def test_memory_that_runs_out_fails_the_headroom() -> None:
    assert failed(judged(STEADY, samples(free=0.04))) == ["RAM headroom"]
    assert failed(judged(STEADY, samples(free=0.04), headroom=0.03)) == []


def test_a_server_that_slows_down_is_found() -> None:
    fewer = [answer(0.05 * at) for at in range(320)] + [answer(16 + 0.1 * at) for at in range(40)]
    assert failed(judged(fewer)) == ["throughput over time"]


def test_a_lull_of_arrivals_and_a_handful_of_requests_are_no_server_that_slows_down() -> None:
    by_chance = random.Random(1)
    for _ in range(20):  # Without the noise of arrivals some of them fail.
        arrivals = sorted(by_chance.uniform(0, 20) for _ in range(400))
        assert failed(judged([answer(at) for at in arrivals])) == []
    few = [answer(2.0 * at) for at in range(7)]
    assert "throughput over time" not in judged(few)
    slower_at_last = [*STEADY[:320], *STEADY[320::4]]
    assert failed(judged(slower_at_last)) == ["throughput over time"]


def test_a_stall_of_all_streams_is_found_and_a_pause_between_requests_is_none() -> None:
    waits = [0.02] * 4 + [1.5] + [0.02] * 4
    held = [answer(9.9, gaps=array("f", waits).tobytes(), end_s=9.9 + TTFT_S + sum(waits))]
    idle = [one for one in STEADY if not 9.5 < one.sent_s < 12]
    found = longest_stall([*idle, *held], 0)
    assert found is not None
    assert found.seconds == pytest.approx(1.5, rel=0.01)
    assert failed(judged([*idle, *held]))[:1] == ["stall"]
    alone = longest_stall(idle, 0)
    assert alone is None or alone.seconds < 0.1


def test_a_stall_is_found_among_many_longer_pauses_without_a_request() -> None:
    waits = [0.02] * 4 + [1.5] + [0.02] * 4
    rare = [answer(3.0 * at) for at in range(100)]
    held = answer(300.0, gaps=array("f", waits).tobytes(), end_s=300.0 + TTFT_S + sum(waits))
    found = longest_stall([*rare, held], 0)
    assert found is not None
    assert (found.streams, round(found.seconds, 2)) == (1, 1.5)
    assert found.at_s == pytest.approx(300.0 + TTFT_S + 4 * 0.02)
    within = longest_stall([*rare, held], 0, (0, 299.0))
    assert within is not None
    assert within.seconds < 0.1
    assert longest_stall([*rare, held], 0, (500.0, 600.0)) is None


def test_a_client_that_falls_behind_says_so() -> None:
    late = [msgspec.structs.replace(one, intended_s=one.sent_s - 0.3) for one in STEADY]
    found = figures(late, 0, 20)
    assert found.ttft is not None
    assert found.ttft_intended is not None
    assert found.ttft_intended.p50 == pytest.approx(found.ttft.p50 + 0.3)
    assert failed(judged(late, objectives=parse_slo("ttft=200ms"))) == ["client", "ttft p99"]
    assert failed(judged(late, limited_client=True)) == []
    for busy, helps in ((0.1, "cores free"), (0.6, "--workers")):
        behind = RunEvidence(peak=found, loop="open", clients=[ClientReport(cpu_share=busy, loop_lag_s=0.0)])
        assert reason_of(checks(behind, Allowed())).endswith(helps)


def rising(capacity: int) -> list[TimedAnswer]:
    """One more at once every second up to 16; beyond `capacity` each takes longer, so that no more come."""
    found: list[TimedAnswer] = []
    for slot in range(16):
        sent_s = float(slot)
        while sent_s < 20:
            slow = max(1.0, min(16, int(sent_s) + 1) / capacity)
            found.append(answer(sent_s, gap_s=GAP_S * slow, ttft_s=TTFT_S * slow))
            sent_s = found[-1].end_s
    return found


def test_the_knee_and_the_safe_concurrency_are_where_the_server_was_full() -> None:
    points = load_points(rising(capacity=6), parse_slo("itl=25ms"))
    found, safe = knee(points), safe_point(points)
    assert found is not None
    assert found.at_once in (6, 8)
    assert safe is not None
    assert safe.at_once in (6, 8)
    assert points[-1].meets_slo is False
    unpromised = load_points(rising(capacity=6))
    assert safe_point(unpromised) == knee(unpromised)


def held(at_once: int, seconds: tuple[float, float], *, odd: int, **changes: object) -> list[TimedAnswer]:
    """So many at once all the time, and one in `odd` of those of the peak another."""
    found, peak = list[TimedAnswer](), 0
    for slot in range(at_once):
        sent_s = seconds[0] + 0.03 * slot
        while sent_s < seconds[1]:
            of_peak = 5 <= sent_s < 15
            peak += of_peak
            found.append(answer(sent_s, **(changes if of_peak and peak % odd == 0 else {})))  # type: ignore[arg-type]
            sent_s = found[-1].end_s
    return found


PEAK = Load(url="http://x", model="m", phases=default_profile(5, 10, 5), concurrency=8)


def test_what_is_safe_is_no_other_judgement_than_that_of_the_slo() -> None:
    """Of all requests with eight under way one in a hundred is slow, of those of the peak two."""
    rules = Allowed(objectives=parse_slo("ttft=150ms"))
    late = held(8, (0, 20), odd=60, ttft_s=0.2)
    points = load_points(late, rules.objectives)
    assert [(point.at_once, point.meets_slo) for point in points][-1] == (8, True)
    found = judged_time(PEAK, rules, late, points, (0.0, 20.0))
    assert "ttft p99" in failed(judged([one for one in late if 5 <= one.sent_s < 15], objectives=rules.objectives))
    assert found.safe is not None  # Of the rise.
    assert found.safe.at_once < 8
    assert safe_reason(points, found, promised=True).endswith("; 8 at once missed the SLO as a whole")


def test_errors_that_are_allowed_leave_a_level_safe() -> None:
    some = held(8, (0, 20), odd=200, error="HTTP 503", first_s=None, gaps=b"")
    rules = Allowed(objectives=parse_slo("ttft=150ms"), error_share=0.01)
    points = load_points(some, rules.objectives)
    found = judged_time(PEAK, rules, some, points, (0.0, 20.0))
    assert found.safe == points[-1]
    assert safe_reason(points, found, promised=True) == "the most that was tried, kept the SLO with 1 error"


def test_a_level_that_is_missed_as_a_whole_is_not_the_one_of_a_search() -> None:
    """Its moments are of the other levels, too: the last requests of one are under way while the next begins."""
    rules = Allowed(objectives=parse_slo("ttft=150ms"))
    some = [*held(4, (0, 5), odd=1), *held(8, (5, 15), odd=60, ttft_s=0.2), *held(8, (15, 20), odd=1)]
    load = msgspec.structs.replace(PEAK, phases=(Phase("4", 5), Phase("8", 10)))
    points = load_points(some, rules.objectives)
    assert safe_point(points) == points[-1]
    found = judged_time(load, rules, some, points, (0.0, 20.0), steps=(4, 8))
    assert (found.level, found.span_s) == (4, (0.0, 5.0))
    assert found.safe is not None
    assert found.safe.at_once < 8


def test_a_server_that_was_never_full_has_no_knee() -> None:
    points = load_points(rising(capacity=99), parse_slo("itl=25ms"))
    assert knee(points) is None
    safe = safe_point(points)
    assert safe is not None
    assert safe.at_once == 16


def test_cached_and_cancelled_requests_are_told_apart() -> None:
    some = [*STEADY, answer(1.0, cancelled=True), answer(2.0, cached_tokens=15)]
    found = figures(some, 0, 20, slo={"ttft": 1.0})
    assert (found.completed, found.cancelled, found.cached_tokens) == (401, 1, 15)
    assert found.good_share == 1.0
    assert found.counted_by == "usage"


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) is None
    found = percentiles([float(at) for at in range(1001)])
    assert found is not None
    assert (found.p50, found.p99, found.p99_9) == pytest.approx((500, 990, 999))


def test_an_objective_that_means_nothing_is_refused() -> None:
    assert parse_slo("e2el:2000")[0].seconds == 2.0
    for wrong in ("ttft", "ttft=fast", "speed=3ms", "ttft.p77=3ms"):
        with pytest.raises(ConfigurationError, match="not an objective"):
            parse_slo(wrong)


def test_vram_is_that_of_the_servers_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = GpuProcess(7, "server", 30 * GIB)
    gpus = [
        NvidiaGpu(index=0, uuid="a", name="H", total_bytes=80 * GIB, free_bytes=40 * GIB, processes=(mine,)),
        NvidiaGpu(index=1, uuid="b", name="H", total_bytes=80 * GIB, free_bytes=4 * GIB),
    ]
    monkeypatch.setattr(nvidia, "probe", lambda **_: NvidiaMachine(gpus=tuple(gpus)))
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetPowerUsage=lambda uuid: {"a": 350_000, "b": 90_000}[uuid],
    )
    expected = {"vram_bytes": 30 * GIB, "vram_free_share": 0.5, "power_w": 350.0}
    assert gpu_reading([7, 8], library) == expected
    assert gpu_reading([9], library) == {}
    # In a container NVML names other ids: of two alike it is the one that holds as much as the server says.
    found = {"vram_free_share": 4 / 80, "power_w": 90.0, "gpu_by_size": True}
    assert gpu_reading([9], library, described=(79 * GIB, 70 * GIB)) == found
    assert gpu_reading([9], library, described=(79 * GIB, 30 * GIB)) == {}  # It may be either.
    assert gpu_reading([9], library, described=(24 * GIB, GIB)) == {}


def test_only_a_loopback_address_is_of_this_machine() -> None:
    assert is_local("http://127.0.0.1:80")
    assert is_local("http://localhost/")
    assert not is_local("http://example.org")


def test_a_server_that_dies_as_load_falls_has_not_passed() -> None:
    died = [answer(20 + 0.1 * at, error="connect: refused", first_s=None) for at in range(50)]
    assert failed(judged([*STEADY, *died])) == ["errors"]
    evidence = RunEvidence(peak=figures(STEADY, 0, 20), loop="closed", same_process=False)
    assert [check.name for check in checks(evidence, Allowed()) if not check.passed] == ["server process"]


def test_answers_without_a_token_are_none() -> None:
    empty = [msgspec.structs.replace(one, output_tokens=0, gaps=b"") for one in STEADY]
    assert failed(judged(empty)) == ["requests"]


def test_a_percentile_needs_values_beyond_it() -> None:
    few = [answer(0.2 * at) for at in range(99)]
    assert failed(judged(few, objectives=parse_slo("ttft=1s"))) == ["ttft p99"]
    assert failed(judged(few, objectives=parse_slo("ttft.p95=1s"))) == []
    assert failed(judged([*few, answer(19.9)], objectives=parse_slo("ttft=1s"))) == []


def test_requests_that_a_late_client_sent_after_the_peak_are_of_the_peak() -> None:
    """They waited longest."""
    late = [msgspec.structs.replace(answer(25.0), intended_s=19.0) for _ in range(10)]
    found = figures([*STEADY, *late], 0, 20)
    assert found.requests == 410
    assert found.ttft_intended is not None
    assert found.ttft_intended.max > 6


def test_a_client_without_sockets_is_not_the_servers_fault() -> None:
    refused = [answer(10.0, error="connect: Too many open files", first_s=None) for _ in range(9)]
    assert failed(judged([*STEADY, *refused])) == ["client", "errors"]


def test_a_request_is_held_to_the_highest_percentile_of_its_objective() -> None:
    assert limits(parse_slo("e2e.p50=2s,e2e.p99=20s,tpot=50ms,itl=90ms")) == {"e2e": 20.0, "itl": 0.05}
    assert limits(parse_slo("e2e.p99=20s,e2e.p50=2s,itl=90ms")) == {"e2e": 20.0, "itl": 0.09}


def test_memory_that_nobody_saw_is_said() -> None:
    seen, unseen = (RunEvidence(peak=figures(STEADY, 0, 20), loop="closed", samples=held) for held in (samples(), []))
    assert reason_of(checks(seen, Allowed())).endswith("checks passed")
    assert "memory could not be seen" in reason_of(checks(unseen, Allowed()))


def test_every_event_has_its_moment_and_its_part_of_the_tokens() -> None:
    three = answer(5.0, ttft_s=1.0, gaps=array("f", [0.5, 0.25]).tobytes(), output_tokens=6)
    left = answer(2.0, ttft_s=1.0, gaps=array("f", [0.5]).tobytes(), output_tokens=9, cancelled=True)
    one = answer(7.0, ttft_s=1.0, gaps=b"", output_tokens=0)
    times, weights = token_times([three, answer(1.0, error="reset", first_s=None), left, one])
    assert times.tolist() == pytest.approx([6.0, 6.5, 6.75, 3.0, 3.5, 8.0])
    assert weights.tolist() == [2.0, 2.0, 2.0, 1.0, 1.0, 0.0]
    assert [len(found) for found in token_times([])] == [0, 0]


def test_requests_in_flight_are_those_of_each_moment() -> None:
    held = [msgspec.structs.replace(answer(0.0), sent_s=sent, end_s=end) for sent, end in ((9.0, 10.5), (10.25, 13.0))]
    assert mean_in_flight(held, np.array([10.0, 11.0, 12.0, 14.0])).tolist() == pytest.approx([1.25, 1.0, 0.5])


def test_an_engine_that_was_restarted_is_noticed() -> None:
    told = [
        ServerSample(at_s=0.0, engine_restarts=1.0),
        ServerSample(at_s=1.0),
        ServerSample(at_s=2.0, engine_restarts=2.0),
    ]
    assert restarted(told)
    assert not restarted(told[:2])
    assert not restarted([])


def test_without_a_token_at_peak_a_stall_is_measured_by_the_whole_run() -> None:
    slow = [answer(0.1 * at, gap_s=0.4) for at in range(40)]
    evidence = RunEvidence(
        peak=figures(slow, 50, 60), whole=figures(slow, 0, 60), loop="closed", stall=Stall(at_s=1, seconds=3, streams=2)
    )
    found = {check.name: check.passed for check in checks(evidence, Allowed())}
    assert (found["requests"], found["stall"]) == (False, True)


def test_requests_to_a_server_that_is_gone_say_nothing_of_what_is_too_much() -> None:
    lost = [answer(19.95, error="reset", gaps=b"", first_s=None)]
    refused = [answer(21 + 0.05 * at, error="connect: Connection refused", gaps=b"", first_s=None) for at in range(40)]
    assert until_it_ended(STEADY + lost + refused) == STEADY + lost
    assert until_it_ended(refused) == []
