"""The course of a search: the default and its pace, the search, the finalists, the confirmation, and what to keep.

    default at the traffic's pace ─► faster until it no longer holds ─► search ─► best few again ─► best against default
                                     (else all would hold alike)                                    in turns: the gain

Compared is a replay whose pace climbs from the last that the default held, or from the traffic's own where it does not
hold that: each configuration falls behind somewhere on the way, and the pace up to which it kept up tells them apart.
At one pace near what a server can do, equal runs differ by half; at an easy one all are alike.

Measures through a function and reads time from a clock that it is given, so that a made-up landscape can be searched
in a test. Starts no server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from time import monotonic
from typing import Protocol

from holdfast.tune.configuration import DEFAULT, ServerConfiguration
from holdfast.tune.gain import FEWEST_ROUNDS, MOST_ROUNDS, USUAL_ROUNDS, WITHIN, Gain, gain_of
from holdfast.tune.search import FEWEST, Point, search, smoothed, spread_of_repeats
from holdfast.tune.trial import (
    BETTER,
    LIKELY,
    NO_HEADROOM,
    NOTHING,
    ONLY,
    OWN_PACE,
    SAME,
    STANDS,
    UNCONFIRMED,
    Stage,
    Trial,
    TuneOutcome,
    at_own_pace,
    chance_of,
    is_sound,
    mean_merit,
    no_setting_helps,
    plainest_first,
    standing,
)

FASTEST = 64.0
"""Beyond it the traffic is not the user's any more."""
FINALISTS = 3
RACE_SHARE = 0.4
"""Of what is left of the time, at most, that the finalists are told apart in."""
DOUBT = 1.64
"""Standard errors within which another finalist may be the best: one chance in twenty beyond them."""
PROOF_SHARE = 0.5
"""Of the time, at most, that is kept for proving the gain; more where the shortest proof takes that."""
LONGER = 0.5
"""Of a trial, by which the trials of a proof may take longer than those before."""
CLIMB = 2.0
"""From the last pace that the default held, or the traffic's own, to so many times that."""
NEAR = 1.5
"""So many times the last pace that the default held, it held no longer: near enough to begin there."""
TOO_MANY = 3
"""That keep up with all of a climb; two may be lucky."""
KEPT_SHARE = 0.99
"""Of requests within the SLO: from there on a faster replay is needed to tell configurations apart."""


class Measure(Protocol):
    def __call__(
        self, configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0
    ) -> Trial: ...


class Choices(Protocol):
    """What there is to choose from at one pace: the default first."""

    @property
    def configurations(self) -> Sequence[ServerConfiguration]: ...

    @property
    def points(self) -> Sequence[Point]: ...

    @property
    def same_as(self) -> Mapping[Point, int]: ...


def _pace(trial: Trial) -> tuple[float, float]:
    return trial.speed, trial.climb


def _kept(trial: Trial) -> bool:
    return trial.held and trial.good_share >= KEPT_SHARE


