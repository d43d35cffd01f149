"""The layer kernels on a GPU: microseconds, GB/s and the share of what memory gives, beside torch's own products.

Launches run in a CUDA graph, as decoding runs them, over enough copies of a matrix that none is still in cache.
`--sweep` tries other tiles than the table's and prints the best of each shape. Owns no model: a whole step is measured
elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from holdfast.execution.triton_kernels import layer
from holdfast.execution.triton_kernels.quantized import products
from holdfast.execution.triton_kernels.quantized.product_tiles import WARP_BYTES, ProductTile, few_rows_tile

MEMORY_BYTES_S = 4.3e12
"""What a copy moves on an H200, bytes read and written."""
CACHE_BYTES = 240e6
"""Several times the second level cache."""
LAUNCHES = 24
"""Of a graph; more where one is short."""
KIND = torch.bfloat16

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
}
"""(outputs, inputs)"""
GATED = {"8B gate+up": (14336, 4096), "0.6B gate+up": (3072, 1024)}
"""(inner, inputs)"""

Launch = Callable[[int], None]
"""Runs one kernel on the copy of this index."""


class Clock:
    """What is left of the time given, and how long things take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out = 0

    def over(self) -> bool:
        """Whether time is up; counts what is left out because of it."""
        late = time.monotonic() > self._end
        self.left_out += late
        return late

    def microseconds(self, launch: Launch, copies: int) -> float:
        """Mean of one launch in a graph, over the best of some replays."""
        count = -(-LAUNCHES // copies) * copies
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(count):
                launch(index % copies)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = float("inf")
        for _ in range(6):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e3 / count)
        return best


def rates(microseconds: float, moved_bytes: float) -> str:
    speed = moved_bytes / microseconds * 1e6
    return f"{microseconds:>9.2f}{speed / 1e9:>8.0f}{speed / MEMORY_BYTES_S:>6.0%}"


HEADER = f"{'us':>9}{'GB/s':>8}{'share':>6}"


def alone(work: Callable[[], None]) -> Launch:
    """A launch that has no copies to choose from."""

    def launch(index: int) -> None:
        del index
        work()

    return launch


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=KIND)


