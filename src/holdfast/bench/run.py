"""One run from load to result: client processes on one side, samples of the server on the other, then figures."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

import holdfast
from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.processes import ClientProcesses, client_processes
from holdfast.bench.client.steps import ClientSteps
from holdfast.bench.judged_time import JudgedTime, judged_time, safe_reason
from holdfast.bench.load.load import Load
from holdfast.bench.load.profile import Phase, level_at, total_seconds
from holdfast.bench.measure.advice import advice
from holdfast.bench.measure.figures import figures, gaps_of, mean_in_flight, tokens_between, tpot_of
from holdfast.bench.measure.load_points import LoadPoint, knee, load_points, until_it_ended
from holdfast.bench.measure.objectives import limits
from holdfast.bench.measure.rate_points import RatePoint, kept, knee_words, rate_knee, rate_point
from holdfast.bench.measure.samples import ServerSample, ServerSampler, restarted
from holdfast.bench.measure.steadiness import longest_stall, memory_drift, throughput_drift
from holdfast.bench.measure.verdict import CLIENT, Allowed, BenchVerdict, RunEvidence, checks, reason_of
from holdfast.bench.result import BenchResult, RequestColumns, Timeline
from holdfast.bench.target import Target

DRIFT_LEAST_S = 5.0
"""A shorter peak has no fifths worth comparing."""
BINS, FEWEST_BINS, SHORTEST_BIN_S, REQUESTS_OF_A_BIN = 240, 24, 0.1, 4
HISTOGRAM_EDGES = tuple(1e-4 * 10 ** (place / 20) for place in range(121))
"""From 0.1 ms to 100 s, twenty to a power of ten."""

Progress = Callable[[float, Sequence[TimedAnswer]], None]
"""Told now and then: seconds since the start, and what has been answered."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    allowed: Allowed = Allowed()
    workers: int = 1
    sample_every_s: float = 1.0
    steps: tuple[int, ...] = ()
    """Of a search for the knee: the levels, which are the names of the phases."""
    rates: tuple[float, ...] = ()
    """Of a search for the knee in an open loop: requests a second, which are the names of the phases."""
    model: str | None = None
    """What the planner calls the model, for advice."""
    command: str | None = None
    """How the server was started, where that is known: advice keeps its other flags."""
    api_key: str | None = None
    advise: bool = True
    """Plan flags for a run that failed."""


def run_bench(target: Target, load: Load, options: RunOptions, progress: Progress | None = None) -> BenchResult:
    sampler = ServerSampler(load.url, options.api_key, every_s=options.sample_every_s, certificate=load.certificate)
    sampler.start()
    interrupted_s, rate_points = None, list[RatePoint]()
    try:
        with _clients(load, options, rate_points) as clients:
            try:
                clients.wait(lambda: progress(clients.elapsed_s(), clients.answers) if progress else None)
            except KeyboardInterrupt:
                if not any(answer.good for answer in clients.answers):
                    raise
                interrupted_s = time.monotonic()
    finally:
        sampler.stop()
    if isinstance(clients, ClientSteps):
        load = msgspec.structs.replace(load, phases=tuple(clients.phases))
    return make_result(target, load, options, clients, sampler, interrupted_s, rate_points)


@contextlib.contextmanager
def _clients(load: Load, options: RunOptions, rate_points: list[RatePoint]) -> Iterator[ClientProcesses | ClientSteps]:
    """`rate_points` gets one of each rate that was answered; a search ends with the first that was not kept."""
    if not options.rates:
        with client_processes(load, options.workers) as clients:
            yield clients
        return

    def goes_on(phase: Phase, answers: Sequence[TimedAnswer], begin_s: float) -> bool:
        allowed, span_s = options.allowed, (begin_s, begin_s + phase.seconds)
        rate = options.rates[len(rate_points)]
        rate_points.append(
            rate_point(
                answers,
                rate,
                span_s,
                objectives=allowed.objectives,
                error_share=allowed.error_share,
                limited_client=allowed.limited_client,
            )
        )
        return not rate_points[-1].missed

    yield ClientSteps(load, options.workers, goes_on)


