"""What the figures of a running server mean: each rule looks at what was seen and answers with a finding, or not.

Asks no server anything. What a rule is sure of it says with numbers; a server that is merely busy is healthy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from holdfast.doctor.live_page import OK, Sample
from holdfast.doctor.records import Evidence, Finding, Fix, RootCause
from holdfast.doctor.said import Confidence, found
from holdfast.doctor.spellings import translated
from holdfast.units import counted

KV_FULL, KV_LOW = 0.95, 0.50
USUAL_UTILIZATION, LOW_UTILIZATION = 0.90, 0.75
PREFIX_WORTH = 0.30
"""Below this share of found prompt tokens prefix caching is not worth its bookkeeping."""
PREFIX_LEAST_TOKENS = 20_000
"""Looked up before a rate is believed."""
SLOWER = 2.0
"""Times its own average since the start: then a token takes too long."""
STEPS_LEAST, LIFE_STEPS_LEAST = 50, 2_000
STUCK_S = 5.0
TOGETHER_S, STREAM_LEAST_S = 0.02, 0.4
"""Events of a whole answer that arrive within the first, of one that took longer than the second, were held back."""


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
    health: int
    said: str
    samples: tuple[Sample, ...]
    models: int = OK
    stream: StreamLook | None = None

    @property
    def seconds(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s if len(self.samples) > 1 else 0.0

    def seen(self, figure: str) -> list[float]:
        return [sample.figures[figure] for sample in self.samples if figure in sample.figures]

    def last(self, figure: str) -> float | None:
        return next(iter(reversed(self.seen(figure))), None)

    def grown(self, figure: str) -> float:
        """Of a counter, while it was looked at; 0 where it is not told, or was set back."""
        seen = self.seen(figure)
        return max(0.0, seen[-1] - seen[0]) if len(seen) > 1 else 0.0

    def evidence(self, *figures: str) -> list[Evidence]:
        """First and last of each."""
        lines = []
        for figure in figures:
            seen = self.seen(figure)
            if seen:
                moved = f"{seen[0]:g}" if len(seen) == 1 or seen[0] == seen[-1] else f"{seen[0]:g} -> {seen[-1]:g}"
                lines.append(Evidence(line=f"{figure}: {moved} within {self.seconds:.0f} s", source=self.address))
        return lines


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
        told.append(f"{looked.grown('tokens') / looked.seconds:,.0f} tokens/s")
    if told:
        yield f"within {looked.seconds:.0f} s: {', '.join(told)}"


def findings_of(looked: Looked) -> list[Finding]:
    """What matters most first."""
    if looked.health != OK:
        return [_not_ready(looked)]
    rules = (_stuck, _thrash, _kv_full, _places, _slower, _prefix, _buffered)
    return [finding for rule in rules for finding in rule(looked)]


def _finding(
    cause: str, root: RootCause, confidence: Confidence, looked: Looked, *, what: str, why: str,
    figures: tuple[str, ...] = (), fix: Fix | None = None, alternatives: tuple[Fix, ...] = (),
    evidence: list[Evidence] | None = None,
) -> Finding:  # fmt: skip
    numbers = {figure: value for figure in figures if (value := looked.last(figure)) is not None}
    return found(
        cause, root, confidence, what=what, why=why, numbers=numbers | {"seconds": round(looked.seconds, 1)},
        evidence=looked.evidence(*figures) if evidence is None else evidence,
        fixes=[*([] if fix is None else [fix]), *alternatives],
    )  # fmt: skip


def _flag(looked: Looked, ours: str) -> str:
    return translated(looked.engine or "vllm", ours) or f"--{ours}"


def _not_ready(looked: Looked) -> Finding:
    line = f"GET {looked.address}/health: {looked.health} {looked.said}".rstrip()
    evidence = [Evidence(line=line, source=looked.address)]
    if looked.health in (401, 403):
        return _finding(
            "other", "not_memory", "high", looked, evidence=evidence,
            what=f"{looked.address} wants a key", why="the server is there and asks who you are: this is not memory",
            fix=Fix(why="set HOLDFAST_API_KEY to the server's key and ask again"),
        )  # fmt: skip
    if 300 <= looked.health < 400 or looked.health == 404:
        return _finding(
            "other", "not_memory", "medium", looked, evidence=evidence,
            what=f"{looked.address} is no inference server, or sits behind another address",
            why="it answers neither /health nor /v1/models; redirects are not followed",
            fix=Fix(why="give the address that the engine itself listens on"),
        )  # fmt: skip
    return _finding(
        "not_ready_yet", "not_memory", "high" if looked.health == 503 else "medium", looked, evidence=evidence,
        what=f"the server answers, and says that it is not ready ({looked.health})",
        why="it is still loading its model or its engine is gone: requests fail until /health says 200",
        fix=Fix(why=f"wait: until curl -sf {looked.address}/health; do sleep 2; done; if it stays so, read its log:"
                " holdfast doctor LOG"),
    )  # fmt: skip


def _stuck(looked: Looked) -> Iterator[Finding]:
    """Requests run, and not one token comes."""
    running = looked.seen("running")
    tokens = len(looked.seen("tokens")) > 1
    if not running or min(running) < 1 or not tokens or looked.grown("tokens") or looked.grown("prompts"):
        return
    if looked.seconds < STUCK_S:
        return
    yield _finding(
        "timeout_or_hang", "not_memory", "medium", looked, figures=("running", "waiting", "tokens"),
        what=f"{counted(int(min(running)), 'request')} ran for {looked.seconds:.0f} s and not one token was computed",
        why="the engine hangs, or compiles, or is stopped: /health answers because the front lives",
        fix=Fix(why="look again in a minute; if it stays so, restart the server and keep its log"),
    )  # fmt: skip


def _thrash(looked: Looked) -> Iterator[Finding]:
    preempted = looked.grown("preemptions")
    if preempted < 1:
        return
    running, share = looked.seen("running"), looked.last("kv_share")
    held = max(1, int(min(running) * 0.9)) if running else None
    flag = _flag(looked, "max-num-seqs")
    fix = None if held is None else Fix(
        changes={flag: str(held)}, price="the others wait in the queue instead",
        why=f"KV held {counted(int(min(running)), 'sequence')} of this traffic before one was put back: {held} fit",
    )  # fmt: skip
    full = share is not None and share >= KV_FULL
    yield _finding(
        "preemption_thrash", "concurrency_misjudged", "high" if full or preempted >= 5 else "medium", looked,
        figures=("preemptions", "kv_share", "running", "waiting"),
        what=f"{counted(int(preempted), 'request')} put back and computed again within {looked.seconds:.0f} s:"
        " more sequences run than KV holds",
        why="a sequence that finds no block gives back all it has and is computed again from its beginning",
        fix=fix, alternatives=tuple(_more_kv(looked)),
    )  # fmt: skip


def _more_kv(looked: Looked) -> Iterator[Fix]:
    """Other ways to hold more of them, with their price."""
    share = _utilization(looked)
    if share is not None and share < USUAL_UTILIZATION:
        yield Fix(
            changes={_flag(looked, "gpu-memory-utilization"): f"{USUAL_UTILIZATION:g}"},
            why=f"only {share:g} of the GPU's memory is used", price="less is left for others on that GPU",
        )  # fmt: skip
    if looked.engine in ("vllm", "sglang"):
        value = "fp8" if looked.engine == "vllm" else "fp8_e4m3"
        yield Fix(
            changes={"--kv-cache-dtype": value}, why="twice as many tokens in the same memory",
            price="KV in 8 bits; needs a GPU with FP8 units to be as fast",
        )  # fmt: skip
    yield Fix(
        changes={}, why="a shorter context, where requests are shorter than it: holdfast plan --traffic URL says",
        price="longer requests are refused",
    )  # fmt: skip


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
    if not shares or not waiting or looked.grown("preemptions") or min(shares) < KV_FULL or min(waiting) < 1:
        return
    growing = waiting[-1] > waiting[0]
    share = _utilization(looked)
    starved = share is not None and share < LOW_UTILIZATION
    yield _finding(
        "utilization_too_low" if starved else "preemption_thrash",
        "configuration_overshoot" if starved else "concurrency_misjudged",
        "medium", looked, figures=("kv_share", "waiting", "running", "preemptions"),
        what=f"KV is full and {counted(int(waiting[-1]), 'request')} wait{'s' if waiting[-1] == 1 else ''}"
        + (", more and more" if growing else ""),
        why=f"only {share:g} of the GPU's memory may be used, so KV is small" if starved
        else "more work arrives than KV holds at once; the next burst will be preempted",
        fix=next(_more_kv(looked)), alternatives=tuple(_more_kv(looked))[1:],
    )  # fmt: skip


def _places(looked: Looked) -> Iterator[Finding]:
    """A queue beside an empty cache: a limit on sequences holds it up, no memory."""
    shares, waiting, running = looked.seen("kv_share"), looked.seen("waiting"), looked.seen("running")
    if not shares or not waiting or not running or max(shares) > KV_LOW or min(waiting) < 1 or min(running) < 1:
        return
    if max(running) != min(running):  # A limit shows as one number that is never passed.
        return
    most = int(max(running) / max(0.05, max(shares)) * 0.8)
    if most <= running[-1]:
        return
    yield _finding(
        "other", "concurrency_misjudged", "medium", looked, figures=("running", "waiting", "kv_share"),
        what=f"{counted(int(waiting[-1]), 'request')} wait while KV is {max(shares):.0%} full: {int(running[-1])} run,"
        " and no more are let in",
        why="the limit on sequences is what holds them up: this is not memory",
        fix=Fix(changes={_flag(looked, "max-num-seqs"): str(min(most, 1024))},
                why=f"KV would hold about {most} of these", price="each token takes longer with more beside it"),
    )  # fmt: skip


def _slower(looked: Looked) -> Iterator[Finding]:
    """The time between two tokens, now and since the server was started."""
    seconds, steps = looked.grown("step_seconds"), looked.grown("steps")
    life_seconds, life_steps = looked.last("step_seconds"), looked.last("steps")
    if steps < STEPS_LEAST or not life_seconds or not life_steps or life_steps - steps < LIFE_STEPS_LEAST:
        return
    now, before = seconds / steps, (life_seconds - seconds) / (life_steps - steps)
    if before <= 0 or now < SLOWER * before:
        return
    yield _finding(
        "throughput_decay", "kv_blowout", "low", looked, figures=("kv_share", "running", "preemptions", "waiting"),
        what=f"a token takes {now * 1e3:.0f} ms now, and took {before * 1e3:.0f} ms on average since the start",
        why="long sequences pin KV blocks and make each step longer, or the machine is slower than it was (heat, a"
        " neighbour)",
        fix=Fix(why="look at preemptions and at the lengths of requests; limit max_tokens; nvidia-smi -q -d PERFORMANCE"
                " shows a GPU that is held back"),
    )  # fmt: skip


def _prefix(looked: Looked) -> Iterator[Finding]:
    asked, hits = looked.last("prefix_asked"), looked.last("prefix_found")
    off = any(sample.settings.get("enable_prefix_caching") == "False" for sample in looked.samples)
    if off or asked is None or hits is None or asked < PREFIX_LEAST_TOKENS:
        return
    rate = hits / asked
    if rate >= PREFIX_WORTH:
        return
    yield _finding(
        "prefix_caching_unused", "not_memory", "low", looked, figures=("prefix_asked", "prefix_found"),
        evidence=[Evidence(line=f"since its start: {hits:,.0f} of {asked:,.0f} tokens found", source=looked.address)],
        what=f"prefix caching finds {rate:.0%} of {int(asked):,} prompt tokens: it hardly pays",
        why="requests share few beginnings, or what they share does not stand at the very beginning (a date, a name, a"
        " shuffled list before the common part)",
        fix=Fix(why="put what is common first in the prompt; switching the cache off costs nothing where"
                " prompts have nothing in common"),
    )  # fmt: skip


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
    yield _finding(
        "stream_buffered", "not_memory", "medium", looked, evidence=[Evidence(line=line, source=looked.address)],
        what="a streamed answer arrives whole at its end: something between you and the engine holds it back",
        why="a proxy that buffers answers; the engine itself sends each token",
        fix=Fix(why="in nginx: proxy_buffering off; proxy_cache off; elsewhere switch buffering and compression off for"
                " text/event-stream; then ask the engine's own address to compare"),
    )  # fmt: skip
