"""The expert kernels on a GPU: microseconds, and the share of what memory or tensor cores give.

Launches run in a CUDA graph, as decoding runs them, over enough copies of the experts that none is still in cache.
Rows of `layer` are all kernels of a layer's experts, one after the other. Owns no model.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from holdfast.execution.gpu.cuda.int4_experts import against_int4_experts, expert_cut, multiply_int4
from holdfast.execution.triton_kernels.experts import launch as experts
from holdfast.execution.triton_kernels.experts.blocks import multiply_blocks
from holdfast.execution.triton_kernels.experts.direct import multiply_dense, multiply_rounded
from holdfast.execution.triton_kernels.experts.planes import RoundedRows, ScaledPlanes
from holdfast.execution.triton_kernels.experts.rounding import round_rows
from holdfast.execution.triton_kernels.experts.scaled import multiply_scaled
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

MEMORY_BYTES_S, ARITHMETIC_S, FP8_ARITHMETIC_S = 4.3e12, 752e12, 1400e12
"""What an H200 gives."""
CACHE_BYTES = 240e6
LAUNCHES, REPLAYS = 12, 5
GPU, KIND = torch.device("cuda"), torch.bfloat16
SHAPES = {"30B-A3B": (128, 8, 2048, 768), "8x7B": (8, 2, 4096, 14336)}
"""(experts, chosen of them, hidden, inner)"""
TOKENS = (1, 8, 64, 512, 4096, 8192)
MOST_COPIES = 48
"""Of experts of whom one token chooses few."""
LAYOUTS: dict[str, ScaledLayout | str | None] = {
    "bf16": None,
    "int4": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "fp8": ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8"),
    "fp8 rows": ScaledLayout(codes="fp8", inputs="fp8"),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "Q4_K": "Q4_K",
}
"""A name: GGUF's blocks."""

Launch = Callable[[int], None]


def microseconds(launch: Launch, copies: int) -> float:
    """Of one launch in a graph, the median of some replays."""
    launch(0)
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(copies, LAUNCHES // copies * copies)
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index % copies)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = list[float]()
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / count)
    return median(taken)


class Stack:
    """The same matrix of all experts, as it is kept, and its product as a layer takes it."""

    def __init__(self, layout: ScaledLayout | str | None, count: int, rows: int, columns: int) -> None:
        self.layout, self.rows, self.columns = layout, rows, columns
        self._in_cuda = False
        if layout is None:
            self.weight = torch.randn(count, rows, columns, dtype=KIND, device=GPU)
            self.nbytes = self.weight.nbytes
            return
        if isinstance(layout, str):
            blocks = QuantizedMatrix(layout, count * rows, columns, GPU)
            blocks.quants.random_(0, 256)
            for plane in (blocks.scales, blocks.minimums):
                if plane is not None:
                    plane.fill_(1 / 1024)
            if blocks.small is not None:
                blocks.small.random_(0, 256)
            self.blocks = BlockPlanes(
                layout, blocks.quants, blocks.scales, blocks.minimums, blocks.high, blocks.small
            )  # fmt: skip
            self.nbytes = blocks.nbytes
            return
        matrix = ScaledMatrix(layout, count * rows, columns, GPU)
        matrix.codes.view(torch.uint8).random_(0, 120)
        matrix.scales.fill_(1)
        if matrix.zeros is not None:
            matrix.zeros.random_(0, 16)
        self.planes, self.nbytes = ScaledPlanes(layout, matrix.codes, matrix.scales, matrix.zeros), matrix.nbytes
        self._in_cuda = against_int4_experts(layout, count, rows, columns, KIND, GPU) is None

    def inputs(self, x: torch.Tensor) -> torch.Tensor | RoundedRows:
        if not isinstance(self.layout, ScaledLayout) or self.layout.inputs == "plain":
            return x
        groups = x.shape[1] // self.layout.group if self.layout.group else 1
        codes = torch.empty(x.shape, dtype=torch.uint8, device=GPU)
        rounded = RoundedRows(codes, torch.empty(len(x), groups, device=GPU))
        self.round(x, rounded)
        return rounded

    def round(self, x: torch.Tensor, taken: torch.Tensor | RoundedRows) -> None:
        if isinstance(taken, RoundedRows):
            round_rows(x, taken.codes, taken.scales)

    def multiply(
        self, x: torch.Tensor | RoundedRows, lines: experts.ExpertAssignments, out: torch.Tensor, *, gated: bool
    ) -> None:
        activation: experts.Activation | None = "silu" if gated else None
        if isinstance(x, RoundedRows):
            multiply_rounded(x, self.planes, lines, out, by_token=gated, activation=activation)
        elif self.layout is None:
            multiply_dense(x, self.weight, lines, out, by_token=gated, activation=activation)
        elif isinstance(self.layout, str):
            multiply_blocks(x, self.blocks, lines, out, by_token=gated, activation=activation)
        elif self._in_cuda and (cut := expert_cut(len(out), lines.chosen_from, self.columns)) is not None:
            multiply_int4(x, self.planes, lines, out, by_token=gated, activation=activation, cut=cut)
        else:
            multiply_scaled(x, self.planes, lines, out, by_token=gated, activation=activation)