def make_result(
    target: Target,
    load: Load,
    options: RunOptions,
    clients: ClientProcesses | ClientSteps,
    sampler: ServerSampler,
    interrupted_s: float | None = None,
    rate_points: Sequence[RatePoint] = (),
) -> BenchResult:
    """`interrupted_s`: when it was, on the clock of the answers; those under way then are in none of it."""
    start_s, answers = clients.start_s, sorted(clients.answers, key=lambda answer: answer.sent_s)
    allowed, slo = options.allowed, limits(options.allowed.objectives)
    last_s = max((answer.end_s for answer in answers), default=start_s)
    asked = until_it_ended(answers) if sampler.same_process is False else answers
    points = load_points(asked, allowed.objectives)
    if sampler.same_process is False:  # A server that is gone says nothing of where its knee was.
        rate_points = [point for point in rate_points if not point.missed]
    rate = kept(rate_points)
    judged = judged_time(
        load, allowed, asked, points, (start_s, last_s),
        steps=options.steps,
        rate=None if not options.rates else options.rates[0] if rate is None else rate.rate,
        interrupted_s=interrupted_s,
    )  # fmt: skip
    level, (begin_s, end_s) = judged.level, judged.span_s
    before = [sample for sample in sampler.samples if sample.at_s < start_s]
    samples = before[-1:] + sampler.samples[len(before) :]  # What counts up is counted from before the first request.
    # What the last requests leave undone is no loss of speed, nor is a log that has quiet hours.
    drains = load.requests is not None or bool(load.replay)
    until_s = min(end_s, max((answer.sent_s for answer in answers), default=end_s)) if drains else end_s
    steady = until_s - begin_s >= DRIFT_LEAST_S and level_at(load.phases, begin_s - start_s + 1e-6) > 0
    whole = figures(answers, start_s, max(last_s, start_s + 1e-3) + 1e-3, slo=slo)
    evidence = RunEvidence(
        peak=figures(answers, begin_s, end_s, slo=slo),
        whole=None if level is not None else whole,
        loop=load.loop,
        same_process=sampler.same_process,
        clients=clients.reports,
        # A search goes on until a level is too much for the server: what happens there is no fault of the one judged.
        stall=longest_stall(answers, start_s, None if level is None else (begin_s, end_s)),
        throughput=throughput_drift(answers, begin_s, until_s) if steady and not load.replay else None,
        ram=memory_drift(samples, begin_s, until_s, vram=False) if steady else None,
        vram=memory_drift(samples, begin_s, until_s, vram=True) if steady else None,
        samples=samples if level is None else _within(samples, begin_s, end_s),
        rate_points=rate_points,
    )
    cut = "" if interrupted_s is None else f"interrupted after {interrupted_s - start_s:.0f} s, no verdict; until then "
    verdict = _verdict(target, load, options, sampler, answers, evidence, points, judged, cut)
    return BenchResult(
        holdfast=holdfast.__version__,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=target,
        engine=sampler.engine or target.engine,
        engine_settings=sampler.settings,
        load=described(load, options),
        phases=[{"name": phase.name, "seconds": _finite(phase.seconds)} for phase in load.phases],
        slo=list(allowed.objectives),
        interrupted=interrupted_s is not None,
        window_s=(begin_s - start_s, end_s - start_s),
        peak=evidence.peak,
        whole=whole,
        points=points,
        knee=knee(points),
        rate_points=list(rate_points),
        rate_knee=rate_knee(rate_points),
        throughput_drift=evidence.throughput,
        ram_drift=evidence.ram,
        vram_drift=evidence.vram,
        stall=evidence.stall,
        clients=list(clients.reports),
        samples=[_since(sample, start_s) for sample in samples],
        timeline=timeline(answers, start_s, last_s),
        itl_histogram=itl_histogram(answers),
        requests=columns(answers, start_s),
        verdict=verdict,
    )


def _verdict(
    target: Target,
    load: Load,
    options: RunOptions,
    sampler: ServerSampler,
    answers: Sequence[TimedAnswer],
    evidence: RunEvidence,
    points: Sequence[LoadPoint],
    judged: JudgedTime,
    cut: str,
) -> BenchVerdict:
    """`cut`: that it was interrupted, before the reason; a run that was is no pass."""
    found, safe = checks(evidence, options.allowed), judged.safe
    sound = all(check.passed for check in found if check.name != CLIENT)
    told = []
    if options.advise and not sound:
        told = advice(
            options.model or target.root or target.model,
            url=target.url,
            ended=sampler.same_process is False and not restarted(sampler.samples),
            engine=sampler.engine or target.engine,
            asked=(load.prompt.high, load.output.high),
            local=sampler.local,
            answers=answers,
            samples=sampler.samples,
            safe=safe,
            peak_in_flight=evidence.peak.peak_in_flight,
            too_few=not points,
            command=options.command or sampler.command,
        )
    turn, rate = knee_words(evidence.rate_points), kept(evidence.rate_points)
    return BenchVerdict(
        passed=all(check.passed for check in found) and not cut,
        reason=cut + (f"{turn}; " if turn else "") + reason_of(found),
        checks=found,
        safe_concurrency=None if safe is None else safe.at_once,
        safe_reason=safe_reason(points, judged, promised=bool(options.allowed.objectives)),
        safe_rate=None if rate is None else rate.rate,
        advice=told,
    )


