"""`holdfast tune` held against an exhaustive grid: for two shapes of traffic, what it keeps and the best of all.

    python -m benchmarks.tune_grid --out results/tune.json                 one server at a time, 45 minutes
    python -m benchmarks.tune_grid --out results/tune.json --at-once 5     on 16 cores: 15 minutes
    python -m benchmarks.tune_grid --out results/tune.json --slo-times 8 --rate-times 0.5   for a machine that is busy
    bash benchmarks/tune_grid_job.sh FOLDER                                the same, in pieces of at most 9 minutes

The grid is small enough to measure all of it, each configuration in turn, as often as `--repeats` says, and `--more`
times those that come near the best, so that the difference from what was kept has a standard error. What tune kept
is then read off the grid's own runs, so that both are judged by the same measurements. Wants a machine that does
nothing else: the spread of equal runs is printed beside the result. Judged is by medians: on a machine that others
share a whole trial is late now and then, and with three repeats or more one such decides nothing. `--at-once N` divides
the cores into N lanes, with a server (pinned by taskset) and its client in each; lanes share caches and memory, so the
figures are those of a server that has neighbours. A file that is there is continued: what it holds is not measured
again. Ends with 1 where tune is more than 5% below the best, and with 3 where no server of the grid answered anything
in time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from benchmarks.machine import describe_machine, today
from benchmarks.tune_lanes import LaneTrials, Task, cores_here, lanes_of
from holdfast.bench.load.load import Arrival
from holdfast.bench.measure.objectives import parse_slo
from holdfast.tune.configuration import Axis, ServerConfiguration
from holdfast.tune.measure import TrialSettings
from holdfast.tune.report import trial_line
from holdfast.tune.space.pruning import configuration_at
from holdfast.tune.trial import Stage, Trial
from holdfast.tune.tuner import Tuner
from holdfast.units import parse_duration

WITHIN = 0.05
CONTENDS = 0.25
"""Of the best of the first turns: those that come so near it are measured more often."""
NOTHING_IN_TIME = 3
AXES = (Axis("max_num_seqs", (4, 16, None)), Axis("max_num_batched_tokens", (128, None, 2048)))
POINTS = sorted(itertools.product(range(3), range(3)), key=lambda point: (point[0] != 2) + (point[1] != 1))
"""The default first, then those with one change."""
SHAPES = {
    "chat": {"rate": 2.0, "prompt": (20, 120), "output": (20, 60), "slo": "ttft.p90=1s,tpot.p90=100ms"},
    "documents": {"rate": 0.5, "prompt": (600, 1500), "output": (5, 20), "slo": "ttft.p90=4s,tpot.p90=300ms"},
    "labels": {"rate": 2.0, "prompt": (20, 120), "output": (4, 12), "slo": "e2e.p90=1s"},
}
USUAL_SHAPES = ("chat", "documents")
"""The third is quick to measure on a busy machine: what is late is given up soon."""
FLAGS = ("--device", "cpu", "--kv-cache-memory-bytes", "1GiB")
"""Servers beside each other would else each plan with all memory."""
DUMMY = "dummy"
DUMMY_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
"""SmolLM2-135M, for a machine that has no network and no model."""
DUMMY_FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init")


class Grid(NamedTuple):
    configurations: Sequence[ServerConfiguration]
    points: Sequence[tuple[int, ...]]
    same_as: Mapping[tuple[int, ...], int]


class Results:
    """The file: written after every trial, and continued where it is there."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self._path, self._lock = path, Lock()
        self.found: dict[str, Any] = {"date": today(), "machine": describe_machine(), **asked, "shapes": {}}
        if path.exists():
            earlier = json.loads(path.read_text())
            if any(earlier.get(name) != value for name, value in asked.items()):
                raise SystemExit(f"{path} was measured with other settings; name another file, or remove it")
            self.found = earlier

    def shape(self, name: str) -> dict[str, Any]:
        shape: dict[str, Any] = self.found["shapes"].setdefault(name, {})
        return shape

    def change(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def arrivals_of(shape: dict[str, Any], seconds: float) -> tuple[Arrival, ...]:
    draw, at_s, found = random.Random(0), 0.0, list[Arrival]()
    while at_s < seconds:
        found.append(Arrival(at_s, draw.randint(*shape["prompt"]), draw.randint(*shape["output"])))
        at_s += draw.expovariate(shape["rate"])
    return tuple(found)


class Comparison:
    """Of one shape of traffic: tune's search, then the grid at the pace that it found."""

    def __init__(self, name: str, settings: TrialSettings, trials: LaneTrials, results: Results, points: int) -> None:
        self.name, self._settings, self._trials, self._results = name, settings, trials, results
        self.shape = results.shape(name)
        self._points = POINTS[:points]
        self.configurations = [configuration_at(AXES, point) for point in self._points]

    def tune(self, budget_s: float, speed: float | None) -> None:
        if "tuned" in self.shape:
            return
        grid = Grid(self.configurations, self._points, {point: place for place, point in enumerate(self._points)})
        outcome = Tuner(lambda *pace: grid, self._told, budget_s=budget_s, speed=speed).run()
        tuned = {
            "speed": outcome.speed,
            "climb": outcome.climb,
            "verdict": outcome.verdict,
            "gain": None if outcome.gain is None else msgspec.to_builtins(outcome.gain),
            "trials": len(outcome.trials),
            "kept": str(outcome.kept or self.configurations[0]),
        }
        self._results.change(lambda: self.shape.update(tuned=tuned, grid={str(one): [] for one in self.configurations}))

    def contenders(self, repeats: int) -> list[ServerConfiguration]:
        """What tune kept, and those that may be the best by the first turns: only they are worth more."""
        goodput = {name: statistics.median(values[:repeats]) for name, values in self.shape["grid"].items()}
        worth = (1 - CONTENDS) * max(goodput.values())
        kept = self.shape["tuned"]["kept"]
        return [one for one in self.configurations if str(one) == kept or 0 < worth <= goodput[str(one)]]

    def remaining(self, configurations: Sequence[ServerConfiguration], repeats: int) -> list[ServerConfiguration]:
        """In turns, the other way round in every second one, without those that were measured."""
        done = {name: len(values) for name, values in self.shape["grid"].items()}
        turns = [
            (turn, one)
            for turn in range(repeats)
            for one in (configurations if turn % 2 == 0 else reversed(configurations))
        ]
        return [one for turn, one in turns if turn >= done[str(one)]]

    def measure(self, configuration: ServerConfiguration) -> None:
        tuned = self.shape["tuned"]
        trial = self._told(configuration, speed=tuned["speed"], stage="search", climb=tuned["climb"])
        self._results.change(lambda: self.shape["grid"][str(configuration)].append(trial.goodput))

    def judge(self) -> None:
        measured: dict[str, list[float]] = self.shape["grid"]
        goodput = {one: statistics.median(values) for one, values in measured.items()}
        best, kept = max(goodput, key=lambda one: goodput[one]), self.shape["tuned"]["kept"]
        spreads = [
            statistics.stdev(values) / goodput[one] for one, values in measured.items() if goodput[one] and values[1:]
        ]
        judged = {
            "best": best,
            "kept_of_best": goodput[kept] / goodput[best] if goodput[best] else None,
            "spread_of_equal_runs": statistics.median(spreads) if spreads else None,
            "kept_over_best": difference_of(measured[kept], measured[best]),
        }
        self._results.change(lambda: self.shape.update(judged))
        print(self.name, json.dumps(self.shape), flush=True)

    def _told(self, configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
        trial = self._trials.measure(Task(self._settings, configuration, speed, stage, climb))
        print(f"{self.name}: {trial_line(trial)}", flush=True)
        return trial


def difference_of(kept: Sequence[float], best: Sequence[float]) -> dict[str, float] | None:
    """Of what was kept from the best, as a share of the best, with its standard error: by turns, in which both were
    measured. The best of several means is too high by luck, so that this is too low rather than too high."""
    differences = [one - other for one, other in zip(kept, best, strict=False)]
    base = statistics.mean(best)
    if len(differences) < 2 or not base:
        return None
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return {
        "mean": statistics.mean(differences) / base,
        "standard_error": error / base,
        "turns": len(differences),
    }


def settings_of(shape: dict[str, Any], arguments: argparse.Namespace, folder: str) -> TrialSettings:
    seconds, dummy = parse_duration(arguments.trial, field="trial"), arguments.model == DUMMY
    if dummy:
        Path(folder, "config.json").write_text(json.dumps(DUMMY_SHAPE))
    return TrialSettings(
        engine="holdfast",
        model=folder if dummy else arguments.model,
        flags=(*FLAGS, *(DUMMY_FLAGS if dummy else ()), *shlex.split(arguments.serve_flags)),
        arrivals=arrivals_of(shape | {"rate": arguments.rate_times * shape["rate"]}, 10 * seconds),
        seconds=seconds,
        objectives=tuple(
            msgspec.structs.replace(one, seconds=arguments.slo_times * one.seconds) for one in parse_slo(shape["slo"])
        ),
        endpoint="/v1/completions" if dummy else "/v1/chat/completions",
        token_ids=dummy,
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="dummy: dummy weights in its shape, prompts of token ids")
    parser.add_argument("--minutes", type=float, default=10.0, help="of tune, for each shape (default: 10)")
    parser.add_argument("--trial", default="10s")
    parser.add_argument("--repeats", type=int, default=2, help="of each point of the grid (default: 2)")
    parser.add_argument("--more", type=int, default=4, help="of those near the best, and of what was kept (default: 4)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="servers beside each other (default: 1)")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(USUAL_SHAPES))
    parser.add_argument("--rate-times", type=float, default=1.0, metavar="X", help="so many times the requests")
    parser.add_argument("--serve-flags", default="", help="of every server: --threads 1 where cores are shared")
    parser.add_argument("--speed", type=float, help="of the replay; default: until the default does not keep the SLO")
    parser.add_argument("--slo-times", type=float, default=1.0, metavar="X", help="the SLO's times, so many times")
    parser.add_argument("--points", type=int, default=len(POINTS), help="of the grid; fewer to try this program out")
    return parser


def main() -> int:
    arguments = options().parse_args()
    names = (
        "model",
        "minutes",
        "trial",
        "repeats",
        "more",
        "at_once",
        "points",
        "slo_times",
        "rate_times",
        "serve_flags",
        "speed",
    )
    results = Results(arguments.out, {name: getattr(arguments, name) for name in names})
    trials = LaneTrials(lanes_of(cores_here(), arguments.at_once))
    print("lanes:", [lane._asdict() for lane in trials.lanes], flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        comparisons = [
            Comparison(name, settings_of(shape, arguments, folder), trials, results, arguments.points)
            for name, shape in SHAPES.items()
            if name in arguments.shapes
        ]
        list(pool.map(lambda one: one.tune(60 * arguments.minutes, arguments.speed), comparisons))
        tasks = [(one, place) for one in comparisons for place in one.remaining(one.configurations, arguments.repeats)]
        list(pool.map(lambda task: task[0].measure(task[1]), tasks))
        turns = arguments.repeats + arguments.more
        tasks = [
            (one, place) for one in comparisons for place in one.remaining(one.contenders(arguments.repeats), turns)
        ]
        list(pool.map(lambda task: task[0].measure(task[1]), tasks))
        for one in comparisons:
            one.judge()
    shares = [one.shape["kept_of_best"] for one in comparisons]
    if None in shares:
        return NOTHING_IN_TIME
    return 0 if min(shares) >= 1 - WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
