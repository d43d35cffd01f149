"""Scaled matrices and rounded inputs as the kernels with experts take them: tensors, and nothing that is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from holdfast.footprint.scaled_layouts import ScaledLayout


class ScaledPlanes(NamedTuple):
    """A matrix of `execution.weights.scaled_matrix`, the rows of all experts one below the other."""

    layout: ScaledLayout
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def code_planes(matrix: ScaledPlanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [rows, bytes], scales, zero points or something that is not read)"""
    codes = matrix.codes.view(len(matrix.codes), -1)
    if matrix.layout.codes == "fp8":
        codes = codes.view(torch.uint8)
    return codes, matrix.scales, codes if matrix.zeros is None else matrix.zeros


class RoundedRows(NamedTuple):
    """Inputs in small codes."""

    codes: torch.Tensor
    """uint8 (e4m3's bits) or int8 [rows, columns]"""
    scales: torch.Tensor
    """float32 [rows, 1 or groups of columns]"""
