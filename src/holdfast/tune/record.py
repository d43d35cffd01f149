"""Trials in a file while a search goes on, one a line, so that one that was interrupted goes on where it was.

    {"tune": 1, "asked": {...}}      what was asked: trials of another question are of no use to this one
    {trial}                          in the order in which they were made
    {trial}                          a last line that was cut off is left out

The search follows from what was measured, so that the same trials lead it to where it was. Measures nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.tune.configuration import ServerConfiguration
from holdfast.tune.trial import Stage, Trial
from holdfast.units import shorten

VERSION = 1
Measured = Callable[..., Trial]


class TrialRecord:
    """`trials`: of earlier runs, which are taken instead of being made again."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self._path = path
        self.trials = _without_half_a_round(_read(path, asked))
        self.taken_s = 0.0
        """What the trials took that were taken from the file: time that an earlier run has spent."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [_line({"tune": VERSION, "asked": dict(asked)}), *map(_line, self.trials)]
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"--resume: {shorten(str(path))} cannot be written",
                needed="a file for what is measured",
                found=str(error.strerror),
                fix="--resume tune.jsonl",
                field="resume",
            ) from error

    def kept(self, measure: Measured) -> Measured:
        """The same, but what the file has is not measured again, and what is measured is in the file."""

        def measured(configuration: ServerConfiguration, *, speed: float, stage: Stage) -> Trial:
            for place, trial in enumerate(self.trials):
                if (trial.configuration, trial.speed, trial.stage) == (configuration, speed, stage):
                    self.taken_s += trial.seconds
                    return self.trials.pop(place)
            trial = measure(configuration, speed=speed, stage=stage)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(trial))
            return trial

        return measured


def recorded_trial_s(path: Path) -> float | None:
    """How long the trials of a file are; None: there is none that says so."""
    try:
        with path.open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["asked"]["trial_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _line(what: object) -> str:
    return msgspec.json.encode(what).decode() + "\n"


def _read(path: Path, asked: Mapping[str, Any]) -> list[Trial]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise _not_ours(path, str(error)) from error
    if not lines:
        return []
    try:
        before = json.loads(lines[0])
        if before["tune"] != VERSION or not isinstance(before["asked"], dict):
            raise ValueError(f"version {before['tune']}")
        found = [msgspec.json.decode(line, type=Trial) for line in lines[1:] if line.endswith("\n")]
    except (ValueError, KeyError, TypeError) as error:
        raise _not_ours(path, str(error)) from error
    wanted = json.loads(msgspec.json.encode(dict(asked)))
    differs = [name for name, value in wanted.items() if before["asked"].get(name) != value]
    if differs:
        raise ConfigurationError(
            f"--resume: {shorten(str(path))} has trials of another search",
            needed="; ".join(f"{name} {shorten(before['asked'].get(name))}" for name in differs),
            found="; ".join(f"{name} {shorten(wanted[name])}" for name in differs),
            fix="name another file, or ask as before (--minutes may differ)",
            field="resume",
        )
    return found


def _not_ours(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--resume: {shorten(str(path))} is not a file of trials",
        needed="a file that holdfast tune --resume wrote, or a name that is free",
        found=shorten(why, 200),
        fix="--resume tune.jsonl",
        field="resume",
    )


def _without_half_a_round(trials: list[Trial]) -> list[Trial]:
    """Both of a round are measured one after the other, or they cannot be compared."""
    rounds = [trial for trial in trials if trial.stage == "confirmation"]
    return trials[:-1] if len(rounds) % 2 and trials[-1].stage == "confirmation" else trials
