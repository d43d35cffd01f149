"""Engines side by side on one GPU: all are started at the same time, then each is asked alone, in turns.

    python -m benchmarks.gpu_turns llama-8b-fp8 llama-8b-q4k --vllm SITE --llama FOLDER --out FILE.json --limit-s 570

What is compared is in gpu_turns.toml. Files of weights are written first (`--write-only`: nothing else is done). The
order alternates from round to round, with the sides of a comparison next to each other; every turn adds to `--out`. A
worker that dies is named, and the others go on; when the time is over what was measured counts. Owns no row:
gpu_worker.py and llama_programs.py do the work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_worker, llama_programs
from benchmarks.gpu_peers import ROWS, machine
from benchmarks.machine import commit, today

WORKER = Path(__file__).with_name("gpu_worker.py")
COMPARISONS = Path(__file__).with_name("gpu_turns.toml")
POLL_S = 0.05
VLLM_SHARE = 0.05
"""With a KV cache of a given size vLLM uses this for one check alone: that so much is free. Others fill the GPU too."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    comparison: str
    name: str
    engine: str
    model: str
    rows: tuple[str, ...]
    settings: dict[str, Any]
    against: str
    """The name of the side that this one is compared with; empty: none."""
    before: bool = False
    """By the sources of an earlier commit."""

    @property
    def label(self) -> str:
        return f"{self.comparison}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    work: Path
    """For logs, and the files by which workers are asked."""
    files: Path
    """For weights."""
    vllm: Path | None = None
    llama: Path | None = None
    before: Path | None = None
    """Root of an earlier commit's tree."""


class FailedError(Exception):
    """A side gives no more figures."""


