"""Products of rounded inputs on a GPU (FP8 and INT8): microseconds, and the share of what memory or tensor cores give.

    layer      the four products of an 8B model's layer one after the other, with the kernels that norm, gate and round
    products   each way there is for a product alone: the choice among them was made by this
    rounding   the kernels before a product

Launches run in a CUDA graph, as decoding runs them, over enough copies of a matrix that none is still in cache. Owns no
model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_kernels_layer import CACHE_BYTES, MEMORY_BYTES_S, Clock, alone, random, rates
from holdfast.execution.gpu.layers.linear import Scratch, gpu_linear
from holdfast.execution.gpu.layers.rounded_linear import RoundedGpuLinear
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.triton_kernels.rounded.products import rounded_product, scale_sums
from holdfast.execution.triton_kernels.rounded.rounding import round_rows
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.rounded import GROUP, MOST_PARTS, PART_BYTES
from holdfast.footprint.scaled_layouts import ScaledLayout

ARITHMETIC_S = 1400e12
"""What an H200 gives in FP8."""
KIND = torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}
"""(outputs, inputs) of an 8B model's layer."""
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 2048, 8192)
LAYERS = 6
LAYOUTS = {
    "fp8": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8 blocks": ScaledLayout(codes="fp8", inputs="fp8", group=GROUP, group_rows=GROUP, input_group=GROUP),
    "int8": ScaledLayout(codes="int8", inputs="int8"),
}


def matrix(layout: ScaledLayout, outputs: int, inputs: int) -> ScaledMatrix:
    made = ScaledMatrix(layout, outputs, inputs, torch.device("cuda"))
    most = 448.0 if layout.codes == "fp8" else 127.0
    wide = torch.randn(outputs, inputs, device="cuda").mul_(most / 7).clamp_(-most, most)
    made.codes.copy_(wide.to(made.codes.dtype))
    made.scales.copy_(torch.rand_like(made.scales) / most / inputs**0.5)
    return made


def report(name: str, rows: int, taken: float, codes: int) -> None:
    """`codes`: bytes of matrices read, each multiplied with every row."""
    done = 2 * rows * codes / taken * 1e6
    print(f"{name:<28}{rows:>5} |{rates(taken, codes)} |{done / 1e12:>6.0f}{done / ARITHMETIC_S:>6.0%}", flush=True)


class Layers:
    """Some layers of an 8B model, without attention between their products."""

    def __init__(self, layout: ScaledLayout) -> None:
        scratch = Scratch(KIND, torch.device("cuda"), max(ROWS))
        self._parts = [
            [gpu_linear(QuantizedLinear(matrix(layout, *shape), KIND), scratch) for shape in SHAPES.values()]
            for _ in range(LAYERS)
        ]
        self._norm = random(4096)

    def launch(self, rows: int) -> Callable[[int], None]:
        return partial(self._run, random(rows, 4096), random(rows, 6144), random(rows, 28672))

    def _run(self, stream: torch.Tensor, qkv: torch.Tensor, wide: torch.Tensor, index: int) -> None:
        project, output, gate_up, down = self._parts[index]
        project.write_normed(stream, self._norm, 1e-5, stream, qkv)
        output.add(qkv[:, :4096], stream)
        gate_up.write_normed(stream, self._norm, 1e-5, stream, wide)
        if isinstance(down, RoundedGpuLinear):
            down.add_gated(wide, "silu", stream)


def layer(clock: Clock) -> None:
    print(f"\n{'a layer':<28}{'rows':>5} |{'us':>9}{'GB/s':>8}{'share':>6} |{'TFLOP/s and share':>18}")
    codes = sum(outputs * inputs for outputs, inputs in SHAPES.values())
    for name, layout in LAYOUTS.items():
        layers = Layers(layout)
        for rows in ROWS:
            if not clock.over():
                report(name, rows, clock.microseconds(layers.launch(rows), LAYERS), codes)


