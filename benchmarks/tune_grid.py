"""`holdfast tune` held against an exhaustive grid: for two shapes of traffic, what it keeps and the best of all.

    python -m benchmarks.tune_grid --out results/tune.json [--model smollm2] [--minutes 10] [--trial 10s] [--repeats 3]

The grid is small enough to measure all of it, each configuration in turn, as often as `--repeats` says. What tune kept
is then read off the grid's own runs, so that both are judged by the same measurements. Wants a machine that does
nothing else: the spread of equal runs is printed beside the result. Ends with 1 where tune is more than 5% below
the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.machine import describe_machine, today
from holdfast.bench.load.load import Arrival
from holdfast.bench.measure.objectives import parse_slo
from holdfast.tune.configuration import Axis, ServerConfiguration
from holdfast.tune.measure import ServerTrials, TrialSettings
from holdfast.tune.pruning import configuration_at
from holdfast.tune.report import trial_line
from holdfast.tune.trial import Stage, Trial
from holdfast.tune.tuner import Tuner
from holdfast.units import parse_duration

WITHIN = 0.05
AXES = (Axis("max_num_seqs", (4, 16, None)), Axis("max_num_batched_tokens", (128, None, 2048)))
POINTS = sorted(itertools.product(range(3), range(3)), key=lambda point: point != (2, 1))
"""The default first."""
SHAPES = {
    "chat": {"rate": 2.0, "prompt": (20, 120), "output": (20, 60), "slo": "ttft.p90=1s,tpot.p90=100ms"},
    "documents": {"rate": 0.5, "prompt": (600, 1500), "output": (5, 20), "slo": "ttft.p90=4s,tpot.p90=300ms"},
}


class Grid(NamedTuple):
    configurations: Sequence[ServerConfiguration]
    points: Sequence[tuple[int, ...]]
    same_as: Mapping[tuple[int, ...], int]


def arrivals_of(shape: dict[str, Any], seconds: float) -> tuple[Arrival, ...]:
    draw, at_s, found = random.Random(0), 0.0, list[Arrival]()
    while at_s < seconds:
        found.append(Arrival(at_s, draw.randint(*shape["prompt"]), draw.randint(*shape["output"])))
        at_s += draw.expovariate(shape["rate"])
    return tuple(found)


def compared(shape: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = parse_duration(arguments.trial, field="trial")
    trials = ServerTrials(
        TrialSettings(
            engine="holdfast",
            model=arguments.model,
            arrivals=arrivals_of(shape, 10 * seconds),
            seconds=seconds,
            objectives=parse_slo(shape["slo"]),
        )
    )

    def told(configuration: ServerConfiguration, *, speed: float, stage: Stage) -> Trial:
        trial = trials(configuration, speed=speed, stage=stage)
        print(trial_line(0, trial), flush=True)
        return trial

    configurations = [configuration_at(AXES, point) for point in POINTS]
    grid = Grid(configurations, POINTS, {point: place for place, point in enumerate(POINTS)})
    outcome = Tuner(lambda speed: grid, told, budget_s=60 * arguments.minutes).run()
    measured: dict[ServerConfiguration, list[float]] = {one: [] for one in configurations}
    for repeat in range(arguments.repeats):
        for configuration in configurations if repeat % 2 == 0 else reversed(configurations):
            measured[configuration].append(told(configuration, speed=outcome.speed, stage="search").goodput)
    goodput = {one: statistics.mean(values) for one, values in measured.items()}
    best = max(goodput, key=lambda one: goodput[one])
    kept = outcome.kept or configurations[0]
    spreads = [
        statistics.stdev(values) / goodput[one] for one, values in measured.items() if goodput[one] and values[1:]
    ]
    return {
        "speed": outcome.speed,
        "verdict": outcome.verdict,
        "gain": None if outcome.gain is None else msgspec.to_builtins(outcome.gain),
        "trials": len(outcome.trials),
        "kept": str(kept),
        "best": str(best),
        "kept_of_best": goodput[kept] / goodput[best] if goodput[best] else None,
        "spread_of_equal_runs": statistics.median(spreads) if spreads else None,
        "grid": {str(one): values for one, values in measured.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trial", default="10s")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"date": today(), "machine": describe_machine(), "model": arguments.model, "shapes": {}}
    for name, shape in SHAPES.items():
        found["shapes"][name] = compared(shape, arguments)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found["shapes"][name]), flush=True)
    shares = [one["kept_of_best"] for one in found["shapes"].values()]
    return 0 if all(share is not None and share >= 1 - WITHIN for share in shares) else 1


if __name__ == "__main__":
    sys.exit(main())