class Product:
    """Copies of one matrix, and the ways to multiply with it."""

    def __init__(self, rows: int, outputs: int, inputs: int, *, gated: bool = False) -> None:
        self.gated, self.stored = gated, outputs * (2 if gated else 1)
        self.bytes = self.stored * inputs * 2
        self.copies = max(1, -(-int(CACHE_BYTES) // self.bytes))
        self.matrices = [random(self.stored, inputs) for _ in range(self.copies)]
        self.x, self.norm = random(rows, inputs), random(inputs)
        self.out, self.wide_out = random(rows, outputs), random(rows, self.stored)

    def torch(self, index: int) -> None:
        torch.mm(self.x, self.matrices[index].t(), out=self.wide_out)

    def ours(self, index: int, *, tile: ProductTile | None = None, normed: bool = True) -> None:
        norm = self.norm if normed else None
        matrix = self.matrices[index]
        if self.gated:
            products.skinny_gate_up(self.x, matrix, self.out, norm_weight=norm, epsilon=1e-5, tile=tile)
        else:
            products.skinny_product(self.x, matrix, self.out, norm_weight=norm, epsilon=1e-5, tile=tile)


def dense(clock: Clock) -> None:
    print(f"\n{'dense product, bf16':<26}{'rows':>5} |torch{HEADER[5:]} |ours{HEADER[4:]} |normed{HEADER[6:]}")
    for rows in (1, 2):
        for name, (outputs, inputs) in (SHAPES | GATED).items():
            if clock.over():
                continue
            product = Product(rows, outputs, inputs, gated=name in GATED)
            sides: list[Launch] = [product.torch, partial(product.ours, normed=False), product.ours]
            measured = [clock.microseconds(side, product.copies) for side in sides]
            print(f"{name:<26}{rows:>5} |" + " |".join(rates(taken, product.bytes) for taken in measured))


def small(clock: Clock) -> None:
    """Norm, rotary with the write, gate, embedding: of an 8B's shape, for one token, a batch, and a prompt's chunk."""
    print(f"\n{'small kernels, 8B':<26}{'rows':>5} |{HEADER}")
    hidden, inner, heads, kv_heads, dim = 4096, 14336, 32, 8, 128
    pages = torch.zeros(1024, 2, 2, 16, kv_heads, dim, device="cuda", dtype=KIND)
    tables = torch.randperm(1024, device="cuda").int()[None]
    angles, embedding = torch.randn(16384, dim, device="cuda"), random(32000, hidden)
    ids = torch.randint(0, 32000, (1, 16384), device="cuda", dtype=torch.int32)
    for rows in (1, 64, 8192):
        if clock.over():
            continue
        stream, out, norm = random(rows, hidden), random(rows, hidden), random(hidden)
        qkv, gate_up, gated = random(rows, (heads + 2 * kv_heads) * dim), random(rows, 2 * inner), random(rows, inner)
        positions = torch.arange(rows, device="cuda", dtype=torch.int32)
        slots = torch.zeros_like(positions)
        parts: dict[str, tuple[Callable[[], None], int]] = {
            "norm": (partial(layer.rms_norm, stream, norm, 1e-5, out), 2 * stream.nbytes),
            "rotate and store": (
                partial(layer.rotate_and_store, qkv, angles, positions, slots, pages, tables, place=1),
                2 * qkv.nbytes + rows * dim * 4,
            ),
            "gate": (partial(layer.gate, gate_up, "silu", gated), gate_up.nbytes + gated.nbytes),
            "embed": (partial(layer.embed, ids, slots, positions, embedding, out), 2 * out.nbytes),
        }
        for name, (work, moved) in parts.items():
            taken = clock.microseconds(alone(work), 1)
            print(f"{name:<26}{rows:>5} |{rates(taken, moved)}")


def few_rows_choices(element_bytes: int) -> Iterator[ProductTile]:
    for outputs, warps, loads in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2)):
        yield ProductTile(outputs, loads * warps * WARP_BYTES // element_bytes, warps)


def best_of(
    clock: Clock,
    name: str,
    tiles: Iterator[ProductTile],
    launch: Callable[..., None],
    copies: int,
    moved_bytes: int,
) -> None:
    """Times every tile, the table's first; prints that one and the best three."""
    found: list[tuple[float, ProductTile]] = []
    for tile in tiles:
        if clock.over():
            break
        try:
            found.append((clock.microseconds(partial(launch, tile=tile), copies), tile))
        except Exception as refused:  # a tile that does not compile or does not fit is no candidate
            print(f"{name}: {tile} refused: {str(refused).splitlines()[0][:80]}")
    for taken, tile in found[:1] + sorted(found, key=lambda pair: pair[0])[:3]:
        print(f"{name:<30}{rates(taken, moved_bytes)}  {tile}")


def sweep(clock: Clock) -> None:
    for name, (outputs, inputs) in (SHAPES | GATED).items():
        if clock.over():
            continue
        gated = name in GATED
        product = Product(1, outputs, inputs, gated=gated)
        launch = partial(product.ours, normed=False)
        tiles = itertools.chain((few_rows_tile(outputs, inputs, 2, gated=gated),), few_rows_choices(2))
        best_of(clock, f"{name}, 1 row", tiles, launch, product.copies, product.bytes)


def check(clock: Clock) -> None:
    """A wrong product can be fast: one of each kind against torch before anything is timed."""
    del clock
    for rows, gated in itertools.product((1, 2), (False, True)):
        product = Product(rows, 1024, 1024, gated=gated)
        product.ours(0)
        normed = functional.rms_norm(product.x.float(), (1024,), product.norm.float(), 1e-5)
        wanted = normed @ product.matrices[0].float().t()
        if gated:
            wanted = functional.silu(wanted[:, :1024]) * wanted[:, 1024:]
        error = (product.out.float() - wanted).norm() / wanted.norm()
        if not error < 0.02:
            raise SystemExit(f"{rows} rows, gated {gated}: off by {float(error):.3f} of the result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles than the table's")
    parser.add_argument("--seconds", type=float, default=50, help="no new measurement is begun after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    clock = Clock(options.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; share of {MEMORY_BYTES_S / 1e12} TB/s")
    check(clock)
    if options.sweep:
        sweep(clock)
    else:
        for part in (dense, small):
            part(clock)
    if clock.left_out:
        print(f"{clock.left_out} measurements left out: --seconds {options.seconds:g} are over")


if __name__ == "__main__":
    main()
