"""A search for the knee by arrival rates: what counts as kept, and what is said of it."""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from made_up_answers import GAP_S, TOKENS, TTFT_S, answer
from msgspec.structs import replace

from holdfast.bench.arguments import read_load
from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.worker import ClientReport
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import Phase
from holdfast.bench.measure.objectives import parse_slo
from holdfast.bench.measure.rate_points import RatePoint, kept, rate_knee, rate_point
from holdfast.bench.measure.samples import ServerSample
from holdfast.bench.measure.verdict import Allowed
from holdfast.bench.report.page import page
from holdfast.bench.report.text import lines
from holdfast.bench.result import BenchResult
from holdfast.bench.run import RunOptions, make_result
from holdfast.bench.target import Target
from holdfast.cli.commands import bench
from holdfast.errors import ConfigurationError

STEP_S, CAPACITY = 15.0, 12.0


def queued(rate: float, *, begin_s: float = 0.0, seed: int = 1, poisson: bool = True) -> list[TimedAnswer]:
    """Of a server that begins one request after the other, `CAPACITY` of them a second, of differing lengths."""
    draw = random.Random(seed)
    found, due, free = [], 0.0, 0.0
    while (due := due + (draw.expovariate(rate) if poisson else 1 / rate)) <= STEP_S:
        free = max(free, due) + 1 / CAPACITY
        gap_s = GAP_S * draw.uniform(0.5, 4)
        found.append(answer(begin_s + due, ttft_s=free - due, gap_s=gap_s))
    return found


def point(rate: float, slo: str = "", **changes: object) -> RatePoint:
    objectives = parse_slo(slo) if slo else ()
    return rate_point(queued(rate, **changes), rate, (0.0, STEP_S), objectives=objectives)  # type: ignore[arg-type]


def test_a_rate_beyond_the_capacity_grows_a_backlog_and_one_below_it_does_not() -> None:
    missed = sum(bool(point(rate, seed=seed).missed) for rate in (4.0, 8.0, 10.0) for seed in range(100))
    assert (
        missed <= 6
    )  # A burst at the end of a step is no backlog: of single requests' scatter it would look like one.
    for seed in range(40):
        assert point(9.0, seed=seed).missed == "", seed
        assert "the backlog grew" in point(18.0, seed=seed).missed, seed
    beyond = point(16.0, poisson=False)
    assert beyond.answered_per_s == pytest.approx(CAPACITY, rel=0.05)
    assert beyond.offered_per_s == pytest.approx(16.0, rel=0.01)
    assert beyond.missed.startswith("the backlog grew, 12")
    assert point(9.0, poisson=False).output_tokens_per_s == pytest.approx(9 * TOKENS, rel=0.1)


def test_a_rate_that_misses_the_slo_or_has_errors_is_not_kept() -> None:
    assert point(9.0, "ttft=2s").meets_slo is True
    late = point(9.0, "ttft=50ms")
    assert late.meets_slo is False
    assert late.missed.startswith("missed the SLO, ttft p99 ")
    broken = [*queued(9.0)[:-1], answer(14.0, error="HTTP 503", first_s=None, gaps=b"")]
    assert "requests failed" in rate_point(broken, 9.0, (0.0, STEP_S)).missed
    assert rate_point(broken, 9.0, (0.0, STEP_S), error_share=0.05).missed == ""


def test_a_rate_that_the_client_was_late_for_says_so() -> None:
    late = [replace(one, intended_s=one.sent_s - 0.3) for one in queued(9.0, begin_s=0.4) if one.sent_s < STEP_S]
    objectives = parse_slo("ttft=200ms")
    found = rate_point(late, 9.0, (0.0, STEP_S), objectives=objectives)
    assert "the client itself was late" in found.missed
    limited = rate_point(late, 9.0, (0.0, STEP_S), objectives=objectives, limited_client=True)
    assert limited.missed.startswith("missed the SLO")
    assert "client" not in limited.missed


