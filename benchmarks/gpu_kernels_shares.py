"""Which share of the bandwidth each kernel of decoding reaches on a GPU: microseconds, the bytes that have to be moved
(weights or keys and values, inputs and outputs), GB/s of these, and their share of what its memory can move by its
clock and width.

    python -m benchmarks.gpu_kernels_shares --out FILE

Every format of weights in two products of an 8B model and every form of KV at 1, 8 and 64 rows, experts at as many
tokens. Launches run in a CUDA graph, over enough copies of a matrix that none is still in cache; medians of replays.
Kernels are compiled by some processes beforehand. No kernel reaches all of it: what reading alone and what a copy reach
in the same run is said beside. Owns no model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from benchmarks import gpu_kernels_attention as attention
from benchmarks import gpu_kernels_experts as experts
from benchmarks import gpu_kernels_quantized as products
from benchmarks.gpu_kernels_layer import KIND, random
from benchmarks.machine import commit, today

ROWS = (1, 8, 64)
SHAPES = ("gate_up", "down")
"""Of `gpu_kernels_quantized`: three quarters of a layer's weights, one with many outputs and one with many inputs."""
KEPT_TOKENS = 4096
EXPERT_SHAPE = "30B-A3B"
ROUNDED_NOTE = "with the kernel that rounds its inputs"


@dataclass(frozen=True, slots=True)
class Share:
    kernel: str
    shape: str
    rows: int
    microseconds: float
    bytes: int
    note: str = ""

    @property
    def bytes_s(self) -> float:
        return self.bytes / self.microseconds * 1e6


def weights(name: str) -> Iterator[Share]:
    note = ROUNDED_NOTE if name in products.SCALED and products.SCALED[name].inputs != "plain" else ""
    for shape in SHAPES:
        outputs, inputs = products.SHAPES[shape]
        product = products.Product(name, outputs, inputs)
        for rows in ROWS:
            x, out = random(rows, inputs), random(rows, outputs)
            product.check(x, out)
            taken = experts.microseconds(product.ours(x, out), product.copies)
            moved = product.bytes + x.nbytes + out.nbytes
            yield Share(name, shape, rows, taken, moved, note if rows > 1 or "int8" in name else "")


def of_experts(name: str) -> Iterator[Share]:
    for tokens in ROWS:
        layer = experts.Layer(name, experts.SHAPES[EXPERT_SHAPE], tokens)
        for shape, launch, stack, x, out in (
            ("gate_up", layer.first, layer.gate_up[0], layer.x, layer.inner),
            ("down", layer.second, layer.down[0], layer.inner, layer.rows),
        ):
            taken = experts.microseconds(launch, len(layer.gate_up))
            moved = round(stack.nbytes * layer.used) + x.nbytes + out.nbytes
            yield Share(f"experts {name}", shape, tokens, taken, moved)
        del layer
        torch.cuda.empty_cache()


def keys_and_values(name: str) -> Iterator[Share]:
    for rows in ROWS:
        decode = attention.Decode(attention.LLAMA_8B, rows, KEPT_TOKENS, 0, attention.STORED[name])
        yield Share(f"KV {name}", f"{KEPT_TOKENS} tokens", rows, decode.seconds() * 1e6, decode.nbytes)


def run_once(name: str) -> None:
    """In a process of its own: leaves kernels in the caches on the disk."""
    if name.startswith("KV "):
        for _ in keys_and_values(name.removeprefix("KV ")):
            pass
    elif name.startswith("experts "):
        for tokens in ROWS:
            layer = experts.Layer(name.removeprefix("experts "), experts.SHAPES[EXPERT_SHAPE], tokens, copies=1)
            layer.first(0)
            layer.second(0)
    else:
        for shape in SHAPES:
            outputs, inputs = products.SHAPES[shape]
            product = products.Product(name, outputs, inputs, copies=1)
            for rows in ROWS:
                product.ours(random(rows, inputs), random(rows, outputs))(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def stated_bytes_s() -> float:
    """Of the GPU's memory: two transfers a clock."""
    about = torch.cuda.get_device_properties()
    return 2 * about.memory_clock_rate * 1e3 * about.memory_bus_width / 8


def moved_bytes_s() -> dict[str, float]:
    """What torch's own kernels reach: reading alone, and reading and writing."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    read = attention.seconds([lambda: torch.amax(source)] * 4)
    copied = attention.seconds([lambda: torch.neg(source, out=target)] * 4)
    return {"read": source.nbytes / read, "copied": 2 * source.nbytes / copied}


def compile_ahead(names: list[str], processes: int) -> None:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(run_once, name) for name in names]:
            done.result()


def measured(formats: list[str]) -> Iterator[Share]:
    for name in formats:
        if name.startswith("KV "):
            yield from keys_and_values(name.removeprefix("KV "))
        elif name.startswith("experts "):
            yield from of_experts(name.removeprefix("experts "))
        else:
            yield from weights(name)


def main() -> None:
    every = [*products.SCALED, *products.BLOCKS]
    every += [f"experts {name}" for name in experts.LAYOUTS] + [f"KV {name}" for name in attention.STORED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(every), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=14, help="that compile kernels; 0: none")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--commit", help="of the code, where git is not there to be asked")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    formats, began = asked.formats.split(","), time.monotonic()
    if unknown := [name for name in formats if name not in every]:
        raise SystemExit(f"no such format: {', '.join(unknown)}; there are {', '.join(every)}")
    if asked.processes:
        compile_ahead(formats, asked.processes)
    possible, moved = stated_bytes_s(), moved_bytes_s()
    print(f"{torch.cuda.get_device_name()}: {possible / 1e9:.0f} GB/s by its clock, of which reading reaches "
          f"{moved['read'] / possible:.1%} and a copy {moved['copied'] / possible:.1%}; compiled in "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    print(f"{'kernel':<18}{'shape':<12}{'rows':>5}{'us':>9}{'MB':>8}{'GB/s':>7}{'share':>9}")
    found = []
    for share in measured(formats):
        print(
            f"{share.kernel:<18}{share.shape:<12}{share.rows:>5}{share.microseconds:>9.1f}{share.bytes / 1e6:>8.1f}"
            f"{share.bytes_s / 1e9:>7.0f}{share.bytes_s / possible:>9.1%}  {share.note}".rstrip(),
            flush=True,
        )
        found.append(asdict(share) | {"bytes_s": share.bytes_s, "share": share.bytes_s / possible})
        asked.out.write_text(
            json.dumps(
                {
                    "date": today(),
                    "commit": asked.commit or commit(),
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "numbers": str(KIND),
                    "stated_bytes_s": possible,
                    "reached_bytes_s": moved,
                    "shares": found,
                },
                indent=1,
            )
        )
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
