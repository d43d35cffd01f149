"""Layers that do not fit in RAM, from a plan: slots that they take turns in, the file that has them, what is told."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.execution.streaming.layer_file import LayerFile
from holdfast.execution.streaming.layer_slots import LayerSlots
from holdfast.planner import Plan
from holdfast.records import LowerTier, MemoryTerm
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")


def layer_slots(config: EngineConfig, plan: Plan) -> LayerSlots | None:
    """None: all layers stay in memory."""
    streamed = plan.engine.streamed
    if streamed is None or config.nvme_path is None:
        return None
    size = format_bytes(streamed.file_bytes)
    log.info("writing %d layers, %s, to a file without a name in %s", len(streamed.layers), size, config.nvme_path)
    return LayerSlots(streamed, LayerFile(Path(config.nvme_path), len(streamed.layers), streamed.place_bytes))


def lower_tiers(config: EngineConfig, plan: Plan) -> list[LowerTier]:
    """Once the file is written."""
    streamed = plan.engine.streamed
    if streamed is None or config.nvme_path is None:
        return []
    disk, size = shutil.disk_usage(config.nvme_path), streamed.file_bytes
    return [
        LowerTier(
            tier="nvme",
            total_bytes=disk.total,
            free_bytes=disk.free + size,
            limited_by="disk",  # Clients are told, and paths are not theirs to know.
            terms=[MemoryTerm(tier="nvme", term="weights", planned_bytes=size, measured_bytes=size)],
        )
    ]
