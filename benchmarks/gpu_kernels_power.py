"""What the numbers in a matrix cost a long product on a GPU: TFLOP/s, watts and clock, by type and by bits in use.

    python -m benchmarks.gpu_kernels_power --rows 8192 --seconds 0.5 --rounds 2

The same cuBLAS product with a prompt's rows runs for `--seconds` at a time, the kinds of matrices in turns, so that all
see the same warmth. A GPU at its limit of power lowers its clock: a type, or numbers with more changing bits, can cost
speed although the arithmetic is the same. `awq` is what expanding int4 codes gives (code times scale, rounded to the
type), `awq 9` that rounded to 9 significant bits, `codes` the codes alone. Owns no kernel of ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""(outputs, inputs) of an 8B model."""
GROUP = 128
SPREAD = 0.02
"""Standard deviation of the weights."""
BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Significant ones, the first included."""

Matrix = Callable[[int, int, torch.device], torch.Tensor]


def normal(kind: torch.dtype) -> Matrix:
    return lambda outputs, inputs, device: torch.randn(outputs, inputs, device=device, dtype=kind).mul_(SPREAD)


def codes(kind: torch.dtype) -> Matrix:
    """Codes less their zero points, both of 4 bits."""

    def drawn(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
        code = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP), device=device, dtype=torch.int8)
        zero = torch.randint(0, 16, (outputs, inputs // GROUP, 1), device=device, dtype=torch.int8)
        return (code - zero).view(outputs, inputs).to(kind)

    return drawn


def awq(kind: torch.dtype, bits: int = 0) -> Matrix:
    """Codes times a float16 scale of their group, in `kind`; with `bits` rounded to so many significant ones."""

    def drawn(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
        scales = torch.rand(outputs, inputs // GROUP, 1, device=device).add_(0.5).mul_(SPREAD / 6.5).half()
        matrix = codes(kind)(outputs, inputs, device).view(outputs, -1, GROUP).mul_(scales).view(outputs, inputs)
        return significant(matrix, bits) if bits else matrix

    return drawn


def significant(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded in place to so many significant bits; half goes away from zero."""
    dropped = BITS[matrix.dtype] - bits
    whole = matrix.view(torch.int16)
    # The sign is the highest bit of a word whose rest counts up with the magnitude, across exponents.
    return whole.add_(1 << (dropped - 1)).bitwise_and_(-1 << dropped).view(matrix.dtype)


MATRICES: dict[str, tuple[torch.dtype, Matrix]] = {
    "bfloat16": (torch.bfloat16, normal(torch.bfloat16)),
    "float16": (torch.float16, normal(torch.float16)),
    "awq bfloat16": (torch.bfloat16, awq(torch.bfloat16)),
    "awq float16": (torch.float16, awq(torch.float16)),
    "awq 10": (torch.float16, awq(torch.float16, 10)),
    "awq 9": (torch.float16, awq(torch.float16, 9)),
    "awq 8": (torch.float16, awq(torch.float16, 8)),
    "codes": (torch.float16, codes(torch.float16)),
}


class Meter(Protocol):
    def joules(self) -> float: ...
    def clock_mhz(self) -> float: ...


class NvmlMeter:
    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def clock_mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))


@dataclass(frozen=True, slots=True)
class Reading:
    tflop_per_s: float
    watts: float
    clock_mhz: float


class Product:
    """One matrix and the rows that it is multiplied with."""

    def __init__(self, name: str, shape: tuple[int, int], rows: int) -> None:
        kind, made = MATRICES[name]
        self._matrix = made(*shape, torch.device("cuda"))
        self._x = torch.randn(rows, shape[1], device="cuda", dtype=kind)
        self._out = torch.empty(rows, shape[0], device="cuda", dtype=kind)
        self._flop = 2 * rows * shape[0] * shape[1]

    def _run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._x, self._matrix.t(), out=self._out)

    def measure(self, seconds: float, meter: Meter) -> Reading:
        """The first third only brings the GPU to its clock."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._run(4)
        end.record()
        end.synchronize()
        count = max(8, int(seconds / (begin.elapsed_time(end) / 4e3)))
        self._run(count // 3)
        torch.cuda.synchronize()
        joules = meter.joules()
        begin.record()
        self._run(count // 2)
        clock = meter.clock_mhz()
        self._run(count // 2)
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end) / 1e3
        return Reading(self._flop * (count // 2 * 2) / taken / 1e12, (meter.joules() - joules) / taken, clock)


def measured(shapes: list[str], names: list[str], rows: int, seconds: float, rounds: int) -> Iterator[dict[str, Any]]:
    meter = NvmlMeter()
    for shape in shapes:
        products = {name: Product(name, SHAPES[shape], rows) for name in names}
        found: dict[str, list[Reading]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                found[name].append(products[name].measure(seconds, meter))
        first = middle(found[names[0]]).tflop_per_s
        for name in names:
            one = middle(found[name])
            print(
                f"{shape:<10}{name:<14}{one.tflop_per_s:>10.1f}{one.tflop_per_s / first:>8.3f}"
                f"{one.watts:>8.0f}{one.clock_mhz:>8.0f}",
                flush=True,
            )
            yield {
                "shape": shape,
                "matrix": name,
                "tflop_per_s": [reading.tflop_per_s for reading in found[name]],
                "watts": [reading.watts for reading in found[name]],
                "clock_mhz": [reading.clock_mhz for reading in found[name]],
            }


def middle(readings: list[Reading]) -> Reading:
    return Reading(
        statistics.median(one.tflop_per_s for one in readings),
        statistics.median(one.watts for one in readings),
        statistics.median(one.clock_mhz for one in readings),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rows} rows; times the first's")
    print(f"{'':<24}{'TFLOP/s':>10}{'times':>8}{'W':>8}{'MHz':>8}")
    found = list(measured(options.shapes, options.matrices, options.rows, options.seconds, options.rounds))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
