"""Yes or no: each check with what was measured, what was allowed and why it failed; the first is the reason.

    client       the client kept up, so that the figures are the server's
    process      the server's own was there from the beginning to the end
    rate         of a search for the knee by rates: one at least was kept
    requests     something was answered at peak
    errors       few enough failed, at peak and over the whole run
    slo          each objective, at its percentile, of enough requests for one
    stall        no time in which every stream stood still
    throughput   the last fifth of the peak against the second
    memory       the same, of RAM and VRAM: a leak
    headroom     what the machine and the GPU had left at the worst moment

Decides by what it is given; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.bench.client.worker import ClientReport
from holdfast.bench.measure.figures import LATE_S, LATE_SHARE, Figures, Percentiles
from holdfast.bench.measure.objectives import Objective
from holdfast.bench.measure.rate_points import RatePoint, kept
from holdfast.bench.measure.samples import ServerSample
from holdfast.bench.measure.steadiness import Drift, Stall
from holdfast.units import MIB, counted, format_bytes, format_duration

CLIENT = "client"
"""The check that is not of the server."""
BUSY_SHARE = 0.9
"""Of a core: a client process beyond it reads late."""
HELD_S = 0.5
"""A client process that was kept from running for longer has no figures of the server's."""
STALL_S, STALL_GAPS = 1.0, 20
"""A stall is at least this long, and so many usual times between tokens."""
LEAK_BYTES, LEAK_SHARE = 16 * MIB, 0.02
SLOWER_SHARE = 0.1
LEAST_VALUES = {"p50": 2, "p90": 10, "p95": 20, "p99": 100, "p99_9": 1000}
"""Of fewer no value lies beyond the percentile: it is the highest by another name, and proves nothing."""
OUT_OF_SOCKETS = ("Too many open files", "Cannot assign requested address")
"""What the client's own system says when it has no more."""
CHANCE = 3
"""Standard errors by which throughput may fall beyond that: arrivals are random, and so is what two fifths got."""
HEADROOM = " headroom"
SERVER_PROCESS = "server process"


