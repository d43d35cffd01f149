"""What is tried and what is not: ladders, what the planner rules out, the part of a traffic that is replayed, words."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from holdfast.bench.load.load import Arrival
from holdfast.bench.measure.objectives import parse_slo
from holdfast.cli.commands.tune import planned_settings, settings_of_flags
from holdfast.hardware.probe import Memory
from holdfast.tune.configuration import DEFAULT, Axis, ServerConfiguration, command_of, start_words
from holdfast.tune.gain import gain_of
from holdfast.tune.measure import cause_of, timeout_of
from holdfast.tune.replay import busiest, kept_per_s, replayed
from holdfast.tune.report import lines
from holdfast.tune.result import make_result
from holdfast.tune.space import headroom
from holdfast.tune.space.axes import space_of
from holdfast.tune.space.headroom import nearest_miss, no_headroom
from holdfast.tune.space.plans import Planner
from holdfast.tune.space.pruning import (
    REFUSED,
    SAME,
    SHORT,
    SLOWER,
    TIGHT,
    PrunedAgainst,
    Survivors,
    most_goodput,
    survivors,
)
from holdfast.tune.trial import BETTER, LIKELY, NO_HEADROOM, Trial, TuneOutcome

FEW = [Arrival(0.1 * at, 100, 20) for at in range(40)]


def of(model: str, *axes: Axis, arrivals: list[Arrival] | None = None, **settings: str) -> Survivors:
    planner = Planner(model, engine="holdfast", settings=settings)
    return survivors(axes, planner, PrunedAgainst(arrivals=arrivals or FEW, engine="holdfast", headroom=0.05))


def told(found: Survivors) -> dict[str, int]:
    return {one.kind: one.count for one in found.pruned}


def test_what_is_beyond_the_whole_traffic_is_measured_once() -> None:
    found = of("smollm2", Axis("max_num_seqs", (16, None, 128, 256)), Axis("gpu_memory_utilization", (0.5, None, 0.95)))
    assert [str(one) for one in found.configurations] == ["the default", "--max-num-seqs 16"]
    assert told(found) == {SAME: 10}
    assert found.combinations == 12
    assert found.same_as[(3, 2)] == 0  # 256 sequences at 0.95, of 40 requests.


def test_a_larger_kv_cache_is_tried_where_what_may_run_at_once_does_not_fit() -> None:
    long = [Arrival(0.1 * at, 3000, 1000) for at in range(200)]
    axes = (Axis("max_num_seqs", (16, None)), Axis("gpu_memory_utilization", (0.8, None)))
    found = of("llama-3.1-8b", *axes, arrivals=long, gpu="h100-80")
    assert [str(one) for one in found.configurations] == [
        "the default", "--max-num-seqs 16", "--gpu-memory-utilization 0.8",
    ]  # fmt: skip
    assert told(found) == {SAME: 1}  # 16 of them fit in either.


def test_what_leaves_too_little_of_a_cpus_memory_says_ram() -> None:
    planner = Planner("smollm2", engine="holdfast", settings={"ram": "8GiB", "device": "cpu"})
    found = survivors(
        (Axis("max_num_seqs", (None, 16)),), planner, PrunedAgainst(arrivals=FEW, engine="holdfast", headroom=0.99)
    )
    tight = next(one for one in found.pruned if one.kind == TIGHT)
    assert "% of RAM would be left, of 99%" in tight.example


def test_what_does_not_fit_or_is_too_short_is_not_started() -> None:
    axes = (
        Axis("max_model_len", (64, None)),
        Axis("max_num_batched_tokens", (32, None)),
        Axis("max_num_seqs", (None, 64)),
    )
    found = of("smollm2", *axes)
    assert told(found)[SHORT] >= 1
    assert told(found)[REFUSED] >= 1  # 64 sequences in a step of 32 tokens.
    short = next(one for one in found.pruned if one.kind == SHORT)
    assert "a request has 120" in short.example


def test_layers_of_a_disk_are_not_tried_where_the_model_fits_in_ram() -> None:
    assert told(of("smollm2", Axis("nvme_path", (None, "/tmp")))) == {SLOWER: 1}


def test_a_device_cannot_answer_more_than_its_memory_reads() -> None:
    planner = Planner("llama-3.1-8b", engine="holdfast", settings={"gpu": "h100-80"})
    burst = [Arrival(0.0, 100, 200)] * 1000
    one, many = (
        most_goodput(planner.plan(ServerConfiguration((("max_num_seqs", count),))), burst, 10.0) for count in (1, 64)
    )
    assert one is not None
    assert many is not None
    assert 0 < one < many / 8
    assert most_goodput(Planner("smollm2", engine="holdfast", settings={}).plan(DEFAULT), burst, 10.0) is None


def test_ladders_surround_the_default_and_lossy_settings_are_asked_for() -> None:
    plan = Planner("smollm2", engine="holdfast", settings={}).plan(DEFAULT)
    exact = {axis.name: axis.values for axis in space_of(plan, FEW, engine="holdfast", cores=2, memory_nodes=1).axes}
    assert exact["max_num_seqs"] == (8, 16, 32, None, 128, 256)
    assert exact["max_model_len"] == (256, None)
    assert exact.keys() == {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization"}
    lossy = {
        axis.name: axis.values for axis in space_of(plan, FEW, engine="holdfast", lossy=True, nvme_path="/disk").axes
    }
    assert lossy["kv_cache_dtype"] == (None, "bfloat16", "fp8")
    assert lossy["nvme_path"] == (None, "/disk")
    fixed = space_of(plan, FEW, engine="holdfast", fixed=frozenset({"max_num_seqs"})).axes
    assert "max_num_seqs" not in [axis.name for axis in fixed]
    theirs = {axis.name: axis.values for axis in space_of(plan, FEW, engine="vllm").axes}
    assert theirs["max_num_seqs"] == (8, 16, 32, 64, None, 128, 256)  # What None is there nobody says.


def test_the_busiest_part_is_replayed_and_a_short_file_begins_again() -> None:
    quiet, busy = [Arrival(at, 10, 10) for at in range(10)], [Arrival(20 + 0.1 * at, 10, 10) for at in range(10)]
    assert [one.at_s for one in busiest([*quiet, *busy], 1.0)] == pytest.approx([0.1 * at for at in range(10)])
    twice = replayed([Arrival(0, 5, 1), Arrival(1, 6, 1)], 4.0, 1.0)
    assert [(one.at_s, one.prompt_tokens) for one in twice] == [(0, 5), (1, 6), (2, 5), (3, 6)]
    quick = replayed([Arrival(at, 5, 1) for at in range(10)], 2.0, 4.0)
    assert [one.at_s for one in quick] == [at / 4 for at in range(8)]
    assert len(replayed([Arrival(0, 5, 1)], 2.0, 1.0)) == 1


def test_a_pace_climbs_evenly_to_so_many_times_what_it_began_with() -> None:
    """A second at twice the pace, then from that to 6 times in 15 s: 62 s of the traffic."""
    climbing = replayed([Arrival(at, 5, 1) for at in range(100)], 16.0, 2.0, 3.0)
    assert len(climbing) == 62
    assert [climbing[at].at_s for at in (1, 2, 32)] == pytest.approx(
        [0.5, 1.0, 10.2705], abs=1e-4
    )  # 30 = 2 t + 4 / 15 * t^2 / 2
    assert replayed([Arrival(at, 5, 1) for at in range(9)], 3.0, 2.0, 1.0) == replayed(
        [Arrival(at, 5, 1) for at in range(9)], 3.0, 2.0
    )


@pytest.mark.parametrize("kept", [2.5, 4.0, 5.5])
def test_goodput_of_a_pace_that_climbs_is_what_it_had_climbed_to(kept: float) -> None:
    """Of requests that are one a second at their own pace, those that came before it was so quick."""
    climbing = replayed([Arrival(0.01 * at, 5, 1) for at in range(10_000)], 16.0, 2.0, 3.0)
    in_time = sum(one.at_s < 1 + 15 * (kept - 2) / 4 for one in climbing)
    assert kept_per_s(in_time, len(climbing), 16.0, 3.0) == pytest.approx(100 * kept, rel=0.01)
    at_first = kept_per_s(1.0, len(climbing), 16.0, 3.0)
    assert 0 < at_first < 2.0
    assert kept_per_s(0, len(climbing), 16.0, 3.0) == 0.0
    assert kept_per_s(20, 40, 10.0, 1.0) == 2.0


def test_commands_are_as_people_write_them_without_keys() -> None:
    chosen = ServerConfiguration((("max_num_seqs", 32), ("kv_cache_dtype", "fp8")))
    text = command_of(chosen, engine="holdfast", model="my model", flags=["--api-key", "k"])
    assert text == "holdfast serve 'my model' --max-num-seqs 32 --kv-cache-dtype fp8 --api-key \"${API_KEY:?}\""
    words = start_words(chosen, engine="holdfast", model="m", flags=["--api-key", "k"], port=81)
    assert "k" in words
    assert words[1:5] == ["-m", "holdfast", "serve", "m"]
    assert words[-3:] == ["--port", "81", "--disable-access-log"]
    flags = ["--max-num-seqs", "4", "--enforce-eager", "--port", "80", "--dtype=float32", "-tp", "2", "-c", "8k"]
    assert planned_settings(settings_of_flags(flags, "holdfast")) == {
        "max_num_seqs": "4", "enforce_eager": True, "dtype": "float32", "tensor_parallel_size": "2",
        "max_model_len": "8k",
    }  # fmt: skip
    assert settings_of_flags(["--swap-space", "4"], "holdfast").keys() == {"swap_space", "kv_ram"}


def test_a_gain_needs_rounds_and_tells_its_interval() -> None:
    assert gain_of([1.0, 1.0], [2.0, 2.0]) is None
    assert gain_of([0.0] * 3, [2.0] * 3) is None
    sure, unsure = gain_of([1.0, 1.1, 0.9], [1.5, 1.6, 1.4]), gain_of([1.0, 1.1, 0.9], [1.5, 0.8, 1.2])
    assert sure is not None
    assert unsure is not None
    assert sure.proven
    assert sure.change == pytest.approx(0.5)
    assert not unsure.proven
    assert unsure.low < 0 < unsure.change < unsure.high


def test_a_request_is_given_up_when_it_is_of_no_use_any_more() -> None:
    assert timeout_of(parse_slo("ttft=1s,itl=100ms"), FEW) == 10.0
    assert timeout_of(parse_slo("e2e=20s"), FEW) == 60.0
    assert timeout_of(parse_slo("ttft=1s"), FEW) == 120.0


def test_the_doctor_says_what_a_server_died_of(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR [core.py:718] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    died, of_memory = cause_of(log, "it ended")
    assert "memory" in died
    assert of_memory
    log.write_text("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm\n")
    died, of_memory = cause_of(log, "it ended")
    assert died.endswith(": A module is missing or does not match: vllm.")
    assert not of_memory
    log.write_text("")
    assert cause_of(log, "it ended") == ("it ended", True)


def test_what_is_likely_but_not_proven_is_said_to_be_that() -> None:
    defaults, others = [2.0, 4.0, 3.0], [4.0, 3.0, 5.0]
    gain = gain_of(defaults, others)
    assert gain is not None
    assert (gain.proven, gain.likely) == (False, True)
    better = ServerConfiguration((("max_num_seqs", 16),))
    trials = [
        Trial(configuration=one, stage="confirmation", speed=2.0, climb=2.0, goodput=goodput, good_share=0.5)
        for pair in zip(defaults, others, strict=True)
        for one, goodput in zip((DEFAULT, better), pair, strict=True)
    ]
    outcome = TuneOutcome(
        kept=better, verdict=LIKELY, gain=gain, speed=2.0, climb=2.0, trials=trials, ended="time was up"
    )
    result = make_result(
        outcome, of("smollm2", Axis("max_num_seqs", (16, None, 128))), model="smollm2", engine="holdfast", flags=[],
        source="t.jsonl", arrivals=FEW, replay=FEW, trial_s=10.0, objectives=parse_slo("ttft=1s"), headroom=0.05,
        lossy=False, seconds=60.0,
    )  # fmt: skip
    said = list(lines(result))
    assert any(
        line.startswith("likely better, not proven: +33.3% goodput over the default in the mean") for line in said
    )
    assert any("at a pace that climbs from 2 to 4 times its own" in line for line in said)
    assert said[-1] == "holdfast serve smollm2 --max-num-seqs 16"
    assert any(" 3.00 " in line and " 3 " in line for line in said)  # The default's row: of this pace.


def test_memory_that_others_hold_is_no_matter_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has ended, and without it there is less than what shall be free."""
    now = Memory(total_bytes=100 << 30, available_bytes=77 << 30, limited_by="machine")
    monkeypatch.setattr(headroom, "memory", lambda: now)
    monkeypatch.setattr(headroom, "memory_holders", lambda: ("python3 (pid 7) 20.00 GiB",))
    small = Planner("smollm2", engine="holdfast", settings={})
    tight = Trial(configuration=DEFAULT, stage="default", speed=1.0, headroom_held=False, free_share={"RAM": 0.75})
    said = no_headroom([tight], 0.8, small, FEW, model="smollm2").fix or ""
    assert said.startswith(
        "without any server 77.0% of RAM is free now: end what else holds it (python3 (pid 7) 20.00 GiB)"
    )
    assert "--max-num-seqs" not in said
    assert "holdfast plan" not in said
    assert "without any server" not in (no_headroom([tight], 0.76, small, FEW, model="smollm2").fix or "")


