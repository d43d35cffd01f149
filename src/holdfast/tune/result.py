"""`TuneResult`: everything that a tuning found, which is the JSON of `--json` (docs/tune.md)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

import holdfast
from holdfast.bench.load.load import Arrival
from holdfast.bench.measure.objectives import Objective
from holdfast.errors import HoldfastError
from holdfast.tune.configuration import DEFAULT, Axis, LeftOut, ServerConfiguration, Value, command_of
from holdfast.tune.gain import Gain
from holdfast.tune.space.axes import LOSSY
from holdfast.tune.space.pruning import SLOWER, Pruned, Survivors
from holdfast.tune.trial import BETTER, LIKELY, NO_HEADROOM, NOTHING, ONLY, STANDS, Trial, TuneOutcome
from holdfast.units import format_duration

VERSION = 1
"""Of the JSON. Names are added under it; one that changes its meaning or goes makes a new one."""
SMALLEST_TOLD = 0.05
"""Share by which a figure must differ to be named as a reason."""


class TunedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    requests: int
    """In the file."""
    replayed: int
    """In a trial."""
    trial_s: float
    speed: float
    """Of the trials that are compared; 1 is the traffic's own pace."""
    climb: float = 1.0
    """So many times that pace at the end of each of these trials."""
    offered_per_s: float
    """Requests a second at that speed, over all of a trial."""


class TriedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Value]
    """Empty: the default."""
    stage: str
    speed: float
    climb: float
    goodput: float
    good_share: float
    requests: int
    failed: int
    errors: str
    answered_per_s: float
    output_tokens_per_s: float
    measured_s: dict[str, float]
    slo_held: bool
    headroom_held: bool
    free_share: dict[str, float]
    """Of RAM and VRAM at the worst moment; what nobody said is not in it."""
    preemptions: float | None
    died: str
    warnings: list[str]
    seconds: float


class TuneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """As of any command that fails."""

    code: str
    message: str
    field: str | None
    needed: str | None
    found: str | None
    fix: str | None


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    holdfast: str
    date: str
    model: str
    engine: str
    slo: dict[str, float]
    headroom: float
    traffic: TunedTraffic
    axes: list[Axis]
    not_varied: list[LeftOut]
    combinations: int
    pruned: list[Pruned]
    trials: list[TriedConfiguration]
    verdict: str
    settings: dict[str, Value] | None
    """Of the command to keep; empty: the default; None: nothing runs, or nothing leaves the headroom."""
    command: str | None
    default_command: str
    gain: Gain | None
    held: bool
    """What is kept kept the headroom and the SLO, at the traffic's own pace where that was measured."""
    why: list[str]
    ended: str
    interrupted: bool
    seconds: float
    lossy: bool
    minutes_needed: int | None
    """For a search and its proof, by what trials took; None: it had enough, or nothing is known."""
    error: TuneFailure | None
    """Why nothing is kept although servers ran, and what to change."""


def make_result(
    outcome: TuneOutcome,
    space: Survivors,
    *,
    model: str,
    engine: str,
    flags: Sequence[str],
    source: str,
    arrivals: Sequence[Arrival],
    replay: Sequence[Arrival],
    trial_s: float,
    objectives: Sequence[Objective],
    headroom: float,
    lossy: bool,
    seconds: float,
    left_out: Sequence[LeftOut] = (),
    error: HoldfastError | None = None,
) -> TuneResult:
    """`arrivals`: of the file; `replay`: of a trial."""
    kept = outcome.kept

    def command(configuration: ServerConfiguration) -> str:
        return command_of(configuration, engine=engine, model=model, flags=flags)

    return TuneResult(
        holdfast=holdfast.__version__,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        model=model,
        engine=engine,
        slo={f"{one.metric}.{one.percentile}": one.seconds for one in objectives},
        headroom=headroom,
        traffic=TunedTraffic(
            source=source,
            requests=len(arrivals),
            replayed=len(replay),
            trial_s=trial_s,
            speed=outcome.speed,
            climb=outcome.climb,
            offered_per_s=len(replay) / trial_s,
        ),
        axes=space.axes,
        not_varied=list(left_out),
        combinations=space.combinations,
        pruned=[*space.pruned, *_too_slow(outcome.slower)],
        trials=[_tried(trial) for trial in outcome.trials],
        verdict=outcome.verdict,
        settings=None if kept is None else dict(kept.changes),
        command=None if kept is None else command(kept),
        default_command=command(DEFAULT),
        gain=outcome.gain,
        held=outcome.held,
        why=list(reasons(outcome)),
        ended=outcome.ended,
        interrupted=outcome.interrupted,
        seconds=seconds,
        lossy=lossy,
        minutes_needed=None if outcome.needed_s is None else math.ceil(outcome.needed_s / 60),
        error=None if error is None else _failure(error),
    )


def _failure(error: HoldfastError) -> TuneFailure:
    return TuneFailure(**{name: getattr(error, name) for name in TuneFailure.__struct_fields__})


def _too_slow(count: int) -> list[Pruned]:
    why = "even at the rates of its memory the device could not answer what another was measured to answer"
    return [Pruned(kind=SLOWER, count=count, example=why)] if count else []


def _tried(trial: Trial) -> TriedConfiguration:
    names = [name for name in TriedConfiguration.__struct_fields__ if name != "settings"]
    return TriedConfiguration(
        settings=dict(trial.configuration.changes), **{name: getattr(trial, name) for name in names}
    )


def reasons(outcome: TuneOutcome) -> list[str]:
    """What the kept one did otherwise than the default, in the trials that compare them."""
    compared = [
        trial
        for trial in outcome.trials
        if trial.stage == "confirmation" and (trial.speed, trial.climb) == outcome.pace
    ]
    default, kept = ([trial for trial in compared if trial.configuration == one] for one in (DEFAULT, outcome.kept))
    if outcome.verdict == ONLY:
        causes = {
            trial.died or "it left too little memory" for trial in outcome.trials if trial.configuration == DEFAULT
        }
        return [f"the default: {cause}" for cause in sorted(causes)]
    if outcome.verdict in (NOTHING, NO_HEADROOM):
        return sorted({trial.died for trial in outcome.trials if trial.died})
    if outcome.verdict not in (BETTER, LIKELY, STANDS) or not default or not kept:
        return []
    found = []
    for name in default[0].measured_s:
        before, after = (_mean(one.measured_s.get(name) for one in trials) for trials in (default, kept))
        if before and after is not None and abs(after / before - 1) >= SMALLEST_TOLD:
            found.append(f"{name} {format_duration(after)} instead of {format_duration(before)}")
    for field, words in (("output_tokens_per_s", "output tokens/s"), ("preemptions", "preemptions a run")):
        before, after = (_mean(getattr(one, field) for one in trials) for trials in (default, kept))
        if before is not None and after is not None and abs(after - before) > SMALLEST_TOLD * max(before, 1.0):
            found.append(f"{after:,.0f} {words} instead of {before:,.0f}")
    held = [sum(trial.slo_held for trial in trials) for trials in (default, kept)]
    if held[0] != held[1]:
        found.append(f"the SLO was held in {held[1]} of {len(kept)} runs instead of {held[0]} of {len(default)}")
    return found


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def is_lossy(settings: dict[str, Value]) -> bool:
    return any(name in settings for name in LOSSY)
