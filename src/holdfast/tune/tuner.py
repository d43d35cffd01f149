"""The course of a search: the default and its pace, the search, the finalists, the confirmation, and what to keep.

    default at the traffic's pace ─► faster until it no longer holds ─► search ─► best few again ─► best against default
                                     (else all would hold alike)                                    in turns: the gain

Measures through a function and reads time from a clock that it is given, so that a made-up landscape can be searched
in a test. Starts no server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol

import msgspec

from holdfast.tune.configuration import DEFAULT, ServerConfiguration
from holdfast.tune.gain import FEWEST_ROUNDS, MOST_ROUNDS, Gain, gain_of
from holdfast.tune.search import FEWEST, Point, search, smoothed
from holdfast.tune.trial import Stage, Trial, mean_merit, standing

FASTEST = 64.0
"""Beyond it the traffic is not the user's any more."""
FINALISTS = 3
PROOF_SHARE = 0.5
"""Of the time, at most, that is kept for proving the gain."""
ALIKE = 0.01
"""Share of what the best is worth, by which another may be below it and count as equal."""
OWN_PACE = 1.0
SOME_SHARE, STEPS_BACK = 0.5, 3
"""Of requests within the SLO: below it a pace is too fast to tell configurations apart; and how often half the way back
is tried then."""
KEPT_SHARE = 0.99
"""Of requests within the SLO: from there on a faster replay is needed to tell configurations apart."""

BETTER, SAME, UNCONFIRMED = "better", "no difference", "not confirmed"
STANDS, ONLY, NOTHING = "holds what the default does not", "the default does not run", "nothing runs"


class Measure(Protocol):
    def __call__(self, configuration: ServerConfiguration, *, speed: float, stage: Stage) -> Trial: ...


class Choices(Protocol):
    """What there is to choose from at one speed: the default first."""

    @property
    def configurations(self) -> Sequence[ServerConfiguration]: ...

    @property
    def points(self) -> Sequence[Point]: ...

    @property
    def same_as(self) -> Mapping[Point, int]: ...


class TuneOutcome(msgspec.Struct, frozen=True, kw_only=True):
    kept: ServerConfiguration | None
    """None: nothing runs."""
    verdict: str
    gain: Gain | None = None
    speed: float
    trials: list[Trial]
    ended: str
    """Why the search ended."""
    interrupted: bool = False
    needed_s: float | None = None
    """Where there was no time for a proof: what the search and its proof take, by what trials took."""
    slower: int = 0
    """Configurations that were not run because their device cannot answer so much at its very best."""

    @property
    def held(self) -> bool:
        """What is kept kept the headroom and the SLO: at the traffic's own pace, where that was measured."""
        mine = [trial for trial in self.trials if trial.configuration == self.kept]
        own = [trial for trial in mine if trial.speed == OWN_PACE]
        return all(standing(own or mine))


def _plainest_first(
    ordered: Sequence[ServerConfiguration], rank: Callable[[ServerConfiguration], tuple[object, float]]
) -> list[ServerConfiguration]:
    """Of those that are as good as the first, those with the fewest settings first: a setting that changes nothing is
    one more to explain and to carry along."""
    if not ordered:
        return []
    standing_of_first, most = rank(ordered[0])
    alike = [one for one in ordered if rank(one)[0] == standing_of_first and rank(one)[1] >= (1 - ALIKE) * most]
    return [*sorted(alike, key=lambda one: len(one.changes)), *(one for one in ordered if one not in alike)]


