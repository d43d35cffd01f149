"""Where the time of GPU steps goes: kernels as shares of the physical limit, and the gap between steps.

    python -m benchmarks.gpu_trace llama-8b --trace decode.json.gz --out trace.json
    python -m benchmarks.gpu_trace qwen3-30b-a3b+fp8 --kernels 12

Each work is run once to warm up and once under torch's profiler. Busy is the time in which any kernel runs; the gap is
the rest, per step: what the host did not hide. `--trace` keeps the timeline of 64 streams, for Perfetto; `--kernels`
names those that took longest.
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
    "products": ("nvjet", "gemm", "multiply", "splitK", "cutlass", "product", "skinny"),
    "attention": ("_attend", "_join", "_prefill", "_expand"),
    "norm, gate, rotary, embed": ("rms_norm", "_gate", "rotate", "embed", "cos_sin"),
    "routing": ("_route", "add_pairs"),
    "rounding of inputs": ("round_rows",),
    "sampling": ("pick", "weigh", "scan", "settle", "gather", "stage", "penalize", "mark", "draw"),
    "copies": ("Memcpy", "Memset", "scatter"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float
    flop_per_s: float


WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "awq": 0.5 + (2 + 1) / 128, "q4_k": 4.5 / 8}
"""Of a number of the layers' matrices, scales and zero points included, by variant."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes and operations that a step cannot do without."""

    layers: int
    matrices: int
    """Numbers in the layers' matrices but experts'."""
    expert: int
    """Numbers in one expert of every layer."""
    experts: int
    per_token: int
    head: int
    kv_per_token: int
    heads: int
    width: int
    weight_bytes: float
    kv_bytes: int

    @staticmethod
    def of(config: dict[str, Any], variant: str) -> Shape:
        hidden, width, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
        query, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        layer, experts = hidden * (query + 2 * kv) + query * hidden, config.get("num_experts", 0)
        mlp = 3 * hidden * config["moe_intermediate_size" if experts else "intermediate_size"]
        return Shape(
            layers=layers,
            matrices=layers * (layer if experts else layer + mlp),
            expert=layers * mlp if experts else 0,
            experts=experts,
            per_token=config.get("num_experts_per_tok", 0),
            head=hidden * config["vocab_size"],
            kv_per_token=2 * layers * kv,
            heads=config["num_attention_heads"],
            width=width,
            weight_bytes=WEIGHT_BYTES[variant],
            kv_bytes=1 if variant == "fp8" else 2,
        )

    def decode_bytes(self, rows: int, context: float) -> dict[str, float]:
        # So many experts are chosen by any row, where rows choose alike often.
        chosen = self.experts * (1 - (1 - self.per_token / self.experts) ** rows) if self.experts else 0.0
        return {
            "products": self.weight_bytes * (self.matrices + chosen * self.expert) + 2.0 * self.head,
            "attention": self.kv_bytes * rows * context * self.kv_per_token,
        }

    def prefill_flop(self, prompts: int, length: int) -> dict[str, float]:
        causal, active = length * (length + 1) / 2, self.matrices + self.per_token * self.expert
        return {
            "products": 2.0 * active * prompts * length + 2.0 * self.head * prompts,
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
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
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
        "kernels": {name: {"calls": len(times), "ms": sum(times) / 1e3} for name, times in kernels.items()},
    }


def shares(found: dict[str, Any], least: dict[str, float], limit: float) -> dict[str, float]:
    """Of the limit, by kind: what had to be moved or computed, over the time it took."""
    return {kind: amount / (found["ms_by_kind"][kind] / 1e3) / limit for kind, amount in least.items()}


def measure(model: str, trace: Path | None) -> dict[str, Any]:
    import torch

    name, _, variant = model.partition("+")
    limits, shape = measure_limits(), Shape.of(SHAPES[name], variant)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        module, llm, ready_s = start("holdfast", model, folder)
        work = Work(module, llm, SHAPES[name]["vocab_size"])
        works: dict[str, Any] = {}
        for rows, prompt, output in ((1, 32, 64), (64, 128, 64)):
            asked = partial(work.run, rows, work.between(prompt, prompt), work.between(output, output))
            found = profile(llm, asked, trace if rows == 64 else None)
            # The prompts' own step is among them; for one stream it reads each matrix once, as the others do.
            least = shape.decode_bytes(rows, prompt + output / 2)
            found["share_of_bandwidth"] = shares(found, {k: v * output for k, v in least.items()}, limits.bytes_per_s)
            works[f"{rows} x ({prompt} in, {output} out)"] = found
        length = LONGEST[name] - 96
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


def lines(found: dict[str, Any], kernels: int) -> list[str]:
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
        for kernel, taken in sorted(work["kernels"].items(), key=lambda one: -one[1]["ms"])[:kernels]:
            each = taken["ms"] * 1e3 / taken["calls"]
            said.append(f"    {kernel[:60]:<60} {taken['calls']:6} x {each:8.1f} us = {taken['ms']:8.2f} ms")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [model + variant for model in SHAPES for variant in ("", *(f"+{one}" for one in WEIGHT_BYTES if one))]
    parser.add_argument("model", choices=sorted(models), metavar="MODEL[+VARIANT]")
    parser.add_argument("--trace", type=Path, help="keep the timeline of 64 streams here (.json.gz)")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to name for each work")
    asked = parser.parse_args()
    found = measure(asked.model, asked.trace)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found, asked.kernels)))


if __name__ == "__main__":
    main()