class BenchCheck(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    passed: bool
    measured: str
    limit: str
    reason: str = ""
    """Why it failed, and what that means."""


class BenchVerdict(msgspec.Struct, frozen=True, kw_only=True):
    passed: bool
    reason: str
    checks: list[BenchCheck]
    safe_concurrency: int | None = None
    safe_reason: str = ""
    safe_rate: float | None = None
    """Of a search for the knee by rates: the highest that was kept, in requests a second."""
    advice: list[str] = []
    """Commands and flags, each planned before it is named; or why there are none."""


class RunEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a verdict is made of."""

    peak: Figures
    whole: Figures | None = None
    """None: errors beyond what is judged are what the run was for, as in a search for the knee."""
    loop: str
    same_process: bool | None = None
    """Whether the server at the end was that of the beginning; None: it cannot be seen from here."""
    clients: Sequence[ClientReport] = ()
    stall: Stall | None = None
    throughput: Drift | None = None
    ram: Drift | None = None
    vram: Drift | None = None
    samples: Sequence[ServerSample] = ()
    rate_points: Sequence[RatePoint] = ()


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    objectives: tuple[Objective, ...] = ()
    headroom: float = 0.05
    error_share: float = 0.001
    limited_client: bool = False
    """The client itself was told to send no more than so many at once, and is late for that reason."""


def checks(evidence: RunEvidence, allowed: Allowed) -> list[BenchCheck]:
    found = [_client(evidence, allowed)]
    # Before what follows from it: of a server that has ended every later request fails.
    found += [] if evidence.same_process is None else [_process(same=evidence.same_process)]
    found += [_rate(evidence.rate_points)] if evidence.rate_points else []
    found += [_requests(evidence), _errors(evidence, allowed)]
    found += [_objective(evidence, objective) for objective in allowed.objectives]
    found += [_stall(evidence)]
    if evidence.throughput is not None:
        found.append(_throughput(evidence.throughput))
    found += [
        _leak(name, drift) for name, drift in (("RAM", evidence.ram), ("VRAM", evidence.vram)) if drift is not None
    ]
    found += _headroom(evidence.samples, allowed.headroom)
    return found


def promises_kept(peak: Figures, allowed: Allowed) -> bool | None:
    """As the checks of errors and of the SLO judge this time; None: too little was answered to tell."""
    if _failed_share(peak) > allowed.error_share:
        return False
    values = [(one, _judged(peak, one)) for one in allowed.objectives]
    if any(found is not None and found.at(one.percentile) > one.seconds for one, found in values):
        return False
    few = any(found is None or found.count < LEAST_VALUES[one.percentile] for one, found in values)
    return None if few or not peak.completed else True


def reason_of(found: Sequence[BenchCheck]) -> str:
    """The first that failed, and how many others did."""
    failed = [check for check in found if not check.passed]
    if not failed:
        seen = any(check.name.endswith(HEADROOM) for check in found)
        return f"{len(found)} checks passed{'' if seen else '; memory could not be seen from here and is not judged'}"
    more = f"; {len(failed) - 1} more failed" if len(failed) > 1 else ""
    return f"{failed[0].name}: {failed[0].reason}{more}"


def _client(evidence: RunEvidence, allowed: Allowed) -> BenchCheck:
    busiest = max((report.cpu_share for report in evidence.clients), default=0.0)
    held = max((report.loop_lag_s for report in evidence.clients), default=0.0)
    lag, ttft = evidence.peak.lag, evidence.peak.ttft
    behind = evidence.loop != "closed" and lag is not None and ttft is not None and not allowed.limited_client
    late = behind and lag is not None and ttft is not None and lag.p99 > max(LATE_S, LATE_SHARE * ttft.p50)
    refused = next((one.kind for one in evidence.peak.errors if any(why in one.kind for why in OUT_OF_SOCKETS)), "")
    reason = ""
    if refused:
        reason = f"the client's own system gave it no more connections ({refused}): raise ulimit -n, or use --workers"
    elif late and lag is not None:
        helps = "use more --workers" if busiest > BUSY_SHARE / 2 else "use a machine with cores free"
        reason = f"the client fell behind its own schedule, by {format_duration(lag.p99)} at p99: {helps}"
    elif busiest > BUSY_SHARE:
        reason = "a client process used all of its core, so that events waited to be read: use more --workers"
    elif held > HELD_S:
        reason = f"other work kept the client from running for {format_duration(held)}: use a machine with cores free"
    measured = f"{busiest:.0%} of a core" + (f", p99 {1e3 * lag.p99:.1f} ms late" if behind and lag else "")
    limit = f"{BUSY_SHARE:.0%} of a core"
    if behind and ttft is not None:
        limit += f", {1e3 * max(LATE_S, LATE_SHARE * ttft.p50):.0f} ms"
    return BenchCheck(name=CLIENT, passed=not reason, measured=measured, limit=limit, reason=reason)


def _rate(points: Sequence[RatePoint]) -> BenchCheck:
    safe = kept(points)
    return BenchCheck(
        name="rate",
        passed=safe is not None,
        measured="none kept" if safe is None else f"{safe.rate:g} requests/s kept",
        limit=f"{points[0].rate:g} requests/s",
        reason="" if safe is not None else f"not even {points[0].rate:g} requests/s were kept: {points[0].missed}",
    )


def _requests(evidence: RunEvidence) -> BenchCheck:
    peak = evidence.peak
    reason = ""
    if not peak.requests:
        reason = "no request was sent at peak: those of the rise were still under way, or it was too short"
    elif not peak.completed:
        kinds = ", ".join(f"{error.count} x {error.kind}" for error in peak.errors[:3])
        reason = f"no request that was sent at peak was answered{': ' + kinds if kinds else ''}"
    elif not peak.output_tokens:
        reason = "not one answer had a token"
    return BenchCheck(
        name="requests",
        passed=not reason,
        measured=f"{peak.completed:,} of {peak.requests:,}",
        limit="1",
        reason=reason,
    )


def _errors(evidence: RunEvidence, allowed: Allowed) -> BenchCheck:
    """Of the peak, or of the whole run where that is worse: a server that dies as load falls has not passed."""
    worst = max((evidence.peak, evidence.whole or evidence.peak), key=_failed_share)
    share = _failed_share(worst)
    passed = share <= allowed.error_share
    kinds = ", ".join(
        f"{error.count} x {error.kind}{' (' + error.example + ')' if error.example else ''}"
        for error in worst.errors[:3]
    )
    when = "" if worst is evidence.peak else " of the whole run"
    return BenchCheck(
        name="errors",
        passed=passed,
        measured=f"{share:.2%}",
        limit=f"{allowed.error_share:.2%}",
        reason="" if passed else f"{worst.failed:,} of {worst.requests:,} requests{when} failed: {kinds}",
    )


def _failed_share(found: Figures) -> float:
    return found.failed / found.requests if found.requests else 0.0


def _process(*, same: bool) -> BenchCheck:
    return BenchCheck(
        name=SERVER_PROCESS,
        passed=same,
        measured="the same" if same else "ended",
        limit="the same",
        reason="" if same else "it ended during the run, and at most another one took its place: see its log",
    )


def _objective(evidence: RunEvidence, objective: Objective) -> BenchCheck:
    found = _judged(evidence.peak, objective)
    value = None if found is None else found.at(objective.percentile)
    limit = f"{1e3 * objective.seconds:g} ms"
    rank = objective.percentile.replace("_", ".")
    measured = "nothing" if value is None else f"{1e3 * value:.1f} ms"
    reason = ""
    if value is None or value > objective.seconds:
        reason = f"{measured} at {rank}, above {limit}"
    elif found is not None and found.count < (least := LEAST_VALUES[objective.percentile]):
        longer = "--step" if evidence.rate_points else "--peak"
        reason = (
            f"{found.count} values are too few for {rank}, which needs {least}: a longer {longer}, or a lower"
            f" percentile ({objective.metric}.p90=...)"
        )
        measured, limit = f"{measured} of {counted(found.count, 'value')}", f"{limit}, of {least}"
    return BenchCheck(
        name=f"{objective.metric} {rank}",
        passed=not reason,
        measured=measured,
        limit=limit,
        reason=reason,
    )


def _judged(peak: Figures, objective: Objective) -> Percentiles | None:
    by_metric = {"ttft": peak.ttft_intended, "e2e": peak.e2e_intended, "tpot": peak.tpot}
    return by_metric.get(objective.metric, peak.itl)


def _stall(evidence: RunEvidence) -> BenchCheck:
    paced = evidence.peak.itl or (evidence.whole.itl if evidence.whole is not None else None)
    usual = paced.p50 if paced else 0.0
    limit = max(STALL_S, STALL_GAPS * usual)
    stall = evidence.stall
    passed = stall is None or stall.seconds <= limit
    return BenchCheck(
        name="stall",
        passed=passed,
        measured="none" if stall is None else format_duration(stall.seconds),
        limit=format_duration(limit),
        reason=""
        if passed or stall is None
        else f"nothing came for {format_duration(stall.seconds)}, {stall.at_s:.0f} s into the run, with"
        f" {counted(stall.streams, 'stream')} under way",
    )


def _throughput(drift: Drift) -> BenchCheck:
    chance = CHANCE * drift.noise / drift.early
    passed = drift.share >= -SLOWER_SHARE - chance
    told = f"{drift.late:,.0f} output tokens/s in the last fifth of the peak, {drift.early:,.0f} in the second"
    return BenchCheck(
        name="throughput over time",
        passed=passed,
        measured=f"{drift.share:+.1%}",
        limit=f"-{SLOWER_SHARE:.0%}" + (f", and {chance:.1%} by chance" if chance >= 0.001 else ""),
        reason="" if passed else f"it falls: {told}",
    )


def _leak(tier: str, drift: Drift) -> BenchCheck:
    """Of what is held beside weights and pools, which come and go by plan: 2% of those would hide gigabytes."""
    grown = drift.late - drift.early - drift.pools_grew
    allowed = max(LEAK_BYTES, LEAK_SHARE * (drift.early - drift.pools))
    passed = grown < allowed
    told = f"{format_bytes(drift.late)} in the last fifth of the peak, {format_bytes(drift.early)} in the second"
    if drift.pools_grew:
        changed = f"{'+' if drift.pools_grew > 0 else ''}{format_bytes(drift.pools_grew)}"
        told += f", of which weights and pools are {changed}"
    return BenchCheck(
        name=f"{tier} over time",
        passed=passed,
        measured=f"{'+' if grown >= 0 else ''}{format_bytes(grown)}",
        limit=f"+{format_bytes(allowed)}",
        reason="" if passed else f"it grows under steady load: {told}",
    )


def least_free(samples: Sequence[ServerSample]) -> dict[str, float]:
    """Of RAM and VRAM the share that was left at the worst moment, as far as anybody said."""
    shares = {
        tier.upper(): [share for sample in samples if (share := getattr(sample, f"{tier}_free_share")) is not None]
        for tier in ("ram", "vram")
    }
    return {tier: min(found) for tier, found in shares.items() if found}


def _headroom(samples: Sequence[ServerSample], headroom: float) -> list[BenchCheck]:
    found = []
    for tier, least in least_free(samples).items():
        passed = least >= headroom
        found.append(
            BenchCheck(
                name=f"{tier}{HEADROOM}",
                passed=passed,
                measured=f"{least:.1%}",
                limit=f"{headroom:.0%}",
                reason="" if passed else f"{least:.1%} of {tier} was left at the worst moment",
            )
        )
    return found
