"""The figures of a run under vLLM's names: the keys of its result file, and the lines of its table."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.measure.figures import gaps_of, meets, peak_in_flight, token_times, tpot_of
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
}
_GOALS = {"ttft": "ttft", "tpot": "itl", "e2el": "e2e"}


def goodput_limits(given: Sequence[str]) -> dict[str, float] | None:
    """`ttft:500 tpot:50`, in milliseconds, as limits of a request in seconds."""
    found: dict[str, float] = {}
    for goal in given:
        name, _, value = goal.partition(":")
        try:
            found[_GOALS[name]] = float(value) / 1e3
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"--goodput: {shorten(goal)!r} is not an objective",
                needed=f"{', '.join(_GOALS)}, a colon and milliseconds",
                fix="--goodput ttft:500 tpot:50",
                field="goodput",
            ) from error
    return found or None


def result_keys(
    answers: Sequence[TimedAnswer], arguments: argparse.Namespace, *, model: str, start_s: float
) -> dict[str, Any]:
    goals = goodput_limits(arguments.goodput)
    good = [answer for answer in answers if answer.good]
    begin = min(answer.sent_s for answer in answers)
    duration = max(answer.end_s for answer in answers) - begin
    prompts, outputs = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
    times, weights = token_times(good)
    per_second = np.bincount((times - begin).astype(int), weights=weights) if len(times) else np.zeros(1)
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": arguments.tokenizer or model,
        "num_prompts": arguments.num_prompts,
        "request_rate": arguments.request_rate if math.isfinite(arguments.request_rate) else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": None if goals is None else _met(good, goals) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
        "input_lens": [one.prompt_tokens for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "ttfts": [0.0 if one.first_s is None else one.first_s - one.sent_s for one in answers],
        "itls": [gaps_of([one]).tolist() for one in answers],
        "start_times": [one.sent_s - start_s for one in answers],
        "generated_texts": [""] * len(answers),
        "errors": [f"{one.error}: {one.said}" if one.error else "" for one in answers],
        "latencies": [one.end_s - one.sent_s for one in answers],
        "queue_times": [one.sent_s - one.intended_s for one in answers],
        "max_output_tokens_per_s": float(per_second.max()),
        "max_concurrent_requests": peak_in_flight(answers),
        "rtfx": 0.0,
    }
    if arguments.ramp_up_strategy:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        found |= {name: getattr(arguments, name) for name in names}
    return found | _latencies(good, arguments)


def _met(good: Sequence[TimedAnswer], goals: dict[str, float]) -> int:
    """vLLM counts from when a request was sent."""
    return sum(meets(msgspec.structs.replace(answer, intended_s=answer.sent_s), goals) for answer in good)


def _latencies(good: Sequence[TimedAnswer], arguments: argparse.Namespace) -> dict[str, float]:
    values = {
        "ttft": [one.first_s - one.sent_s for one in good if one.first_s is not None],
        "tpot": [tpot for one in good if (tpot := tpot_of(one)) is not None],
        "itl": gaps_of(good),
        "e2el": [one.end_s - one.sent_s for one in good],
    }
    found: dict[str, float] = {}
    for name in _chosen(arguments):
        taken = 1e3 * np.asarray(values[name], dtype=np.float64)
        taken = taken if len(taken) else np.zeros(1)
        found |= {f"mean_{name}_ms": float(taken.mean()), f"median_{name}_ms": float(np.median(taken))}
        found[f"std_{name}_ms"] = float(taken.std())
        for rank in _ranks(arguments):
            found[f"p{rank:g}_{name}_ms"] = float(np.percentile(taken, rank))
    return found


def _chosen(arguments: argparse.Namespace) -> list[str]:
    asked = [name.strip() for name in (arguments.percentile_metrics or "").split(",") if name.strip()]
    unknown = [name for name in asked if name not in METRICS]
    if unknown:
        raise ConfigurationError(
            f"--percentile-metrics: {shorten(unknown[0])} is not measured",
            needed=", ".join(METRICS),
            fix="--percentile-metrics ttft,tpot,itl",
            field="percentile_metrics",
        )
    return asked


def _ranks(arguments: argparse.Namespace) -> list[float]:
    try:
        found = [float(rank) for rank in arguments.metric_percentiles.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= rank <= 100 for rank in found):
        raise ConfigurationError(
            f"--metric-percentiles: {shorten(arguments.metric_percentiles)!r} are no percentiles",
            needed="numbers from 0 to 100, with commas",
            fix="--metric-percentiles 50,90,99",
            field="metric_percentiles",
        )
    return found


def table(found: dict[str, Any], arguments: argparse.Namespace) -> Iterator[str]:
    yield "{:=^50}".format(" Serving Benchmark Result ")
    at_once, rate = found["max_concurrency"], found["request_rate"]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
        *([("Maximum request concurrency:", at_once)] if at_once is not None else []),
        *([("Request rate configured (RPS):", rate)] if rate != "inf" else []),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Request throughput (req/s):", found["request_throughput"]),
    ]
    if found["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", found["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(found["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    for name in _chosen(arguments):
        rows.append((METRICS[name], None))
        rows += [(f"Mean {METRICS[name]} (ms):", found[f"mean_{name}_ms"])]
        rows += [(f"Median {METRICS[name]} (ms):", found[f"median_{name}_ms"])]
        rows += [(f"P{rank:g} {METRICS[name]} (ms):", found[f"p{rank:g}_{name}_ms"]) for rank in _ranks(arguments)]
    for words, value in rows:
        if value is None:
            yield f"{words:-^50}"
        else:
            yield f"{words:<40} {value:<10.2f}" if isinstance(value, float) else f"{words:<40} {value:<10}"
    yield "=" * 50
