"""What a server really gets, from its log or its metrics: the P99 of lengths and the peak of requests at once.

    JSON lines    our access log, or any with prompt_tokens and completion_tokens (beside them or under `usage`)
                  peak: requests that overlap, where lines have a time and a duration, or a start and an end
    /metrics      histograms under vLLM's names, which are ours; peak: what runs now, or ran on average

Reads in bounded memory, however long the log. Plans nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.peak_concurrency import Overlaps
from holdfast.planner.inputs.question import Traffic
from holdfast.planner.inputs.traffic_reader import lines_of, unreadable
from holdfast.units import MIB, counted, shorten

NO_REQUESTS = "HF161"
SHARE = 0.99
MAX_TOKENS = 1 << 27
MAX_METRICS_BYTES = 32 * MIB
MAX_COUNT = 2.0**53
"""Beyond it a metric counts nothing that anybody can have."""
EXACT_BELOW = 4096
"""Shorter lengths are counted one by one, longer ones in steps of 0.1%, so that counting takes a bounded room."""

_METRIC = re.compile(rb"#|[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})?\s+[-+0-9.]")
"""A comment, or a sample: what a page of metrics begins with, and no JSON."""
_BUCKETS = ("request_prompt_tokens_bucket", "request_generation_tokens_bucket")
_START = ("start_time", "start", "arrival_time", "started_at")
_END = ("end_time", "end", "finished_at", "time", "timestamp", "ts")
_STATUS = ("status", "status_code")
CLIENT_GONE = 499
"""Its client left; until then it took its place like any other."""
_DURATION = (("duration_s", 1.0), ("duration", 1.0), ("latency_s", 1.0), ("e2e_latency", 1.0), ("duration_ms", 1e-3))


def read_traffic(source: str, *, concurrency: int | None = None) -> tuple[Traffic, tuple[Decision, ...]]:
    """`source`: a file, an http(s) address, or - for standard input. `concurrency` outranks what is found there."""
    with lines_of(source) as lines:
        first = next((line for line in map(_without_mark, lines) if line), b"")
        rest = chain((first,) if first else (), lines)
        if _METRIC.match(first):
            return _from_metrics(rest, source, concurrency)
        return _from_json_lines(rest, source, concurrency)


def _without_mark(line: bytes) -> bytes:
    """Some editors begin a file with the mark of its encoding."""
    return line.removeprefix(b"\xef\xbb\xbf").strip()


def _empty(source: str, said: str) -> ConfigurationError:
    return ConfigurationError(
        f"traffic: {shorten(source)} contains no requests",
        code=NO_REQUESTS,
        needed="lines with prompt_tokens and completion_tokens, or vLLM's histograms of them",
        found=said,
        fix="set it directly: --concurrency 16 --prompt 1000 --output 300",
        field="traffic",
    )


# JSON lines


@dataclass(slots=True)
class Lengths:
    """How often each length came, in bounded room."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, tokens: int) -> None:
        step = 1 if tokens < EXACT_BELOW else 1 << (tokens.bit_length() - 11)
        edge = -(-tokens // step) * step
        self.counts[edge] = self.counts.get(edge, 0) + 1
        self.total += 1

    def percentile(self, share: float) -> int:
        """The length that this share of all stays within."""
        left = self.total * share
        for tokens in sorted(self.counts):
            left -= self.counts[tokens]
            if left <= 1e-9 * self.total:
                return tokens
        return 0


@dataclass(slots=True)
class _Reading:
    prompts: Lengths = field(default_factory=Lengths)
    outputs: Lengths = field(default_factory=Lengths)
    both: Lengths = field(default_factory=Lengths)
    overlaps: Overlaps = field(default_factory=Overlaps)
    timed: int = 0
    torn: int = 0
    """Begin like JSON and do not parse."""
    wrong: int = 0
    """With numbers of tokens that nobody can have."""
    others: int = 0
    """Of something else: a server's other words."""
    refused: int = 0
    """Requests that were answered with an error: they took no KV."""
    without_output: int = 0
    """Lines that do not say how long the answer was: counted as none."""

    def line(self, line: bytes) -> None:
        if not line.startswith(b"{"):
            self.others += bool(line)
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            self.torn += 1
            return
        tokens = _tokens(row)
        if tokens is None:
            self.others += 1
            return
        if _is_refused(row):
            self.refused += 1
            return
        prompt, output = tokens
        unsaid, output = output is None, 0 if output is None else output
        if not (_is_count(prompt) and _is_count(output) and prompt + output > 0):
            self.wrong += 1
            return
        self.without_output += unsaid
        self.prompts.add(prompt)
        self.outputs.add(output)
        self.both.add(prompt + output)
        span = _span(row)
        if span is not None:
            self.timed += 1
            self.overlaps.add(*span)

    def left_out(self) -> str:
        said = [
            f"{counted(count, what)}{more}"
            for count, what, more in (
                (self.torn, "truncated line", ""),
                (self.wrong, "line", " with impossible numbers"),
                (self.refused, "refused request", ""),
                (self.others, "other line", ""),
            )
            if count
        ]
        return ", ".join(said)


def _tokens(row: object) -> tuple[Any, Any] | None:
    """Prompt and output of a line; None: it is not about an answered request."""
    if not isinstance(row, dict):
        return None
    usage = row.get("usage")
    holder = usage if isinstance(usage, dict) and row.get("prompt_tokens") is None else row
    prompt, output = holder.get("prompt_tokens"), holder.get("completion_tokens")
    return None if prompt is None else (prompt, output)


def _is_refused(row: Mapping[str, Any]) -> bool:
    found = next((row[name] for name in _STATUS if isinstance(row.get(name), int)), 200)
    return int(found) >= 400 and found != CLIENT_GONE


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _span(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Start and end in seconds; None where the line does not tell both."""
    start, end = _moment(row, _START), _moment(row, _END)
    duration = None
    for name, scale in _DURATION:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
            duration = value * scale
            break
    if start is None and end is not None and duration is not None:
        start = end - duration
    if start is not None and duration is not None:
        end = start + duration
    return (start, end) if start is not None and end is not None and end >= start else None


def _moment(row: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
            return float(value) if value < 1e11 else value / 1000  # milliseconds since 1970
        if isinstance(value, str):
            with contextlib.suppress(ValueError, OverflowError, OSError):
                return datetime.fromisoformat(value).timestamp()
    return None


def _from_json_lines(
    lines: Iterable[bytes], source: str, concurrency: int | None
) -> tuple[Traffic, tuple[Decision, ...]]:
    reading = _Reading()
    for line in lines:
        reading.line(line)
    count, left_out = reading.both.total, reading.left_out()
    if not count:
        raise _empty(source, left_out or "an empty file")
    traffic = Traffic(
        concurrency=concurrency or max(1, reading.overlaps.peak() if reading.timed else 1),
        prompt_tokens=reading.prompts.percentile(SHARE),
        output_tokens=reading.outputs.percentile(SHARE),
        length_tokens=reading.both.percentile(SHARE),
        source=shorten(source),
        requests=count,
        peak_known=concurrency is not None or reading.timed > 0,
        without_output=reading.without_output,
    )
    reason = f"P99 of {counted(count, 'request')} in {shorten(source)}"
    if left_out:
        reason += f"; left out: {left_out}"
    if concurrency is not None:
        peak, origin = "as stated", "set"
    elif reading.timed == count:
        peak, origin = "the most that overlapped in time", "traffic"
    elif reading.timed:
        peak, origin = (
            f"the most that overlapped in time, of {counted(reading.timed, 'line')} with timestamps",
            "traffic",
        )
    else:
        peak, origin = "the lines have no timestamps: set --concurrency to the peak", "default"
    return traffic, (
        Decision("traffic", f"{counted(traffic.length, 'token')}", reason, "traffic"),
        Decision("concurrency", str(traffic.concurrency), peak, origin),
    )


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    start_s: float | None
    """On the log's own clock; None: it does not say."""
    prompt_tokens: int
    output_tokens: int


def read_requests(source: str) -> list[LoggedRequest]:
    """Every answered request of a log, in its order. `source`: as for `read_traffic`, but no metrics."""
    found = []
    with lines_of(source) as lines:
        for line in map(_without_mark, lines):
            try:
                row = json.loads(line) if line.startswith(b"{") else None
            except (ValueError, RecursionError):
                continue
            tokens = _tokens(row)
            if tokens is None or not isinstance(row, dict) or _is_refused(row) or not all(map(_is_count, tokens)):
                continue
            span = _span(row)
            start = span[0] if span is not None else _moment(row, _START)
            found.append(LoggedRequest(start, *tokens))
    if not found:
        raise _empty(source, "no line with both")
    return found


# Metrics


def _from_metrics(lines: Iterable[bytes], source: str, concurrency: int | None) -> tuple[Traffic, tuple[Decision, ...]]:
    found = _parse_metrics(lines, source)
    prompts, outputs = found.histogram("request_prompt_tokens"), found.histogram("request_generation_tokens")
    requests = int(max(prompts.values(), default=0))
    if not requests:
        raise _empty(source, "no finished request in vllm:request_prompt_tokens")
    now = found.value("num_requests_running") + found.value("num_requests_waiting")
    average = found.average_running()
    peak = concurrency or max(1, int(now), -int(-average // 1))
    (prompt, prompt_open), (output, output_open) = _edge(prompts), _edge(outputs) if outputs else (0, False)
    beyond = prompt_open or output_open
    traffic = Traffic(
        concurrency=min(peak, 1 << 20),
        prompt_tokens=prompt,
        output_tokens=output,
        at_least=beyond,
        without_output=0 if outputs else requests,
        source=shorten(source),
        requests=requests,
        peak_known=concurrency is not None,
    )
    said = f"{int(now)} running or waiting now, {average:.1f} on average; these metrics have no peak: set --concurrency"
    lengths = f"P99 of {counted(requests, 'request')}, from the upper bounds of histogram buckets"
    if beyond:
        past = "is beyond the last histogram bucket, whose bound is all that is known"
        lengths = f"P99 of {counted(requests, 'request')} {past}"
    least = f"{'>= ' if beyond else ''}{counted(traffic.length, 'token')}"
    return traffic, (
        Decision("traffic", least, f"{lengths}, at {shorten(source)}", "traffic"),
        Decision(
            "concurrency",
            str(traffic.concurrency),
            "as stated" if concurrency else said,
            "set" if concurrency else "traffic",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Metrics:
    values: Mapping[str, float]
    """Over all labels, by name without the prefix."""
    buckets: Mapping[str, Mapping[float, float]]

    def value(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def histogram(self, name: str) -> Mapping[float, float]:
        """Requests up to each edge."""
        return self.buckets.get(name, {})

    def average_running(self) -> float:
        """Time spent in all requests over the time since the process began, where both are told."""
        began, spent = self.value("process_start_time_seconds"), self.value("e2e_request_latency_seconds_sum")
        lived = datetime.now().timestamp() - began
        return min(spent / lived, 1e6) if began and lived > 1 else 0.0


def _parse_metrics(lines: Iterable[bytes], source: str) -> _Metrics:
    from prometheus_client.parser import text_string_to_metric_families

    text = _bounded(lines, source)
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name, value = sample.name.removeprefix("vllm:"), float(sample.value)
                sound = 0 <= value <= MAX_COUNT
                if name in _BUCKETS:
                    edge = float(sample.labels["le"])
                    if not (sound and edge >= 0):
                        # Without one bucket the next lower edge would pass for P99.
                        raise ValueError(f"{name} of {value:g} up to {edge:g}")
                    edges = buckets.setdefault(name.removesuffix("_bucket"), {})
                    edges[edge] = edges.get(edge, 0.0) + value
                elif sound:  # A gauge may say NaN for having no value.
                    values[name] = values.get(name, 0.0) + value
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(source, f"not Prometheus text: {error}") from error
    return _Metrics(values, buckets)


def _bounded(lines: Iterable[bytes], source: str) -> str:
    kept: list[bytes] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > MAX_METRICS_BYTES:
            raise unreadable(source, f"more than {MAX_METRICS_BYTES >> 20} MiB of metrics")
        kept.append(line)
    return (b"\n".join(kept) + b"\n").decode("utf-8", errors="replace")


def _edge(buckets: Mapping[float, float]) -> tuple[int, bool]:
    """The upper edge of the bucket that P99 is in; of the last one its lower edge, and that it may be any more."""
    total = max(buckets.values())
    finite = sorted(edge for edge in buckets if edge < MAX_TOKENS)
    for edge in finite:
        if buckets[edge] >= SHARE * total:
            return max(1, int(edge)), False
    return max(1, int(finite[-1])) if finite else 1, True