def searched(
    *rates: float,
    same_process: bool | None = None,
    samples: Sequence[ServerSample] = (),
    more: Sequence[TimedAnswer] = (),
) -> BenchResult:
    phases, points, answers = list[Phase](), list[RatePoint](), list(more)
    for at, rate in enumerate(rates):
        begin_s = 20.0 * at
        step = queued(rate, begin_s=begin_s, poisson=False)
        points.append(rate_point(step, rate, (begin_s, begin_s + STEP_S)))
        phases += [Phase(f"{rate:g}", STEP_S), Phase("drain", 20.0 - STEP_S, 0.0, 0.0)]
        answers += step
    sampler = SimpleNamespace(
        samples=list(samples), engine=None, settings={}, local=False, same_process=same_process, command=None
    )
    clients = SimpleNamespace(answers=answers, start_s=0.0, reports=[ClientReport(cpu_share=0.1, loop_lag_s=0.0)])
    load = Load(url="http://x", model="m", phases=tuple(phases), rate=20.0, arrivals="constant")
    options = RunOptions(allowed=Allowed(), rates=(*rates, 20.0), advise=False)
    target = Target(url="http://x", model="m")
    return make_result(target, load, options, clients, sampler, None, points)  # type: ignore[arg-type]


def test_the_verdict_and_the_reports_say_the_knee_in_requests_a_second() -> None:
    found = searched(8.0, 10.0, 14.0)
    assert found.verdict.passed, found.verdict.reason
    assert found.verdict.reason.startswith("knee at 10 requests/s (at 14: the backlog grew, 12 of 14 requests/s")
    assert (found.verdict.safe_rate, found.window_s) == (10.0, (20.0, 35.0))
    said = "\n".join(lines(found))
    assert "open loop, 8 to 20 requests/s, constant, 15 s each" in said
    assert [line.split()[0] for line in said.splitlines() if "<- knee" in line] == ["10"]
    assert "safe: 10 requests/s" in said
    assert "at once (" not in said
    assert "knee at 10 requests/s" in page(found)


def test_a_fault_beyond_the_knee_is_none_of_the_rate_that_is_kept() -> None:
    """The search goes on until something gives: what counts is what happened at the rate that is named."""
    waits = [0.02] * 4 + [3.0] + [0.02] * 4

    def stuck(at_s: float) -> TimedAnswer:
        """Three seconds after the last of the others, so that nothing else comes meanwhile."""
        return answer(at_s, gaps=array("f", waits).tobytes(), end_s=at_s + TTFT_S + sum(waits))

    def sampled(full_s: float) -> list[ServerSample]:
        return [ServerSample(at_s=at, ram_free_share=0.01 if at == full_s else 0.5) for at in range(60)]

    beyond = searched(8.0, 10.0, 14.0, samples=sampled(50.0), more=[stuck(70.0)])
    assert beyond.verdict.passed, beyond.verdict.reason
    assert len(beyond.samples) == 60
    at_it = searched(8.0, 10.0, 14.0, samples=sampled(30.0), more=[stuck(70.0)])
    assert [check.name for check in at_it.verdict.checks if not check.passed] == ["RAM headroom"]


def test_a_search_that_found_no_knee_says_so() -> None:
    below = searched(8.0, 10.0)
    assert below.rate_knee is None
    assert below.verdict.reason.startswith("no knee up to 10 requests/s; ")
    gone = searched(8.0, 14.0, same_process=False)
    assert (gone.rate_knee, len(gone.rate_points), gone.verdict.passed) == (None, 1, False)
    beyond = searched(14.0)
    assert (rate_knee(beyond.rate_points), kept(beyond.rate_points), beyond.verdict.safe_rate) == (None, None, None)
    assert not beyond.verdict.passed
    assert beyond.verdict.reason.startswith("rate: not even 14 requests/s were kept: the backlog grew")


def rates(*words: str) -> tuple[float, ...]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    load, options = read_load(parser.parse_args(["http://127.0.0.1:1", "--find-knee", *words]), "http://127.0.0.1:1")
    assert [phase.name for phase in load.phases] == [f"{rate:g}" for rate in options.rates or options.steps]
    assert [phase.start * (load.rate or 0) for phase in load.phases] == pytest.approx(options.rates or [0] * 7)
    return options.rates


def test_rates_rise_in_ten_even_steps() -> None:
    assert rates("--rate", "20") == (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
    assert rates("--rate", "10-20") == (10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
    assert rates() == ()
    with pytest.raises(ConfigurationError, match="too few requests"):
        rates("--rate", "8", "--step", "15s")
    with pytest.raises(ConfigurationError, match="too few requests"):
        rates("--rate", "20", "--arrivals", "bursts", "--burst", "50")