def described(load: Load, options: RunOptions) -> dict[str, Any]:
    """For people who must know what was asked: without keys, prompts and times of a log."""
    left_out = ("headers", "prompts", "replay", "phases", "certificate", "url", "model", "schema", "extra_body",
        "first_request")  # fmt: skip
    found = {name: value for name, value in msgspec.to_builtins(load).items() if name not in left_out}
    found |= {"loop": load.loop, "workers": options.workers, "steps": list(options.steps)}
    found |= {"rates": list(options.rates)}
    found |= {"seconds": _finite(total_seconds(load.phases)), "replayed": len(load.replay)}
    found |= {"prompts_of_a_file": len(load.prompts), "structured_output": load.schema is not None}
    return {name: (None if isinstance(value, float) and math.isinf(value) else value) for name, value in found.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _within(samples: Sequence[ServerSample], begin_s: float, end_s: float) -> Sequence[ServerSample]:
    """All of them, where it is shorter than the time between two."""
    return [sample for sample in samples if begin_s <= sample.at_s < end_s] or samples


def _since(sample: ServerSample, start_s: float) -> ServerSample:
    return msgspec.structs.replace(sample, at_s=round(sample.at_s - start_s, 3))


def columns(answers: Sequence[TimedAnswer], start_s: float) -> RequestColumns:
    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    return RequestColumns(
        intended_s=[round(answer.intended_s - start_s, 6) for answer in answers],
        sent_s=[round(answer.sent_s - start_s, 6) for answer in answers],
        end_s=[round(answer.end_s - start_s, 6) for answer in answers],
        ttft_s=[seconds(None if answer.first_s is None else answer.first_s - answer.sent_s) for answer in answers],
        tpot_s=[seconds(tpot_of(answer)) if answer.good else None for answer in answers],
        prompt_tokens=[answer.prompt_tokens for answer in answers],
        output_tokens=[answer.output_tokens for answer in answers],
        error=[answer.error for answer in answers],
        cancelled=[answer.cancelled for answer in answers],
        adapter=[answer.adapter for answer in answers],
        turn=[answer.turn for answer in answers],
    )


def itl_histogram(answers: Sequence[TimedAnswer]) -> list[tuple[float, int]]:
    counts = np.zeros(len(HISTOGRAM_EDGES), dtype=np.int64)
    for answer in answers:
        if answer.good:
            places = np.searchsorted(HISTOGRAM_EDGES, gaps_of([answer]))
            counts += np.bincount(np.minimum(places, len(HISTOGRAM_EDGES) - 1), minlength=len(HISTOGRAM_EDGES))
    return [(edge, int(count)) for edge, count in zip(HISTOGRAM_EDGES, counts, strict=True) if count]


def timeline(answers: Sequence[TimedAnswer], start_s: float, last_s: float) -> Timeline:
    # With some requests in each, so that a slow server's lines are no comb.
    wanted = min(BINS, max(FEWEST_BINS, len(answers) // REQUESTS_OF_A_BIN))
    bin_s = max(SHORTEST_BIN_S, (last_s - start_s) / wanted)
    count = max(1, math.ceil((last_s - start_s) / bin_s))
    edges = start_s + bin_s * np.arange(count + 1, dtype=np.float64)
    tokens = tokens_between(answers, edges)
    ttfts = [list[float]() for _ in range(count)]
    bins = [np.empty(0, np.uint16)]
    started = [answer for answer in answers if answer.first_s is not None]
    for answer in started:
        first_s = (answer.first_s or 0.0) - start_s
        ttfts[min(count - 1, max(0, int((answer.sent_s - start_s) / bin_s)))].append(first_s + start_s - answer.sent_s)
        moments = first_s + np.cumsum(gaps_of([answer]), dtype=np.float64)
        bins.append(np.clip(moments / bin_s, 0, count - 1).astype(np.uint16))
    places = np.concatenate(bins)
    del bins
    ordered = gaps_of(started)[np.argsort(places, kind="stable")]
    split = np.split(ordered, np.cumsum(np.bincount(places, minlength=count))[:-1])

    def ranks(values: Sequence[Any], rank: float) -> list[float | None]:
        return [round(float(np.percentile(found, rank)), 6) if len(found) else None for found in values]

    return Timeline(
        bin_s=bin_s,
        output_tokens_per_s=[round(float(value) / bin_s, 3) for value in tokens],
        in_flight=[round(float(value), 3) for value in mean_in_flight(answers, edges)],
        ttft_p50_s=ranks(ttfts, 50),
        ttft_p99_s=ranks(ttfts, 99),
        itl_p50_s=ranks(split, 50),
        itl_p99_s=ranks(split, 99),
    )
