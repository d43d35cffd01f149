"""Settings with which a model lies over VRAM, RAM and a disk: budgets found by planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.errors import HoldfastError
from holdfast.footprint.streamed import StreamedLayers
from holdfast.units import GIB, MIB


def three_tiers(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """With a budget of VRAM that leaves some layers there, and one of RAM that holds some of the others."""
    apart, model = settings | {"nvme_path": folder}, find_model(EngineConfig(**settings))

    def streamed(**budgets: int) -> StreamedLayers | None:
        """As planned; None: all layers stay on the GPU."""
        return plan_model(EngineConfig(**apart, **budgets), model).engine.streamed

    vram = _middle(lambda size: streamed(vram=size) is None, 512 * MIB, 16 * GIB)
    ram = _middle(lambda size: _none_on_disk(streamed(vram=vram, ram=size)), MIB, 16 * GIB)
    found = streamed(vram=vram, ram=ram)
    assert found is not None
    assert len(found.in_ram) > 1, "some wait in RAM"
    assert len(found.on_disk) > 1, "some on the disk"
    return apart | {"vram": vram, "ram": ram}


def _none_on_disk(layers: StreamedLayers | None) -> bool:
    return layers is None or not layers.on_disk


def _middle(is_enough: Callable[[int], bool], least: int, most: int) -> int:
    """Between the least that is not refused, and the least that is enough."""

    def refused(size: int) -> bool:
        try:
            is_enough(size)
        except HoldfastError:
            return True
        return False

    taken = _first(lambda size: not refused(size), least, most)
    return (taken + _first(lambda size: not refused(size) and is_enough(size), taken, most)) // 2


def _first(holds: Callable[[int], bool], least: int, most: int) -> int:
    while most - least > MIB // 4:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most