def test_what_nothing_kept_is_told_with_what_came_nearest_and_what_would_be_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = Memory(total_bytes=64 << 30, available_bytes=64 << 30, limited_by="machine")
    monkeypatch.setattr(headroom, "memory", lambda: free)
    planner = Planner("llama-3.1-8b", engine="holdfast", settings={"gpu": "h100-80"})
    arrivals = [Arrival(0.1 * at, 3000, 1000) for at in range(200)]
    nearest = ServerConfiguration((("max_num_seqs", 64),))
    trials = [
        Trial(configuration=one, stage="search", speed=1.0, headroom_held=False, free_share={"RAM": 0.5, "VRAM": share})
        for one, share in ((DEFAULT, 0.01), (nearest, 0.04), (nearest, 0.03))
    ]
    died = ServerConfiguration((("max_num_seqs", 256),))
    trials.append(Trial(configuration=died, stage="search", speed=1.0, died="no", free_share={"VRAM": 0.045}))
    error = no_headroom(trials, 0.05, planner, arrivals, model="llama-3.1-8b")
    assert error.code == "HF167"
    assert error.found is not None
    assert error.fix is not None
    assert error.found.startswith(
        "3.0% of VRAM with --max-num-seqs 64, which came nearest of 3 configurations: 2.0% short"
    )
    assert error.found.endswith("1 of them died")
    assert "--gpu-memory-utilization 0.8 (a smaller KV cache" in error.fix
    for way in error.fix.split("; or ")[:-1]:  # Each is planned to hold that much less.
        flag, value = way.split(" ")[:2]
        name = flag.removeprefix("--").replace("-", "_")
        changed = {**dict(nearest.changes), name: value if name == "quantization" else float(value)}
        if name == "gpu_memory_utilization":
            less = planner.plan(ServerConfiguration(tuple(changed.items()))).ranks[0].pool_bytes
            assert less < planner.plan(nearest).ranks[0].pool_bytes - 0.02 * 80e9
    assert "holdfast plan llama-3.1-8b --vram" in error.fix

    small = Planner("smollm2", engine="holdfast", settings={})
    tight = Trial(configuration=DEFAULT, stage="default", speed=1.0, headroom_held=False, free_share={"RAM": 0.1})
    assert "end what else holds memory" in (no_headroom([tight], 0.99, small, FEW, model="smollm2").fix or "")
    unknown = Trial(configuration=DEFAULT, stage="default", speed=1.0, headroom_held=False)
    assert no_headroom([unknown], 0.05, small, FEW, model="smollm2").code == "HF167"

    outcome = TuneOutcome(kept=None, verdict=NO_HEADROOM, speed=1.0, trials=trials, ended="time was up")
    result = make_result(
        outcome, of("smollm2", Axis("max_num_seqs", (16, None))), model="smollm2", engine="holdfast", flags=[],
        source="t.jsonl", arrivals=FEW, replay=FEW, trial_s=10.0, objectives=parse_slo("ttft=1s"), headroom=0.05,
        lossy=False, seconds=60.0, error=error,
    )  # fmt: skip
    said = json.loads(msgspec.json.encode(result))
    assert (said["command"], said["settings"], said["held"]) == (None, None, False)
    assert said["error"]["code"] == "HF167"
    assert said["error"]["fix"] == error.fix
    assert said["trials"][1]["free_share"] == {"RAM": 0.5, "VRAM": 0.04}
    assert any(line.startswith("nothing is kept: no configuration that was tried left 5%") for line in lines(result))


