"""A result for people: what was asked, what came back, what memory did, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.bench.measure.figures import NAMES, Figures, Percentiles
from holdfast.bench.measure.samples import prefix_hit_share
from holdfast.bench.result import BenchResult
from holdfast.units import counted, format_bytes

ROWS = (
    ("ttft", "time to first token"),
    ("itl", "between tokens"),
    ("tpot", "per output token"),
    ("e2e", "end to end"),
    ("lag", "sent late by"),
)
WIDTH = 12
TIMES = {2.0: "twice", 0.5: "half"}
USUAL_BLOCK = 16
"""Tokens that a prefix cache counts by."""


def lines(result: BenchResult) -> Iterator[str]:
    peak = result.peak
    yield f"{result.target.model} at {result.target.url}" + (f" ({result.engine})" if result.engine else "")
    yield f"  {load_line(result)}"
    yield ""
    yield f"{'requests':<24}{peak.completed:,} answered, {peak.failed:,} failed, {peak.cancelled:,} cancelled" + (
        f", at most {peak.peak_in_flight:,} at once"
    )
    yield f"{'tokens':<24}{peak.prompt_tokens:,} in{_cached(peak)}, {peak.output_tokens:,} out{_counted(peak)}"
    if _were_asked_before(result):
        yield f"{'':<24}the server had these prompts from an earlier run: for a cold cache another --seed"
    rates = f"{peak.output_tokens_per_s:,.1f} output tokens/s, {peak.total_tokens_per_s:,.1f} in all,"
    yield f"{'throughput':<24}{rates} {peak.requests_per_s:,.2f} requests/s"
    if peak.good_requests_per_s is not None:
        share = "" if peak.good_share is None else f", {peak.good_share:.1%} of requests"
        yield f"{'goodput under the SLO':<24}{peak.good_requests_per_s:,.2f} requests/s{share}"
    yield ""
    yield f"{'milliseconds':<24}" + "".join(f"{name.replace('_', '.'):>{WIDTH}}" for name in ("mean", *NAMES, "max"))
    for name, words in ROWS:
        found = getattr(peak, name)
        if found is not None and not (name == "lag" and result.load["loop"] == "closed"):
            yield f"{words:<24}" + _row(found)
    for error in peak.errors:
        yield f"{'error':<24}{error.count:,} x {error.kind}{': ' + error.example if error.example else ''}"
    if server := server_line(result):
        yield ""
        yield f"{'server':<24}{server}"
    yield from _rate_points(result) if result.rate_points else _points(result)
    yield ""
    for check in result.verdict.checks:
        mark = "ok  " if check.passed else "FAIL"
        yield f"  {mark} {check.name:<24}{check.measured:>24}   (limit {check.limit})"
    yield ""
    yield f"{'PASS' if result.verdict.passed else 'NONE' if result.interrupted else 'FAIL'}: {result.verdict.reason}"
    if safe := safe_line(result):
        yield f"  {safe}"
    for advice in result.verdict.advice:
        yield f"  {advice}"


def safe_line(result: BenchResult) -> str:
    """Empty: nothing can be said of it."""
    verdict = result.verdict
    if result.rate_points:  # Why it is no more stands beside the knee.
        return "" if verdict.safe_rate is None else f"safe: {verdict.safe_rate:g} requests/s"
    if verdict.safe_concurrency is not None:
        return f"safe: {verdict.safe_concurrency} at once ({verdict.safe_reason})"
    return f"safe: unknown, {verdict.safe_reason}" if verdict.safe_reason else ""


def load_line(result: BenchResult) -> str:
    load = result.load
    begin, end = result.window_s
    judged = f"figures are of seconds {begin:.0f} to {end:.0f}"
    if rates := load.get("rates"):
        seconds = result.phases[0]["seconds"]
        search = f"open loop, {rates[0]:g} to {rates[-1]:g} requests/s, {load['arrivals']}, {seconds:g} s each"
        return f"{search}; {judged}, at {result.peak.requests / (end - begin):.3g} requests/s"
    if load["loop"] == "closed":
        how = f"closed loop, {load['concurrency']} at once"
    elif load["loop"] == "replay":
        how = f"replay of {counted(load['replayed'], 'request')} at their own times{_faster(load.get('speed', 1.0))}"
    elif load["rate"] is None:
        how = "open loop, all at once"
    else:
        how = f"open loop, {load['rate']:g} requests/s, {load['arrivals']}"
    phases = ", ".join(
        f"{phase['name']} {phase['seconds']:g} s" for phase in result.phases if phase["seconds"] is not None
    )
    return f"{how}{'; ' + phases if phases else ''}; {judged}"


def _faster(speed: float) -> str:
    if speed == 1:
        return ""
    return f", {TIMES.get(speed, f'{speed:g} times')} as fast"


def _cached(peak: Figures) -> str:
    if peak.cached_tokens is None or not peak.prompt_tokens:
        return ""
    return f" ({peak.cached_tokens / peak.prompt_tokens:.0%} of them cached)"


def _were_asked_before(result: BenchResult) -> bool:
    """More was cached than the chat template's, of prompts that have nothing else in common within a run."""
    load, peak = result.load, result.peak
    if load["prefix_tokens"] or load["turns"] > 1 or load["prompts_of_a_file"]:
        return False
    return bool((peak.cached_tokens or 0) > peak.completed * (load["template_tokens"] + USUAL_BLOCK))


