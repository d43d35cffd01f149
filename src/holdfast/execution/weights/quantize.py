"""Weights quantized while they are loaded, tile by tile of rows, on the device that they are for.

    fp8     a row has one scale, its largest weight / 448
    int4    groups of a row, codes -8 to 7 without zero points; of SHRINKS · largest / 7 the scale with least error

A group of zeros has the scale zero. Weights that are no numbers, or too large for the scales, are refused by the name
that the caller gives. Knows no files.
"""

from __future__ import annotations

import torch

from holdfast.errors import CheckpointError
from holdfast.execution.weights.scaled_matrix import INT4_ZERO, ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

FP8_MAX = 448.0
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of the largest weight of a group: cutting it off leaves finer steps for the others."""
TILE_ELEMENTS = 1 << 20
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def fill_quantized(matrix: ScaledMatrix, first: int, weights: torch.Tensor, name: str) -> None:
    """Numbers [rows, columns] to rows first, first+1, ... Raises CheckpointError with the tensor's `name`."""
    step = max(1, TILE_ELEMENTS // matrix.columns)
    for start in range(0, len(weights), step):
        wide = weights[start : start + step].float()
        codes, scales = quantize_rows(wide, matrix.layout)
        if not bool(torch.isfinite(scales).all()):
            raise _no_scales(wide, matrix.layout, name)
        matrix.fill_codes(first + start, codes)
        matrix.scales[first + start : first + start + len(wide)] = scales


def _no_scales(wide: torch.Tensor, layout: ScaledLayout, name: str) -> CheckpointError:
    largest = float(wide.abs().max())
    finite = torch.isfinite(wide).all()
    most = torch.finfo(getattr(torch, layout.scales)).max
    return CheckpointError(
        f"tensor {name!r} cannot be quantized while it is loaded",
        needed=f"finite weights, with scales of at most {most:g}",
        found=f"weights to {largest:g}" if finite else "NaN or infinity among the weights",
        fix="leave --quantization out" if finite else "download the model again: its weights are broken",
        field="quantization",
    )


def quantize_rows(wide: torch.Tensor, layout: ScaledLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes as `ScaledMatrix.fill_codes` takes them, scales [rows, groups]) of float32 [rows, columns]."""
    if layout.codes == "fp8":
        scales = wide.abs().amax(1, keepdim=True) / FP8_MAX
        return (wide * _inverse(scales)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales
    groups = wide.view(len(wide), -1, layout.group)
    largest = groups.abs().amax(-1, keepdim=True)
    kind = getattr(torch, layout.scales)
    best, least = _scales(groups, largest * SHRINKS[0], kind)
    for shrink in SHRINKS[1:]:
        scales, error = _scales(groups, largest * shrink, kind)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    codes = _rounded(groups, best.float()).add_(INT4_ZERO).to(torch.uint8)
    return codes.view(wide.shape), best.squeeze(-1)


def _scales(groups: torch.Tensor, largest: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales in their type, squared error of each group with them)"""
    scales = (largest / 7).to(kind)
    steps = scales.float()
    return scales, _rounded(groups, steps).mul_(steps).sub_(groups).square_().sum(-1, keepdim=True)


def _rounded(groups: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Codes from -8 to 7, still as numbers. All is done in place: on a CPU this is bound by its memory."""
    return (groups * _inverse(steps)).round_().clamp_(-INT4_ZERO, INT4_ZERO - 1)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """0 also for scales so small that theirs would be infinite: such weights are as good as zero."""
    return torch.where(scales < _LEAST_SCALE, 0.0, 1.0 / scales)
