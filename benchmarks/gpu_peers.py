"""Holdfast beside vLLM on one GPU, in turns, the same work: `python -m benchmarks.gpu_peers --vllm SITE --rounds 2`.

`--vllm`: a folder with vLLM and what it needs, for PYTHONPATH; left out: the one that is installed. Each turn is a
process of its own. Prints a table of medians and ratios; `--out` keeps every figure as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_worker import USUAL
from benchmarks.machine import commit

WORKER = Path(__file__).with_name("gpu_worker.py")
ROWS = {
    "ready_s": ("start to ready, s", None),
    "mixed": ("256 requests, 100-1,024 in and out, output tok/s", "out_tok_per_s"),
    "one_stream": ("one stream, 32 in, 256 out, tok/s", "out_tok_per_s"),
    "prefill": ("prefill 32 x 4,000, prompt tok/s", "in_tok_per_s"),
    "streams_8": ("8 streams, 128 in, 256 out, output tok/s", "out_tok_per_s"),
    "streams_32": ("32 streams, 128 in, 128 out, output tok/s", "out_tok_per_s"),
    "decode_128": ("one stream, 1 in, 128 out, tok/s", "out_tok_per_s"),
    "streams_1_128": ("one stream, 128 in, 128 out, tok/s", "out_tok_per_s"),
    "streams_8_128": ("8 streams, 128 in, 128 out, output tok/s", "out_tok_per_s"),
    "prompt_1500": ("one prompt of 1,500, prompt tok/s", "in_tok_per_s"),
    "burst": ("512 requests, 512 in, 128 out, output tok/s", "out_tok_per_s"),
    "streams_64": ("64 streams, 128 in, 256 out, output tok/s", "out_tok_per_s"),
    "long_30k": ("one prompt of 30,000, prompt tok/s", "in_tok_per_s"),
    "long_60k": ("one prompt of 60,000, prompt tok/s", "in_tok_per_s"),
}


def turn(engine: str, model: str, rows: str, site: Path | None) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if engine == "vllm" and site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, str(WORKER), engine, model, rows], env=environment, capture_output=True, text=True, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{engine} did not finish")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def values(turns: list[dict[str, Any]], row: str, unit: str | None) -> list[float]:
    if unit is None:
        return [float(one[row]) for one in turns]
    names = [row, f"{row}_again"] if f"{row}_again" in turns[0] else [row]
    return [one[name][unit] for one in turns for name in names]


def table(turns: list[dict[str, Any]], engines: list[str]) -> str:
    lines = [f"| work | {' | '.join(engines)} | ratio |", f"|---|{'---:|' * (len(engines) + 1)}"]
    for row, (title, unit) in ROWS.items():
        if row not in turns[0]:
            continue
        found = [values([one for one in turns if one["engine"] == name], row, unit) for name in engines]
        middles = [statistics.median(one) for one in found]
        cells = [
            f"{middle:,.1f} ({min(one):,.1f} to {max(one):,.1f})" for middle, one in zip(middles, found, strict=True)
        ]
        ratio = f"{middles[0] / middles[1]:.2f}" if len(middles) == 2 else ""
        lines.append(f"| {title} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for PYTHONPATH")
    parser.add_argument("--engines", nargs="+", default=["holdfast", "vllm"])
    parser.add_argument("--models", nargs="+", default=["llama-8b", "llama-0.6b"])
    parser.add_argument("--rows", default=",".join(USUAL), help="of gpu_worker.py, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    turns: list[dict[str, Any]] = []
    for model in asked.models:
        here: list[dict[str, Any]] = []
        for _ in range(asked.rounds):
            for engine in asked.engines:
                here.append(turn(engine, model, asked.rows, asked.vllm))
                print(json.dumps(here[-1]), file=sys.stderr, flush=True)
                turns.append(here[-1])
                if asked.out is not None:
                    asked.out.write_text(json.dumps(record(turns), indent=1) + "\n")
        print(f"{model}\n{table(here, asked.engines)}", flush=True)


def record(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "machine": machine(), "turns": turns}


def machine() -> str:
    from holdfast.hardware.nvidia import probe
    from holdfast.hardware.torch_build import torch_build

    found, build = probe(), torch_build()
    version = "none" if build is None else build.version
    name = found.gpus[0].name if found.gpus else "no GPU"
    return f"{name}, driver {found.driver}, torch {version}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    main()
