"""What the figures of a running server mean: each rule looks at what was seen and answers with a finding, or not.

Asks no server anything. What a rule is sure of it says with numbers; a server that is merely busy is healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.doctor.probe.metrics_page import TOLD_AT_THE_END
from holdfast.doctor.probe.server_queue import falling_behind, held_up
from holdfast.doctor.probe.server_samples import Looked, finding_of, flag_of
from holdfast.units import counted

KV_FULL, KV_HIGH = 0.95, 0.80
USUAL_UTILIZATION, LOW_UTILIZATION = 0.90, 0.75
PREFIX_WORTH = 0.30
"""Below this share of found prompt tokens prefix caching is not worth its bookkeeping."""
PREFIX_LEAST_TOKENS = 5_000
"""Looked up meanwhile before a rate is believed."""
SLOWER = 2.0
"""Times its own average since the start: then a token takes too long."""
FEW_RUNNING = 4
"""With no more at once, a token's time is the machine's own."""
STEPS_LEAST, LIFE_STEPS_LEAST = 50, 2_000
STUCK_S = 5.0
MOVING = ("tokens", "prompts", "computed", "steps", "step_seconds", "kv_share", "throughput", "held_tokens")
"""Any of them moves: something is computed."""
TOGETHER_S, STREAM_LEAST_S = 0.02, 0.4
"""Events of a whole answer that arrive within the first, of one that took longer than the second, were held back."""


def seen_of(looked: Looked) -> Iterator[str]:
    """What was measured, in one line, of a server that is well too."""
    running, waiting, share = looked.last("running"), looked.last("waiting"), looked.last("kv_share")
    told = []
    if running is not None:
        told.append(f"{counted(int(running), 'request')} running")
    if waiting is not None:
        told.append(f"{int(waiting)} waiting")
    if share is not None:
        told.append(f"KV {share:.0%} full")
    if looked.seconds > 0 and len(looked.seen("tokens")) > 1:
        told.append(_speed(looked))
    if told:
        yield f"within {looked.seconds:.0f} s: {', '.join(told)}"
    arrived = () if looked.stream is None else looked.stream.arrived_s
    if arrived:
        each_ms = (arrived[-1] - arrived[0]) / max(1, len(arrived) - 1) * 1e3
        yield (
            f"one streamed answer: {counted(len(arrived), 'event')}, the first after {arrived[0]:.2f} s, then one every"
            f" {each_ms:.0f} ms"
        )


def _speed(looked: Looked) -> str:
    """Where tokens are told when a request ends, steps say more while one runs."""
    tokens, steps, now = looked.grown("tokens"), looked.grown("computed"), looked.last("throughput")
    if looked.engine in TOLD_AT_THE_END and now:
        return f"{now:,.0f} tokens/s"
    if looked.engine in TOLD_AT_THE_END and steps and not tokens:
        return f"{steps / looked.seconds:,.1f} steps/s (its tokens are told when a request ends)"
    return f"{tokens / looked.seconds:,.0f} tokens/s"


def findings_of(looked: Looked) -> list[Finding]:
    """What matters most first."""
    pressing = (_stuck, _thrash, _kv_full, held_up, falling_behind)
    # What a queue waits for is one thing: the first rule that knows it speaks.
    first = next((finding for rule in pressing for finding in rule(looked)), None)
    others = [finding for rule in (_slower, _prefix, _buffered) for finding in rule(looked)]
    return [*([] if first is None else [first]), *others]


def _stuck(looked: Looked) -> Iterator[Finding]:
    """Requests run, and nothing at all moves. Where an engine tells no figure that moves with its steps, nothing is
    said: its tokens are told when a request ends.
    """
    running = looked.seen("running")
    if not running or min(running) < 1 or looked.seconds < STUCK_S:
        return
    stepwise = ("computed", "throughput") if looked.engine in TOLD_AT_THE_END else ("tokens", "computed")
    told = any(len(looked.seen(figure)) > 1 for figure in stepwise)
    if not told or any(len(set(looked.seen(figure))) > 1 for figure in MOVING):
        return
    yield finding_of(
        "timeout_or_hang",
        "not_memory",
        "medium",
        looked,
        figures=("running", "waiting", "tokens", "computed"),
        what=f"{counted(int(min(running)), 'request')} ran for {looked.seconds:.0f} s and nothing was computed: neither"
        " a token nor a step",
        why="the engine hangs, or compiles, or is within one very long step: /health answers because the front lives",
        fix=Fix(why="look again in a minute (--seconds 60); if it stays so, restart the server and keep its log"),
    )


def _thrash(looked: Looked) -> Iterator[Finding]:
    preempted = looked.grown("preemptions") or max(looked.seen("put_back"), default=0.0)
    if preempted < 1:
        return
    running, share = looked.seen("running"), looked.last("kv_share")
    held = max(1, int(min(running) * 0.9)) if running else None
    flag = flag_of(looked, "max-num-seqs")
    fix = (
        None
        if held is None
        else Fix(
            changes={flag: str(held)},
            price="the others wait in the queue instead",
            why=f"KV held {counted(int(min(running)), 'sequence')} of this traffic before one was put back: {held} fit",
        )
    )
    full = share is not None and share >= KV_FULL
    yield finding_of(
        "preemption_thrash",
        "concurrency_misjudged",
        "high" if full or preempted >= 5 else "medium",
        looked,
        figures=("preemptions", "put_back", "kv_share", "running", "waiting"),
        what=f"{counted(int(preempted), 'request')} put back and computed again within {looked.seconds:.0f} s:"
        " more sequences run than KV holds",
        why="a sequence that finds no block gives back all it has and is computed again from its beginning",
        fix=fix,
        alternatives=tuple(_more_kv(looked)),
    )


def _more_kv(looked: Looked) -> Iterator[Fix]:
    """Other ways to hold more of them, with their price."""
    share = _utilization(looked)
    if share is not None and share < USUAL_UTILIZATION:
        yield Fix(
            changes={flag_of(looked, "gpu-memory-utilization"): f"{USUAL_UTILIZATION:g}"},
            why=f"only {share:g} of the GPU's memory is used",
            price="less is left for others on that GPU",
        )
    if looked.engine in ("vllm", "sglang"):
        value = "fp8" if looked.engine == "vllm" else "fp8_e4m3"
        yield Fix(
            changes={"--kv-cache-dtype": value},
            why="twice as many tokens in the same memory",
            price="KV in 8 bits; needs a GPU with FP8 units to be as fast",
        )
    yield Fix(
        why=f"a smaller {flag_of(looked, 'max-model-len')}, where requests are shorter than it: holdfast plan --traffic"
        " URL says",
        price="longer requests are refused",
    )


def _utilization(looked: Looked) -> float | None:
    for sample in looked.samples:
        try:
            return float(sample.settings["gpu_memory_utilization"])
        except (KeyError, ValueError):
            continue
    return None


def _kv_full(looked: Looked) -> Iterator[Finding]:
    """Nobody is put back, and yet KV is what the queue waits for."""
    shares, waiting = looked.seen("kv_share"), looked.seen("waiting")
    if not shares or not waiting or min(shares) < KV_FULL or min(waiting) < 1:
        return
    growing = waiting[-1] > waiting[0]
    share = _utilization(looked)
    starved = share is not None and share < LOW_UTILIZATION
    yield finding_of(
        "utilization_too_low" if starved else "preemption_thrash",
        "configuration_overshoot" if starved else "concurrency_misjudged",
        "medium",
        looked,
        figures=("kv_share", "waiting", "running", "preemptions"),
        what=f"KV is full and {counted(int(waiting[-1]), 'request')} wait{'s' if waiting[-1] == 1 else ''}"
        + (", more and more" if growing else ""),
        why=f"only {share:g} of the GPU's memory may be used, so KV is small"
        if starved
        else "more work arrives than KV holds at once; the next burst will be preempted",
        fix=next(_more_kv(looked)),
        alternatives=tuple(_more_kv(looked))[1:],
    )


def _slower(looked: Looked) -> Iterator[Finding]:
    """The time between two tokens, now and since the server was started. Many at once take longer each: with a cache
    that is not nearly full, that is load and no decay.
    """
    seconds, steps = looked.grown("step_seconds"), looked.grown("steps")
    life_seconds, life_steps = looked.last("step_seconds"), looked.last("steps")
    if steps < STEPS_LEAST or not life_seconds or not life_steps or life_steps - steps < LIFE_STEPS_LEAST:
        return
    now, before = seconds / steps, (life_seconds - seconds) / (life_steps - steps)
    if before <= 0 or now < SLOWER * before:
        return
    shares, running = looked.seen("kv_share"), looked.seen("running")
    if running and fmean(running) > FEW_RUNNING and max(shares, default=0.0) < KV_HIGH:
        return
    yield finding_of(
        "throughput_decay",
        "kv_blowout",
        "low",
        looked,
        figures=("kv_share", "running", "preemptions", "waiting"),
        what=f"a token takes {now * 1e3:.0f} ms now, and took {before * 1e3:.0f} ms on average since the start",
        why="long sequences pin KV blocks and make each step longer, or the machine is slower than it was (heat, a"
        " neighbour)",
        fix=Fix(
            why="look at preemptions and at the lengths of requests; limit max_tokens; nvidia-smi -q -d PERFORMANCE"
            " shows a GPU that is held back"
        ),
    )


def _prefix(looked: Looked) -> Iterator[Finding]:
    """Of what was looked up meanwhile: what a server found since its start says little of today's requests."""
    asked, hits = looked.grown("prefix_asked"), looked.grown("prefix_found")
    off = any(sample.settings.get("enable_prefix_caching") == "False" for sample in looked.samples)
    if off or not looked.seen("prefix_found") or asked < PREFIX_LEAST_TOKENS:
        return
    rate = hits / asked
    if rate >= PREFIX_WORTH:
        return
    line = f"within {looked.seconds:.0f} s: {hits:,.0f} of {asked:,.0f} prompt tokens found"
    yield finding_of(
        "prefix_caching_unused",
        "not_memory",
        "low",
        looked,
        evidence=[Evidence(line=line, source=looked.address)],
        what=f"prefix caching found {rate:.0%} of the {int(asked):,} prompt tokens of {looked.seconds:.0f} s: it hardly"
        " pays",
        why="requests share few beginnings, or what they share does not stand at the very beginning (a date, a name, a"
        " shuffled list before the common part)",
        fix=Fix(
            why="put what is common first in the prompt; switching the cache off costs nothing where"
            " prompts have nothing in common"
        ),
    )


def _buffered(looked: Looked) -> Iterator[Finding]:
    stream = looked.stream
    if stream is None or len(stream.arrived_s) < 4:
        return
    first, last = stream.arrived_s[0], stream.arrived_s[-1]
    if last - first > TOGETHER_S or first < STREAM_LEAST_S:
        return
    gaps = [later - earlier for earlier, later in zip(stream.arrived_s, stream.arrived_s[1:], strict=False)]
    line = (
        f"{len(stream.arrived_s)} events of one streamed answer arrived together after {first:.2f} s"
        f" (mean gap {fmean(gaps) * 1e3:.1f} ms){f'; Server: {stream.server}' if stream.server else ''}"
    )
    yield finding_of(
        "stream_buffered",
        "not_memory",
        "medium",
        looked,
        evidence=[Evidence(line=line, source=looked.address)],
        what="a streamed answer arrives whole at its end: something between you and the engine holds it back",
        why="a proxy that buffers answers; the engine itself sends each token",
        fix=Fix(
            why="in nginx: proxy_buffering off; proxy_cache off; elsewhere switch buffering and compression off for"
            " text/event-stream; then ask the engine's own address to compare"
        ),
    )
