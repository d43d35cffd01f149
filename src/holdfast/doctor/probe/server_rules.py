"""What was seen of a running server while it was looked at, as numbers, and what they mean by the rules over them
(rules/data/probe_server.toml). Asks no server anything. A server that is merely busy is healthy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from holdfast.doctor.build_finding import flag_of, judged
from holdfast.doctor.findings import Finding
from holdfast.doctor.probe.metrics_page import NAMES, TOLD_AT_THE_END, MetricSample
from holdfast.units import counted

ENDED_LEAST = 20
"""Requests answered whole before their mean length is believed."""
KV_SPARE = 0.8
MOVING = ("tokens", "prompts", "computed", "steps", "step_seconds", "kv_share", "throughput", "held_tokens")
"""Any of them moves: something is computed."""


@dataclass(frozen=True, slots=True)
class StreamLook:
    arrived_s: tuple[float, ...]
    """Of each event, after the request."""
    server: str
    """As the answer's header names who sent it: a proxy, often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    address: str
    engine: str | None
    samples: tuple[MetricSample, ...]
    stream: StreamLook | None = None

    @property
    def seconds(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s if len(self.samples) > 1 else 0.0

    @property
    def no_numbers(self) -> tuple[str, ...]:
        """NaN and infinite figures that matter, of the last page."""
        return self.samples[-1].no_numbers if self.samples else ()

    def seen(self, figure: str) -> list[float]:
        return [sample.figures[figure] for sample in self.samples if figure in sample.figures]

    def setting(self, name: str) -> float | None:
        """Of the first page that tells it as a number."""
        for sample in self.samples:
            with contextlib.suppress(KeyError, ValueError):
                return float(sample.settings[name])
        return None


def numbers_of(looked: Looked) -> dict[str, float]:
    numbers = dict(_figures(looked))
    numbers |= {
        "seconds": round(looked.seconds, 1),
        "looked_s": looked.seconds,
        "slots": float(looked.engine == "llama.cpp"),
        "at_the_end": float(looked.engine in TOLD_AT_THE_END),
        "moving": float(any(len(set(looked.seen(figure))) > 1 for figure in MOVING)),
        "preempted": numbers["preemptions_grown"] or numbers.get("put_back_max", 0.0),
        "waiting_rises": float(looked.seen("waiting") == sorted(looked.seen("waiting"))),
        "running_highest": numbers.get("running_max", 0.0),
        "kv_share_highest": numbers.get("kv_share_max", 0.0),
        "running_mean": fmean(looked.seen("running") or [0.0]),
        "prefix_off": float(any(one.settings.get("enable_prefix_caching") == "False" for one in looked.samples)),
    }
    known = {
        "utilization": looked.setting("gpu_memory_utilization"),
        "token_s": _token_s(looked, numbers),
        "kv_room": _kv_tokens(looked, numbers),
        "mean_length": _mean_length(numbers),
    }
    numbers |= {name: value for name, value in known.items() if value is not None}
    with contextlib.suppress(KeyError):
        numbers["token_ms"] = numbers["token_s"] * 1e3
    with contextlib.suppress(KeyError):
        numbers["places"] = float(int(numbers["kv_room"] / numbers["mean_length"] * KV_SPARE))
    with contextlib.suppress(KeyError, ZeroDivisionError):
        numbers["prefix_rate"] = numbers["prefix_found_grown"] / numbers["prefix_asked_grown"]
    with contextlib.suppress(KeyError, ZeroDivisionError):
        seconds, steps = numbers["step_seconds_grown"], numbers["steps_grown"]
        numbers["now_ms"] = seconds / steps * 1e3
        numbers["before_ms"] = (numbers["step_seconds"] - seconds) / (numbers["steps"] - steps) * 1e3
    arrived = () if looked.stream is None else looked.stream.arrived_s
    if arrived:
        numbers |= {"events": float(len(arrived)), "first_event_s": arrived[0], "last_event_s": arrived[-1]}
        numbers["gap_ms"] = (arrived[-1] - arrived[0]) / max(1, len(arrived) - 1) * 1e3
    return numbers


def _figures(looked: Looked) -> Iterator[tuple[str, float]]:
    for figure in NAMES:
        seen = looked.seen(figure)
        # Of a counter, while it was looked at; 0 where it is not told, or was set back.
        yield f"{figure}_grown", max(0.0, seen[-1] - seen[0]) if len(seen) > 1 else 0.0
        yield f"{figure}_seen", float(len(seen))
        if seen:
            lately = seen[len(seen) // 2 :] if len(seen) > 3 else seen  # A queue need not have been there before.
            yield from ((figure, seen[-1]), (f"{figure}_first", seen[0]))
            yield from ((f"{figure}_min", min(seen)), (f"{figure}_max", max(seen)))
            yield from ((f"{figure}_lately_min", min(lately)), (f"{figure}_lately_max", max(lately)))


def _token_s(looked: Looked, numbers: dict[str, float]) -> float | None:
    """Between two tokens of one request; None: not told."""
    if numbers["steps_grown"] > 0:
        return numbers["step_seconds_grown"] / numbers["steps_grown"]
    if looked.engine not in TOLD_AT_THE_END and numbers["tokens_grown"] > 0:
        return looked.seconds * numbers["running_mean"] / numbers["tokens_grown"]
    steps = numbers["computed_grown"] if looked.engine in ("llama.cpp", "tgi") else 0.0
    return looked.seconds / steps if steps else None


def _mean_length(numbers: dict[str, float]) -> float | None:
    """Of requests that were answered whole: those that just began say nothing."""
    try:
        mean = (numbers["ended_prompts"] + numbers["ended_tokens"]) / numbers["ended"]
    except (KeyError, ZeroDivisionError):
        return None
    return max(1.0, mean) if numbers["ended"] >= ENDED_LEAST else None


def _kv_tokens(looked: Looked, numbers: dict[str, float]) -> float | None:
    blocks, size = looked.setting("num_gpu_blocks"), looked.setting("block_size")
    return numbers.get("kv_tokens", None if blocks is None or size is None else blocks * size)


def words_of(looked: Looked, numbers: dict[str, float]) -> dict[str, object]:
    """The same as text, where a number alone is none."""
    running, waiting = int(numbers.get("running", 0)), int(numbers.get("waiting", 0))
    least = int(numbers.get("running_min", 0))
    words: dict[str, object] = {
        "within": f"{looked.seconds:.0f} s",
        "seqs_flag": flag_of(looked.engine, "max-num-seqs"),
        "length_flag": flag_of(looked.engine, "max-model-len"),
        "run": "1 runs" if running == 1 else f"{running} run",
        "ran": counted(least, "request"),
        "ran_sequences": counted(least, "sequence"),
        "queue": f"{counted(waiting, 'request')} wait{'s' if waiting == 1 else ''}",
        "growing": ", and the queue grows" if numbers.get("waiting", 0) > numbers.get("waiting_first", 0) else "",
        "put_back_requests": counted(int(numbers["preempted"]), "request"),
        "slots_there": f"{counted(running, 'slot')} {'is' if running == 1 else 'are'}",
        "stream_server": f"; Server: {looked.stream.server}" if looked.stream and looked.stream.server else "",
    }
    for figure in NAMES:
        if figure in numbers:
            first, last = f"{numbers[f'{figure}_first']:g}", f"{numbers[figure]:g}"
            moved = last if numbers[f"{figure}_first"] == numbers[figure] else f"{first} -> {last}"
            words[f"{figure}_line"] = f"{figure}: {moved} within {looked.seconds:.0f} s"
    return words


def findings_of(looked: Looked) -> list[Finding]:
    """What matters most first: of what a queue waits for, one finding."""
    numbers = numbers_of(looked)
    words = words_of(looked, numbers)
    load, others = (
        judged(about, numbers, words, source=looked.address, engine=looked.engine)
        for about in ("server_load", "server")
    )
    return [*islice(load, 1), *others]


def seen_of(looked: Looked) -> Iterator[str]:
    """What was measured, of a server that is well too."""
    numbers = numbers_of(looked)
    told = []
    if "running" in numbers:
        told.append(f"{counted(int(numbers['running']), 'request')} running")
    if "waiting" in numbers:
        told.append(f"{int(numbers['waiting'])} waiting")
    if "kv_share" in numbers:
        told.append(f"KV {numbers['kv_share']:.0%} full")
    if looked.seconds > 0 and numbers["tokens_seen"] > 1:
        told.append(_speed(looked.seconds, numbers))
    if told:
        yield f"within {looked.seconds:.0f} s: {', '.join(told)}"
    if "events" in numbers:
        yield (
            f"one streamed answer: {counted(int(numbers['events']), 'event')}, the first after"
            f" {numbers['first_event_s']:.2f} s, then one every {numbers['gap_ms']:.0f} ms"
        )


def _speed(seconds: float, numbers: dict[str, float]) -> str:
    """Where tokens are told when a request ends, steps say more while one runs."""
    tokens, steps = numbers["tokens_grown"], numbers["computed_grown"]
    if numbers["at_the_end"] and numbers.get("throughput"):
        return f"{numbers['throughput']:,.0f} tokens/s"
    if numbers["at_the_end"] and steps and not tokens:
        return f"{steps / seconds:,.1f} steps/s (this engine reports tokens when a request ends)"
    return f"{tokens / seconds:,.0f} tokens/s"
