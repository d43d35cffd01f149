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
from holdfast.execution.streaming.disk.layer_slots import LayerSlots
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.hardware import memory, resident
from holdfast.planner import Plan
from holdfast.planner.serve.refusals import RAM_IS_SHORT
from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES, LEFT_FREE_BYTES, host_budget
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
    order = [*range(layers, len(sizes)), *range(layers)]
    pinned = PinnedMemory(sizes, device, progress, background=order, room=room_to_pin)
    ranges = None if streamed.resident_sizes is None else LayerRanges(streamed.all_sizes, device)
    share, held = layers_share(config, plan), list[weakref.ref[DeviceLayers]]()

    def room() -> int:
        """Of RAM that may still be pinned."""
        now = held[0]()
        assert now is not None, "who asks has it"
        return room_for_more(share, now.pinned_bytes + now.host_bytes, now.kv_to_come())

    made = DeviceLayers(streamed, device, CudaCopies(device), pinned, file, ranges, room)
    made.kv_to_come = lambda: plan.engine.kv_ram_bytes
    held.append(weakref.ref(made))
    return made


def layers_share(config: EngineConfig, plan: Plan) -> int | None:
    """Of RAM, what layers or experts may take of the server's share: without what KV pages have of it. None: it has
    none, but what is free."""
    most = plan.question.machine.pinned_bytes
    # What was set for KV pages is left out already; a default was chosen when layers were placed.
    return most if most is None or config.kv_ram_bytes is not None else most - plan.engine.kv_ram_bytes


def room_for_more(share: int | None, taken_bytes: int, to_come_bytes: int) -> int:
    """Of RAM that may still be pinned while the server runs: of the share, of which so much is taken, and of what is
    free now, of which so much will be."""
    free = host_budget(memory().available_bytes) - to_come_bytes
    return max(0, free if share is None else min(free, share - taken_bytes))


def room_to_pin() -> int:
    """Of RAM, while what was planned is pinned: others may take what is free meanwhile."""
    return memory().available_bytes - LEFT_FREE_BYTES


def check_ram(pinned_bytes: int, what: str) -> None:
    """That it is there now, beside what this process will still take for itself: the plan may be of another day, before
    the engine slept or was started again."""
    host, own = memory(), resident()
    held = 0 if own is None else own.now_bytes - own.files_bytes
    beside = max(0, HOST_ENGINE_BYTES - held)
    short = pinned_bytes + beside - host.available_bytes
    if short > 0:
        raise DoesNotFitError(
            "RAM no longer holds what does not fit on the GPU: pinned, it would leave the machine without memory",
            code=RAM_IS_SHORT,
            needed=f"{format_bytes(pinned_bytes)} of pinned RAM for {what}, and {format_bytes(beside)} for the engine's"
            " process",
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
