"""What a result becomes: a page that needs nothing else, a comparison that knows when there is no difference."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_up_answers import answer
from msgspec.structs import replace

from holdfast.bench.client.worker import ClientReport
from holdfast.bench.load.load import Arrival, Load
from holdfast.bench.load.profile import Phase, default_profile
from holdfast.bench.measure.objectives import parse_slo
from holdfast.bench.measure.samples import ServerSample
from holdfast.bench.measure.verdict import Allowed
from holdfast.bench.report.compare import compare, compare_lines
from holdfast.bench.report.page import page
from holdfast.bench.report.plots import Plot, Series, svg
from holdfast.bench.report.text import lines
from holdfast.bench.result import BenchResult, RequestColumns
from holdfast.bench.run import RunOptions, make_result
from holdfast.bench.target import Target
from holdfast.cli.main import main
from holdfast.units import MIB

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told apart here lies far apart."""
    monkeypatch.setattr("holdfast.bench.report.compare.DRAWS", 300)


@cache
def result(
    seed: int, *, slower: float = 1.0, requests: int = 1500, model: str = "m", busy: float = 0.2, slo: str = "ttft=1s"
) -> BenchResult:
    """Of a server whose latencies were drawn, 30 seconds at peak."""
    draw = random.Random(seed)
    answers = [
        answer(
            1 + 30 * at / requests, ttft_s=slower * draw.uniform(0.05, 0.15), gap_s=slower * draw.uniform(0.01, 0.03)
        )
        for at in range(requests)
    ]
    samples = [
        ServerSample(at_s=float(at), running=8.0, waiting=0.0, kv_share=0.3, ram_bytes=900 * MIB + at, power_w=300.0)
        for at in range(31)
    ]
    sampler = SimpleNamespace(samples=samples, engine="vllm", settings={}, local=False, same_process=None, command=None)
    clients = SimpleNamespace(answers=answers, start_s=0.0, reports=[ClientReport(cpu_share=busy, loop_lag_s=0.0)])
    load = Load(url="http://x", model=model, phases=default_profile(1, 30, 1), concurrency=8)
    options = RunOptions(allowed=Allowed(objectives=parse_slo(slo)))
    return make_result(Target(url="http://x", model=model), load, options, clients, sampler)  # type: ignore[arg-type]


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_and_repeats_no_markup() -> None:
    text = page(result(1, model=HOSTILE))
    found = Parsed(text)
    assert found.open == []
    assert "script" not in found.tags
    assert not {"src", "href", "onload", "style"} & {name for name, _ in found.attributes}
    assert "url(" not in text
    assert "@import" not in text
    assert found.tags.count("svg") >= 9
    assert "&lt;script&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert ">PASS<" in text
    cut = replace(result(1), interrupted=True, verdict=replace(result(1).verdict, passed=False))
    assert ">NONE<" in page(cut)
    assert ">FAIL<" not in page(cut)


def test_a_plot_leaves_holes_where_nothing_is_known() -> None:
    drawn = svg(Plot(title="t", x_label="x", y_label="y", series=[Series("a", [0, 1, 2, 3], [1.0, None, 2.0, 3.0])]))
    assert drawn.count("M") == 2
    assert svg(Plot(title="t", x_label="x", y_label="y", series=[Series("a", [0, 1], [None, None])])) == ""
    flat = svg(Plot(title="t", x_label="x", y_label="y", series=[Series("a", [1, 1], [0.0, 0.0])], log_x=True))
    assert "nan" not in flat


def test_two_runs_of_one_server_show_no_difference() -> None:
    found = compare(result(1), result(2))
    assert found.alike, found
    assert len(found.differences) == 9
    assert list(compare_lines(found))[-1].startswith("no difference")


def test_a_slower_server_is_told_with_its_interval() -> None:
    found = compare(result(1), result(2, slower=1.1))
    assert not found.alike
    told = {one.name: one for one in found.differences}
    for name in ("ttft p50", "tpot p50", "e2e p50"):
        assert told[name].verdict == "worse", told[name]
        assert told[name].low < 0.1 < told[name].high
    assert "B differs from A" in list(compare_lines(found))[-1]
    assert compare(result(2, slower=1.1), result(1)).differences[3].verdict == "better"


