"""`Trial`: what one run of one configuration showed, and how trials are ranked; `TuneOutcome`: what all of a search
came to. Records and comparisons only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from holdfast.bench.measure.figures import Figures
from holdfast.bench.measure.objectives import Objective
from holdfast.bench.measure.verdict import HEADROOM, least_free
from holdfast.bench.result import BenchResult
from holdfast.tune.configuration import ServerConfiguration
from holdfast.tune.gain import Gain
from holdfast.tune.replay import kept_per_s

Stage = Literal["default", "search", "finalists", "confirmation", "own pace"]
SLACK = 0.05
"""At most this share of its goodput a configuration gains by staying well within the SLO: what tells two apart that
both answer everything in time."""

LATE_WORTH = 0.02
"""Of an answer, whether in time or not: what tells two apart where none is in time."""
OWN_PACE = 1.0
FAILED_ALIKE = 4
"""So many configurations that fail alike: all others would too."""
ALIKE = 0.01
"""Share of what the best is worth, by which another may be below it and count as equal."""

BETTER, LIKELY, SAME, UNCONFIRMED = "better", "likely better", "no difference", "not confirmed"
STANDS, ONLY, NOTHING = "holds what the default does not", "the default does not run", "nothing runs"
NO_HEADROOM = "nothing keeps the headroom"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    configuration: ServerConfiguration
    stage: Stage
    speed: float
    """Of the replay: 1 is the traffic's own pace."""
    climb: float = 1.0
    """So many times that speed at the end of the replay."""
    goodput: float = 0.0
    """Requests a second that were answered within the SLO; of a pace that climbs, up to which it kept up."""
    good_share: float = 0.0
    requests: int = 0
    failed: int = 0
    errors: str = ""
    """Kinds of failures, the most frequent first."""
    answered_per_s: float = 0.0
    """In time or not."""
    output_tokens_per_s: float = 0.0
    measured_s: dict[str, float] = {}
    """Each objective, as `ttft p99`."""
    times_limit: float | None = None
    """The objective that comes nearest to its limit, or goes furthest beyond it, as a multiple of it."""
    slo_held: bool = False
    headroom_held: bool = True
    free_share: dict[str, float] = {}
    """Of RAM and VRAM, at the worst moment; what nobody said is not in it."""
    preemptions: float | None = None
    died: str = ""
    """Why the server did not start or did not live; empty: it did."""
    died_of_memory: bool = False
    """Or of what nobody knows to be anything else."""
    warnings: list[str] = []
    seconds: float = 0.0
    """All of it: start, replay, end."""

    @property
    def held(self) -> bool:
        return not self.died and self.headroom_held and self.slo_held

    @property
    def merit(self) -> float | None:
        """What the search climbs: goodput, with a little for what is left of the SLO. None: it died, or left too
        little memory, so that it cannot be kept."""
        if self.died or not self.headroom_held:
            return None
        worth = self.goodput + LATE_WORTH * self.answered_per_s
        return worth * (1 - SLACK * math.tanh(math.log(self.times_limit))) if self.times_limit else worth


def is_sound(trials: Sequence[Trial]) -> bool:
    """Of runs of one configuration: one at least, and all lived and kept the headroom. Nothing else is ever kept."""
    return bool(trials) and all(not trial.died and trial.headroom_held for trial in trials)


def standing(trials: Sequence[Trial]) -> tuple[bool, bool]:
    """Of runs of one configuration: whether all lived and kept the headroom, and whether most kept the SLO too. The
    higher is never given up for goodput."""
    sound = is_sound(trials)
    return sound, sound and sum(trial.slo_held for trial in trials) * 2 >= len(trials)


def at_own_pace(trial: Trial) -> bool:
    return (trial.speed, trial.climb) == (OWN_PACE, 1.0)


class TuneOutcome(msgspec.Struct, frozen=True, kw_only=True):
    kept: ServerConfiguration | None
    """None: nothing runs, or what runs leaves too little memory."""
    verdict: str
    gain: Gain | None = None
    speed: float
    climb: float = 1.0
    trials: list[Trial]
    ended: str
    """Why the search ended."""
    interrupted: bool = False
    needed_s: float | None = None
    """Where there was no time for a proof: what the search and its proof take, by what trials took."""
    slower: int = 0
    """Configurations that were not run because their device cannot answer so much at its very best."""

    @property
    def pace(self) -> tuple[float, float]:
        return self.speed, self.climb

    @property
    def held(self) -> bool:
        """What is kept kept the headroom and the SLO: at the traffic's own pace, where that was measured."""
        mine = [trial for trial in self.trials if trial.configuration == self.kept]
        own = [trial for trial in mine if at_own_pace(trial)]
        return all(standing(own or mine))


