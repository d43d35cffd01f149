"""Where the time of GPU steps goes: kernels as shares of the physical limit, and the gap between steps.

    python -m benchmarks.gpu_trace llama-8b --trace decode.json.gz --out trace.json

Each work is run once to warm up and once under torch's profiler. Busy is the time in which any kernel runs; the gap is
the rest, per step: what the host did not hide. `--trace` keeps the timeline of 64 streams, for Perfetto.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_worker import LONGEST, SHAPES, Work, start

KINDS = {
    "products": ("nvjet", "gemm", "multiply", "splitK", "cutlass"),
    "attention": ("_attend", "_join", "_prefill", "_expand"),
    "norm, gate, rotary, embed": ("rms_norm", "_gate", "rotate", "embed", "cos_sin"),
    "sampling": ("pick", "weigh", "scan", "settle", "gather", "stage", "penalize", "mark", "draw"),
    "copies": ("Memcpy", "Memset", "scatter"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes and operations that a step cannot do without."""

    layers: int
    matrices: int
    """Numbers in the layers' matrices."""
    head: int
    kv_per_token: int
    heads: int
    width: int

    @staticmethod
    def of(config: dict[str, Any]) -> Shape:
        hidden, width = config["hidden_size"], config["head_dim"]
        query, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return Shape(
            layers, layers * layer, hidden * config["vocab_size"], 2 * layers * kv, config["num_attention_heads"], width
        )

    def decode_bytes(self, rows: int, context: float) -> dict[str, float]:
        return {"products": 2.0 * (self.matrices + self.head), "attention": 2.0 * rows * context * self.kv_per_token}

    def prefill_flop(self, prompts: int, length: int) -> dict[str, float]:
        causal = length * (length + 1) / 2
        return {
            "products": 2.0 * self.matrices * prompts * length + 2.0 * self.head * prompts,
            "attention": 4.0 * self.heads * self.width * causal * self.layers * prompts,
        }


def measure_limits() -> Limits:
    import torch

    def best_s(run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target, square = torch.empty_like(source), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return Limits(2 * (1 << 30) / best_s(lambda: target.copy_(source)), 2 * 8192**3 / best_s(lambda: square @ square))


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def profile(llm: Any, run: Callable[[], object], trace: Path | None) -> dict[str, Any]:
    import torch

    run()
    steps = llm.get_stats().steps_total
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
    steps = llm.get_stats().steps_total - steps
    if trace is not None:
        found.export_chrome_trace(str(trace))
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end, kind_of(event.name)) for event in events)
    busy, end, gaps, kinds = 0.0, spans[0][0], list[float](), dict[str, float]()
    for begin, finish, kind in spans:
        if begin > end:
            gaps.append(begin - end)
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
        kinds[kind] = kinds.get(kind, 0.0) + finish - begin
    span = end - spans[0][0]
    return {
        "steps": steps,
        "span_ms": span / 1e3,
        "busy_ms": busy / 1e3,
        "gap_us_per_step": (span - busy) / steps,
        "largest_gap_us": max(gaps, default=0.0),
        "ms_by_kind": {kind: us / 1e3 for kind, us in kinds.items()},
    }


def shares(found: dict[str, Any], least: dict[str, float], limit: float) -> dict[str, float]:
    """Of the limit, by kind: what had to be moved or computed, over the time it took."""
    return {kind: amount / (found["ms_by_kind"][kind] / 1e3) / limit for kind, amount in least.items()}


def measure(model: str, trace: Path | None) -> dict[str, Any]:
    import torch

    limits, shape = measure_limits(), Shape.of(SHAPES[model])
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        module, llm, ready_s = start("holdfast", model, folder)
        work = Work(module, llm, SHAPES[model]["vocab_size"])
        works: dict[str, Any] = {}
        for rows, prompt, output in ((1, 32, 64), (64, 128, 64)):
            asked = partial(work.run, rows, work.between(prompt, prompt), work.between(output, output))
            found = profile(llm, asked, trace if rows == 64 else None)
            # The prompts' own step is among them; for one stream it reads each matrix once, as the others do.
            least = shape.decode_bytes(rows, prompt + output / 2)
            found["share_of_bandwidth"] = shares(found, {k: v * output for k, v in least.items()}, limits.bytes_per_s)
            works[f"{rows} x ({prompt} in, {output} out)"] = found
        length = LONGEST[model] - 96
        found = profile(llm, partial(work.run, 4, work.between(length, length), work.between(1, 1)), None)
        found["share_of_arithmetic"] = shares(found, shape.prefill_flop(4, length), limits.flop_per_s)
        works[f"4 x ({length} in, 1 out)"] = found
    return {
        "model": model,
        "ready_s": ready_s,
        "limit_gb_per_s": limits.bytes_per_s / 1e9,
        "limit_tflop_per_s": limits.flop_per_s / 1e12,
        "works": works,
    }


def lines(found: dict[str, Any]) -> list[str]:
    said = [f"{found['model']}: limits {found['limit_gb_per_s']:,.0f} GB/s, {found['limit_tflop_per_s']:,.0f} TFLOP/s"]
    for name, work in found["works"].items():
        said.append(
            f"{name}: {work['steps']} steps, {work['span_ms']:.1f} ms, busy {work['busy_ms'] / work['span_ms']:.1%}, "
            f"gap {work['gap_us_per_step']:.1f} us a step (largest {work['largest_gap_us']:.0f})"
        )
        limit = work.get("share_of_bandwidth") or work.get("share_of_arithmetic") or {}
        for kind, spent in sorted(work["ms_by_kind"].items(), key=lambda one: -one[1]):
            share = f", {limit[kind]:.0%} of the limit" if kind in limit else ""
            said.append(f"  {kind:<26} {spent:9.2f} ms {spent / work['busy_ms']:6.1%}{share}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--trace", type=Path, help="keep the timeline of 64 streams here (.json.gz)")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    asked = parser.parse_args()
    found = measure(asked.model, asked.trace)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
