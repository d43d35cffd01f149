"""A tuning for people: what was ruled out, what was run, and the command to keep. Lines of a trial while it goes on."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.tune.configuration import ServerConfiguration
from holdfast.tune.result import TriedConfiguration, TuneResult, is_lossy
from holdfast.tune.trial import BETTER, LIKELY, NO_HEADROOM, NOTHING, ONLY, SAME, STANDS, UNCONFIRMED, Trial
from holdfast.units import counted, format_duration

SHOWN = 12
"""Configurations in the table."""


def trial_line(trial: Trial) -> str:
    """While it goes on."""
    if trial.died:
        said = f"died: {trial.died}"
    else:
        said = f"{trial.goodput:.2f} requests/s within the SLO ({trial.good_share:.0%}), {_latencies(trial.measured_s)}"
        said += f", failed: {trial.errors}" if trial.failed else ""
        said += "" if trial.headroom_held else ", too little memory left"
    pace = f"{trial.speed:g}x" if trial.climb == 1 else f"{trial.speed:g}-{trial.climb * trial.speed:g}x"
    return f"{trial.stage}, {pace}: {trial.configuration}: {said}"


def lines(result: TuneResult) -> Iterator[str]:
    traffic = result.traffic
    yield f"{result.model} ({result.engine}), {', '.join(_objectives(result))}, {result.headroom:.0%} of memory free"
    yield (
        f"  {counted(traffic.replayed, 'request')} of {traffic.source} in {traffic.trial_s:g} s at"
        f" {pace_words(traffic.speed, traffic.climb, whose='its')}"
        f" ({traffic.offered_per_s:.2f} requests/s)"
    )
    if traffic.speed * traffic.climb > 1:
        yield "  quicker than it was, since at its own pace those that keep the SLO could not be told apart"
    yield ""
    yield f"{counted(result.combinations, 'combination')} of " + ", ".join(_flag(axis.name) for axis in result.axes)
    for one in result.pruned:
        yield f"  {one.count:,} not run, {one.kind}; {one.example}"
    yield f"  {len(_tried(result)):,} run in {counted(len(result.trials), 'trial')}, {format_duration(result.seconds)}"
    yield f"  the search ended because {result.ended}"
    for left in result.not_varied:
        yield f"  not varied: {', '.join(map(_flag, left.names))}: {left.why}"
    yield ""
    yield from _table(result)
    for warning in sorted({warning for trial in result.trials for warning in trial.warnings}):
        yield f"note: {warning}"
    yield ""
    yield from _end(result)


def pace_words(speed: float, climb: float, *, whose: str = "the traffic's") -> str:
    if climb != 1:
        return f"a pace that climbs from {speed:g} to {climb * speed:g} times {whose} own"
    return f"{whose} own pace" if speed == 1 else f"{speed:g} times {whose} pace"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tried(result: TuneResult) -> set[tuple[tuple[str, object], ...]]:
    return {tuple(trial.settings.items()) for trial in result.trials}


def _more_time(result: TuneResult) -> str:
    if result.minutes_needed is None:
        return "a higher --minutes leaves time to prove it"
    return f"at the pace of these trials it takes --minutes {result.minutes_needed}"


def _objectives(result: TuneResult) -> Iterator[str]:
    for name, seconds in result.slo.items():
        yield f"{name.replace('.', ' ').replace('_', '.')} within {format_duration(seconds)}"


def _table(result: TuneResult) -> Iterator[str]:
    """Of the speed that was compared at, the best first."""
    by_settings: dict[str, list[TriedConfiguration]] = {}
    for trial in result.trials:
        if (trial.speed, trial.climb) == (result.traffic.speed, result.traffic.climb) or trial.died:
            name = str(ServerConfiguration(tuple(trial.settings.items())))
            by_settings.setdefault(name, []).append(trial)
    rows = sorted(by_settings.items(), key=lambda item: (-_goodput(item[1]), item[0]))
    yield f"{'requests/s in the SLO':>22}{'runs':>6}  configuration"
    for name, trials in rows[:SHOWN]:
        died = next((trial.died for trial in trials if trial.died), "")
        marks = [
            f"died: {died}" if died else "",
            "" if all(trial.headroom_held for trial in trials) else "too little memory left",
            "" if died else _latencies(trials[-1].measured_s),
            f"failed: {trials[-1].errors}" if trials[-1].failed and not died else "",
        ]
        yield f"{_goodput(trials):>22.2f}{len(trials):>6}  {name}  ({'; '.join(filter(None, marks))})"
    if len(rows) > SHOWN:
        yield f"{'':>22}{'':>6}  and {len(rows) - SHOWN} more (--json has them)"
    slower = {str(ServerConfiguration(tuple(one.settings.items()))) for one in result.trials if one.stage == "search"}
    if left := len(slower - by_settings.keys()):
        yield f"{'':>22}{'':>6}  and {left} at a slower pace, with which the best could not be told apart"


def _goodput(trials: list[TriedConfiguration]) -> float:
    return sum(trial.goodput for trial in trials) / len(trials)


def _latencies(measured: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in measured.items()) or "nothing measured"


def _end(result: TuneResult) -> Iterator[str]:
    gain = result.gain
    interval = "" if gain is None else f"{gain.low:+.1%} to {gain.high:+.1%} at 99%, {gain.rounds} rounds in turns"
    if result.interrupted:
        yield "interrupted: this is what is known so far"
    if result.verdict == BETTER and gain is not None:
        yield f"{gain.change:+.1%} goodput over the default ({interval}): {gain.default_goodput:.2f} to" + (
            f" {gain.goodput:.2f} requests/s within the SLO"
        )
    elif result.verdict == LIKELY and gain is not None:
        yield (
            f"likely better, not proven: {gain.change:+.1%} goodput over the default in the mean ({interval}),"
            f" {gain.default_goodput:.2f} to {gain.goodput:.2f} requests/s within the SLO"
        )
        yield "  for a proof equal runs differ too much: a higher --minutes, or a machine that does nothing else"
    elif result.verdict == STANDS:
        more = f"; goodput {gain.change:+.1%} ({interval})" if gain is not None else ""
        yield f"this one keeps what the default does not{more}"
    elif result.verdict == ONLY:
        yield "the default does not run here, or leaves too little memory; this one does"
    elif result.verdict == SAME:
        more = f": the best of the others was {gain.change:+.1%} ({interval})" if gain is not None else ""
        yield f"no difference: keep the default{more}"
    elif result.verdict == UNCONFIRMED:
        yield f"keep the default: nothing was proven better in this time; {_more_time(result)}"
    elif result.verdict == NOTHING:
        yield "no configuration ran"
    elif result.verdict == NO_HEADROOM:
        yield f"nothing is kept: no configuration that was tried left {result.headroom:.0%} of memory free"
    for why in result.why:
        yield f"  {why}"
    if result.command is not None:
        if not result.held:
            what = "it did not keep" if len(_tried(result)) == 1 else "none kept"
            yield f"  {what} the SLO at this load: fewer requests for one server, more servers, or a looser SLO"
        if result.settings and is_lossy(result.settings):
            yield "  it changes answers: check their quality before you keep it"
        yield ""
        yield result.command
