"""The seam by device: one table of functions for each kind of device the decoder can run on."""

from __future__ import annotations

import torch

from holdfast.errors import ConfigurationError
from holdfast.execution.ops.interface import (
    AttentionBackend,
    AttentionShape,
    FusedLayers,
    Heads,
    Ops,
    StepBuffers,
    StepRows,
)

__all__ = ["AttentionBackend", "AttentionShape", "FusedLayers", "Heads", "Ops", "StepBuffers", "StepRows", "ops_for"]


def ops_for(device: torch.device, *, reference: bool = False, compiled: bool = False) -> Ops:
    """`reference`: the plain forms that run anywhere and that the fast ones are tested against.
    `compiled`: kernels of our own, for float32, where `native.available()`."""
    if reference:
        from holdfast.execution.ops.reference import OPS

        return OPS
    if device.type == "cpu" and compiled:
        from holdfast.execution.ops.compiled import OPS as COMPILED_OPS

        return COMPILED_OPS
    if device.type == "cpu":
        from holdfast.execution.ops.cpu import OPS as CPU_OPS

        return CPU_OPS
    raise ConfigurationError(
        f"no kernels for device {device.type!r}", needed="cpu", found=device.type, fix="--device cpu", field="device"
    )
