"""Lanes: groups of cores, in each of which one server is measured at a time, beside those of the other lanes.

A trial runs in a process of its own, which reads from its standard input what to try and writes the `Trial` as the last
line of its output. Knows `taskset`; knows nothing of what is compared.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.tune.configuration import ServerConfiguration
from holdfast.tune.measure import ServerTrials, TrialSettings
from holdfast.tune.trial import Stage, Trial

CLIENT_CORES_FROM = 3
"""Cores of a lane from which on the client has one to itself."""


class Lane(NamedTuple):
    server: tuple[int, ...]
    client: tuple[int, ...]
    """No cores: wherever the system puts it."""


class Task(msgspec.Struct, frozen=True):
    settings: TrialSettings
    configuration: ServerConfiguration
    speed: float
    stage: Stage
    climb: float = 1.0


def lanes_of(cores: Sequence[int], count: int) -> list[Lane]:
    """Equal ones, of neighbouring cores. A single one is not pinned."""
    if count == 1:
        return [Lane((), ())]
    each = len(cores) // count
    if each < 1:
        raise SystemExit(f"--at-once {count} needs as many cores, and there are {len(cores)}")
    if shutil.which("taskset") is None:
        raise SystemExit("--at-once pins servers with taskset, which is not installed (Debian: apt install util-linux)")
    parts = [tuple(cores[number * each : (number + 1) * each]) for number in range(count)]
    return [Lane(part[:-1], part[-1:]) if each >= CLIENT_CORES_FROM else Lane(part, part) for part in parts]


class LaneTrials:
    """`measure` waits for a free lane; called from several threads."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self._free = queue.SimpleQueue[Lane]()
        for lane in lanes:
            self._free.put(lane)

    def measure(self, task: Task) -> Trial:
        lane = self._free.get()
        try:
            return _in_lane(lane, task)
        finally:
            self._free.put(lane)


def _in_lane(lane: Lane, task: Task) -> Trial:
    settings = msgspec.structs.replace(task.settings, launcher=_pinned(lane.server))
    done = subprocess.run(
        [*_pinned(lane.client), sys.executable, "-m", "benchmarks.tune_lanes"],
        input=msgspec.json.encode(msgspec.structs.replace(task, settings=settings)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Trial)


def _pinned(cores: Sequence[int]) -> tuple[str, ...]:
    return ("taskset", "-c", ",".join(map(str, cores))) if cores else ()


def cores_here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    trial = ServerTrials(task.settings)(task.configuration, speed=task.speed, stage=task.stage, climb=task.climb)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(trial) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
