"""Random matrices of int4 codes in every layout that the kernels in CUDA take, with their elements; on a GPU in the
order of tensor cores. Knows no kernel."""

from __future__ import annotations

import os

import torch

from holdfast.execution.gpu.cuda.fragments import rearrange
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

NAN = float("nan")
AWQ = ScaledLayout(codes="int4", scales="float16", group=128, zeros=True)
LAYOUTS = {
    "awq": AWQ,
    "gptq 32": ScaledLayout(codes="int4", scales="float16", group=32, zeros=True, ordered=True),
    "compressed 64": ScaledLayout(codes="int4", scales="bfloat16", group=64),
    "wide groups": ScaledLayout(codes="int4", scales="float32", group=256, zeros=True),
    "whole rows": ScaledLayout(codes="int4"),
}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def seeded() -> torch.Generator:
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def drawn(
    layout: ScaledLayout, rows: int, columns: int, source: torch.Generator, scale: float = 1 / 64
) -> tuple[ScaledMatrix, torch.Tensor]:
    """A matrix whose scales are about so large, and its elements in float32."""
    matrix = ScaledMatrix(layout, rows, columns, torch.device("cpu"))
    matrix.fill_codes(0, torch.randint(0, 16, (rows, columns), generator=source, dtype=torch.uint8))
    matrix.scales.copy_((torch.rand(matrix.scales.shape, generator=source) + 0.1) * scale)
    if matrix.zeros is not None:
        matrix.zeros.copy_(torch.randint(0, 17, matrix.zeros.shape, generator=source, dtype=torch.uint8))
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(columns, generator=source))
    exact = torch.empty(rows, columns)
    matrix.dequantize(0, rows, exact)
    return matrix, exact


def on_device(matrix: ScaledMatrix, device: torch.device) -> ScaledMatrix:
    """Rearranged there."""
    moved = ScaledMatrix(matrix.layout, matrix.rows, matrix.columns, device)
    for name in ("codes", "scales", "zeros", "order"):
        if (plane := getattr(matrix, name)) is not None:
            getattr(moved, name).copy_(plane)
    rearrange(moved)
    return moved


def workspace(device: torch.device) -> SplitSums:
    return SplitSums(torch.full((1 << 22,), NAN, device=device), torch.zeros(4096, dtype=torch.int32, device=device))


def rounded_elements(matrix: ScaledMatrix, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [rows, columns] in the order of the codes, as products with many rows have them: rounded to `dtype`."""
    order = slice(None) if matrix.order is None else matrix.order.long()
    return exact[:, order].to(dtype).double()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor) -> None:
    """The result is rounded once; sums are float32."""
    tolerance = 1.1 * UNIT[found.dtype] * wanted.abs() + 2.0**-16 * terms
    worst = ((found.double() - wanted).abs() / tolerance).max().item()
    assert worst <= 1, f"{worst:.2f} of what is allowed"
