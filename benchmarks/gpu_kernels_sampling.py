"""Sampling on a GPU: microseconds of a step by rows and options, beside one reading of the logits and torch's argmax.

Launches run in a CUDA graph, as decoding runs them; the logits were just written, so that few rows lie in cache, as
they do after a product. `--sweep` tries other blocks, warps and splits. Owns no model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from holdfast.execution.triton_kernels.sampling import adjust, launch
from holdfast.execution.triton_kernels.sampling.slots import SlotParams
from holdfast.records import SamplingParams

MEMORY_BYTES_S = 4.3e12
"""What a copy moves on an H200, bytes read and written."""
ROWS = (1, 8, 64, 256)
VOCAB = 128_256
KNOWN_TOKENS, PROMPT_TOKENS = 4096, 3000
LANES = 256
LAUNCHES = 8
DEVICE = torch.device("cuda")

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "both": {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "temperature": 0.0},
}


def microseconds(work: Callable[[], object]) -> float:
    """Mean of one call in a graph of some, over the best of some replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(8):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return best


def peaked(rows: int) -> torch.Tensor:
    """Chances that fall as a power of the rank, at ranks of no order: a few dozen tokens make nine tenths."""
    ranks = torch.rand((rows, VOCAB), device=DEVICE).argsort(-1)
    return ((ranks + 1).float().log() * -1.6).to(torch.bfloat16)


def flat(rows: int) -> torch.Tensor:
    """Nine tenths of the weight are tens of thousands of tokens: what top_p finds hardest."""
    return torch.randn((rows, VOCAB), device=DEVICE).to(torch.bfloat16)


class Step:
    """Everything a sampling step of so many rows needs, with the same options for all of them."""

    def __init__(self, logits: torch.Tensor, options: dict[str, Any]) -> None:
        rows = len(logits)
        self.logits, self.penalized = logits, "frequency_penalty" in options
        self.params = SlotParams(rows, VOCAB, DEVICE, LANES)
        for slot in range(rows):
            if not self.params.write(slot, SamplingParams(seed=slot, **options), PROMPT_TOKENS):
                raise RuntimeError("there are fewer lanes than rows")
        self.params.upload()
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.full((rows,), KNOWN_TOKENS - 1, dtype=torch.int32, device=DEVICE)
        self.known = torch.randint(0, VOCAB, (rows, KNOWN_TOKENS), dtype=torch.int32, device=DEVICE)
        self.out = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.workspace = launch.Workspace.allocate(rows, VOCAB, DEVICE)
        self.lanes = adjust.Lanes.allocate(rows, VOCAB, DEVICE) if self.penalized else None

    def __call__(self) -> None:
        adjusted = None
        if self.lanes is not None:
            adjusted = adjust.adjust_rows(self.logits, self.slots, self.lengths, self.params, self.known, self.lanes)
        launch.sample_rows(
            self.logits,
            self.slots,
            self.lengths,
            self.params,
            self.known,
            self.out,
            self.workspace,
            adjusted=adjusted,
        )


def line(name: str, rows: int, work: Callable[[], object]) -> float:
    taken = microseconds(work)
    once = rows * VOCAB * 2 / MEMORY_BYTES_S * 1e6
    print(f"{name:<24}{rows:>6}{taken:>10.1f}{once:>12.1f}{rows * VOCAB * 2 / taken / 1e3:>10.0f}", flush=True)
    return taken


def table() -> None:
    print(f"{'':<24}{'rows':>6}{'us':>10}{'once, us':>12}{'GB/s':>10}")
    for rows in ROWS:
        likely = peaked(rows)
        line("torch argmax", rows, lambda likely=likely: likely.argmax(-1))  # type: ignore[misc]
        for name, options in OPTIONS.items():
            line(name, rows, Step(likely, options))
        unlikely = flat(rows)
        for name in ("top_k 50", "top_p 0.9"):
            line(f"{name}, flat", rows, Step(unlikely, OPTIONS[name]))


def sweep() -> None:
    blocks = ((512, 4), (1024, 4), (1024, 8), (2048, 8))
    for rows, name in itertools.product(ROWS, ("greedy", "top_k 50", "top_p 0.9")):
        step, found = Step(peaked(rows), OPTIONS[name]), []
        for (block, warps), tokens in itertools.product(blocks, (2048, 4096, 8192, 16384)):
            with patch.multiple(launch, BLOCK=block, WARPS=warps, split_tokens=lambda *_, tokens=tokens: tokens):
                found.append((microseconds(step), f"{block}/{warps}/{tokens}"))
        best = "; ".join(f"{taken:.1f} us with {constants}" for taken, constants in sorted(found)[:4])
        print(f"{name}, {rows} rows: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other constants: block/warps/tokens of a split")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, vocabulary {VOCAB}, bfloat16 logits")
    table()
    if arguments.sweep:
        sweep()


if __name__ == "__main__":
    main()
