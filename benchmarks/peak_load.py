"""Minutes of peak load on one server, several times: `holdfast bench` with its default profile, and whether memory and
throughput stay flat.

    python -m benchmarks.peak_load --out results                       an 8B model with dummy weights, on a GPU
    python -m benchmarks.peak_load --out results --model smollm2 --concurrency 2 --up 2s --peak 8s --down 2s

Writes of each run its JSON and its page, run-1.json and run-1.html, and summary.json after every run, so that what is
cut off by a time limit loses the last run alone. server.log has what the server said, also where a run failed;
status.txt says how far it is, for a caller that cannot wait so long and looks again and again:

    setsid -f python -m benchmarks.peak_load --out results --runs 3 >results/peak_load.log 2>&1
    cat results/status.txt                             ends with `ended with 0` or another code

Ends with 1 where a run does not pass.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, describe_machine
from holdfast.bench.own_server import free_port, launched
from holdfast.hardware import nvidia

DUMMY = "8b"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}
"""Llama 3.1 8B, in bfloat16."""
DUMMY_FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "8192")
"""Without a tokenizer, which would have to be fetched: ids go in and come out."""
START_LIMIT_S = 300.0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", default=DUMMY, help="8b: dummy weights in that shape (default); or any other")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the dummy (default: 32)")
    parser.add_argument("--device", default="cuda", help="of the dummy: cuda (default) or cpu")
    parser.add_argument("--serve-flags", default="", metavar='"FLAGS"')
    parser.add_argument("--bench-flags", default="", metavar='"FLAGS"', help="--prefix-tokens 1000 --prefixes 40")
    parser.add_argument("--runs", type=int, default=1, help="one after the other, on one server (default: 1)")
    parser.add_argument("--first", type=int, default=1, help="number of the first, where runs are made in parts")
    parser.add_argument("--concurrency", default="256")
    parser.add_argument("--prompt", default="100-2000")
    parser.add_argument("--output", default="50-500")
    parser.add_argument("--workers", default="2")
    for name, usual in (("up", "1m"), ("peak", "5m"), ("down", "1m")):
        parser.add_argument(f"--{name}", default=usual)
    return parser


def serve_words(arguments: argparse.Namespace, folder: Path, port: int) -> list[str]:
    model, flags = arguments.model, list[str]()
    if model == DUMMY:
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": arguments.layers}))
        model, flags = str(folder), [*DUMMY_FLAGS, "--served-model-name", DUMMY]
        flags += ["--device", arguments.device]
    words = [sys.executable, "-m", "holdfast", "serve", model, *flags, *shlex.split(arguments.serve_flags)]
    return [*words, "--port", str(port), "--disable-access-log"]


def bench_words(arguments: argparse.Namespace, url: str, number: int) -> list[str]:
    words = [sys.executable, "-m", "holdfast", "bench", url, "--quiet", "--seed", str(number)]
    words += ["--token-ids"] if arguments.model == DUMMY else []
    for name in ("concurrency", "prompt", "output", "workers", "up", "peak", "down"):
        words += [f"--{name}", getattr(arguments, name)]
    kept = [str(arguments.out / f"run-{number}.{kind}") for kind in ("json", "html")]
    return [*words, *shlex.split(arguments.bench_flags), "--save", kept[0], "--html", kept[1]]


def summary_of(document: dict[str, Any]) -> dict[str, Any]:
    """Of one run, what says whether it is flat."""
    peak, samples = document["peak"], document["samples"]

    def drift(name: str) -> dict[str, float] | None:
        found = document[name]
        return found and {"early": found["early"], "late": found["late"], "pools": found.get("pools", 0.0)}

    counted = [sample["preemptions"] for sample in samples if sample["preemptions"] is not None]
    return {
        "date": document["date"],
        "passed": document["verdict"]["passed"],
        "reason": document["verdict"]["reason"],
        "checks": {check["name"]: [check["passed"], check["measured"]] for check in document["verdict"]["checks"]},
        "requests": peak["requests"],
        "failed": peak["failed"],
        "output_tokens_per_s": peak["output_tokens_per_s"],
        "ttft_p50_p99_s": [peak["ttft"]["p50"], peak["ttft"]["p99"]] if peak["ttft"] else None,
        "itl_p50_p99_s": [peak["itl"]["p50"], peak["itl"]["p99"]] if peak["itl"] else None,
        "throughput_drift": drift("throughput_drift"),
        "ram_drift": drift("ram_drift"),
        "vram_drift": drift("vram_drift"),
        "ram_bytes": held_over_time(samples, "ram_bytes"),
        "vram_bytes": held_over_time(samples, "vram_bytes"),
        "preemptions": counted[-1] - counted[0] if counted else None,
    }


def held_over_time(samples: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """Over the whole run. The medians of its first and its last fifth: single samples may be of a moment."""
    known = [sample for sample in samples if sample[name] is not None]
    if not known:
        return None
    begin_s, end_s = known[0]["at_s"], known[-1]["at_s"]
    fifth_s = (end_s - begin_s) / 5
    return {
        "first_fifth": statistics.median(one[name] for one in known if one["at_s"] <= begin_s + fifth_s),
        "most": max(one[name] for one in known),
        "last_fifth": statistics.median(one[name] for one in known if one["at_s"] >= end_s - fifth_s),
    }


class Progress:
    """status.txt, for whoever looks again and again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "status.txt"
        self._path.unlink(missing_ok=True)

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def measured(arguments: argparse.Namespace, progress: Progress, folder: Path) -> int:
    port = free_port()
    words = serve_words(arguments, folder, port)
    began_s, runs = time.monotonic(), list[dict[str, Any]]()
    with launched(words, port, kept=True) as server:
        try:
            server.wait_until_ready(START_LIMIT_S)
            ready_s = time.monotonic() - began_s
            progress.say(f"ready after {ready_s:.1f} s")
            for number in range(arguments.first, arguments.first + arguments.runs):
                kept = arguments.out / f"run-{number}.json"
                for stale in (kept, kept.with_suffix(".html")):
                    stale.unlink(missing_ok=True)
                done = subprocess.run(bench_words(arguments, server.url, number), check=False)
                if not kept.exists():
                    progress.say(f"run {number} ended with {done.returncode} and kept nothing")
                    return 1
                runs.append(summary_of(json.loads(kept.read_text())))
                summary = {
                    "command": shlex.join(sys.orig_argv[1:]),
                    "commit": commit(),
                    "machine": describe_machine() | {"gpus": [gpu.name for gpu in nvidia.probe().gpus]},
                    "ready_s": ready_s,
                    "runs": runs,
                }
                (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
                progress.say(f"run {number}: {runs[-1]['reason']}")
                print(json.dumps(runs[-1]), flush=True)
        finally:
            shutil.copy(server.log, arguments.out / "server.log")
    return 0 if all(run["passed"] for run in runs) else 1


def main() -> int:
    arguments = options().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    progress, code = Progress(arguments.out), 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            code = measured(arguments, progress, Path(folder))
    finally:
        progress.say(f"ended with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
