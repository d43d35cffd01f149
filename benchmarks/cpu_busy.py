"""One stream on a machine that others use too: tokens a second alone, and beside busy loops on the same cores.

    python benchmarks/cpu_busy.py                                  this build: LLM, and a server
    python benchmarks/cpu_busy.py --sources OLD/src src            two builds, turn by turn

Every engine has a process of its own, stopped while it is not its turn. What else ran on the machine meanwhile is
measured too (`others`, in cores): alone means others near 0. Medians of the rounds are printed, and every value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import EngineChoice, Worker
from benchmarks.machine import describe_machine, process_tree
from benchmarks.workloads import Work
from holdfast.checkpoints import locate

LIMITS: dict[str, int | str] = {"max_model_len": 2048, "max_num_seqs": 32, "kv_cache_memory_bytes": 200 << 20}
ENGINES = ("holdfast", "holdfast-server")
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = list(range(100, 132))


@dataclass(frozen=True, slots=True)
class Turn:
    tokens_per_s: float
    others_cores: float
    """That everything but the engine and our loops kept busy."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", type=Path, default=[Path(__file__).resolve().parents[1] / "src"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="LLM, and a server")
    parser.add_argument("--gguf", type=Path, help="a GGUF file; default: the built-in model")
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet-only", action="store_true", help="no loops: compares builds")
    return parser.parse_args()


def machine_busy_s() -> float:
    """Of all cores since the start, without idle time and what waits for a disk."""
    user, nice, system, _, _, interrupt, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupt + soft) / TICKS


def processes_busy_s(roots: list[int]) -> float:
    total = 0
    for pid in [pid for root in roots for pid in process_tree(root)]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    loops = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if loops else 0)  # Python has started, and the scheduler has spread them
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(worker: Worker, loops: int, work: Work) -> Turn:
    worker.resume()
    with busy_loops(loops) as pids:
        ours = [worker.root_pid, *pids]
        began, machine, own = time.perf_counter(), machine_busy_s(), processes_busy_s(ours)
        seconds, _ = worker.run(work)
        busy = machine_busy_s() - machine - (processes_busy_s(ours) - own)
        elapsed = time.perf_counter() - began
    worker.pause()
    return Turn(work.value(seconds), max(0.0, busy / elapsed))


def start(engine: str, source: Path, gguf: Path, logs: Path) -> Worker:
    os.environ["PYTHONPATH"] = str(source.resolve())
    cores = len(os.sched_getaffinity(0))
    choice = EngineChoice(
        name=engine, python=Path(sys.executable), model=gguf, dtype="auto", limits=LIMITS, threads=cores
    )
    worker = Worker(choice, logs / f"{engine}.log", 0)
    worker.run(Work(name="warm", prompts=[PROMPT], output_tokens=8, counts="output"))
    worker.pause()
    return worker


def show(name: str, alone: list[Turn], beside: list[Turn]) -> None:
    print(f"\n{name}")
    for title, turns in (("alone", alone), ("beside loops", beside)):
        if turns:
            values = " ".join(f"{turn.tokens_per_s:.1f} ({turn.others_cores:.1f})" for turn in turns)
            middle = median(turn.tokens_per_s for turn in turns)
            print(f"  {title:13} median {middle:6.1f} tok/s; each, with others' cores: {values}")
    if beside:
        ratio = median(turn.tokens_per_s for turn in beside) / median(turn.tokens_per_s for turn in alone)
        print(f"  beside / alone: {ratio:.2f}")


def main() -> None:
    arguments = parse_arguments()
    gguf = arguments.gguf or locate(None).weights[0]
    work = Work(name="streams", prompts=[PROMPT] * arguments.streams, output_tokens=arguments.tokens, counts="output")
    print(json.dumps(describe_machine()), f"{arguments.loops} loops, {arguments.streams} streams")
    with tempfile.TemporaryDirectory() as logs:
        workers = {
            f"{engine} of {source}": start(engine, source, gguf, Path(logs))
            for engine in arguments.engines
            for source in arguments.sources
        }
        turns: dict[str, tuple[list[Turn], list[Turn]]] = {name: ([], []) for name in workers}
        try:
            for _ in range(arguments.rounds):
                for loops in (0,) if arguments.quiet_only else (0, arguments.loops):
                    for name, worker in workers.items():
                        turns[name][loops > 0].append(measure(worker, loops, work))
        finally:
            for worker in workers.values():
                worker.close()
    for name, (alone, beside) in turns.items():
        show(name, alone, beside)


if __name__ == "__main__":
    main()
