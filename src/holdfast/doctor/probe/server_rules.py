"""What the figures of a running server mean, by rules/data/probe_server.toml; and what was measured, in one line.

Asks no server anything. A server that is merely busy is healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from holdfast.doctor.build_finding import judged
from holdfast.doctor.findings import Finding
from holdfast.doctor.probe.server_samples import Looked, numbers_of, words_of
from holdfast.units import counted


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