def test_goodput_is_compared_under_one_slo() -> None:
    promise = "ttft.p90=130ms,e2e=500ms"
    quick, slow = result(1, slo=promise), result(2, slower=1.3, slo="e2e=500ms,ttft.p90=130ms")
    told = {one.name: one for one in compare(quick, slow).differences}["good requests/s"]
    assert told.verdict == "worse"
    for value, run in ((told.a, quick), (told.b, slow)):
        assert value == pytest.approx(run.peak.good_requests_per_s, rel=0.05)
    assert told.b < 0.7 * told.a
    other = compare(quick, result(2, slo="ttft.p90=1s"))
    assert "good requests/s" not in [one.name for one in other.differences]
    assert other.warnings == [
        "the SLOs differ, and goodput is not compared: ttft.p90=130ms,e2e.p99=500ms and ttft.p90=1000ms"
    ]
    nothing = replace(result(1), slo=[])
    assert "good requests/s" not in [one.name for one in compare(nothing, nothing).differences]
    assert compare(nothing, nothing).left_out == []
    never = result(3, slo="ttft=1ms")
    assert compare(never, never).left_out == ["good requests/s"]


def test_a_comparison_says_that_one_run_of_each_is_little() -> None:
    said = list(compare_lines(compare(result(1), result(2, slower=1.1))))
    assert any("one run of each" in line and "A B A B" in line for line in said[:-1])
    assert said[-1].startswith("B differs from A")


def _failing(run: BenchResult, every: int) -> RequestColumns:
    kinds = ["" if at % every else "HTTP 500" for at in range(len(run.requests.error))]
    return msgspec.structs.replace(run.requests, error=kinds)


def test_a_server_that_fails_more_often_differs_however_quick_the_others_are() -> None:
    sound = result(1)
    failing = msgspec.structs.replace(sound, requests=_failing(sound, 20))
    found = compare(sound, failing)
    told = {one.name: one for one in found.differences}
    assert told["answered"].verdict == "worse"
    assert told["answered"].change == pytest.approx(-0.05, abs=0.01)
    assert not found.alike
    assert any("100.00%" in line and "95.0" in line for line in compare_lines(found))


def test_few_requests_prove_nothing() -> None:
    found = compare(result(1, requests=60), result(2, requests=60))
    assert [name for name in found.left_out if name.endswith("p99")] == ["ttft p99", "tpot p99", "e2e p99"]
    assert sum("too few requests" in line for line in compare_lines(found)) == 1
    nothing = compare(result(1, requests=5), result(2, requests=5))
    assert not nothing.alike
    assert [one.name for one in nothing.differences] == ["output tokens/s"]
    silent = msgspec.structs.replace(result(1), requests=_failing(result(1), 1))
    assert "answered" in compare(silent, result(2)).left_out  # Nothing is how many times more than none.


def test_runs_of_different_loads_are_compared_with_a_note() -> None:
    other = msgspec.structs.replace(result(2), load=result(2).load | {"concurrency": 16})
    assert compare(result(1), other).warnings == ["the loads differ: concurrency is 8 and 16"]
    without = msgspec.structs.replace(result(2), load=result(2).load | {"concurrency": None})
    assert compare(result(1), without).warnings == ["the loads differ: concurrency is 8 and not set"]


def test_prefix_caches_that_differ_are_told_beside_a_comparison() -> None:
    cold, warm = (
        msgspec.structs.replace(
            run, peak=msgspec.structs.replace(run.peak, cached_tokens=share * run.peak.prompt_tokens)
        )
        for run, share in ((result(1), 0), (result(2), 1))
    )
    (warning,) = compare(cold, warm).warnings
    assert warning.startswith("the prefix caches differ: of prompt tokens A had 0% cached, B 100%")
    assert any(warning in line for line in compare_lines(compare(cold, warm)))
    assert compare(warm, warm).warnings == []
    # A server whose answers do not tell, but its counters do; and one that tells nothing.
    counted = [ServerSample(at_s=at, prefix_asked=100 * at, prefix_found=100 * at) for at in (1.0, 2.0)]
    assert compare(warm, msgspec.structs.replace(result(2), samples=counted)).warnings == []
    assert "A had 100% cached, B does not tell" in compare(warm, result(2)).warnings[0]


def test_a_comparison_of_nothing_has_no_table() -> None:
    found = msgspec.structs.replace(compare(result(1, requests=5), result(2, requests=5)), differences=[])
    assert not any("99% interval" in line for line in compare_lines(found))
    assert "nothing to compare" in list(compare_lines(found))[-1]


