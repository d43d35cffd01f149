"""Tests and benchmarks that want a GPU, in a stated time: one after the other or, where they may, beside each other.

    python -m benchmarks.gpu_jobs weights kernel-shares --limit-s 1200 --out FOLDER [--model FILE] [--disk FOLDER]
    python -m benchmarks.gpu_jobs --list

The jobs and their groups are in gpu_jobs.toml. They run in a copy of this tree with its compiled kernels, so that what
is changed here meanwhile changes nothing there, and without the settings of Holdfast that this process has. What a job
prints is FOLDER/NAME.log; how each ended is in FOLDER/jobs.json and printed as it ends, and so is what no time was left
for. Ends with 1 if a job failed, or did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import commit, today

ROOT = Path(__file__).resolve().parents[1]
JOBS = Path(__file__).with_name("gpu_jobs.toml")
MODEL_VARIABLE = "HOLDFAST_TEST_MODEL"
LEAST_S = 20.0
"""With less time left nothing is begun."""
POLL_S = 0.1
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "results")


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    group: str
    command: str
    limit_s: float
    gib: float | None = None
    """Of the GPU's memory; None: it runs alone."""
    model: bool = False


def jobs(path: Path) -> list[Job]:
    return [Job(name=name, **about) for name, about in tomllib.loads(path.read_text()).items()]


def chosen(known: Sequence[Job], names: Sequence[str]) -> list[Job]:
    words = {job.name for job in known} | {job.group for job in known}
    if unknown := [name for name in names if name not in words]:
        raise SystemExit(f"{', '.join(unknown)}: neither a job nor a group; --list shows them")
    return [job for job in known if job.name in names or job.group in names]


class Running:
    def __init__(
        self, job: Job, words: list[str], folder: Path, environment: dict[str, str], log: Path, limit_s: float
    ):
        self.job, self._log, self._began = job, log, time.monotonic()
        self._until = self._began + limit_s
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._itself, self._begun = psutil.Process(self._process.pid), set[psutil.Process]()

    def ended(self) -> dict[str, Any] | None:
        """None: it runs."""
        self._look()
        late = time.monotonic() > self._until
        if self._process.poll() is None and not late:
            return None
        found = "its time was over" if self._process.poll() is None else self._process.returncode
        self.end()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        seconds = round(time.monotonic() - self._began, 1)
        return {"ended": found, "seconds": seconds, "last": lines[-1][:300] if lines else ""}

    def end(self) -> None:
        """With all that it was seen to start, servers in sessions of their own too, also where it has ended by itself:
        what stays would hold the GPU's memory."""
        self._look()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for one in self._begun:
            with contextlib.suppress(psutil.NoSuchProcess):  # Also where another process has its number by now.
                one.kill()
        self._process.wait()

    def _look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._begun.update(self._itself.children(recursive=True))


class Jobs:
    def __init__(
        self, folder: Path, out: Path, gib: float, end: float, names: dict[str, str], model: Path | None
    ) -> None:
        """`folder`: where they run; `end`: by the monotonic clock; `names`: what stands in commands in braces."""
        self._folder, self._out, self._gib, self._end = folder, out, gib, end
        self._names, self._model = names, model
        self._running = list[Running]()
        self.results = dict[str, dict[str, Any]]()

    def run(self, asked: Sequence[Job]) -> None:
        waiting = list(asked)
        try:
            while waiting or self._running:
                # In their order: one that wants to be alone would wait for ever behind small ones that overtake it.
                while waiting and self._may_begin(waiting[0]):
                    self._begin(waiting.pop(0))
                for one in self._running[:]:
                    if (found := one.ended()) is not None:
                        self._running.remove(one)
                        self._note(one.job, found)
                time.sleep(POLL_S)
        finally:
            for one in self._running:
                one.end()

    def _may_begin(self, job: Job) -> bool:
        if not self._running:
            return True
        beside = [one.job.gib for one in self._running]
        if job.gib is None or None in beside:
            return False
        return job.gib + sum(gib for gib in beside if gib is not None) <= self._gib

    def _begin(self, job: Job) -> None:
        left_s = self._end - time.monotonic()
        if (problem := self._why_not(job, left_s)) is not None:
            self._note(job, {"ended": problem, "seconds": 0.0, "last": ""})
            return
        command = job.command.format_map(self._names)
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        paths = [str(self._folder / "src"), str(self._folder), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if job.model:
            environment[MODEL_VARIABLE] = str(self._model)
        log = self._out / f"{job.name}.log"
        print(f"{left_s:5.0f} s left  {job.name}: {command}", flush=True)
        self._running.append(Running(job, words, self._folder, environment, log, min(job.limit_s, left_s)))

    def _why_not(self, job: Job, left_s: float) -> str | None:
        if left_s < LEAST_S:
            return "did not run: no time was left"
        if job.model and self._model is None:
            return "did not run: --model names none"
        missing = [name for name, value in self._names.items() if not value and f"{{{name}}}" in job.command]
        return f"did not run: without --{missing[0]}" if missing else None

    def _note(self, job: Job, found: dict[str, Any]) -> None:
        self.results[job.name] = {"command": job.command} | found
        print(f"{job.name}: {found['ended']}, {found['seconds']:.0f} s  {found['last']}", flush=True)
        part = self._out / "jobs.part"
        stamp = {"date": today(), "commit": self._names["commit"], "jobs": self.results}
        part.write_text(json.dumps(stamp, indent=1) + "\n")
        part.replace(self._out / "jobs.json")


def options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of jobs or groups")
    parser.add_argument("--jobs", type=Path, default=JOBS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-jobs"))
    parser.add_argument("--limit-s", type=float, default=3600, help="for all of it")
    parser.add_argument(
        "--gib", type=float, default=130, help="of the GPU's memory for jobs that run beside each other"
    )
    parser.add_argument("--model", type=Path, help="a real one, for tests that want it")
    parser.add_argument("--disk", type=Path, help="an empty folder on an NVMe with 30 GB of room")
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for PYTHONPATH")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs, with their libraries")
    parser.add_argument("--commit", help="of the code, where git is not there to be asked")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    asked = options(given)
    known = jobs(asked.jobs)
    if asked.list or not asked.names:
        for job in known:
            where = "alone" if job.gib is None else f"{job.gib:.0f} GiB"
            print(f"{job.group:8} {job.name:20} {job.limit_s:4.0f} s  {where:7}  {job.command}")
        return 0
    wanted, end = chosen(known, asked.names), time.monotonic() + asked.limit_s
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folders = {"disk": asked.disk, "vllm": asked.vllm, "llama": asked.llama}
    names = {name: str(path.resolve()) if path else "" for name, path in folders.items()}
    names |= {"out": str(out), "commit": asked.commit or commit()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "holdfast"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
        model = asked.model.resolve() if asked.model else None
        all_of_them = Jobs(folder, out, asked.gib, end, names, model)
        all_of_them.run(wanted)
    return 0 if all(one["ended"] == 0 for one in all_of_them.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
