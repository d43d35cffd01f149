"""SmolLM2's rows of Holdfast beside llama.cpp's own programs, on two cores, in turn:

    python -m benchmarks.llama_programs FOLDER [--rounds 2] [--out FILE.json]

FOLDER has llama-bench and llama-batched-bench with their libraries; no GPU is shown to them. Both sides run a file of
random weights in SmolLM2's shape, so that nothing has to be downloaded. A round takes three quarters of a minute. Owns
no other model: `benchmarks/cpu_peers.py` compares real ones in process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import commit, describe_machine, today

ROWS = ("one stream", "prefill 512", "prefill 1500", "8 at once", "32 at once")
"""Tokens a second: of 64 output tokens, of a prompt, and of outputs over the whole time of 128 in, 64 out."""
Rows = dict[str, float]


def physical_cores(count: int) -> list[int]:
    """The first of those allowed, one of each that share a core."""
    chosen: list[int] = []
    taken: set[str] = set()
    for core in sorted(os.sched_getaffinity(0)):
        place = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = place.read_text().strip() if place.exists() else str(core)
        if siblings not in taken:
            taken.add(siblings)
            chosen.append(core)
    if len(chosen) < count:
        raise SystemExit(f"{count} cores are needed, {len(chosen)} are allowed")
    return chosen[:count]


def holdfast_rows(model: str) -> Rows:
    """In this process."""
    import numpy

    from holdfast import LLM, SamplingParams

    llm = LLM(
        model=model,
        device="cpu",
        skip_tokenizer_init=True,
        kv_cache_dtype="float16",
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    random = numpy.random.default_rng(0)

    def seconds(streams: int, prompt: int, output: int, repeats: int) -> float:
        taken = []
        for _ in range(repeats):
            prompts = [{"prompt_token_ids": random.integers(0, 49152, prompt).tolist()} for _ in range(streams)]
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    seconds(1, 64, 4, 1)
    return {
        "one stream": 64 / seconds(1, 1, 64, 3),
        "prefill 512": 512 / seconds(1, 512, 1, 3),
        "prefill 1500": 1500 / seconds(1, 1500, 1, 2),
        "8 at once": 8 * 64 / seconds(8, 128, 64, 1),
        "32 at once": 32 * 64 / seconds(32, 128, 64, 1),
    }


def run_pinned(command: list[str], cores: list[int], environment: dict[str, str]) -> str:
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
    done = subprocess.run(pinned, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def llama_rows(folder: Path, model: str, cores: list[int]) -> Rows:
    libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    hidden = {"LD_LIBRARY_PATH": libraries, "CUDA_VISIBLE_DEVICES": ""}
    common = ["-m", model, "-t", str(len(cores)), "-ngl", "0"]
    single = run_pinned(
        [str(folder / "llama-bench"), *common, "-p", "512,1500", "-n", "64", "-r", "2", "-o", "json"], cores, hidden
    )
    together = run_pinned(
        [str(folder / "llama-batched-bench"), *common, "-c", "8192", "-b", "2048", "-ub", "512", "-npp", "128",
         "-ntg", "64", "-npl", "8,32", "--output-format", "jsonl"], cores, hidden
    )  # fmt: skip
    return read_llama_bench(single) | read_batched_bench(together)


def gpu_rows(folder: Path, model: str, limit_s: float) -> Rows:
    """All layers on a GPU, with the programs' own settings: rows of `gpu_worker`. In those of streams prompts count."""
    environment = os.environ | {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    end = time.monotonic() + limit_s

    def printed(program: str, *flags: str) -> str:
        command = [str(folder / program), "-m", model, "-ngl", "99", *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=max(1.0, end - time.monotonic())
        )
        if done.returncode:
            raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout

    names = {(1500, 0): "prompt_1500", (0, 128): "decode_128"}
    single = read_llama_bench(printed("llama-bench", "-p", "1500", "-n", "128", "-r", "3", "-o", "json"), names)
    together = read_batched_bench(
        printed("llama-batched-bench", "-c", "8192", "-npp", "128", "-ntg", "128", "-npl", "1,8,32",
                "--output-format", "jsonl")
    )  # fmt: skip
    again = {"1 at once": "streams_1_128", "8 at once": "streams_8_128", "32 at once": "streams_32"}
    return single | {again[row]: value for row, value in together.items()}


CPU_NAMES = {(512, 0): "prefill 512", (1500, 0): "prefill 1500", (0, 64): "one stream"}
"""By the tokens of prompt and output."""


def read_llama_bench(printed: str, names: dict[tuple[int, int], str] = CPU_NAMES) -> Rows:
    return {names[test["n_prompt"], test["n_gen"]]: float(test["avg_ts"]) for test in json.loads(printed)}


def read_batched_bench(printed: str) -> Rows:
    """Output tokens over the whole time; what is printed around the lines of JSON is passed over."""
    tests = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {f"{test['pl']} at once": test["pl"] * test["tg"] / test["t"] for test in tests}


def holdfast_turn(model: str, cores: list[int]) -> Rows:
    printed = run_pinned([sys.executable, "-m", "benchmarks.llama_programs", "--ours", model], cores, {})
    rows: Rows = json.loads(printed.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of llama.cpp's programs; without one, Holdfast alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, help="for every value, as JSON")
    parser.add_argument("--ours", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours is not None:
        print(json.dumps(holdfast_rows(options.ours)))
        return
    from benchmarks.random_checkpoints import write_smollm2

    cores = physical_cores(options.cores)
    sides: dict[str, list[Rows]] = {"holdfast": []}
    if options.folder is not None:
        sides["llama.cpp"] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = str(Path(scratch) / "smollm2-shape.gguf")
        write_smollm2(Path(model))
        for _ in range(options.rounds):
            sides["holdfast"].append(holdfast_turn(model, cores))
            if options.folder is not None:
                sides["llama.cpp"].append(llama_rows(options.folder.resolve(), model, cores))
            report(sides, cores)
            if options.out is not None:
                found = {"date": today(), "commit": commit(), "machine": describe_machine(), "cores": cores, **sides}
                options.out.write_text(json.dumps(found, indent=1) + "\n")


def report(sides: dict[str, list[Rows]], cores: list[int]) -> None:
    """Medians over the rounds so far."""
    print(f"\ncores {cores}, rounds {len(sides['holdfast'])}, tokens a second", flush=True)
    for row in ROWS:
        values = {side: statistics.median(turn[row] for turn in turns) for side, turns in sides.items()}
        ratio = f"{values['holdfast'] / values['llama.cpp']:>8.2f}x" if "llama.cpp" in values else ""
        print(f"{row:<14}" + "".join(f"{side:>12} {value:>8.1f}" for side, value in values.items()) + ratio, flush=True)


if __name__ == "__main__":
    main()
