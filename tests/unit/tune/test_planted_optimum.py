"""A search over planted landscapes: measurements are a function here, with a best place that is known, noise, cliffs
beyond which servers die, plateaus and interactions. No server is in it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from holdfast.tune.configuration import DEFAULT, Axis, ServerConfiguration
from holdfast.tune.result import reasons
from holdfast.tune.space.pruning import configuration_at
from holdfast.tune.trial import (
    BETTER,
    LIKELY,
    NO_HEADROOM,
    NOTHING,
    ONLY,
    SAME,
    STANDS,
    UNCONFIRMED,
    Stage,
    Trial,
    TuneOutcome,
)
from holdfast.tune.tuner import Tuner

TRIAL_S = 10.0
AXES = (
    Axis("max_num_seqs", (8, 16, 32, None, 128, 256)),
    Axis("max_num_batched_tokens", (64, 128, 256, None, 1024, 2048)),
    Axis("gpu_memory_utilization", (0.7, 0.8, None, 0.95)),
    Axis("max_model_len", (1024, None)),
)
START = tuple(axis.values.index(None) for axis in AXES)
POINTS = sorted(
    itertools.product(*(range(len(axis.values)) for axis in AXES)), key=lambda point: point != START
)  # The default first.
Landscape = Callable[[tuple[int, ...]], float | None]


class AllPlaces(NamedTuple):
    configurations: list[ServerConfiguration]
    points: list[tuple[int, ...]]
    same_as: dict[tuple[int, ...], int]


class PlantedServer:
    """Answers what the landscape says, with noise, and takes TRIAL_S of a clock of its own."""

    def __init__(self, landscape: Landscape, *, noise: float = 0.0, seed: int = 0, saturated_at: float = 1.0) -> None:
        self.landscape, self.noise, self.draw = landscape, noise, random.Random(seed)
        self.saturated_at = saturated_at
        self.now_s = 0.0
        self.interrupt_after = math.inf
        self.places = {configuration_at(AXES, point): point for point in POINTS}
        self.tight: set[ServerConfiguration] = set()

    def __call__(self, configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
        if self.now_s / TRIAL_S >= self.interrupt_after:
            raise KeyboardInterrupt
        self.now_s += TRIAL_S
        value = self.landscape(self.places[configuration])
        if value is None:
            return Trial(
                configuration=configuration,
                stage=stage,
                speed=speed,
                climb=climb,
                died="out of memory",
                died_of_memory=True,
                seconds=TRIAL_S,
            )
        offered = speed * climb * 10.0 / self.saturated_at  # At the end.
        goodput = max(0.0, min(value * (1 + self.draw.gauss(0, self.noise)), offered))
        share = goodput / offered
        return Trial(
            configuration=configuration, stage=stage, speed=speed, climb=climb, goodput=goodput,
            good_share=share, requests=100,
            times_limit=offered / value, slo_held=share >= 0.99, headroom_held=configuration not in self.tight,
            seconds=TRIAL_S,
        )  # fmt: skip

    def tune(self, trials: int = 60, *, speed: float | None = 1.0) -> TuneOutcome:
        every = AllPlaces(list(self.places), POINTS, {point: at for at, point in enumerate(POINTS)})
        return Tuner(lambda *pace: every, self, budget_s=trials * TRIAL_S, speed=speed, clock=lambda: self.now_s).run()


def hill(best: tuple[int, ...], *, width: float = 3.0) -> Landscape:
    return lambda point: 9.0 * math.exp(-(math.dist(point, best) ** 2) / (2 * width**2))


def cliff(point: tuple[int, ...]) -> float | None:
    """The more at once the better, until it dies; a large step helps, until it does not."""
    if point[0] + point[1] > 7 or point[2] == 3:
        return None
    return 3.0 + 1.0 * point[0] + 0.5 * point[1]


def valley(point: tuple[int, ...]) -> float:
    """Sequences and tokens help only together: each alone makes it worse."""
    return 5.0 + (3.0 if point[0] >= 4 and point[1] >= 4 else -0.4 * abs(point[0] - 3) - 0.4 * abs(point[1] - 3))


def plateau(point: tuple[int, ...]) -> float:
    """All the same, but for one end."""
    return 8.0 if point[0] <= 1 and point[1] <= 2 else 5.0


def of(landscape: Landscape, outcome: TuneOutcome) -> float:
    assert outcome.kept is not None
    value = landscape(PlantedServer(landscape).places[outcome.kept])
    assert value is not None
    return value


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(
    "landscape",
    [hill((1, 4, 2, 1)), hill((5, 0, 1, 0)), hill((0, 5, 3, 1), width=2.0), cliff, valley, plateau],
    ids=["hill", "corner", "narrow", "cliff", "valley", "plateau"],
)
def test_a_planted_optimum_is_found(landscape: Landscape, noise: float) -> None:
    """In 288 combinations, with time for 60 runs, those that prove it among them."""
    best = max(value for point in POINTS if (value := landscape(point)) is not None)
    for seed in range(3):
        outcome = PlantedServer(landscape, noise=noise, seed=seed).tune()
        assert outcome.verdict == BETTER
        assert of(landscape, outcome) >= (0.95 if noise == 0 else 0.93) * best, (seed, str(outcome.kept))
        assert outcome.gain is not None
        truly = of(landscape, outcome) / (landscape(START) or 1.0) - 1
        assert outcome.gain.change == pytest.approx(truly, abs=0.1 * (1 + truly))
        assert len(outcome.trials) <= 60


@pytest.mark.parametrize(("speed", "fewest"), [(1.0, 10), (None, 13)])
def test_a_short_time_is_enough_for_a_proof_where_its_fewest_rounds_fit(speed: float | None, fewest: int) -> None:
    for seed in range(5):
        outcome = PlantedServer(hill((1, 4, 2, 1)), noise=0.03, seed=seed).tune(fewest, speed=speed)
        assert outcome.verdict in (BETTER, LIKELY)
        # Where they do not fit, none of the time is kept for them.
        server = PlantedServer(hill((1, 4, 2, 1)), noise=0.03, seed=seed)
        assert server.tune(8, speed=speed).verdict == UNCONFIRMED
        assert server.now_s >= 7 * TRIAL_S


def test_where_nothing_differs_the_default_is_kept() -> None:
    kept = [PlantedServer(lambda point: 5.0, noise=0.05, seed=seed).tune() for seed in range(20)]
    told = [outcome.verdict for outcome in kept]
    assert told.count(SAME) >= 16  # What is neither shown nor excluded may be taken for likely.
    assert told.count(BETTER) <= 1
    assert all(outcome.kept == DEFAULT for outcome in kept if outcome.verdict == SAME)


def test_a_default_that_is_best_is_kept() -> None:
    outcome = PlantedServer(hill(START), noise=0.02).tune()
    assert (outcome.kept, outcome.verdict) == (DEFAULT, SAME)


def test_what_fails_headroom_is_never_kept_however_fast() -> None:
    landscape = hill((1, 4, 2, 1))
    server = PlantedServer(landscape)
    best = configuration_at(AXES, (1, 4, 2, 1))
    server.tight = {best}
    outcome = server.tune()
    assert outcome.kept != best
    assert outcome.verdict == BETTER
    assert of(landscape, outcome) > 8.0


@pytest.mark.parametrize("interrupt_after", [1, 4, math.inf])
@pytest.mark.parametrize("speed", [1.0, None])
def test_where_nothing_keeps_the_headroom_nothing_is_kept(speed: float | None, interrupt_after: float) -> None:
    server = PlantedServer(hill((1, 4, 2, 1)))
    server.tight, server.interrupt_after = set(server.places), interrupt_after
    outcome = server.tune(speed=speed)
    assert (outcome.kept, outcome.verdict, outcome.gain, outcome.held) == (None, NO_HEADROOM, None, False)
    short = PlantedServer(lambda point: None if point[0] else 5.0)  # All others die, the default among them.
    short.tight = {configuration for configuration, point in short.places.items() if not point[0]}
    assert (short.tune().kept, short.tune().verdict) == (None, NO_HEADROOM)


def test_what_leaves_the_headroom_is_kept_where_the_default_does_not() -> None:
    server = PlantedServer(hill((1, 4, 2, 1)))
    server.tight = {one for one, point in server.places.items() if point[0] >= 2}
    outcome = server.tune()
    assert outcome.verdict == ONLY
    assert outcome.kept is not None
    assert outcome.kept not in server.tight
    server.now_s, server.interrupt_after = 0.0, 1
    assert server.tune().verdict == NO_HEADROOM  # The default is all that was tried until then.


@pytest.mark.parametrize("speed", [1.0, None])
def test_what_left_too_little_memory_once_is_not_kept_at_whatever_stage_that_was(speed: float | None) -> None:
    class Moody(PlantedServer):
        def __call__(self, configuration: ServerConfiguration, **asked: Any) -> Trial:
            trial = super().__call__(configuration, **asked)
            return msgspec.structs.replace(trial, headroom_held=self.draw.random() < 0.85)

    seen = set()
    for seed in range(20):
        server = Moody(lambda point: 14.0 + point[0], seed=seed)
        server.interrupt_after = math.inf if seed % 3 else 5 + seed
        outcome = server.tune(trials=10 + seed, speed=speed)
        runs = [trial for trial in outcome.trials if trial.configuration == outcome.kept]
        assert all(trial.headroom_held for trial in runs), seed
        assert bool(runs) == (outcome.kept is not None)
        seen.add(outcome.verdict)
    assert len(seen) >= 3


def test_what_holds_the_slo_is_kept_over_what_does_not() -> None:
    """Beyond 10 requests a second nothing more is offered: both ends answer all, one of them within the SLO."""
    outcome = PlantedServer(lambda point: 12.0 if point[0] == 1 else 9.85).tune()
    assert outcome.verdict == STANDS
    assert outcome.kept is not None
    assert outcome.kept.value("max_num_seqs") == 16
    assert outcome.held


def several_hold(point: tuple[int, ...]) -> float:
    """More than the 10 requests a second that are offered, some by much; not so the default."""
    return {0: 9.0, 1: 11.0, 2: 14.0}.get(point[0], 8.0)


def test_of_several_that_hold_what_the_default_does_not_the_one_with_most_left_is_kept() -> None:
    server = PlantedServer(several_hold)
    outcome = server.tune(speed=None)
    assert (outcome.verdict, outcome.pace, outcome.held) == (STANDS, (1.0, 2.0), True)
    assert of(several_hold, outcome) == 14.0
    assert outcome.gain is not None
    assert outcome.gain.change == pytest.approx(14 / 8 - 1)
    again = [trial.configuration.is_default for trial in outcome.trials if trial.stage == "own pace"]
    assert again == [True, False]  # That the default does not hold it was seen once.


def test_what_holds_the_users_pace_is_kept_over_what_keeps_up_with_more_and_does_not() -> None:
    """As where it falls behind only with time."""
    lost: list[ServerConfiguration] = []

    class Moody(PlantedServer):
        """The first finalist does not hold the traffic's own pace."""

        def __call__(self, configuration: ServerConfiguration, **asked: Any) -> Trial:
            trial = super().__call__(configuration, **asked)
            if lost or asked["stage"] != "own pace" or configuration.is_default:
                return trial
            lost.append(configuration)
            return msgspec.structs.replace(trial, goodput=8.0, good_share=0.8, slo_held=False)

    outcome = Moody(several_hold).tune(trials=90, speed=None)
    assert (outcome.verdict, outcome.held) == (STANDS, True)
    assert outcome.kept not in (DEFAULT, *lost)