@dataclass(slots=True)
class Measured:
    """Of one side."""

    values: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class Worker:
    """An engine in a process of its own, which stays until it is ended."""

    def __init__(self, side: Side, number: int, rounds: int, around: Surroundings) -> None:
        self.side, self.measured = side, Measured()
        self._go, self._log = str(around.work / f"{number}-go"), around.work / f"{number}-{side.engine}"
        environment = os.environ | {
            "HOLDFAST_BENCHMARK_FILES": str(around.files),
            "HOLDFAST_BENCHMARK_SETTINGS": json.dumps(side.settings),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        if side.engine == "vllm" and around.vllm is not None:
            environment["PYTHONPATH"] = str(around.vllm)
        if side.before:
            if around.before is None:
                raise SystemExit(f"{side.label}: --before names no tree of an earlier commit")
            paths = [str(around.before / "src"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        # One turn more than is asked for: a worker that has nothing left to wait for would end beside others' turns.
        rows = "/".join([",".join(side.rows)] * (rounds + 1))
        with self._log.with_suffix(".out").open("wb") as out, self._log.with_suffix(".err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), side.engine, side.model, rows, self._go],
                env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> bool:
        self._check_alive()
        return Path(f"{self._go}.ready").exists()

    def turn(self, number: int, until: float) -> None:
        asked = Path(f"{self._go}.{number}")
        asked.touch()
        while asked.exists():
            self._check_alive()
            if time.monotonic() > until:
                raise FailedError(f"no answer in turn {number + 1} before its time was over")
            time.sleep(POLL_S)
        figures = self._figures()
        self.measured.facts = {key: figures[key] for key in ("engine", "version", "model", "ready_s")}
        add(self.measured.values, {row: figures[row][ROWS[usual(row)][1]] for row in self.side.rows})

    def _figures(self) -> dict[str, Any]:
        lines = [line for line in self._said("out").splitlines() if line.startswith('{"engine"')]
        if not lines:
            raise FailedError("it answered without figures")
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def _said(self, stream: str) -> str:
        return self._log.with_suffix(f".{stream}").read_text(errors="replace")

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            last = (self._said("err") or self._said("out"))[-600:].strip()
            raise FailedError(f"ended with {self._process.returncode}: {last}")

    def end(self) -> None:
        """At once, and whatever it started: nothing of it is needed, and the GPU's memory is the driver's to free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class LlamaPrograms:
    """llama.cpp's own, which load the file in every turn and keep nothing."""

    def __init__(self, side: Side, around: Surroundings) -> None:
        self.side, self.measured = side, Measured()
        self._folder = around.llama
        model, _, variant = side.model.partition("+")
        self._file = gpu_worker.place(model, variant, around.files)

    def ready(self) -> bool:
        if self._folder is None:
            raise FailedError("--llama names no folder with llama.cpp's programs")
        return True

    def turn(self, number: int, until: float) -> None:
        assert self._folder is not None, "asked before it was ready"
        try:
            rows = llama_programs.gpu_rows(self._folder, str(self._file), max(1.0, until - time.monotonic()))
        except (OSError, SystemExit, subprocess.TimeoutExpired) as error:
            raise FailedError(f"turn {number + 1}: {error}") from error
        self.measured.facts = {"engine": self.side.engine, "model": self.side.model}
        add(self.measured.values, {row: rows[row] for row in self.side.rows})

    def end(self) -> None:
        pass


Asked = Worker | LlamaPrograms


def usual(row: str) -> str:
    return row.removesuffix("_again")


def add(values: dict[str, list[float]], rows: dict[str, float]) -> None:
    for row, value in rows.items():
        values.setdefault(usual(row), []).append(value)


def sides(path: Path, names: Sequence[str]) -> list[Side]:
    known = tomllib.loads(path.read_text())
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{', '.join(unknown)}: not among {', '.join(known)}")
    found = list[Side]()
    for name in names:
        first, second, *more = known[name]["sides"]
        first = {"against": second.get("name", second["engine"])} | first
        found += [_side(name, known[name]["rows"], one) for one in (first, second, *more)]
    return found


def _side(comparison: str, rows: list[str], one: dict[str, Any]) -> Side:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": int(one["kv_gib"] * GIB)}
    if one["engine"] == "vllm":
        settings["gpu_memory_utilization"] = VLLM_SHARE
    return Side(
        comparison=comparison,
        name=one.get("name", one["engine"]),
        engine=one["engine"],
        model=one["model"],
        rows=tuple(one.get("rows", rows)),
        settings=settings | one.get("settings", {}),
        against=one.get("against", ""),
        before=one.get("before", False),
    )


def write_files(asked: Iterable[Side], files: Path, end: float) -> None:
    """One after the other, in processes that keep nothing of the GPU."""
    environment = os.environ | {"HOLDFAST_BENCHMARK_FILES": str(files)}
    for model in dict.fromkeys(side.model for side in asked):
        began = time.monotonic()
        subprocess.run([sys.executable, str(WORKER), "files", model], env=environment, check=True, timeout=end - began)
        print(f"{model}: file there after {time.monotonic() - began:.1f} s", flush=True)


class Turns:
    """All sides, and the time that is left for them."""

    def __init__(self, asked: list[Side], rounds: int, around: Surroundings, end: float, stamp: dict[str, str]) -> None:
        """`end`: by the clock; `stamp`: what is said of the run beside its figures."""
        self._began, self._end, self._rounds, self._stamp = time.monotonic(), end, rounds, stamp
        self.workers = list[Asked]()
        try:
            for number, side in enumerate(asked):
                llama = side.engine == "llama.cpp"
                self.workers.append(
                    LlamaPrograms(side, around) if llama else Worker(side, number, rounds, around)
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def run(self, ready_s: float, turn_s: float, out: Path) -> None:
        self._wait_until_ready(min(self._end, time.monotonic() + ready_s))
        for number in range(self._rounds):
            for worker in self.workers if number % 2 == 0 else self.workers[::-1]:
                if worker.measured.failure or time.monotonic() > self._end:
                    continue
                try:
                    worker.turn(number, min(self._end, time.monotonic() + turn_s))
                    print(f"{self._seconds():6.1f} s  turn {number + 1} of {worker.side.label}", flush=True)
                except FailedError as error:
                    self._failed(worker, error)
                self._keep(out)
        self._keep(out)

    def _wait_until_ready(self, until: float) -> None:
        waiting = self.workers[:]
        while waiting:
            for worker in waiting[:]:
                try:
                    if not worker.ready():
                        if time.monotonic() < until:
                            continue
                        raise FailedError("not ready in time")
                    print(f"{self._seconds():6.1f} s  ready: {worker.side.label}", flush=True)
                except FailedError as error:
                    self._failed(worker, error)
                waiting.remove(worker)
            time.sleep(POLL_S)

    def _failed(self, worker: Asked, error: FailedError) -> None:
        worker.measured.failure = str(error)
        worker.end()
        print(f"{self._seconds():6.1f} s  FAILED: {worker.side.label}: {error}", flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _keep(self, out: Path) -> None:
        beside = out.with_suffix(".part")
        beside.write_text(json.dumps(self._stamp | {"comparisons": summary(self.workers)}, indent=1) + "\n")
        beside.replace(out)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


def summary(workers: Sequence[Asked]) -> dict[str, Any]:
    """Of each comparison its sides, and of each row every value, the medians, and their ratios."""
    found = dict[str, Any]()
    for name in dict.fromkeys(worker.side.comparison for worker in workers):
        here = [worker for worker in workers if worker.side.comparison == name]
        rows = dict.fromkeys(usual(row) for worker in here for row in worker.side.rows)
        found[name] = {
            "sides": {one.side.name: one.measured.facts | _about(one) for one in here},
            "rows": {row: _row(row, here) for row in rows},
        }
    return found


def _about(worker: Asked) -> dict[str, Any]:
    failure = {"failure": worker.measured.failure} if worker.measured.failure else {}
    return {"settings": worker.side.settings, "against": worker.side.against} | failure


def _row(row: str, here: list[Asked]) -> dict[str, Any]:
    values = {one.side.name: one.measured.values[row] for one in here if row in one.measured.values}
    medians = {name: statistics.median(found) for name, found in values.items()}
    against = {one.side.name: one.side.against for one in here}
    ratios = {name: median / medians[against[name]] for name, median in medians.items() if against[name] in medians}
    return {"title": ROWS[row][0], "values": values, "medians": medians, "ratios": ratios}


def table(name: str, found: dict[str, Any]) -> str:
    names = list(found["sides"])
    compared = {one: about["against"] for one, about in found["sides"].items() if about["against"]}
    heads = [*names, *(f"{one} / {other}" for one, other in compared.items())]
    lines = [f"| {name} | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for row in found["rows"].values():
        cells = [_cell(row["values"].get(one, [])) for one in names]
        cells += [f"{row['ratios'][one]:.2f}" if one in row["ratios"] else "" for one in compared]
        lines.append(f"| {row['title']} | {' | '.join(cells)} |")
    failures = [f"{one}: {about['failure']}" for one, about in found["sides"].items() if "failure" in about]
    return "\n".join([*lines, *failures])


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f}; {len(values)})"


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="of gpu_turns.toml; together they must fit on the GPU")
    parser.add_argument("--comparisons", type=Path, default=COMPARISONS)
    parser.add_argument(
        "--vllm", type=Path, help="folder with vLLM, for PYTHONPATH; default: the one that is installed"
    )
    parser.add_argument("--llama", type=Path, help="folder with llama-bench, llama-batched-bench and their libraries")
    parser.add_argument("--before", type=Path, help="tree of an earlier commit, for sides that are of one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=570, help="for all of it: then it ends with what there is")
    parser.add_argument("--ready-s", type=float, default=300, help="a worker that is not ready by then is ended")
    parser.add_argument("--turn-s", type=float, default=120, help="likewise of a turn")
    parser.add_argument("--work", type=Path, help="for the workers' logs; default: a folder that is removed")
    parser.add_argument("--files", type=Path, default=os.environ.get("HOLDFAST_BENCHMARK_FILES", "/dev/shm"))
    parser.add_argument("--commit", help="of the code, where git is not there to be asked")
    parser.add_argument("--out", type=Path, default=Path("gpu-turns.json"))
    parser.add_argument("--write-only", action="store_true", help="write the files of weights, and end")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    asked = options(given)
    began, chosen = time.monotonic(), sides(asked.comparisons, asked.names)
    write_files(chosen, asked.files, began + asked.limit_s)
    if asked.write_only:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    with tempfile.TemporaryDirectory() as scratch:
        work = (asked.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        around = Surroundings(work=work, files=asked.files, vllm=asked.vllm, llama=asked.llama, before=asked.before)
        stamp = {"date": today(), "commit": asked.commit or commit(), "machine": machine()}
        turns = Turns(chosen, asked.rounds, around, began + asked.limit_s, stamp)
        try:
            turns.run(asked.ready_s, asked.turn_s, asked.out)
        finally:
            turns.close()
            for name, found in summary(turns.workers).items():
                print(f"\n{table(name, found)}", flush=True)


if __name__ == "__main__":
    main()
