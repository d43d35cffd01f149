"""Paged attention on the GPU, as a share of what the GPU can: GB/s of keys and values in decode, TFLOP/s in prefill.

    python -m benchmarks.gpu_kernels_attention            the shapes that matter, with the constants of the table
    python -m benchmarks.gpu_kernels_attention --sweep    other constants for the two that matter most
    python -m benchmarks.gpu_kernels_attention --kv fp8_e4m3   either, over float8 pages

Prefill is measured with every kernel that can: the one in Triton, and on Hopper that for Hopper. Every launch works on
another layer place, so that nothing is served from the cache; launches are replayed as one graph. Random data, the
median of repeats, and limits measured in the same run. Knows no model and no engine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import torch
import triton

from holdfast.execution.gpu.layers.prefill_kernel import CAPABILITY, WIDTHS
from holdfast.execution.triton_kernels import tiles
from holdfast.execution.triton_kernels.attention.decode import decode_attention
from holdfast.execution.triton_kernels.attention.prefill import prefill_attention
from holdfast.footprint import gpu

BLOCK_TOKENS, DTYPE, DEVICE = 16, torch.bfloat16, "cuda"
STORED = {"bfloat16": DTYPE, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
POOL_BYTES = 6 << 30
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    width: int


LLAMA_8B = Shape("Llama-8B", 32, 8, 128)
SMALL = Shape("0.6B", 16, 8, 128)
EXPERTS = Shape("30B-A3B", 32, 4, 128)
SMOL = Shape("SmolLM2", 9, 3, 64)
GEMMA = Shape("Gemma-like", 16, 8, 256)

DECODE: list[tuple[Shape, int, int, int]] = [
    # rows, tokens each sees (0: 64 to 8192, mixed), window
    (LLAMA_8B, 1, 512, 0),
    (LLAMA_8B, 1, 4096, 0),
    (LLAMA_8B, 1, 32768, 0),
    (LLAMA_8B, 8, 4096, 0),
    (LLAMA_8B, 64, 4096, 0),
    (LLAMA_8B, 64, 0, 0),
    (LLAMA_8B, 64, 4096, 1024),
    (LLAMA_8B, 256, 1024, 0),
    (SMALL, 1, 4096, 0),
    (SMALL, 64, 2048, 0),
    (SMOL, 64, 1024, 0),
    (GEMMA, 64, 2048, 0),
]
PREFILL: list[tuple[Shape, list[tuple[int, int]], int]] = [
    # rows of (tokens before, tokens), window
    (LLAMA_8B, [(0, 8192)], 0),
    (LLAMA_8B, [(0, 4000)] * 2, 0),
    (LLAMA_8B, [(0, 512)] * 16, 0),
    # The last chunk of prompts of 30k and 60k tokens.
    (LLAMA_8B, [(21808, 8192)], 0),
    (LLAMA_8B, [(51808, 8192)], 0),
    (LLAMA_8B, [(30000, 2048)], 0),
    (LLAMA_8B, [(700 * i, 37 * i + 1) for i in range(12)], 0),
    (LLAMA_8B, [(0, 8192)], 1024),
    (SMALL, [(0, 8192)], 0),
    (SMALL, [(0, 4000)] * 2, 0),
    (EXPERTS, [(0, 4000)] * 2, 0),
    (SMOL, [(0, 8192)], 0),
    (GEMMA, [(0, 8192)], 0),
]


def seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Of one launch: all of them captured as one graph, which is replayed."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = list[float]()
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(launches))
    return statistics.median(times[2:])


def limits() -> tuple[float, float]:
    """(bytes a second of a copy, read and written; operations a second of a bf16 product)."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    product = torch.empty_like(a)
    copied = 2 * source.numel() / seconds([lambda: target.copy_(source)] * 4)
    return copied, 2 * 8192**3 / seconds([lambda: torch.mm(a, b, out=product)] * 4)


