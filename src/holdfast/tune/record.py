"""Trials in a file while a search goes on, one a line, so that one that was interrupted goes on where it was.

    {"tune": 1, "asked": {...}}      what was asked: trials of another question are of no use to this one
    {trial}                          in the order in which they were made
    {trial}                          a last line that was cut off is left out

The search follows from what was measured, so that the same trials lead it to where it was. The file is replaced whole
or gets a line at its end: whatever happens meanwhile, what was there before is still there. Measures nothing itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import holdfast
from holdfast.doctor.probe.installed_version import version_of
from holdfast.errors import ConfigurationError
from holdfast.hardware import processor
from holdfast.hardware.nvidia import probe
from holdfast.tune.configuration import ServerConfiguration, program
from holdfast.tune.trial import Stage, Trial
from holdfast.units import counted, shorten

log = logging.getLogger("holdfast")

VERSION = 1
BEGINNING = b'{"tune":'
Measured = Callable[..., Trial]


class TrialRecord:
    """`trials`: of earlier runs, which are taken instead of being made again."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.trials = _without_half_a_round(_read(path, asked))
        self._path = path.resolve()  # A link stays one.
        self.taken_s = 0.0
        """What the trials took that were taken from the file: time that an earlier run has spent."""
        self._lines = [_line({"tune": VERSION, "asked": dict(asked)}), *map(_line, self.trials)]
        self._complete, self._warned = False, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            raise ConfigurationError(
                f"--resume: {shorten(str(path))} cannot be written",
                needed="a file for what is measured, in a folder that this user can write",
                found=error.strerror or str(error),
                fix="--resume tune.jsonl",
                field="resume",
            ) from error

    def kept(self, measure: Measured) -> Measured:
        """The same, but what the file has is not measured again, and what is measured is in the file."""

        def measured(configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
            for place, trial in enumerate(self.trials):
                if _same(trial, configuration, speed, stage, climb):
                    self.taken_s += trial.seconds
                    return self.trials.pop(place)
            trial = measure(configuration, speed=speed, stage=stage, climb=climb)
            self._keep(trial)
            return trial

        return measured

    def _keep(self, trial: Trial) -> None:
        """What cannot be written now is written with the next one: a disk that is full ends no search."""
        self._lines.append(_line(trial))
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "--resume: %s cannot be written (%s): the search goes on, and trials from here on are kept there"
                    " only once it can be again",
                    shorten(str(self._path)),
                    error.strerror or error,
                )
            self._warned = True

    def _write(self) -> None:
        """The last line at the end of the file; all of them, where it may not have those before."""
        whole, self._complete = not self._complete, False
        if whole:
            _replace(self._path, b"".join(self._lines))
        else:
            with self._path.open("ab") as file:
                file.write(self._lines[-1])
                file.flush()
                os.fsync(file.fileno())
        self._complete = True


def measured_on(engine: str) -> dict[str, Any]:
    """What trials follow from beside what was asked: those of another machine or version cannot be compared."""
    cpu, gpus = processor(), Counter(gpu.name for gpu in probe().gpus)
    return {
        "processor": f"{cpu.model}, {counted(cpu.cores, 'core')}",
        "gpus": ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or "none",
        "holdfast": holdfast.__version__,  # It also plans, sends the requests and counts what was in time.
        "engine_version": None if engine == "holdfast" else version_of(engine, program(engine)),
    }


def recorded_trial_s(path: Path) -> float | None:
    """How long the trials of a file are; None: there is none that says so."""
    try:
        with path.open(encoding="utf-8") as file:
            return float(json.loads(file.readline())["asked"]["trial_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same(trial: Trial, configuration: ServerConfiguration, speed: float, stage: Stage, climb: float) -> bool:
    return (trial.configuration, trial.speed, trial.stage, trial.climb) == (configuration, speed, stage, climb)


def _line(what: object) -> bytes:
    return msgspec.json.encode(what) + b"\n"


def _replace(path: Path, data: bytes) -> None:
    """Whoever reads it has the old file or the new one, after a power loss too."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # Not every file system takes it of a folder.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(path: Path, asked: Mapping[str, Any]) -> list[Trial]:
    try:
        if path.exists() and not path.is_file():
            raise _not_ours(path, "a folder or a device")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _not_ours(path, str(error)) from error
    *lines, cut_off = data.split(b"\n")  # Other ends of lines may be in what a server said before it died.
    if not lines and BEGINNING.startswith(cut_off[: len(BEGINNING)]):
        return []
    try:
        before = json.loads(lines[0] if lines else cut_off)
        if before["tune"] != VERSION or not isinstance(before["asked"], dict):
            raise ValueError(f"version {before['tune']}")
        found = [msgspec.json.decode(line, type=Trial) for line in lines[1:]]
    except (ValueError, KeyError, TypeError) as error:
        raise _not_ours(path, str(error)) from error
    wanted = json.loads(msgspec.json.encode(dict(asked)))
    differs = [name for name, value in wanted.items() if before["asked"].get(name) != value]
    if differs:
        raise ConfigurationError(
            f"--resume: {shorten(str(path))} has trials of another search",
            needed="; ".join(f"{name} {shorten(before['asked'].get(name, 'not recorded'))}" for name in differs),
            found="; ".join(f"{name} {shorten(wanted[name])}" for name in differs),
            fix="name another file, or ask as before (--minutes may differ) on that machine, with those versions",
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