def test_a_default_that_missed_its_own_pace_by_chance_is_not_given_up_for_that() -> None:
    """Once of two times is as good as held."""

    class Unlucky(PlantedServer):
        def __call__(self, configuration: ServerConfiguration, **asked: Any) -> Trial:
            first = not self.now_s
            trial = super().__call__(configuration, **asked)
            return msgspec.structs.replace(trial, goodput=9.0, good_share=0.9, slo_held=False) if first else trial

    outcome = Unlucky(lambda point: 14.0).tune(speed=None)
    assert (outcome.kept, outcome.verdict) == (DEFAULT, SAME)


def test_what_holds_the_users_pace_is_kept_without_time_for_a_proof() -> None:
    outcome = PlantedServer(lambda point: 14.0 if point[0] == 1 else 8.0).tune(trials=7, speed=None)
    assert outcome.verdict == STANDS
    assert outcome.kept is not None
    assert outcome.kept.value("max_num_seqs") == 16


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_alone_holds_the_slo_is_kept_without_time_for_a_proof(interrupted: bool) -> None:
    server = PlantedServer(lambda point: 12.0 if point[0] == 1 else 9.5)
    server.interrupt_after = 3 if interrupted else math.inf
    outcome = server.tune(trials=60 if interrupted else 6)
    assert outcome.verdict == STANDS
    assert outcome.kept is not None
    assert outcome.kept.value("max_num_seqs") == 16
    assert (outcome.gain, outcome.interrupted) == (None, interrupted)


