"""Devices of the GPU catalogue for tests that build a machine by hand. Knows no plan."""

from __future__ import annotations

from holdfast.hardware import gpus
from holdfast.planner.inputs.question import Device


def device_of(name: str, index: int = 0) -> Device:
    """With all its memory free."""
    gpu = gpus.find(name)
    return Device(
        index=index,
        name=gpu.name,
        kind="gpu",
        total_bytes=gpu.usable_bytes,
        free_bytes=gpu.usable_bytes,
        gpu=gpu,
        unified=gpu.unified,
    )