class Product:
    """One product in every way there is, on copies of a matrix."""

    def __init__(self, rows: int, outputs: int, inputs: int, layout: ScaledLayout) -> None:
        self.grouped = layout.group > 0
        self.matrices = [matrix(layout, outputs, inputs) for _ in range(max(2, int(CACHE_BYTES) // (outputs * inputs)))]
        self.codes = torch.empty(rows, inputs, device="cuda").to(self.matrices[0].codes.dtype)
        groups = inputs // GROUP if self.grouped else 1
        self.scales = torch.empty(groups, rows, device="cuda").t()
        round_rows(random(rows, inputs), self.codes, self.scales, grouped=self.grouped)
        self.out, self.one = random(rows, outputs), torch.ones((), device="cuda")
        self.parts = torch.empty(MOST_PARTS * PART_BYTES // 4, device="cuda")
        self.arrivals = torch.zeros(MOST_PARTS, dtype=torch.int32, device="cuda")

    def ways(self) -> dict[str, Callable[[int], None]]:
        found: dict[str, Callable[[int], None]] = {"ours": self.ours}
        if self.codes.dtype == torch.int8:
            return found | {"int_mm, unscaled": self.integers}
        if len(self.codes) >= 16:
            found["cuBLAS"] = lambda index: self.library(index, fast=not self.grouped)
        if len(self.codes) >= 16 and not self.grouped:
            found["cuBLAS, exact sums"] = lambda index: self.library(index, fast=False)
            found["cuBLAS, then scaled"] = self.scaled_after
        return found

    def ours(self, index: int) -> None:
        one = self.matrices[index]
        rounded_product(
            self.codes, self.scales, one.codes, one.scales, self.out, self.parts, self.arrivals, grouped=self.grouped
        )

    def library(self, index: int, *, fast: bool) -> None:
        one = self.matrices[index]
        torch._scaled_mm(
            self.codes, one.codes.t(), self.scales, one.scales.t(), out_dtype=KIND, use_fast_accum=fast, out=self.out
        )

    def scaled_after(self, index: int) -> None:
        one = self.matrices[index]
        torch._scaled_mm(
            self.codes, one.codes.t(), self.one, self.one, out_dtype=KIND, use_fast_accum=True, out=self.out
        )
        scale_sums(self.out, self.scales, one.scales, self.out)

    def integers(self, index: int) -> None:
        if len(self.codes) > 16:
            torch._int_mm(self.codes, self.matrices[index].codes.t())

    def error(self, way: Callable[[int], None]) -> float:
        """Of the result, against float64."""
        one, rows = self.matrices[0], min(256, len(self.codes))
        wide = torch.empty(one.rows, one.columns, device="cuda")
        one.dequantize(0, one.rows, wide)
        groups = self.scales.shape[1]
        x = self.codes[:rows].double().view(rows, groups, -1) * self.scales[:rows].double()[..., None]
        wanted = x.view(rows, -1) @ wide.double().t()
        self.out.fill_(float("nan"))
        way(0)
        return float((self.out[:rows].double() - wanted).norm() / wanted.norm())


def products(clock: Clock) -> None:
    print(f"\n{'a product':<28}{'rows':>5} |{'us':>9}{'GB/s':>8}{'share':>6} |{'TFLOP/s and share':>18}")
    for name, layout in LAYOUTS.items():
        for part, (outputs, inputs) in SHAPES.items():
            for rows in ROWS[2:]:
                if clock.over():
                    continue
                product = Product(rows, outputs, inputs, layout)
                for way, launch in product.ways().items():
                    if way != "int_mm, unscaled" and not product.error(launch) < 0.01:
                        raise SystemExit(f"{name} {part}, {rows} rows, {way}: off by {product.error(launch):.3f}")
                    taken = clock.microseconds(launch, len(product.matrices))
                    report(f"{name} {part}, {way}"[:28], rows, taken, outputs * inputs)


def rounding(clock: Clock) -> None:
    print(f"\n{'rounding to fp8':<28}{'rows':>5} |{'us':>9}{'GB/s':>8}{'share':>6}")
    for rows in (1, 64, 2048, 8192):
        if clock.over():
            continue
        stream, gate_up, norm = random(rows, 4096), random(rows, 28672), random(4096)
        codes = torch.empty(rows, 14336, device="cuda").to(torch.float8_e4m3fn)
        narrow, scales = codes.view(-1)[: rows * 4096].view(rows, 4096), torch.empty(rows, 1, device="cuda")
        gated = partial(round_rows, gate_up, codes, scales, activation="silu")
        works: dict[str, tuple[Callable[[], None], int]] = {
            "plain": (partial(round_rows, stream, narrow, scales), rows * 4096 * 3),
            "after a norm": (partial(round_rows, stream, narrow, scales, norm=norm), rows * 4096 * 3),
            "after a gate": (gated, rows * 14336 * 5),
        }
        for name, (work, moved) in works.items():
            print(f"{name:<28}{rows:>5} |{rates(clock.microseconds(alone(work), 1), moved)}", flush=True)


PARTS = {"layer": layer, "products": products, "rounding": rounding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), help="one part")
    parser.add_argument("--seconds", type=float, default=80, help="no new measurement is begun after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    clock = Clock(options.seconds)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; shares of {MEMORY_BYTES_S / 1e12} TB/s and "
        f"{ARITHMETIC_S / 1e12:.0f} TFLOP/s"
    )
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(clock)
    if clock.left_out:
        print(f"{clock.left_out} measurements left out: --seconds {options.seconds:g} are over")


if __name__ == "__main__":
    main()
