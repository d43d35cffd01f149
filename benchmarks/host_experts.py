"""Experts that the host computes for a GPU (execution/native/host_experts.py), without one: every layer was asked for
before a step is served, so that what is measured is computing alone.

For each number of tokens: microseconds a layer, and bytes of distinct experts read a second. Choices are random, other
ones in every step, over more weights than any cache holds. Weights are random bytes in real shapes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from holdfast.execution import native
from holdfast.execution.native.planes import ScaledBlockMatrix
from holdfast.footprint.experts import ExchangeLayout
from holdfast.footprint.scaled_layouts import ScaledLayout

INT4 = ScaledLayout(codes="int4", scales="bfloat16", group=128)
BLOCK_BYTES, BLOCK_ELEMENTS = 144, 256


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    """Fewer than the model has: enough that no cache holds them."""
    experts: int
    per_token: int
    hidden: int
    inner: int
    layout: str


SHAPES = {
    "qwen3-30b-a3b-q4k": Shape(12, 128, 8, 2048, 768, "Q4_K"),
    "llama-70b-int4": Shape(6, 1, 1, 8192, 28672, "int4"),
    "llama-70b-q4k": Shape(6, 1, 1, 8192, 28672, "Q4_K"),
    "tiny": Shape(2, 4, 2, 256, 256, "Q4_K"),
}


def memory(nbytes: int, huge_pages: bool) -> torch.Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def pattern(nbytes: int) -> torch.Tensor:
    """Random blocks with scales that are small numbers."""
    blocks = torch.randint(0, 256, (nbytes // BLOCK_BYTES, BLOCK_BYTES), dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([1e-4, 1e-4], dtype=torch.float16).view(torch.uint8)
    return blocks.view(-1)


class Maker:
    """Of matrices: each in memory of its own, written by the threads that weave it."""

    def __init__(self, shape: Shape, huge_pages: bool) -> None:
        self.shape, self._huge_pages = shape, huge_pages
        self._filled = pattern(BLOCK_BYTES << 16)

    def matrix(self, whole: torch.Tensor, expert: int, rows: int, columns: int) -> native.CompiledMatrix:
        own = whole[expert]
        for first in range(0, len(own), len(self._filled)):
            part = own[first : first + len(self._filled)]
            part.copy_(self._filled[: len(part)])
        if self.shape.layout == "Q4_K":
            return native.BlockMatrix(own.view(rows, -1), "Q4_K")
        codes = own[: rows * columns // 2].view(rows, -1)
        scales = own[rows * columns // 2 :].view(torch.bfloat16).view(rows, -1).fill_(1e-3)
        wanted = {plane.name: plane for plane in INT4.planes(rows, columns)}
        return ScaledBlockMatrix(INT4, codes.view(wanted["codes"].shape), scales.view(wanted["scales"].shape))

    def bytes_of(self, rows: int, columns: int) -> int:
        if self.shape.layout == "Q4_K":
            return rows * columns // BLOCK_ELEMENTS * BLOCK_BYTES
        return rows * columns // 2 + rows * columns // 128 * 2

    def layer(self, pool: ThreadPoolExecutor) -> native.ExpertLayer:
        shape = self.shape
        sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
        stacks = []
        for rows, columns in sizes:
            whole = memory(shape.experts * self.bytes_of(rows, columns), self._huge_pages).view(shape.experts, -1)
            numbers = range(shape.experts)
            stacks.append(list(pool.map(lambda one, w=whole, r=rows, c=columns: self.matrix(w, one, r, c), numbers)))
        return native.ExpertLayer(
            gate_up=[[one] for one in stacks[0]],
            down=stacks[1],
            per_token=shape.per_token,
            normalized=True,
            activation="silu",
        )


def measure(
    layers: Sequence[native.ExpertLayer], shape: Shape, expert_bytes: int, tokens: int, waiting: float, repeats: int
) -> None:
    """`waiting`: the share of pairs that are the host's."""
    layout = ExchangeLayout(len(layers), tokens, shape.per_token, shape.hidden, 2)
    exchange = native.HostExchange(layout, memory(-(-layout.nbytes // 4096) * 4096, False), torch.bfloat16)
    host = native.HostExperts(layers, exchange)
    times, rates = [], []
    for step in range(1, repeats + 3):
        distinct = 0
        for buffer in (0, 1):
            exchange.x(buffer).copy_(torch.randn(tokens, shape.hidden))
            chosen = torch.stack([torch.randperm(shape.experts)[: shape.per_token] for _ in range(tokens)])
            kept = int(shape.per_token * waiting) if shape.experts > 1 else shape.per_token
            chosen[:, kept:] = -1
            exchange.chosen(buffer).copy_(chosen)
            exchange.weights(buffer).fill_(1 / shape.per_token)
            distinct += len(chosen[chosen >= 0].unique())
        for number in range(len(layers)):
            exchange.request(number).fill_(step)
        seconds = host.serve(step, tokens).computed_s
        if step > 2:
            times.append(seconds / len(layers))
            rates.append(distinct * len(layers) / 2 * expert_bytes / seconds)
    print(
        f"{native.threads():>7}{tokens:>8}{waiting:>9.2f}{1e6 * statistics.median(times):>12.0f}"
        f"{1e6 * min(times):>8.0f}{statistics.median(rates) / 1e9:>9.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b-q4k")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--waiting", type=float, nargs="+", default=[1.0], help="share of pairs that are the host's")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--small-pages", action="store_true", help="of 4 KiB instead of huge ones")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    maker = Maker(shape, not args.small_pages)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        layers = [maker.layer(pool) for _ in range(shape.layers)]
    expert_bytes = maker.bytes_of(2 * shape.inner, shape.hidden) + maker.bytes_of(shape.hidden, shape.inner)
    print(f"{args.shape}: {shape.layers} layers, {expert_bytes / 1e6:.2f} MB an expert")
    print(f"{'threads':>7}{'tokens':>8}{'waiting':>9}{'us a layer':>12}{'least':>8}{'GB/s':>9}")
    for threads in args.threads:
        with native.ComputeThreads(threads, own=True).computing():
            for tokens in args.tokens:
                for waiting in args.waiting:
                    measure(layers, shape, expert_bytes, tokens, waiting, args.repeats)


if __name__ == "__main__":
    main()