def test_what_died_once_or_left_enough_did_not_come_nearest() -> None:
    """Some of its runs may have had plenty free: it is not memory that it was short of."""
    planner = Planner("llama-3.1-8b", engine="holdfast", settings={"gpu": "h100-80"})
    tight, died, roomy = (ServerConfiguration((("max_num_seqs", count),)) for count in (64, 256, 16))

    def trial(configuration: ServerConfiguration, vram: float, reason: str = "") -> Trial:
        return Trial(
            configuration=configuration, stage="search", speed=1.0, headroom_held=vram >= 0.05 or bool(reason),
            died=reason, free_share={} if reason else {"RAM": 0.5, "VRAM": vram},
        )  # fmt: skip

    mixed = [trial(died, 0.30), trial(died, 0.0, "out of memory"), trial(tight, 0.04), trial(roomy, 0.05)]
    for trials in (mixed, mixed[::-1]):
        nearest = nearest_miss(trials, 0.05)
        assert nearest is not None
        assert (nearest.configuration, nearest.free_share) == (tight, 0.04)
        assert nearest.short_share > 0
        error = no_headroom(trials, 0.05, planner, FEW, model="llama-3.1-8b")
        assert error.found == (
            "4.0% of VRAM with --max-num-seqs 64, which came nearest of 3 configurations: 1.0% short, 810.08 MiB;"
            " 1 of them died"
        )
    all_died = [trial(died, 0.01), trial(died, 0.0, "out of memory"), trial(tight, 0.0, "killed")]
    assert nearest_miss(all_died, 0.05) is None
    error = no_headroom(all_died, 0.05, planner, FEW, model="llama-3.1-8b")
    assert error.found == "2 configurations, which left less in some runs and died in others: out of memory"
    assert error.fix == "fewer sequences, a shorter context"