def _counted(peak: Figures) -> str:
    return {"events": " (events: the server gives no usage)", "both": " (usage, or events where there is none)"}.get(
        peak.counted_by, ""
    )


def _row(found: Percentiles) -> str:
    values = [found.mean, *(found.at(name) for name in NAMES), found.max]
    return "".join(f"{1e3 * value:>{WIDTH},.2f}" for value in values)


def server_line(result: BenchResult) -> str:
    """What the server said of itself, or was seen to hold; empty: nothing."""
    samples = result.samples
    told = []
    for name, words in (("ram_bytes", "RAM"), ("vram_bytes", "VRAM")):
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if values:
            told.append(f"{words} {format_bytes(values[0])} to {format_bytes(max(values))}")
    shares = [sample.kv_share for sample in samples if sample.kv_share is not None]
    if shares:
        told.append(f"KV cache at most {max(shares):.0%}")
    waiting = [sample.waiting for sample in samples if sample.waiting is not None]
    if waiting:
        told.append(f"at most {max(waiting):,.0f} waiting")
    queue = [
        (one.queue_seconds, one.queued) for one in samples if one.queue_seconds is not None and one.queued is not None
    ]
    if queue and queue[-1][1] > queue[0][1]:
        mean_s = (queue[-1][0] - queue[0][0]) / (queue[-1][1] - queue[0][1])
        told.append(f"{1e3 * mean_s:,.1f} ms in its queue on average")
    preempted = [sample.preemptions for sample in samples if sample.preemptions is not None]
    if preempted and preempted[-1] > preempted[0]:
        told.append(f"{preempted[-1] - preempted[0]:,.0f} preemptions")
    if (hits := prefix_hit_share(samples)) is not None:
        told.append(f"{hits:.0%} prefix hits")
    power = [sample.power_w for sample in samples if sample.power_w is not None]
    if power:
        told.append(f"{sum(power) / len(power):,.0f} W on average")
    if any(sample.gpu_by_size for sample in samples):
        told.append("GPU: the only one that /memory can mean, since NVML names no process of the server")
    return ", ".join(told)


def _rate_points(result: BenchResult) -> Iterator[str]:
    yield ""
    heads = ("answered/s", "output tok/s", "ttft p50 ms", "ttft p99 ms", "itl p50 ms", "itl p99 ms")
    yield f"{'requests/s':<24}" + "".join(f"{name:>{WIDTH + 2}}" for name in heads)
    for point in result.rate_points:
        values = (point.ttft_p50_s, point.ttft_p99_s, point.itl_p50_s, point.itl_p99_s)
        cells = ["-" if point.answered_per_s is None else f"{point.answered_per_s:,.2f}"]
        cells += [f"{point.output_tokens_per_s:,.1f}"]
        cells += ["-" if value is None else f"{1e3 * value:,.2f}" for value in values]
        mark = "  <- knee" if point == result.rate_knee else f"  {point.missed}" if point.missed else ""
        asked = f"{point.rate:g} ({point.offered_per_s:.3g} sent)"
        yield f"{asked:<24}" + "".join(f"{cell:>{WIDTH + 2}}" for cell in cells) + mark


def _points(result: BenchResult) -> Iterator[str]:
    if len(result.points) < 2:
        return
    yield ""
    yield f"{'requests at once':<24}" + "".join(
        f"{name:>{WIDTH + 4}}" for name in ("output tok/s", "ttft p50 ms", "ttft p99 ms", "itl p50 ms", "itl p99 ms")
    )
    for point in result.points:
        values = (point.ttft_p50_s, point.ttft_p99_s, point.itl_p50_s, point.itl_p99_s)
        cells = [f"{point.output_tokens_per_s:,.1f}"]
        cells += ["-" if value is None else f"{1e3 * value:,.2f}" for value in values]
        mark = "  <- knee" if result.knee is not None and point.at_once == result.knee.at_once else ""
        mark += "  errors" if point.failed else "" if point.meets_slo is not False else "  misses the SLO"
        yield f"{'up to ' + str(point.at_once):<24}" + "".join(f"{cell:>{WIDTH + 4}}" for cell in cells) + mark