def test_a_saved_result_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.cli.commands.bench import as_json

    first = tmp_path / "a.json"
    document: dict[str, Any] = as_json(result(1))
    first.write_text(json.dumps(document))
    assert main(["bench", "--compare", str(first), str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alike"] is True
    assert document["slo"] == [{"metric": "ttft", "percentile": "p99", "seconds": 1.0}]
    earlier = {name: value for name, value in document.items() if name not in ("slo", "rate_points", "rate_knee")}
    earlier["load"] = {name: value for name, value in document["load"].items() if name not in ("rates", "speed")}
    second = tmp_path / "b.json"
    second.write_text(json.dumps(earlier))  # Of before these were kept.
    assert main(["bench", "--compare", str(second), str(first), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alike"] is True
    assert found["warnings"] == ["the SLOs differ, and goodput is not compared: none and ttft.p99=1000ms"]
    first.write_text(json.dumps(document | {"version": 2}))
    assert main(["bench", "--compare", str(first), str(first)]) == 2
    assert main(["bench", "--compare", str(tmp_path / "none"), str(first)]) == 2


def test_people_read_what_was_loaded_and_found() -> None:
    said = "\n".join(lines(result(1)))
    assert "closed loop, 8 at once; up 1 s, peak 30 s, down 1 s; figures are of seconds 1 to 31" in said
    assert "RAM 900.00 MiB to 900.00 MiB, KV cache at most 30%" in said
    assert "300 W on average" in said


@pytest.mark.parametrize(
    ("speed", "told"), [(1.0, ""), (2.0, ", twice as fast"), (0.5, ", half as fast"), (2.5, ", 2.5 times as fast")]
)
def test_a_replay_says_how_fast_it_was(speed: float, told: str) -> None:
    replayed = replace(result(1), load=result(1).load | {"loop": "replay", "replayed": 4, "speed": speed})
    assert f"replay of 4 requests at their own times{told}; " in "\n".join(lines(replayed))


@pytest.mark.parametrize("replay", [(), (Arrival(0.0, 1, 1),)])
def test_the_last_requests_of_a_count_and_a_quiet_log_are_no_loss_of_speed(replay: tuple[Arrival, ...]) -> None:
    waves = [answer(10.0 * wave, gap_s=1.0) for wave in range(3) for _ in range(40)]
    load = Load(url="http://x", phases=(Phase("peak", math.inf),), concurrency=40, requests=121, replay=replay)
    clients = SimpleNamespace(answers=[*waves, answer(30.0, gap_s=1.0)], start_s=0.0, reports=[])
    sampler = SimpleNamespace(samples=[], engine=None, settings={}, local=False, same_process=None, command=None)
    found = make_result(Target(url="http://x", model="m"), load, RunOptions(), clients, sampler)  # type: ignore[arg-type]
    assert found.verdict.passed, found.verdict.reason
    assert (found.throughput_drift is None) == bool(replay)


def test_failures_that_no_figure_has_are_noted() -> None:
    sound = result(1)
    broken = msgspec.structs.replace(sound, peak=msgspec.structs.replace(sound.peak, failed=700))
    assert compare(sound, sound).warnings == []
    [note] = compare(sound, broken).warnings
    assert note.startswith("B: 700 of 1,500 requests failed")


def test_a_result_that_could_not_be_kept_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--save", "--html"):
        assert main(["bench", "http://127.0.0.1:9", flag, str(tmp_path / "none" / "x")]) == 2
        assert f"{flag}: " in capsys.readouterr().err
    assert main(["bench", "http://me:secret@127.0.0.1:9"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_a_client_that_was_too_slow_gives_no_advice_for_the_server() -> None:
    assert not result(1, busy=0.95).verdict.passed
    assert result(1, busy=0.95).verdict.advice == []
    assert result(1, slo="ttft=1ms").verdict.advice


def test_prompts_that_a_server_has_cached_from_an_earlier_run_are_told() -> None:
    found = result(1)

    def told(cached: int, **load: int) -> bool:
        peak = replace(found.peak, cached_tokens=cached * found.peak.completed)
        said = lines(replace(found, peak=peak, load=found.load | {"template_tokens": 30.0} | load))
        return any("another --seed" in line for line in said)

    assert not told(16)
    assert told(64)
    assert not told(64, prefix_tokens=50)
