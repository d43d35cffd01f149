"""Holds what `holdfast plan --for vllm` predicts against what vLLM prints when it starts on the same GPU.

    python scripts/measure_vllm_plan.py --vllm SITE --utilization 0.7

`--vllm`: a folder with vLLM and what it needs, for PYTHONPATH; left out: the one that is installed. Dummy weights in
the shapes of measure_gpu_plan.py, each start in a process of its own, compiled as it comes and without graphs, which
would take a minute more and none of what is compared. Writes
docs/measurements/predicted-and-measured-vllm.md, or with `--results` writes it again from JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure_gpu_plan import CASES, config_of, machine_text

from holdfast.units import GIB

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "predicted-and-measured-vllm.md"
SAID = {
    "weights_gib": re.compile(r"[Mm]odel loading took ([\d.]+) GiB"),
    "kv_gib": re.compile(r"[Aa]vailable KV cache memory: ([\d.]+) GiB"),
    "kv_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
}
LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
LONGEST = 8192

START = """
import json, sys
import vllm
if __name__ == "__main__":
    vllm.LLM(**json.loads(sys.argv[1]))
    print("VERSION", vllm.__version__, flush=True)
"""


def said_by_vllm(folder: str, utilization: float, site: Path | None) -> dict[str, Any]:
    asked = {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_model_len": LONGEST, "gpu_memory_utilization": utilization,
        "compilation_config": {"cudagraph_mode": "NONE"}, **LIMITS,
    }  # fmt: skip
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    script = Path(folder) / "start.py"
    script.write_text(START)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asked)], env=environment, capture_output=True, text=True, timeout=300
    )
    printed = done.stdout + done.stderr
    version = re.search(r"^VERSION (\S+)", printed, re.MULTILINE)
    if version is None:
        raise SystemExit(f"vLLM did not start:\n{printed[-3000:]}")
    found = {name: pattern.search(printed) for name, pattern in SAID.items()}
    return {"version": version[1]} | {
        name: float(one[1].replace(",", "")) for name, one in found.items() if one is not None
    }


def predicted(folder: str, utilization: float, version: str) -> dict[str, float]:
    from holdfast import plan

    release = ".".join(version.split(".")[:2])
    answer = plan(
        folder, engine=f"vllm=={release}", max_model_len=LONGEST, gpu_memory_utilization=utilization, **LIMITS
    ).to_json()
    terms = answer["devices"][0]["terms"]
    return {"weights_gib": terms["weights"] / GIB, "kv_tokens": answer["command_notes"]["vllm"]["kv_tokens"]}


def row(one: dict[str, Any]) -> str:
    said, guess = one["said"], one["predicted"]
    return (
        f"| {one['name']} | {one['utilization']} | {guess['weights_gib']:.2f} | {said['weights_gib']:.2f} "
        f"| {guess['weights_gib'] / said['weights_gib'] - 1:+.1%} | {guess['kv_tokens']:,.0f} "
        f"| {said['kv_tokens']:,.0f} | {guess['kv_tokens'] / said['kv_tokens'] - 1:+.2%} |"
    )


TEXT = """# vLLM: predicted and measured

Written by `scripts/measure_vllm_plan.py`: vLLM {version} started on dummy weights in real shapes, {sequences} sequences
of {longest:,} tokens, {step:,} tokens a step, compared with what `holdfast plan --for vllm` says before anything
is loaded, from the config and the GPU alone.

Measured on {machine}.

| model | gpu_memory_utilization | weights predicted, GiB | printed | off | KV tokens predicted | printed | off |
|---|---:|---:|---:|---:|---:|---:|---:|
{table}
"""


def write(results: list[dict[str, Any]], machine: str) -> None:
    PAGE.write_text(
        TEXT.format(
            version=results[0]["said"]["version"], machine=machine, table="\n".join(map(row, results)),
            sequences=LIMITS["max_num_seqs"], step=LIMITS["max_num_batched_tokens"], longest=LONGEST,
        ),
        encoding="utf-8",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM, for PYTHONPATH")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--cases", nargs="+", default=["1B", "3B, 16 GiB budget", "14B", "32B", "0.6B", "8B"])
    parser.add_argument("--results", type=Path, help="write the page from these JSON lines, and measure nothing")
    asked = parser.parse_args()
    if asked.results is not None:
        lines = [json.loads(line) for line in asked.results.read_text().splitlines() if line.startswith("{")]
        write([one for one in lines if "said" in one], next(one["machine"] for one in lines if "machine" in one))
        return
    print(json.dumps({"machine": machine_text()}), flush=True)
    results = []
    for name in asked.cases:
        case = next(one for one in CASES if one.name == name)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(case)))
            said = said_by_vllm(folder, asked.utilization, asked.vllm)
            guess = predicted(folder, asked.utilization, said["version"])
        results.append(
            {"name": name.partition(",")[0], "utilization": asked.utilization, "said": said, "predicted": guess}
        )
        print(json.dumps(results[-1]), flush=True)
    write(results, machine_text())


if __name__ == "__main__":
    main()