def test_a_default_that_dies_is_replaced_and_one_where_all_die_says_so() -> None:
    outcome = PlantedServer(lambda point: None if point[1] >= 3 else 5.0 + point[0]).tune()
    assert outcome.verdict == ONLY
    assert of(lambda point: None if point[1] >= 3 else 5.0 + point[0], outcome) == 10.0
    dead = PlantedServer(lambda point: None).tune()
    assert (dead.kept, dead.verdict) == (None, NOTHING)
    assert len(dead.trials) > 30  # Less may fit.


def test_a_failure_that_no_setting_changes_ends_the_search() -> None:
    class Misinstalled(PlantedServer):
        def __call__(self, configuration: ServerConfiguration, **asked: Any) -> Trial:
            return msgspec.structs.replace(
                super().__call__(configuration, **asked), died="no package", died_of_memory=False
            )

    outcome = Misinstalled(lambda point: None).tune()
    assert (outcome.kept, outcome.verdict, len(outcome.trials)) == (None, NOTHING, 4)
    assert outcome.ended == "all servers ended alike, whatever was set"


def test_the_replay_is_quickened_until_the_default_no_longer_holds_and_the_kept_one_holds_the_users_pace() -> None:
    server = PlantedServer(lambda point: 30.0 + 4 * point[0], saturated_at=1.0)
    outcome = server.tune(speed=None)
    assert outcome.pace == (4.0, 2.0)
    assert outcome.verdict == BETTER
    found = [(trial.speed, trial.climb) for trial in outcome.trials if trial.stage == "default"]
    assert found == [(1.0, 1.0), (4.0, 1.0), (8.0, 1.0), (5.66, 1.0), (4.0, 2.0)]
    assert [trial.speed for trial in outcome.trials if trial.stage == "own pace"] == [1.0]
    assert outcome.held


