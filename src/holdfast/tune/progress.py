"""What is said while a search goes on, on standard error: what comes next, each trial when it has ended, and the time
that is used. A terminal also shows the trial that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from holdfast.tune.configuration import ServerConfiguration
from holdfast.tune.record import Measured
from holdfast.tune.report import pace_words, trial_line
from holdfast.tune.trial import Stage, Trial

_CLEAR_LINE = "\r\x1b[2K"


class TuneProgress:
    """`out`: None: nothing is said."""

    def __init__(self, out: TextIO | None, *, used_s: Callable[[], float], budget_s: float) -> None:
        self._out, self._used_s, self._budget_s = out, used_s, budget_s
        self._number = 0
        self._stage: tuple[Stage, tuple[float, float]] | None = None

    def say(self, text: str) -> None:
        if self._out is not None:
            print(f"holdfast: {text}", file=self._out, flush=True)

    def end(self) -> None:
        """What is planned for the report need not be told."""
        self._out = None

    def told(self, measure: Measured) -> Measured:
        """The same trials, each told before and after."""

        out = self._out
        if out is None:
            return measure

        def measured(configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
            self._begin(out, configuration, (speed, climb), stage)
            trial = measure(configuration, speed=speed, stage=stage, climb=climb)
            self._number += 1
            end = _CLEAR_LINE if out.isatty() else ""
            at = f"{_clock(self._used_s())} of {_clock(self._budget_s)}"
            print(f"{end}{self._number:>3}  {at}  {trial_line(trial)}", file=out, flush=True)
            return trial

        return measured

    def _begin(self, out: TextIO, configuration: ServerConfiguration, pace: tuple[float, float], stage: Stage) -> None:
        said = _begins(configuration, pace, stage)
        if said and self._stage != (stage, pace):
            self.say(said)
        self._stage = (stage, pace)
        if out.isatty():
            print(f"     runs: {configuration}", end="\r", file=out, flush=True)


def _begins(configuration: ServerConfiguration, pace: tuple[float, float], stage: Stage) -> str:
    """Of the first trial of a stage."""
    said = pace_words(*pace)
    if stage == "default":
        return f"the default at {said}"
    if stage == "finalists":
        return "the best once more"
    if stage == "confirmation":
        return "the best in turns with the default, to prove the gain"
    if stage == "own pace":
        return f"{configuration} at {said}"
    return ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