class Pool:
    """Pages for rows of these lengths, in random order, with as many layer places as are worth it."""

    def __init__(self, shape: Shape, lengths: Sequence[int], stored: torch.dtype) -> None:
        blocks = [-(-length // BLOCK_TOKENS) for length in lengths]
        page = 2 * BLOCK_TOKENS * shape.kv_heads * shape.width
        total = sum(blocks) + 1
        self.places = max(1, min(32, POOL_BYTES // (total * page * stored.itemsize)))
        whole = (total, self.places, 2, BLOCK_TOKENS, shape.kv_heads, shape.width)
        self.pages = torch.empty(whole, dtype=stored, device=DEVICE)
        for pages in self.pages.split(max(1, len(self.pages) // 16)):
            pages.copy_(torch.randn(pages.shape, dtype=DTYPE, device=DEVICE))
        free = numpy.random.default_rng().permutation(total - 1) + 1
        tables = numpy.zeros((len(lengths), max(blocks)), numpy.int32)
        for row, (count, first) in enumerate(zip(blocks, numpy.cumsum(blocks) - blocks, strict=True)):
            tables[row, :count] = free[first : first + count]
        self.tables = torch.from_numpy(tables).to(DEVICE)

    def fused(self, shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries as a view of a fused product, and an output."""
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.randn((tokens, heads, shape.width), device=DEVICE).to(DTYPE)
        return qkv[:, : shape.heads], torch.empty((tokens, shape.heads, shape.width), dtype=DTYPE, device=DEVICE)


def ints(numbers: object) -> torch.Tensor:
    return torch.as_tensor(numpy.asarray(numbers, dtype=numpy.int32)).to(DEVICE)


class Decode:
    def __init__(self, shape: Shape, rows: int, seen: int, window: int, stored: torch.dtype = DTYPE) -> None:
        drawn = numpy.random.default_rng(1).integers(64, 8193, rows)
        self.lengths = [seen or int(length) for length in drawn]
        self.shape, self.window, self.rows = shape, window, rows
        self.pool = Pool(shape, self.lengths, stored)
        self.query, self.out = self.pool.fused(shape, rows)
        self.slots, self.device_lengths = ints(range(rows)), ints(self.lengths)

    @property
    def nbytes(self) -> int:
        tokens = sum(min(length, self.window or length) for length in self.lengths)
        return tokens * 2 * self.shape.kv_heads * self.shape.width * self.pool.pages.itemsize

    def seconds(self, tile: tiles.Tile | None = None, splits: int | None = None) -> float:
        shape, parts = self.shape, splits or gpu.decode_splits(self.rows, self.shape.kv_heads)
        workspace = torch.empty(self.rows * shape.heads * parts * (shape.width + 1), device=DEVICE)

        def launch(place: int) -> Callable[[], None]:
            return lambda: decode_attention(
                self.query,
                self.pool.pages,
                self.pool.tables,
                self.slots,
                self.device_lengths,
                place=place,
                scale=shape.width**-0.5,
                window=self.window,
                softcap=0.0,
                out=self.out,
                workspace=workspace,
                tile=tile,
                splits=splits,
            )

        return seconds([launch(place) for place in range(self.pool.places)])


class Prefill:
    def __init__(self, shape: Shape, rows: list[tuple[int, int]], window: int, stored: torch.dtype = DTYPE) -> None:
        self.shape, self.window, self.rows = shape, window, rows
        self.starts, self.counts = numpy.array(rows).T
        self.pool = Pool(shape, [start + count for start, count in rows], stored)
        self.query, self.out = self.pool.fused(shape, int(self.counts.sum()))
        firsts = numpy.cumsum(self.counts) - self.counts
        self.row_arguments = [ints(x) for x in (range(len(rows)), self.starts, self.counts, firsts)]

    @property
    def operations(self) -> int:
        pairs = 0
        for start, count in self.rows:
            seen = numpy.arange(start + 1, start + count + 1)
            pairs += int((numpy.minimum(seen, self.window) if self.window else seen).sum())
        return 4 * self.shape.heads * self.shape.width * pairs

    def seconds(self, tile: tiles.Tile | None = None) -> float:
        ratio = self.shape.heads // self.shape.kv_heads
        chosen = tile or tiles.prefill_tile(
            ratio, self.shape.width, DTYPE.itemsize, codes=self.pool.pages.itemsize == 1
        )
        tile_lists = tiles.prefill_tiles(self.counts, self.starts, chosen.rows // ratio)
        tile_rows, tile_starts = (ints(x) for x in tile_lists)

        def launch(place: int) -> Callable[[], None]:
            return lambda: prefill_attention(
                self.query,
                self.pool.pages,
                self.pool.tables,
                tile_rows,
                tile_starts,
                *self.row_arguments,
                place=place,
                scale=self.shape.width**-0.5,
                window=self.window,
                softcap=0.0,
                out=self.out,
                tile=tile,
            )

        return seconds([launch(place) for place in range(min(4, self.pool.places))])

    def hopper_seconds(self) -> float | None:
        """None: this GPU or this shape has no such kernel."""
        here = torch.cuda.get_device_capability() == CAPABILITY and self.shape.width in WIDTHS
        if not here or self.pool.pages.dtype != DTYPE:
            return None
        from holdfast.execution.triton_kernels.attention.prefill_hopper import page_descriptor, prefill_attention_hopper

        ratio = self.shape.heads // self.shape.kv_heads
        tile_lists = tiles.prefill_tiles(self.counts, self.starts, tiles.HOPPER_ROWS // ratio)
        tile_rows, tile_starts = (ints(x) for x in tile_lists)
        descriptor = page_descriptor(self.pool.pages)

        def launch(place: int) -> Callable[[], None]:
            return lambda: prefill_attention_hopper(
                self.query,
                self.pool.pages,
                self.pool.tables,
                tile_rows,
                tile_starts,
                *self.row_arguments,
                descriptor=descriptor,
                place=place,
                scale=self.shape.width**-0.5,
                window=self.window,
                out=self.out,
            )

        return seconds([launch(place) for place in range(min(4, self.pool.places))])


def table(bandwidth: float, arithmetic: float, stored: torch.dtype) -> None:
    print(f"\n{'decode':<12}{'rows':>5}{'tokens':>8}{'window':>8}{'splits':>8}{'us':>10}{'GB/s':>9}{'of copy':>9}")
    for shape, rows, seen, window in DECODE:
        decode = Decode(shape, rows, seen, window, stored)
        taken = decode.seconds()
        rate = decode.nbytes / taken
        print(
            f"{shape.name:<12}{rows:>5}{seen or 'mixed':>8}{window or '-':>8}"
            f"{gpu.decode_splits(rows, shape.kv_heads):>8}{taken * 1e6:>10.1f}{rate / 1e9:>9.0f}"
            f"{rate / bandwidth:>9.1%}"
        )
    print(
        f"\n{'prefill':<12}{'rows':>5}{'tokens':>8}{'before':>8}{'window':>8}{'kernel':>8}{'us':>10}{'TFLOP/s':>9}"
        f"{'of mm':>9}"
    )
    for shape, ragged, window in PREFILL:
        prefill = Prefill(shape, ragged, window, stored)
        tokens, before = sum(count for _, count in ragged), sum(start for start, _ in ragged)
        for kernel, found in (("triton", prefill.seconds()), ("hopper", prefill.hopper_seconds())):
            if found is not None:
                rate = prefill.operations / found
                print(
                    f"{shape.name:<12}{len(ragged):>5}{tokens:>8}{before:>8}{window or '-':>8}{kernel:>8}"
                    f"{found * 1e6:>10.1f}{rate / 1e12:>9.1f}{rate / arithmetic:>9.1%}"
                )


def tried(measure: Callable[[], float]) -> float | None:
    """None: these constants want more shared memory than there is."""
    try:
        return measure()
    except triton.runtime.errors.OutOfResources:
        return None


def sweep(bandwidth: float, arithmetic: float, width: int, budget_s: float, stored: torch.dtype) -> None:
    """Best first. What does not fit in the time is left out, and counted."""
    shape = Shape(f"width {width}", 32, 8, width)
    decode, single = Decode(shape, 64, 4096, 0, stored), Decode(shape, 1, 4096, 0, stored)
    found: list[tuple[float, str]] = []
    choices = list(itertools.product((32, 64, 128), (4, 8, 2), (3, 2, 4)))
    end = time.monotonic() + budget_s / 2
    for keys, warps, stages in choices:
        if time.monotonic() > end:
            break
        tile = tiles.Tile(16, keys, warps, stages)
        for case, splits in ((decode, 1), (decode, 2), (decode, 3), (decode, 4), (single, 32), (single, 64)):
            taken = tried(partial(case.seconds, tile, splits))
            if taken is not None:
                rate = case.nbytes / taken
                note = f"rows {case.rows:<3} splits {splits:<3} {tile}  {taken * 1e6:8.1f} us  {rate / bandwidth:.1%}"
                found.append((-rate - 1e15 * (case is single), note))
    print("\ndecode, single row first\n" + "\n".join(note for _, note in sorted(found)))
    prefill, found = Prefill(shape, [(0, 8192)], 0, stored), []
    end = time.monotonic() + budget_s / 2
    for rows, keys, warps, stages in itertools.product((128, 64, 256), (128, 64, 32), (8, 4), (2, 3, 4)):
        if time.monotonic() > end:
            break
        tile = tiles.Tile(rows, keys, warps, stages)
        taken = tried(partial(prefill.seconds, tile))
        if taken is not None:
            rate = prefill.operations / taken
            found.append((-rate, f"{tile}  {taken * 1e6:8.1f} us  {rate / 1e12:.0f} TFLOP/s  {rate / arithmetic:.1%}"))
    print("\nprefill of 8192\n" + "\n".join(note for _, note in sorted(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other constants, best first")
    parser.add_argument("--width", type=int, default=128, help="head width of the sweep")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for the sweep")
    parser.add_argument("--kv", choices=list(STORED), default="bfloat16", help="how pages keep keys and values")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    bandwidth, arithmetic = limits()
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s, bf16 product {arithmetic / 1e12:.0f} TFLOP/s"
    )
    if arguments.sweep:
        sweep(bandwidth, arithmetic, arguments.width, arguments.budget, STORED[arguments.kv])
    else:
        table(bandwidth, arithmetic, STORED[arguments.kv])


if __name__ == "__main__":
    main()
