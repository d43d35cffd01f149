"""The compiled CPU kernels beside torch on this machine: products, attention, and whole steps of SmolLM2's shape.

Both sides alternate in one run, and each figure is the median of its repeats; weights and pages are random. Owns no
model and no server: `benchmarks/cpu_peers.py` measures those.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy
import torch
from torch.nn import functional

from holdfast.execution import native
from holdfast.execution.native.products import LAYOUT_BYTES

HIDDEN, INNER, VOCABULARY, LAYERS = 576, 1536, 49152, 30
HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def alternate(sides: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each side, run in turns so that a busy machine is busy for all."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    for _ in range(repeats):
        for side, taken in zip(sides, times, strict=True):
            begin = time.perf_counter()
            side()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def matrix(rows: int, columns: int, layout: str) -> native.BlockMatrix:
    blocks = torch.randint(0, 256, (rows, columns // 32, LAYOUT_BYTES[layout]), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if layout == "Q4_1":
        blocks[..., 2:4] = torch.tensor([-0.075], dtype=torch.float16).view(torch.uint8)
    return native.BlockMatrix(blocks.view(rows, -1), layout)


def products(repeats: int) -> None:
    print(f"{'product':<24}{'rows':>5}{'ours GFLOP/s':>14}{'torch fp32':>12}{'ours GB/s':>11}{'torch GB/s':>12}")
    shapes = [(3072, HIDDEN, "Q4_1"), (HIDDEN, INNER, "Q4_1"), (3072, HIDDEN, "Q4_0"), (VOCABULARY, HIDDEN, "Q8_0")]
    for outputs, columns, layout in shapes:
        weights = matrix(outputs, columns, layout)
        expanded = torch.empty(outputs, columns)
        weights.dequantize(expanded)
        turned = expanded.t()
        for rows in (1, 4, 8, 16, 32, 128, 512):
            if outputs == VOCABULARY and rows > 32:
                continue
            x, out = torch.randn(rows, columns), torch.empty(rows, outputs)
            ours, theirs = alternate([partial(weights.write, x, out), partial(torch.mm, x, turned, out=out)], repeats)
            work = 2 * rows * outputs * columns / 1e9
            print(
                f"{f'{layout} {outputs}x{columns}':<24}{rows:>5}{work / ours:>14.1f}{work / theirs:>12.1f}"
                f"{weights.nbytes / ours / 1e9:>11.1f}{expanded.nbytes / theirs / 1e9:>12.1f}"
            )


def rows_of(contexts: list[int], counts: list[int]) -> tuple[native.AttentionRows, int]:
    """Rows over pages 1, 2, 3, ... and how many pages that takes."""
    blocks = [-(-context // BLOCK) for context in contexts]
    tables = numpy.zeros((len(contexts), max(blocks)), numpy.int32)
    used = 1
    for row, count in enumerate(blocks):
        tables[row, :count] = numpy.arange(used, used + count)
        used += count
    numbers = numpy.array(counts, numpy.int32)
    firsts = (numpy.cumsum(numbers) - numbers).astype(numpy.int32)
    ends = numpy.array(contexts, numpy.int32)
    return native.AttentionRows(tables, ends, block_tokens=BLOCK, counts=numbers, firsts=firsts), used


def attention(repeats: int) -> None:
    """torch gets keys and values gathered already, which its own path would have to do first."""
    print(f"\n{'attention':<24}{'queries':>8}{'ours us':>9}{'torch us':>10}{'ours GB/s':>11}{'ours GFLOP/s':>14}")
    for rows, context, count in ((1, 128, 1), (1, 1024, 1), (16, 512, 1), (64, 512, 1), (1, 512, 512), (1, 2048, 512)):
        step, pages_needed = rows_of([context] * rows, [count] * rows)
        pages = torch.randn(pages_needed, 1, 2, BLOCK, KV_HEADS, DIM)
        pool = native.PoolPlace(pages, 0)
        query = torch.randn(rows * count, HEADS, DIM)
        out = torch.empty_like(query)
        keys, values = torch.randn(2, rows, HEADS, context, DIM)
        heads = query.view(rows, count, HEADS, DIM).transpose(1, 2)
        mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
        flash = functional.scaled_dot_product_attention
        ours, theirs = alternate(
            [
                partial(native.paged_attention, query, pool, step, DIM**-0.5, out),
                partial(flash, heads, keys, values, attn_mask=mask),
            ],
            repeats,
        )
        seen = rows * (count * (context - count) + count * (count + 1) // 2)
        moved = rows * context * 2 * KV_HEADS * DIM * 4
        print(
            f"{f'{rows} x {context} tokens':<24}{rows * count:>8}{ours * 1e6:>9.0f}{theirs * 1e6:>10.0f}"
            f"{moved / ours / 1e9:>11.1f}{4 * seen * HEADS * DIM / ours / 1e9:>14.1f}"
        )


def make_layer() -> native.DecoderLayer:
    return native.DecoderLayer(
        attention_norm=torch.ones(HIDDEN),
        qkv=[matrix(WIDTH, HIDDEN, "Q4_1")],
        o=matrix(HIDDEN, HEADS * DIM, "Q4_1"),
        mlp_norm=torch.ones(HIDDEN),
        gate_up=[matrix(2 * INNER, HIDDEN, "Q4_1")],
        down=matrix(HIDDEN, INNER, "Q4_1"),
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        epsilon=1e-5,
        scale=DIM**-0.5,
    )


def run_step(
    stack: native.DecoderStack,
    step: native.DecoderStep,
    places: torch.Tensor,
    rows: native.AttentionRows,
    head: Callable[[], None],
) -> None:
    stack.run(step, places, rows, 0, LAYERS)
    head()


def steps(repeats: int) -> None:
    """All layers and the head, as a decode step or a prompt chunk runs them; sampling is not in it."""
    layers, head = [make_layer() for _ in range(LAYERS)], matrix(VOCABULARY, HIDDEN, "Q8_0")
    print(f"\n{'whole step':<24}{'tokens':>8}{'ms':>9}{'tokens/s':>10}")
    for rows, context, count in ((1, 128, 1), (1, 1024, 1), (4, 256, 1), (16, 256, 1), (64, 256, 1), (1, 512, 512)):
        tokens = rows * count
        row_set, pages_needed = rows_of([context] * rows, [count] * rows)
        pages = torch.randn(pages_needed, LAYERS, 2, BLOCK, KV_HEADS, DIM)
        placed = [native.PlacedLayer(layer, native.PoolPlace(pages, at)) for at, layer in enumerate(layers)]
        stack = native.DecoderStack(placed)
        places = torch.arange(tokens) % BLOCK + 2 * LAYERS * BLOCK
        step = native.DecoderStep(
            stream=torch.randn(tokens, HIDDEN),
            normed=torch.empty(tokens, HIDDEN),
            qkv=torch.empty(tokens, WIDTH),
            attended=torch.empty(tokens, HEADS * DIM),
            gate_up=torch.empty(tokens, 2 * INNER),
            inner=torch.empty(tokens, INNER),
            cos=torch.ones(tokens, DIM // 2),
            sin=torch.zeros(tokens, DIM // 2),
        )
        last, logits = torch.randn(rows, HIDDEN), torch.empty(rows, VOCABULARY)

        run = partial(run_step, stack, step, places, row_set, partial(head.write, last, logits))
        (seconds,) = alternate([run], max(3, repeats // 3))
        print(f"{f'{rows} x {context} context':<24}{tokens:>8}{seconds * 1e3:>9.1f}{tokens / seconds:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for torch and the kernels alike")
    parser.add_argument("--repeats", type=int, default=15, help="of each figure; the median is printed")
    parser.add_argument("--only", choices=("products", "attention", "steps"), help="one part; all by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, compiled kernels: {native.why_not() or 'available'}\n"
    )
    parts = {"products": products, "attention": attention, "steps": steps}
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.repeats)


if __name__ == "__main__":
    main()