def test_a_default_that_holds_a_whole_climb_is_given_a_higher_one() -> None:
    """As on a machine that was busy for a moment: it missed a pace that it holds."""

    class Busy(PlantedServer):
        def __call__(self, configuration: ServerConfiguration, **asked: Any) -> Trial:
            trial = super().__call__(configuration, **asked)
            missed = asked["climb"] == 1 and asked["speed"] > 1
            return msgspec.structs.replace(trial, goodput=5.0, good_share=0.5, slo_held=False) if missed else trial

    outcome = Busy(lambda point: 30.0 + 4 * point[0]).tune(speed=None)
    climbs = [trial.speed for trial in outcome.trials if trial.stage == "default" and trial.climb != 1]
    assert climbs == [1.0, 1.41, 1.99, 2.81]
    assert outcome.verdict == BETTER


def test_ctrl_c_keeps_the_default_and_what_was_measured() -> None:
    server = PlantedServer(hill((1, 4, 2, 1)))
    server.interrupt_after = 7
    outcome = server.tune()
    assert (outcome.kept, outcome.verdict, outcome.interrupted) == (DEFAULT, UNCONFIRMED, True)
    assert len(outcome.trials) == 7


def test_what_cannot_be_confirmed_in_the_time_is_not_called_better() -> None:
    outcome = PlantedServer(hill((1, 4, 2, 1))).tune(trials=5)
    assert (outcome.kept, outcome.verdict) == (DEFAULT, UNCONFIRMED)


def test_why_is_told_of_the_pace_that_was_compared_at() -> None:
    """At a slower one, with which it began, the default may have been compared with another."""
    kept = ServerConfiguration((("max_num_seqs", 4),))
    trials = [
        Trial(configuration=one, stage="confirmation", speed=speed, climb=2.0, measured_s={"ttft p90": ttft_s})
        for one, speed, ttft_s in ((DEFAULT, 1.0, 0.1), (DEFAULT, 1.41, 0.4), (kept, 1.41, 0.2))
    ]
    outcome = TuneOutcome(kept=kept, verdict=BETTER, speed=1.41, climb=2.0, trials=trials, ended="")
    assert reasons(outcome) == ["ttft p90 200 ms instead of 400 ms"]