def test_a_report_ends_with_the_command_and_why() -> None:
    better = ServerConfiguration((("max_num_seqs", 16),))

    def trial(configuration: ServerConfiguration, goodput: float, ttft_s: float) -> Trial:
        return Trial(
            configuration=configuration, stage="confirmation", speed=2.0, goodput=goodput, good_share=goodput / 4,
            requests=40, measured_s={"ttft p99": ttft_s}, slo_held=True, seconds=9.0,
        )  # fmt: skip

    trials = [trial(DEFAULT, 2.0, 0.9), trial(better, 3.0, 0.3)] * 3
    outcome = TuneOutcome(
        kept=better, verdict=BETTER, gain=gain_of([2.0] * 3, [3.0] * 3), speed=2.0, trials=trials, ended="time was up"
    )
    result = make_result(
        outcome, of("smollm2", Axis("max_num_seqs", (16, None, 128))), model="smollm2", engine="holdfast", flags=[],
        source="t.jsonl", arrivals=FEW, replay=FEW, trial_s=10.0, objectives=parse_slo("ttft=1s"), headroom=0.05,
        lossy=False, seconds=60.0,
    )  # fmt: skip
    said = list(lines(result))
    assert said[-1] == "holdfast serve smollm2 --max-num-seqs 16"
    assert any(line.startswith("+50.0% goodput over the default (+50.0% to +50.0% at 99%, 3 rounds") for line in said)
    assert "  ttft p99 300 ms instead of 900 ms" in said
    assert any("1 not run, same server as another" in line for line in said)
    assert json.loads(msgspec.json.encode(result))["settings"] == {"max_num_seqs": 16}
