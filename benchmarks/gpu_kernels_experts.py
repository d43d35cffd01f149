"""The expert kernels on a GPU: microseconds, and the share of what memory or tensor cores give.

Launches run in a CUDA graph, as decoding runs them, over enough copies of the experts that none is still in cache.
`--sweep` tries other tiles than the table's and prints the best of each size. Owns no model.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.execution.triton_kernels.experts import launch as experts
from holdfast.execution.triton_kernels.experts.tiles import ExpertTile, expert_tile

MEMORY_BYTES_S, ARITHMETIC_S = 4.3e12, 752e12
"""What an H200 gives in bfloat16."""
CACHE_BYTES = 240e6
LAUNCHES = 12
KIND = torch.bfloat16
SHAPES = {"30B-A3B": (128, 8, 2048, 768), "8x7B": (8, 2, 4096, 14336)}
"""(experts, chosen of them, hidden, inner)"""
TOKENS = (1, 8, 64, 512, 4096)


def microseconds(launch: Callable[[int], None], copies: int) -> float:
    """Mean of one launch in a graph, over the best of some replays."""
    launch(0)
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(copies, LAUNCHES // copies * copies)
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index % copies)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(4):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / count)
    return best


@dataclass(frozen=True, slots=True)
class Layer:
    """Copies of a layer's experts, and tokens that chose among them."""

    gate_up: torch.Tensor
    down: torch.Tensor
    x: torch.Tensor
    inner: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor
    lines: experts.ExpertAssignments

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], tokens: int) -> Layer:
        count, chosen, hidden, inner = shape
        copies = max(1, min(8, round(CACHE_BYTES / (2 * inner * hidden * 2 * min(count, tokens * chosen)))))

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=KIND, device="cuda")

        lines = experts.ExpertAssignments.allocate(tokens, count, chosen, torch.device("cuda"))
        logits = normal(tokens, count)
        experts.route(logits, lines, normalized=True)
        return cls(
            normal(copies, count, 2 * inner, hidden),
            normal(copies, count, hidden, inner),
            normal(tokens, hidden),
            normal(tokens * chosen, inner),
            normal(tokens * chosen, hidden),
            logits,
            lines,
        )

    def share(self, taken_us: float, outputs: int, inputs: int) -> str:
        """Of the limit that is nearer: bytes of the chosen experts, or arithmetic."""
        read = int((self.lines.counts > 0).sum()) * outputs * inputs * 2
        work = 2 * len(self.rows) * outputs * inputs
        least_us = 1e6 * max(read / MEMORY_BYTES_S, work / ARITHMETIC_S)
        rates = f"{read / taken_us / 1e6:6.2f} TB/s {work / taken_us / 1e6:5.0f} TFLOP/s"
        return f"{taken_us:9.1f} us {rates} {least_us / taken_us:5.0%}"

    def measure_routing(self) -> float:
        return microseconds(lambda _: experts.route(self.logits, self.lines, normalized=True), 1)

    def measure(self, gated: bool, tile: ExpertTile | None) -> float:
        copies = len(self.gate_up)
        if gated:
            return microseconds(
                lambda copy: experts.gate_up(self.x, self.gate_up[copy], self.lines, self.inner, "silu", tile=tile),
                copies,
            )
        return microseconds(
            lambda copy: experts.multiply(
                self.inner, self.down[copy], self.lines, self.rows, by_token=False, tile=tile
            ),
            copies,
        )


def tiles(pairs: int, gated: bool) -> list[ExpertTile]:
    """Those that fit shared memory everywhere."""
    rows = (16, 32) if pairs <= 1024 else (64, 128)
    found = []
    for row, outputs, inputs, warps, stages in itertools.product(rows, (32, 64, 128), (64, 128), (4, 8), (2, 3, 4)):
        if stages * (row + (2 if gated else 1) * outputs) * inputs * 2 <= 99 * 1024:
            found.append(ExpertTile(row, outputs, inputs, warps, stages))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sweep", action="store_true")
    sweep = arguments.parse_args().sweep
    for (name, shape), tokens in itertools.product(SHAPES.items(), TOKENS):
        count, _, hidden, inner = shape
        layer = Layer.of(shape, tokens)
        taken = layer.measure_routing()
        print(f"{name:8} {tokens:5} tokens  route    {taken:9.1f} us")
        for what, gated, outputs, inputs in (("gate_up", True, 2 * inner, hidden), ("down", False, hidden, inner)):
            taken = layer.measure(gated, None)
            chosen = expert_tile(len(layer.rows), count, 2, gated=gated)
            print(f"{name:8} {tokens:5} tokens  {what:8} {layer.share(taken, outputs, inputs)}  {chosen}", flush=True)
            if sweep:
                best = min((layer.measure(gated, tile), str(tile)) for tile in tiles(len(layer.rows), gated))
                print(f"{'':24}best     {layer.share(best[0], outputs, inputs)}  {best[1]}", flush=True)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
