"""Layers that do not fit in RAM or on the GPU, from a plan: slots that they take turns in, where they wait, what is
told."""

from __future__ import annotations

import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.execution.device import Device
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.execution.streaming.layer_slots import LayerSlots
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.hardware import memory
from holdfast.planner import Plan
from holdfast.planner.serve.refusals import RAM_IS_SHORT
from holdfast.planner.sizing.host_ram import host_budget
from holdfast.records import LowerTier, MemoryTerm
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")


def layer_slots(config: EngineConfig, plan: Plan) -> LayerSlots | None:
    """None: all layers stay in memory."""
    streamed = plan.engine.streamed
    if streamed is None or config.nvme_path is None:
        return None
    size = format_bytes(streamed.file_bytes)
    log.info("writing %d layers, %s, to a file without a name in %s", len(streamed.layers), size, config.nvme_path)
    return LayerSlots(streamed, LayerFile(Path(config.nvme_path), len(streamed.layers), streamed.waiting_bytes))


def device_layers(
    config: EngineConfig, plan: Plan, device: Device, progress: Callable[[int, int], None]
) -> DeviceLayers | None:
    """None: all layers stay on the GPU. `progress`: of the bytes that are pinned."""
    streamed = plan.engine.streamed
    if streamed is None:
        return None
    check_ram(streamed.pinned_bytes, counted(len(streamed.layers), "layer"))
    file = None
    if streamed.file_bytes and config.nvme_path is not None:
        size, count = format_bytes(streamed.file_bytes), len(streamed.on_disk)
        beside = " and the embedding" if streamed.embedding_on_disk else ""
        log.info("writing %d layers%s, %s, to a file without a name in %s", count, beside, size, config.nvme_path)
        behind = streamed.file_bytes - streamed.embedding_offset
        file = LayerFile(Path(config.nvme_path), count, streamed.waiting_bytes, behind_bytes=behind)
    log.info("pinning %s of RAM for %d layers", format_bytes(streamed.pinned_bytes), len(streamed.layers))
    sizes, layers = streamed.pinned_sizes, len(streamed.in_ram)
    # What the first layers are loaded with comes first; the others are pinned while these are loaded.
    pinned = PinnedMemory(sizes, device, progress, background=[*range(layers, len(sizes)), *range(layers)])
    ranges = None if streamed.resident_sizes is None else LayerRanges(streamed.all_sizes, device)
    most, held = plan.question.machine.pinned_bytes, list[weakref.ref[DeviceLayers]]()

    def room() -> int:
        """Of RAM that may still be pinned: of the server's share, and of what is free now."""
        now, free = held[0](), host_budget(memory().available_bytes)
        taken = 0 if now is None else now.pinned_bytes + now.host_bytes
        return free if most is None else max(0, min(free, most - taken))

    made = DeviceLayers(streamed, device, CudaCopies(device), pinned, file, ranges, room)
    held.append(weakref.ref(made))
    return made


def check_ram(pinned_bytes: int, what: str) -> None:
    """That it is there now: the plan may be of another day, before the engine slept or was started again."""
    host = memory()
    short = pinned_bytes - host.available_bytes
    if short > 0:
        raise DoesNotFitError(
            "RAM no longer holds what does not fit on the GPU: pinned, it would leave the machine without memory",
            code=RAM_IS_SHORT,
            needed=f"{format_bytes(pinned_bytes)} of pinned RAM for {what}",
            found=f"{format_bytes(host.available_bytes)} free ({host.limited_by}): {format_bytes(short)} short",
            fix="stop what else takes RAM, or --nvme-path DIR on a fast disk with room for them",
            field="nvme_path",
        )


def tiers_below_gpu(config: EngineConfig, plan: Plan, pinned_bytes: int, mlps_bytes: int = 0) -> list[LowerTier]:
    """Once layers are in place. `pinned_bytes`: as measured; `mlps_bytes`: of those that the host is to have too."""
    streamed = plan.engine.streamed
    if streamed is None:
        return []
    host, planned = memory(), streamed.pinned_bytes
    pinned = LowerTier(
        tier="ram",
        total_bytes=host.total_bytes,
        free_bytes=host.available_bytes + pinned_bytes,
        limited_by=host.limited_by,
        terms=[
            MemoryTerm(tier="ram", term="weights", planned_bytes=planned, measured_bytes=pinned_bytes),
            *([MemoryTerm(tier="ram", term="mlps_cpu", planned_bytes=mlps_bytes)] if mlps_bytes else []),
        ],
    )
    return [pinned, *(lower_tiers(config, plan) if streamed.file_bytes else [])]


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