class Tuner:
    """`run` once. `trials` has what was measured, also after an interruption."""

    def __init__(
        self,
        choices: Callable[[float, float], Choices],
        measure: Measure,
        *,
        budget_s: float,
        speed: float | None = None,
        most_goodput: Callable[[int, float, float], float | None] = lambda place, speed, climb: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`choices`: at a speed of the replay and so many times that at its end. `speed`: None: found out.
        `most_goodput`: of a place at such a pace, what no server could exceed."""
        self._choices = choices
        self._measure, self._clock, self._most_goodput = measure, clock, most_goodput
        self._ends_s = clock() + budget_s
        self._asked_speed, self._budget_s = speed, budget_s
        self.trials: list[Trial] = []
        self._speed, self._climb = speed or OWN_PACE, 1.0
        self._ended = "it was interrupted"
        self._slower: set[int] = set()
        self._pairs: dict[ServerConfiguration, list[tuple[Trial, Trial]]] = {}
        """Rounds: what the default did, and what this one did."""

    def run(self) -> TuneOutcome:
        try:
            self._find_pace()
            while True:
                self._search()
                finalists = self._finalists()
                if not self._quicken(self._kept_all(finalists)):
                    return self._confirm(finalists)
        except KeyboardInterrupt:
            return self._so_far()

    # Parts of it, in order.

    def _find_pace(self) -> None:
        """Faster until the default no longer answers all in time, and half the way back where that was far: from there
        on the pace climbs."""
        held_at = None
        while True:
            trial = self._try(DEFAULT, "default")
            if self._asked_speed is not None or self._left_s() < self._budget_s / 2:
                return
            if not _kept(trial):
                break
            if self._speed >= FASTEST:
                return
            held_at = self._speed
            self._speed *= 4.0 if (trial.times_limit or 1.0) < 0.25 else 2.0
        if trial.died:
            return
        while held_at is not None and self._speed > NEAR * held_at and self._left_s() > self._budget_s / 2:
            failed_at, self._speed = self._speed, round(math.sqrt(held_at * self._speed), 2)
            if _kept(self._try(DEFAULT, "default")):
                held_at, self._speed = self._speed, failed_at
        self._speed, self._climb = held_at or OWN_PACE, CLIMB
        # What it does not hold for long it may hold at the end of a climb: then nothing could be better there, either.
        while _kept(self._try(DEFAULT, "default")) and self._speed < FASTEST and self._left_s() > self._budget_s / 2:
            self._speed = round(self._speed * math.sqrt(CLIMB), 2)

    def _search(self) -> None:
        provable = self._left_s() - self._cost_s() > self._least_proof_s
        self._ended = self._search_here(provable=provable)
        while self._quicken(self._kept_all()):
            self._ended = self._search_here(provable=provable)

    def _reserve_s(self, *, provable: bool) -> float:
        """For what comes after the search. Where nothing can be proven in any case, all else is searched in: `--resume`
        goes on from there."""
        if not provable:
            return self._own_pace_s
        # The finalists once more, rounds of two, and the kept one at the traffic's own pace.
        after = 2 * FINALISTS + 2 * USUAL_ROUNDS + (not self._at_own_pace)
        return max(min(after * self._cost_s(), PROOF_SHARE * self._budget_s), self._least_proof_s)

    def _search_here(self, *, provable: bool) -> str:
        """At this pace. Returns why it ended."""
        choices = self._choices(self._speed, self._climb)
        places = {configuration: place for place, configuration in enumerate(choices.configurations)}

        def cannot_beat(place: int, best: float) -> bool:
            most = self._most_goodput(place, self._speed, self._climb)
            if most is not None and most < best:
                self._slower.add(place)
                return True
            return False

        ended = search(
            choices.points,
            choices.same_as,
            lambda place: self._try(choices.configurations[place], "search").merit,
            lambda: (
                self._left_s() - self._cost_s() > self._reserve_s(provable=provable)
                and not self._may_quicken(self._kept_all())
                and not no_setting_helps(self.trials)
            ),
            known={places[trial.configuration]: trial.merit for trial in self._here()},
            scatter=self._scatter,
            cannot_beat=cannot_beat,
        )
        return "all servers ended alike, whatever was set" if no_setting_helps(self.trials) else ended

    def _finalists(self) -> list[ServerConfiguration]:
        """The best few, each measured again until one is the best, as far as equal runs let that be said."""
        found = self._ranked()[:FINALISTS]
        proof_s = self._least_proof_s
        ends_s = (1 - RACE_SHARE) * self._left_s()
        for configuration in found:
            if len(found) > 1 and self._left_s() - self._cost_s() > proof_s:
                self._try(configuration, "finalists")
        while self._left_s() - self._cost_s() > max(ends_s, proof_s) and (doubtful := self._in_doubt(found)):
            if self._may_quicken(self._kept_all(found)):
                break
            self._try(min(doubtful, key=lambda one: len(self._here(one))), "finalists")
        return [one for one in self._ranked() if one in found]

    def _in_doubt(self, finalists: Sequence[ServerConfiguration]) -> list[ServerConfiguration]:
        """The leader and those that may be better than it by more than is looked for; empty: there are none."""
        ordered = [one for one in self._ranked() if one in finalists]
        if not ordered:
            return []
        means = {one: mean_merit(self._here(one)) for one in ordered}
        spread = self._scatter()
        doubtful = list[ServerConfiguration]()
        for other in ordered[1:]:
            runs = 1 / len(self._here(ordered[0])) + 1 / len(self._here(other))
            if means[other] + DOUBT * spread * math.sqrt(runs) > (1 + WITHIN) * means[ordered[0]]:
                doubtful.append(other)
        return [ordered[0], *doubtful] if doubtful else []

    def _confirm(self, finalists: Sequence[ServerConfiguration]) -> TuneOutcome:
        """Against the default, in turns; the next finalist where one does not stand and there is time."""
        if not self._sound(DEFAULT):
            return self._without_default(finalists)
        others = len(self._choices(self._speed, self._climb).configurations) > 1
        tried = any(not trial.configuration.is_default for trial in self.trials)
        verdict, gain = SAME if tried or not others else UNCONFIRMED, None
        left, behind = list(finalists), None
        while left:
            finalist = self._rounds(left)
            if finalist is None:
                verdict = UNCONFIRMED if gain is None else verdict
                break
            left.remove(finalist)
            gain = self._gain(finalist)
            default, other = (standing([pair[side] for pair in self._pairs[finalist]]) for side in (0, 1))
            if other < default or (own_default := self._own_pace(DEFAULT)) > (own := self._own_pace(finalist)):
                continue
            outcome = self._against_default(finalist, gain, holds_more=(other, own) > (default, own_default))
            if own[1] or outcome.kept == DEFAULT:
                return outcome
            behind = behind or outcome  # Unless another finalist holds the user's pace.
        if behind is not None:
            return behind
        if verdict == UNCONFIRMED:
            return self._unconfirmed()
        return self._outcome(DEFAULT, verdict, gain)

    def _against_default(self, finalist: ServerConfiguration, gain: Gain | None, *, holds_more: bool) -> TuneOutcome:
        if holds_more:
            return self._outcome(finalist, STANDS, gain)
        if gain is None and mean_merit([pair[1] for pair in self._pairs[finalist]]) > 0:
            return self._outcome(finalist, STANDS, None)  # The default answered nothing in time.
        if gain is not None and (gain.proven or gain.likely):
            return self._outcome(finalist, BETTER if gain.proven else LIKELY, gain)
        return self._outcome(DEFAULT, SAME, gain)

    def _rounds(self, finalists: list[ServerConfiguration]) -> ServerConfiguration | None:
        """The default and the one that is best by all that was measured, in turns, until it is decided or the time is
        up. Returns that one; None: there was no time. Of `finalists` those are taken out that a faster pace leaves
        out."""
        for _ in range(MOST_ROUNDS):
            left_s = self._left_s() - self._own_pace_s
            leader = self._best_of(finalists)
            decided = self._decided(leader)
            if decided and left_s > (2 * FEWEST_ROUNDS + 1) * self._cost_s() and (more := self._in_doubt(finalists)):
                self._try(min(more, key=lambda one: len(self._here(one))), "finalists")
                continue
            if decided:
                return leader
            in_time = [one for one in finalists if self._rounds_wanted(one) * 2 * self._cost_s() <= left_s]
            if not in_time:
                break
            leader = self._best_of(in_time)
            pair = (DEFAULT, leader) if sum(map(len, self._pairs.values())) % 2 == 0 else (leader, DEFAULT)
            found = {configuration: self._try(configuration, "confirmation") for configuration in pair}
            self._pairs.setdefault(leader, []).append((found[DEFAULT], found[leader]))
            if all(map(_kept, found.values())) and self._quicken(finalists):
                finalists[:] = self._there(finalists)
                if not finalists:
                    return None
        proven = [one for one in finalists if len(self._pairs.get(one, ())) >= FEWEST_ROUNDS]
        return self._best_of(proven) if proven else None

    def _kept_all(self, among: Sequence[ServerConfiguration] | None = None) -> list[ServerConfiguration]:
        """Who kept up with all of the climb when it was asked last, the default apart: it cannot tell them apart."""
        last = {trial.configuration: trial for trial in self._here()} if self._climb != 1 else {}
        others = [one for one in last if not one.is_default] if among is None else among
        return [one for one in others if one in last and _kept(last[one])]

    def _may_quicken(self, alike: Sequence[ServerConfiguration]) -> bool:
        """A proof has to follow."""
        again = len(alike) + 1 + 3 * FEWEST_ROUNDS  # With what is searched for at that pace.
        in_time = self._left_s() - self._own_pace_s >= again * self._cost_s()
        return len(alike) >= TOO_MANY and in_time and self._speed < FASTEST

    def _quicken(self, alike: Sequence[ServerConfiguration]) -> bool:
        """Where several keep up with all of a climb, the machine was slower when its pace was found. They and the
        default begin again with a faster one; False: nobody does, or there is no time for it."""
        if not self._may_quicken(alike):
            return False
        self._speed = round(self._speed * math.sqrt(CLIMB), 2)
        self._pairs.clear()
        self._slower.clear()
        for configuration in (DEFAULT, *self._there(alike)):
            self._try(configuration, "search")
        return True

    def _there(self, some: Sequence[ServerConfiguration]) -> list[ServerConfiguration]:
        """Those that are to choose from at this pace: its replay may be another part of the traffic, under which some
        are the same server as others."""
        choices = self._choices(self._speed, self._climb).configurations
        return [one for one in some if one in choices]

    def _rounds_wanted(self, finalist: ServerConfiguration) -> int:
        return max(1, FEWEST_ROUNDS - len(self._pairs.get(finalist, ())))

    def _decided(self, finalist: ServerConfiguration) -> bool:
        rounds = self._pairs.get(finalist, [])
        if len(rounds) < FEWEST_ROUNDS:
            return False
        default, other = (standing([pair[side] for pair in rounds]) for side in (0, 1))
        if default != other:
            return len(rounds) >= USUAL_ROUNDS
        gain = self._gain(finalist)
        return gain is None or gain.decided

    def _gain(self, finalist: ServerConfiguration) -> Gain | None:
        rounds = self._pairs.get(finalist, [])
        defaults, others = ([pair[side].goodput for pair in rounds] for side in (0, 1))
        return gain_of(defaults, others)

    def _own_pace(self, configuration: ServerConfiguration) -> tuple[bool, bool]:
        """How it stands at the user's pace, which what keeps up with a faster one must hold too: measured now, but for
        a default that held it at first. Where nothing was compared at another pace: it is not asked again."""
        if self._at_own_pace or self._asked_speed is not None:
            return True, True
        speed, climb, self._speed, self._climb = self._speed, self._climb, OWN_PACE, 1.0
        try:
            if not configuration.is_default or self._default_missed == 1:
                self._try(configuration, "own pace")
            return standing(self._here(configuration))
        finally:
            self._speed, self._climb = speed, climb

    def _without_default(self, finalists: Sequence[ServerConfiguration]) -> TuneOutcome:
        for finalist in finalists:
            self._try(finalist, "confirmation")
            if not self._sound(finalist) or self._own_pace(finalist) < self._own_pace(DEFAULT):
                continue
            if self._sound(finalist):  # At its own pace as well.
                return self._outcome(finalist, ONLY, None)
        return self._outcome(DEFAULT, ONLY, None)

    # What all of them use.

    def _try(self, configuration: ServerConfiguration, stage: Stage) -> Trial:
        trial = self._measure(configuration, speed=self._speed, stage=stage, climb=self._climb)
        self.trials.append(trial)
        return trial

    def _of(self, configuration: ServerConfiguration, stage: Stage | None = None) -> list[Trial]:
        return [
            trial
            for trial in self.trials
            if trial.configuration == configuration and (trial.stage == stage if stage else True)
        ]

    def _here(self, configuration: ServerConfiguration | None = None) -> list[Trial]:
        """At this speed; None: of all."""
        return [
            trial
            for trial in self.trials
            if _pace(trial) == (self._speed, self._climb)
            and (configuration is None or trial.configuration == configuration)
        ]

    def _scatter(self) -> float:
        """The standard deviation of one trial: of equal ones, but no less than that of so few requests."""
        alive = [(trial.configuration, trial.merit) for trial in self._here() if trial.merit is not None]
        return max(spread_of_repeats(alive), fmean(map(chance_of, self._here())))

    def _best_of(self, finalists: Sequence[ServerConfiguration]) -> ServerConfiguration:
        return next((one for one in self._ranked() if one in finalists), finalists[0])

    def _ranked(self) -> list[ServerConfiguration]:
        """All but the default that lived at this speed and left memory, the best first."""
        here = self._here()
        if all(trial.configuration.is_default for trial in here):
            return []
        choices = self._choices(self._speed, self._climb)
        places = {configuration: place for place, configuration in enumerate(choices.configurations)}
        worth = smoothed(
            choices.points, [(places[trial.configuration], trial.merit) for trial in here], self._scatter()
        )
        tried = dict.fromkeys(trial.configuration for trial in here if not trial.configuration.is_default)
        standings = {one: standing([trial for trial in here if trial.configuration == one]) for one in tried}
        lived = [one for one in tried if standings[one][0]]
        ordered = sorted(lived, key=lambda one: (standings[one], worth[places[one]]), reverse=True)
        return plainest_first(ordered, lambda one: (standings[one], worth[places[one]]))

    @property
    def _default_missed(self) -> int:
        """How often it did not hold the user's pace; after the first time it is asked once more."""
        return sum(not trial.held for trial in self._of(DEFAULT) if at_own_pace(trial))

    @property
    def _own_pace_s(self) -> float:
        """What asking for it takes at the end: see `_own_pace`."""
        return 0.0 if self._at_own_pace else (1 + (self._default_missed == 1)) * self._cost_s()

    @property
    def _least_proof_s(self) -> float:
        """The fewest rounds, and what is kept at the traffic's own pace."""
        return (2 * FEWEST_ROUNDS + LONGER) * self._cost_s() + self._own_pace_s

    @property
    def _at_own_pace(self) -> bool:
        return (self._speed, self._climb) == (OWN_PACE, 1.0)

    def _left_s(self) -> float:
        return self._ends_s - self._clock()

    def _cost_s(self) -> float:
        """Of a trial: the longest half, since a server that dies is quick."""
        costs = sorted(trial.seconds for trial in self.trials)
        return costs[(3 * len(costs)) // 4] if costs else 0.0

    def _needed_s(self) -> float | None:
        """The default, a short search, and a proof."""
        trials = len(self._of(DEFAULT, "default")) + FEWEST + FINALISTS + 2 * USUAL_ROUNDS + 1
        return trials * self._cost_s() if self.trials else None

    def _so_far(self) -> TuneOutcome:
        """Nothing is said to be better that was not confirmed."""
        confirmed = [one for one in self._ranked() if self._of(one, "confirmation")]
        for one in confirmed:
            gain = self._gain(one)
            if gain is not None and gain.proven and standing(self._of(one)) >= standing(self._of(DEFAULT)):
                return self._outcome(one, BETTER, gain, interrupted=True)
        return self._unconfirmed(interrupted=True)

    def _unconfirmed(self, *, interrupted: bool = False) -> TuneOutcome:
        """The default, unless it failed what another held: that is no question of a few percent."""
        for one in self._ranked()[:1]:
            in_time = not interrupted and self._left_s() >= self._own_pace_s
            if self._climb != 1 and self._default_missed and in_time:
                default, other = self._own_pace(DEFAULT), self._own_pace(one)
            else:
                default, other = standing(self._here(DEFAULT)), standing(self._here(one))
            if other > default:
                return self._outcome(one, STANDS if default[0] else ONLY, None, interrupted=interrupted)
        return self._outcome(DEFAULT if self.trials else None, UNCONFIRMED, None, interrupted=interrupted)

    def _sound(self, configuration: ServerConfiguration) -> bool:
        return is_sound(self._of(configuration))

    def _sound_instead(self) -> tuple[ServerConfiguration | None, str]:
        """What to keep where what was to be kept died or left too little memory once, and what is said of it."""
        if self._sound(DEFAULT):
            return DEFAULT, UNCONFIRMED
        tried = sorted(
            dict.fromkeys(trial.configuration for trial in self.trials),
            key=lambda one: mean_merit(self._of(one)),
            reverse=True,
        )
        found = next((one for one in [*self._ranked(), *tried] if self._sound(one)), None)
        if found is not None:
            return found, ONLY
        tight = any(not trial.died and not trial.headroom_held for trial in self.trials)
        return None, NO_HEADROOM if tight else NOTHING

    def _outcome(
        self, kept: ServerConfiguration | None, verdict: str, gain: Gain | None, *, interrupted: bool = False
    ) -> TuneOutcome:
        """Of what is to be kept, unless it died or left too little memory once, whichever way it came here."""
        if kept is not None and not self._sound(kept):
            (kept, verdict), gain = self._sound_instead(), None
        return TuneOutcome(
            kept=kept,
            verdict=verdict,
            gain=gain,
            speed=self._speed,
            climb=self._climb,
            trials=self.trials,
            ended=self._ended,
            interrupted=interrupted,
            needed_s=self._needed_s() if verdict == UNCONFIRMED else None,
            slower=len(self._slower),
        )
