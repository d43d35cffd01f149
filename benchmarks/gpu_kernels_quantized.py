"""Products with quantized matrices on a GPU, shapes of an 8B model: microseconds, GB/s of codes and scales, the share
of what memory gives, and cuBLAS's product with the same matrix in bfloat16.

Launches run in a CUDA graph, as decoding runs them, over enough copies of a matrix that none is still in cache. From
`SKINNY_BLOCK_ROWS` on a product expands its matrix first: the column says what the layers do. Owns no model: a whole
step is measured elsewhere.
"""

from __future__ import annotations

import argparse
from functools import cached_property

import torch

from benchmarks.gpu_kernels_layer import CACHE_BYTES, HEADER, KIND, MEMORY_BYTES_S, Clock, Launch, random, rates
from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.weights.gguf_block_types import KINDS
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""(outputs, inputs)"""
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 8192)
SCALED = {
    "awq": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "gptq": ScaledLayout(codes="int4", scales="float16", group=128),
    "gptq32": ScaledLayout(codes="int4", scales="float16", group=32),
    "nf4": ScaledLayout(codes="nf4", group=64),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "int8": ScaledLayout(codes="int8", scales="bfloat16"),
    "fp8": ScaledLayout(codes="fp8"),
    "fp8 rounded": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8 blocks": ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=128, input_group=128),
    "int8 rounded": ScaledLayout(codes="int8", inputs="int8"),
}
"""Those whose inputs are rounded have a kernel for that before the product, with more than one row."""
BLOCKS = tuple(KINDS)
ERRORS = {"plain": 0.01, "int8": 0.03, "fp8": 0.06}
"""Of a product, by what its inputs are rounded to."""
CUDA = torch.device("cuda")


def drawn(name: str, outputs: int, inputs: int, device: torch.device) -> ScaledMatrix | QuantizedMatrix:
    """Codes and scales at random; FP8's two codes that are no numbers are left out."""
    if name in SCALED:
        matrix = ScaledMatrix(SCALED[name], outputs, inputs, device)
        codes = matrix.codes.view(torch.uint8)
        codes.random_(0, 256)
        if SCALED[name].codes == "fp8":
            codes.masked_fill_(codes & 127 == 127, 0)
        if matrix.scales.dtype == torch.uint8:
            matrix.scales.random_(118, 122)
        else:
            matrix.scales.uniform_(0.005, 0.015)
        if matrix.zeros is not None:
            matrix.zeros.random_(0, 16)
        return matrix
    blocks = QuantizedMatrix(name, outputs, inputs, device)
    for plane in (blocks.quants, blocks.high, blocks.small):
        if plane is not None:
            plane.view(torch.uint8).random_(0, 256)
    for plane in (blocks.scales, blocks.minimums):
        if plane is not None:
            plane.uniform_(0.0005, 0.001)
    return blocks


class Product:
    """Copies of one matrix as a layer has it, and one of what it stands for."""

    def __init__(
        self, name: str, outputs: int, inputs: int, *, device: torch.device = CUDA, copies: int | None = None
    ) -> None:
        scratch = Scratch(KIND, device, max(ROWS))
        first = drawn(name, outputs, inputs, device)
        self.bytes, self.outputs, self.inputs = first.nbytes, outputs, inputs
        self.copies = copies or 1 + int(CACHE_BYTES) // self.bytes
        self._most_error = ERRORS[SCALED[name].inputs if name in SCALED else "plain"]
        self.dense = torch.empty(outputs, inputs, dtype=KIND, device=device)
        for start in range(0, outputs, 1024):  # Before it is put into the order of its kernels.
            first.dequantize(start, min(start + 1024, outputs), self.dense[start : start + 1024])
        matrices = [first, *(drawn(name, outputs, inputs, device) for _ in range(self.copies - 1))]
        self._linears = [gpu_linear(QuantizedLinear(matrix, KIND), scratch) for matrix in matrices]

    @cached_property
    def dense_copies(self) -> list[torch.Tensor]:
        return [self.dense, *(self.dense.clone() for _ in range(int(CACHE_BYTES) // self.dense.nbytes))]

    def ours(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        return lambda index: self._linears[index].write(x, out)

    def cublas(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        def launch(index: int) -> None:
            torch.mm(x, self.dense_copies[index].t(), out=out)

        return launch

    def fused(self, x: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
        """Norm, product, and where outputs are gates beside ups their gate: as a layer begins its halves."""
        normed = torch.empty_like(x)
        if len(out.T) < self.outputs:
            return lambda index: self._linears[index].gated(x, norm, 1e-5, "silu", normed, gate_up, out)
        return lambda index: self._linears[index].write_normed(x, norm, 1e-5, normed, out)

    def check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """A wrong product can be fast."""
        self.ours(x, out)(0)
        wanted = x.float() @ self.dense.float().t()
        error = (out.float() - wanted).norm() / wanted.norm()
        if not error < self._most_error:
            raise SystemExit(f"{len(x)} rows, {self.outputs}x{self.inputs}: off by {float(error):.3f} of the result")


def measure(clock: Clock, name: str, rows: tuple[int, ...]) -> None:
    print(f"\n{name:<10}{'rows':>6} |{HEADER} |{'with norm, gate':>16} |{'bf16 cuBLAS us':>15}")
    for shape, (outputs, inputs) in SHAPES.items():
        if clock.over():
            continue
        product = Product(name, outputs, inputs)
        norm = random(inputs)
        for count in rows:
            if clock.over():
                continue
            x, out = random(count, inputs), random(count, outputs)
            product.check(x, out)
            taken = clock.microseconds(product.ours(x, out), product.copies)
            inner = out[:, : outputs // 2] if shape == "gate_up" else out
            fused = clock.microseconds(product.fused(x, norm, random(count, outputs), inner), product.copies)
            dense = clock.microseconds(product.cublas(x, out), len(product.dense_copies))
            print(f"{shape:<10}{count:>6} |{rates(taken, product.bytes)} |{fused:>16.2f} |{dense:>15.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="awq,Q4_K", help=f"of {', '.join((*SCALED, *BLOCKS))}")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=60, help="no new measurement is begun after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    clock = Clock(options.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; share of {MEMORY_BYTES_S / 1e12} TB/s")
    for name in options.formats.split(","):
        measure(clock, name, tuple(int(count) for count in options.rows.split(",")))
    if clock.left_out:
        print(f"{clock.left_out} measurements left out: --seconds {options.seconds:g} are over")


if __name__ == "__main__":
    main()