def chance_of(trial: Trial) -> float:
    """The standard deviation of its goodput, were each request in time by chance alone."""
    if not trial.requests or not 0 < trial.good_share < 1:
        return 0.0
    in_time, chance = (
        trial.good_share * trial.requests,
        math.sqrt(trial.good_share * (1 - trial.good_share) * trial.requests),
    )
    more, less = (
        kept_per_s(min(max(count, 0.0), trial.requests), trial.requests, 1.0, trial.climb)
        for count in (in_time + chance, in_time - chance)
    )
    return trial.goodput * (more - less) / (2 * kept_per_s(in_time, trial.requests, 1.0, trial.climb))


def no_setting_helps(trials: Sequence[Trial]) -> bool:
    """Several different configurations died of one and the same thing, none lived, and it is no matter of memory, of
    which settings take less."""
    said = {trial.died for trial in trials if not trial.died_of_memory}
    same = len(said) == 1 and all(trial.died in said for trial in trials) and "" not in said
    return same and len({trial.configuration for trial in trials}) >= FAILED_ALIKE


def mean_merit(trials: Sequence[Trial]) -> float:
    return sum(trial.merit or 0.0 for trial in trials) / len(trials) if trials else 0.0


def trial_of(
    result: BenchResult, configuration: ServerConfiguration, *, stage: Stage, speed: float, climb: float,
    offered_s: float, objectives: Sequence[Objective], error_share: float, seconds: float, died: str,
    died_of_memory: bool = False,
) -> Trial:  # fmt: skip
    """`offered_s`: while requests came; what they took beyond it is not the configuration's time but the traffic's."""
    figures = result.whole
    measured = {
        _name(objective): value for objective in objectives if (value := _value(figures, objective)) is not None
    }
    ratios = [measured[_name(one)] / one.seconds for one in objectives if _name(one) in measured]
    answered = len(ratios) == len(objectives) and figures.failed <= error_share * figures.requests
    failed = [check for check in result.verdict.checks if not check.passed]
    told: list[Any] = [sample.preemptions for sample in result.samples if sample.preemptions is not None]
    return Trial(
        configuration=configuration,
        stage=stage,
        speed=speed,
        climb=climb,
        goodput=kept_per_s((figures.good_share or 0.0) * figures.requests, figures.requests, offered_s, climb),
        good_share=figures.good_share or 0.0,
        requests=figures.requests,
        failed=figures.failed,
        errors=", ".join(f"{error.count} x {error.kind}" for error in figures.errors[:3]),
        answered_per_s=figures.requests_per_s,
        output_tokens_per_s=figures.output_tokens_per_s,
        measured_s=measured,
        times_limit=max(ratios, default=None),
        slo_held=answered and max(ratios) <= 1,
        headroom_held=not any(check.name.endswith(HEADROOM) for check in failed),
        free_share=least_free(result.samples),
        preemptions=told[-1] - told[0] if told else None,
        died=died,
        died_of_memory=died_of_memory,
        warnings=[f"{check.name}: {check.reason}" for check in failed if check.name in _WARNED],
        seconds=seconds,
    )


_WARNED = ("client", "stall", "RAM over time", "VRAM over time")


def _name(objective: Objective) -> str:
    return f"{objective.metric} {objective.percentile.replace('_', '.')}"


def _value(figures: Figures, objective: Objective) -> float | None:
    """As the verdict has it: what a user waits for counts from when the request was to be sent."""
    found = getattr(figures, {"ttft": "ttft_intended", "e2e": "e2e_intended"}.get(objective.metric, objective.metric))
    return None if found is None else float(found.at(objective.percentile))


def plainest_first(
    ordered: Sequence[ServerConfiguration], rank: Callable[[ServerConfiguration], tuple[object, float]]
) -> list[ServerConfiguration]:
    """Of those that are as good as the first, those with the fewest settings first: a setting that changes nothing is
    one more to explain and to carry along."""
    if not ordered:
        return []
    standing_of_first, most = rank(ordered[0])
    alike = [one for one in ordered if rank(one)[0] == standing_of_first and rank(one)[1] >= (1 - ALIKE) * most]
    return [*sorted(alike, key=lambda one: len(one.changes)), *(one for one in ordered if one not in alike)]