class Layer:
    """Copies of a layer's experts, and tokens that chose among them."""

    def __init__(self, name: str, shape: tuple[int, int, int, int], tokens: int, *, copies: int | None = None) -> None:
        count, chosen, hidden, inner = shape
        self.name, layout = name, LAYOUTS[name]
        self.lines = experts.ExpertAssignments.allocate(tokens, count, chosen, GPU)
        self.logits = torch.randn(tokens, count, dtype=KIND, device=GPU)
        experts.route(self.logits, self.lines, normalized=True)
        self.used = int((self.lines.counts > 0).sum()) / count
        pairs = tokens * chosen
        self.x = torch.randn(tokens, hidden, dtype=KIND, device=GPU)
        self.inner = torch.randn(pairs, inner, dtype=KIND, device=GPU)
        self.rows = torch.randn(pairs, hidden, dtype=KIND, device=GPU)
        first = Stack(layout, count, 2 * inner, hidden)
        # The last matrices are half as large, and copies of them are not to stay in cache either.
        copies = copies or max(1, min(MOST_COPIES, round(2 * CACHE_BYTES / (first.nbytes * self.used))))
        self.gate_up = [first, *(Stack(layout, count, 2 * inner, hidden) for _ in range(copies - 1))]
        self.down = [Stack(layout, count, hidden, inner) for _ in range(copies)]
        self.taken, self.taken_inner = first.inputs(self.x), self.down[0].inputs(self.inner)

    def first(self, copy: int) -> None:
        self.gate_up[copy].multiply(self.taken, self.lines, self.inner, gated=True)

    def second(self, copy: int) -> None:
        self.down[copy].multiply(self.taken_inner, self.lines, self.rows, gated=False)

    def route(self, copy: int) -> None:
        experts.route(self.logits, self.lines, normalized=True)

    def add(self, copy: int) -> None:
        experts.add_pairs(self.rows, self.lines, self.x, add=False)

    def whole(self, copy: int) -> None:
        self.route(copy)
        self.gate_up[copy].round(self.x, self.taken)
        self.first(copy)
        self.down[copy].round(self.inner, self.taken_inner)
        self.second(copy)
        self.add(copy)

    def share(self, taken_us: float, stacks: Sequence[Stack]) -> str:
        """Of the limit that is nearer: bytes of the chosen experts, or arithmetic."""
        read = sum(stack.nbytes for stack in stacks) * self.used
        work = sum(2 * len(self.rows) * stack.rows * stack.columns for stack in stacks)
        most = FP8_ARITHMETIC_S if self.name.startswith("fp8") else ARITHMETIC_S
        least_us = 1e6 * max(read / MEMORY_BYTES_S, work / most)
        rates = f"{read / taken_us / 1e6:6.2f} TB/s {work / taken_us / 1e6:5.0f} TFLOP/s"
        return f"{taken_us:9.1f} us {rates} {least_us / taken_us:5.0%}"

    def report(self, name: str) -> None:
        copies = len(self.gate_up)
        rows: list[tuple[str, Launch, list[Stack]]] = [
            ("gate_up", self.first, self.gate_up[:1]),
            ("down", self.second, self.down[:1]),
            ("layer", self.whole, [self.gate_up[0], self.down[0]]),
        ]
        line = partial(print, f"{name:8} {self.name:8} {len(self.x):5} tokens ", flush=True)
        line(f"{'route':8} {microseconds(self.route, 1):9.1f} us")
        line(f"{'add':8} {microseconds(self.add, 1):9.1f} us")
        for what, launch, stacks in rows:
            line(f"{what:8} {self.share(microseconds(launch, copies), stacks)}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    arguments.add_argument("--kinds", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    chosen = arguments.parse_args()
    for shape, kind, tokens in itertools.product(chosen.shapes, chosen.kinds, chosen.tokens):
        Layer(kind, SHAPES[shape], tokens).report(shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
