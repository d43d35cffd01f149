"""Why requests wait at a running server whose KV is not full: a limit on sequences, or a machine busy computing.

What KV would hold is reckoned from requests that were answered whole, never from those that just began. Asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from holdfast.doctor.findings import Finding, Fix
from holdfast.doctor.probe.metrics_page import TOLD_AT_THE_END
from holdfast.doctor.probe.server_samples import Looked, finding_of, flag_of
from holdfast.units import counted

KV_LOW = 0.50
SLOW_TOKEN_S = 0.1
"""Between two tokens of one request: from here on a batch costs more than it brings, by what GPUs and CPUs do."""
ENDED_LEAST = 20
"""Requests answered whole before their mean length is believed."""
KV_SPARE = 0.8
GROWN_LEAST = 4


def held_up(looked: Looked) -> Iterator[Finding]:
    """A queue beside an empty cache."""
    shares, waiting, running = looked.seen("kv_share"), _lately(looked, "waiting"), _lately(looked, "running")
    if not waiting or not running or min(waiting) < 1 or min(running) < 1:
        return
    slots = looked.engine == "llama.cpp"  # Each slot has its KV from the start.
    if not slots and (not shares or max(shares) > KV_LOW):
        return
    count, flag = int(running[-1]), flag_of(looked, "max-num-seqs")
    run = "1 runs" if count == 1 else f"{count} run"
    queue = f"{counted(int(waiting[-1]), 'request')} wait{'s' if waiting[-1] == 1 else ''}"
    beside = f" while KV is {max(shares):.0%} full" if shares else ""
    token_s = _token_s(looked)
    if token_s is not None and token_s >= SLOW_TOKEN_S:
        yield finding_of(
            "other",
            "not_memory",
            "medium",
            looked,
            figures=("running", "waiting", "kv_share", "tokens"),
            what=f"{queue}{beside}: {run}, and each gets a token every {token_s:.2g} s: the machine computes all it"
            " can",
            why=f"computing is what holds them up, not memory: a larger {flag} makes each slower still, and answers"
            " more of them only as long as tokens/s grow with it",
            fix=Fix(
                why="send less at once, or put another server beside it; a smaller model or shorter answers are"
                f" computed sooner. A smaller {flag} than {count} gives each request that runs more speed"
            ),
        )
        return
    if max(running) != min(running):  # A limit shows as one number that is never passed.
        return
    fixes = list(_more_places(looked, count, flag))
    yield finding_of(
        "other",
        "concurrency_misjudged",
        "medium" if token_s is not None else "low",
        looked,
        figures=("running", "waiting", "kv_share"),
        what=f"{queue}{beside}: {run}, and no more are let in",
        why=f"the limit on sequences ({flag}) is what holds them up: this is not memory"
        + ("" if token_s is None else f"; each gets a token every {token_s * 1e3:.0f} ms"),
        fix=fixes[0],
        alternatives=tuple(fixes[1:]),
    )


def _lately(looked: Looked, figure: str) -> list[float]:
    """The second half: a queue need not have been there when the look began."""
    seen = looked.seen(figure)
    return seen[len(seen) // 2 :] if len(seen) > 3 else seen


def _token_s(looked: Looked) -> float | None:
    """Between two tokens of one request; None: not told."""
    if looked.grown("steps") > 0:
        return looked.grown("step_seconds") / looked.grown("steps")
    if looked.engine not in TOLD_AT_THE_END and looked.grown("tokens") > 0:
        return looked.seconds * fmean(looked.seen("running")) / looked.grown("tokens")
    steps = looked.grown("computed") if looked.engine in ("llama.cpp", "tgi") else 0.0
    return looked.seconds / steps if steps else None


def _more_places(looked: Looked, count: int, flag: str) -> Iterator[Fix]:
    price = "each token takes longer with more beside it"
    length, room = _mean_length(looked), _kv_tokens(looked)
    if looked.engine == "llama.cpp":
        yield Fix(
            changes={flag: str(2 * count)},
            price=f"{price}; --ctx-size is shared out among twice as many",
            why=f"{counted(count, 'slot')} {'is' if count == 1 else 'are'} there, and all are taken",
        )
    elif length is None or room is None:
        yield Fix(
            price=price,
            why=f"raise {flag} above {count} in small steps and look at preemptions after each: how many KV holds at"
            f" full length is not known before {ENDED_LEAST} requests were answered whole",
        )
    elif (most := int(room / length * KV_SPARE)) > count:
        yield Fix(
            changes={flag: str(min(most, 2 * count))},
            price=price,
            why=f"KV has {room:,.0f} tokens and requests had {length:,.0f} each at their end: about {most} fit",
        )
    else:
        yield Fix(
            why=f"leave {flag} as it is: KV has {room:,.0f} tokens, requests had {length:,.0f} each at their end, so"
            f" that {most} fit and more would be put back; put another server beside it",
        )


def _mean_length(looked: Looked) -> float | None:
    ended, prompts, tokens = looked.last("ended"), looked.last("ended_prompts"), looked.last("ended_tokens")
    if ended is None or prompts is None or tokens is None or ended < ENDED_LEAST:
        return None
    return max(1.0, (prompts + tokens) / ended)


def _kv_tokens(looked: Looked) -> float | None:
    told = looked.last("kv_tokens")
    if told is not None:
        return told
    for sample in looked.samples:
        try:
            return float(sample.settings["num_gpu_blocks"]) * float(sample.settings["block_size"])
        except (KeyError, ValueError):
            continue
    return None


def falling_behind(looked: Looked) -> Iterator[Finding]:
    """A queue that was there and only grew: more arrives than is computed."""
    waiting, running = looked.seen("waiting"), looked.seen("running")
    if len(waiting) < 3 or min(waiting) < 1 or waiting != sorted(waiting):
        return
    grown, busy = waiting[-1] - waiting[0], max(running, default=0.0)
    if grown < max(GROWN_LEAST, busy / 2):
        return
    yield finding_of(
        "other",
        "not_memory",
        "medium",
        looked,
        figures=("waiting", "running", "kv_share", "tokens"),
        what=f"the queue grew from {int(waiting[0])} to {int(waiting[-1])} requests within {looked.seconds:.0f} s and"
        " never shrank: more arrives than is answered",
        why=("KV is not full and nothing was put back" if looked.seen("kv_share") else "no sign that memory is short")
        + ": the rate of requests is more than this server computes",
        fix=Fix(
            why="send less at once, or put another server beside it; look again with --seconds 60 whether it was a"
            " burst"
        ),
    )