class Tuner:
    """`run` once. `trials` has what was measured, also after an interruption."""

    def __init__(
        self,
        choices: Callable[[float], Choices],
        measure: Measure,
        *,
        budget_s: float,
        speed: float | None = None,
        most_goodput: Callable[[int, float], float | None] = lambda place, speed: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`choices`: at a speed of the replay. `speed`: None: found out. `most_goodput`: of a place at a speed, what no
        server could exceed."""
        self._choices = choices
        self._measure, self._clock, self._most_goodput = measure, clock, most_goodput
        self._ends_s = clock() + budget_s
        self._asked_speed, self._budget_s = speed, budget_s
        self.trials: list[Trial] = []
        self._speed = speed or OWN_PACE
        self._ended = "it was interrupted"
        self._slower: set[int] = set()

    def run(self) -> TuneOutcome:
        try:
            self._find_pace()
            self._search()
            return self._confirm(self._finalists())
        except KeyboardInterrupt:
            return self._so_far()

    # Parts of it, in order.

    def _find_pace(self) -> None:
        """Faster until the default no longer answers all in time, and back a little where it then answers next to
        nothing: there all others fail as well, and none can be told from another."""
        held_at = None
        while True:
            trial = self._try(DEFAULT, "default")
            if self._asked_speed is not None or self._left_s() < self._budget_s / 2:
                return
            if not (trial.held and trial.good_share >= KEPT_SHARE):
                break
            if self._speed >= FASTEST:
                return
            held_at = self._speed
            self._speed *= 4.0 if (trial.times_limit or 1.0) < 0.25 else 2.0
        for _ in range(STEPS_BACK if held_at is not None and not trial.died else 0):
            if trial.good_share >= SOME_SHARE or self._left_s() < self._budget_s / 2:
                return
            failed_at, self._speed = self._speed, round(math.sqrt((held_at or OWN_PACE) * self._speed), 2)
            slower = self._try(DEFAULT, "default")
            if slower.held and slower.good_share >= KEPT_SHARE:
                held_at, self._speed = self._speed, failed_at
            else:
                trial = slower

    def _search(self) -> None:
        # What comes after it: the finalists once more, rounds of two, and the kept one at the traffic's own pace.
        after = FINALISTS + 2 * MOST_ROUNDS + (self._speed != OWN_PACE)
        reserve_s = min(after * self._cost_s(), PROOF_SHARE * self._budget_s)

        choices = self._choices(self._speed)

        def measure(place: int) -> float | None:
            return self._try(choices.configurations[place], "search").merit

        def cannot_beat(place: int, best: float) -> bool:
            most = self._most_goodput(place, self._speed)
            if most is not None and most < best:
                self._slower.add(place)
                return True
            return False

        self._ended = search(
            choices.points,
            choices.same_as,
            measure,
            lambda: self._left_s() - self._cost_s() > reserve_s,
            known={0: next(one.merit for one in reversed(self.trials) if one.speed == self._speed)},
            cannot_beat=cannot_beat,
        )

    def _finalists(self) -> list[ServerConfiguration]:
        """The best few, each measured once more where there is time."""
        found = self._ranked()[:FINALISTS]
        for configuration in found:
            if len(found) > 1 and self._left_s() > (2 * FEWEST_ROUNDS + 1) * self._cost_s():
                self._try(configuration, "finalists")
        return [one for one in self._ranked() if one in found]

    def _confirm(self, finalists: Sequence[ServerConfiguration]) -> TuneOutcome:
        """Against the default, in turns; the next finalist where one does not stand and there is time."""
        if standing(self._of(DEFAULT))[0] is False:
            return self._without_default(finalists)
        others = len(self._choices(self._speed).configurations) > 1
        tried = any(not trial.configuration.is_default for trial in self.trials)
        verdict, gain = SAME if tried or not others else UNCONFIRMED, None
        for finalist in finalists:
            gain = self._rounds(finalist)
            default, other = (standing(self._of(one, "confirmation")) for one in (DEFAULT, finalist))
            if gain is None and not self._of(finalist, "confirmation"):
                verdict = UNCONFIRMED
                break
            if other < default or not self._stands_at_own_pace(finalist):
                continue
            if other > default:
                return self._outcome(finalist, STANDS, gain)
            if gain is not None and gain.proven:
                return self._outcome(finalist, BETTER, gain)
            if gain is None and mean_merit(self._of(finalist, "confirmation")) > 0:
                return self._outcome(finalist, STANDS, None)  # The default answered nothing in time.
            return self._outcome(DEFAULT, SAME, gain)
        if verdict == UNCONFIRMED:
            return self._unconfirmed()
        return self._outcome(DEFAULT, verdict, gain)

    def _rounds(self, finalist: ServerConfiguration) -> Gain | None:
        own_pace = self._cost_s() if self._speed != OWN_PACE else 0.0
        rounds = min(MOST_ROUNDS, int((self._left_s() - own_pace) / (2 * self._cost_s())))
        if rounds < FEWEST_ROUNDS:
            return None
        defaults, others = list[float](), list[float]()
        for number in range(rounds):
            pair = (DEFAULT, finalist) if number % 2 == 0 else (finalist, DEFAULT)
            for configuration in pair:
                trial = self._try(configuration, "confirmation")
                (defaults if configuration is DEFAULT else others).append(trial.goodput)
        return gain_of(defaults, others)

    def _stands_at_own_pace(self, finalist: ServerConfiguration) -> bool:
        """What holds more of a faster replay must still hold the user's."""
        if self._speed == OWN_PACE or self._asked_speed is not None:
            return True
        speed, self._speed = self._speed, OWN_PACE
        try:
            before = [trial for trial in self._of(DEFAULT) if trial.speed == OWN_PACE]
            return standing([self._try(finalist, "own pace")]) >= standing(before)
        finally:
            self._speed = speed

    def _without_default(self, finalists: Sequence[ServerConfiguration]) -> TuneOutcome:
        for finalist in finalists:
            self._try(finalist, "confirmation")
            if standing(self._of(finalist))[0] and self._stands_at_own_pace(finalist):
                return self._outcome(finalist, ONLY, None)
        lived = [one for one in self._ranked() if standing(self._of(one))[0]]
        return self._outcome(lived[0], ONLY, None) if lived else self._outcome(None, NOTHING, None)

    # What all of them use.

    def _try(self, configuration: ServerConfiguration, stage: Stage) -> Trial:
        trial = self._measure(configuration, speed=self._speed, stage=stage)
        self.trials.append(trial)
        return trial

    def _of(self, configuration: ServerConfiguration, stage: Stage | None = None) -> list[Trial]:
        return [
            trial
            for trial in self.trials
            if trial.configuration == configuration and (trial.stage == stage if stage else True)
        ]

    def _ranked(self) -> list[ServerConfiguration]:
        """All but the default that lived at this speed and left memory, the best first."""
        here = [trial for trial in self.trials if trial.speed == self._speed]
        if all(trial.configuration.is_default for trial in here):
            return []
        choices = self._choices(self._speed)
        places = {configuration: place for place, configuration in enumerate(choices.configurations)}
        worth = smoothed(choices.points, [(places[trial.configuration], trial.merit) for trial in here])
        tried = dict.fromkeys(trial.configuration for trial in here if not trial.configuration.is_default)
        standings = {one: standing([trial for trial in here if trial.configuration == one]) for one in tried}
        lived = [one for one in tried if standings[one][0]]
        ordered = sorted(lived, key=lambda one: (standings[one], worth[places[one]]), reverse=True)
        return _plainest_first(ordered, lambda one: (standings[one], worth[places[one]]))

    def _left_s(self) -> float:
        return self._ends_s - self._clock()

    def _cost_s(self) -> float:
        """Of a trial: the longest half, since a server that dies is quick."""
        costs = sorted(trial.seconds for trial in self.trials)
        return costs[(3 * len(costs)) // 4] if costs else 0.0

    def _needed_s(self) -> float | None:
        """The default, a short search, and a proof."""
        trials = len(self._of(DEFAULT, "default")) + FEWEST + FINALISTS + 2 * MOST_ROUNDS + 1
        return trials * self._cost_s() if self.trials else None

    def _so_far(self) -> TuneOutcome:
        """Nothing is said to be better that was not confirmed."""
        confirmed = [one for one in self._ranked() if self._of(one, "confirmation")]
        for one in confirmed:
            defaults, others = ([trial.goodput for trial in self._of(name, "confirmation")] for name in (DEFAULT, one))
            gain = gain_of(defaults, others)
            if gain is not None and gain.proven and standing(self._of(one)) >= standing(self._of(DEFAULT)):
                return self._outcome(one, BETTER, gain, interrupted=True)
        return self._unconfirmed(interrupted=True)

    def _unconfirmed(self, *, interrupted: bool = False) -> TuneOutcome:
        """The default, unless it failed what another held: that is no question of a few percent."""
        here = [trial for trial in self.trials if trial.speed == self._speed]
        default = standing([trial for trial in here if trial.configuration == DEFAULT])
        for one in self._ranked()[:1]:
            if standing([trial for trial in here if trial.configuration == one]) > default:
                return self._outcome(one, STANDS if default[0] else ONLY, None, interrupted=interrupted)
        return self._outcome(DEFAULT if self.trials else None, UNCONFIRMED, None, interrupted=interrupted)

    def _outcome(
        self, kept: ServerConfiguration | None, verdict: str, gain: Gain | None, *, interrupted: bool = False
    ) -> TuneOutcome:
        return TuneOutcome(
            kept=kept,
            verdict=verdict,
            gain=gain,
            speed=self._speed,
            trials=self.trials,
            ended=self._ended,
            interrupted=interrupted,
            needed_s=self._needed_s() if verdict == UNCONFIRMED else None,
            slower=len(self._slower),
        )
