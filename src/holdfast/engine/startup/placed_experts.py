"""Experts that do not all fit on the GPU, from a plan: where they wait, and the host that computes with them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.errors import DoesNotFitError
from holdfast.execution.device import DTYPES, Device
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.weights.load import load_host_experts
from holdfast.footprint.expert_places import ExpertPlaces, exchange_layout
from holdfast.hardware import memory, processor
from holdfast.models import ModelSpec
from holdfast.planner import Plan
from holdfast.planner.serve.refusals import RAM_IS_SHORT
from holdfast.records import LowerTier, MemoryTerm
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

PAGE_BYTES = 4096


def device_experts(plan: Plan, device: Device, progress: Callable[[int, int], None]) -> DeviceExperts | None:
    """None: all experts stay on the GPU, or whole layers come. `progress`: of the bytes that are pinned."""
    places = plan.engine.expert_places
    if places is None:
        return None
    what = f"the experts of {counted(len(places.layers), 'layer')}"
    check_ram(places.pinned_bytes + places.host_bytes, what)
    log.info("pinning %s of RAM for %s", format_bytes(places.pinned_bytes), what)
    return DeviceExperts(places, device, CudaCopies(device), PinnedMemory(places.pinned_sizes, device, progress))


def expert_host(plan: Plan, spec: ModelSpec, checkpoint: Checkpoint | None, device: Device) -> ExpertHost | None:
    """With the experts that wait once more; None: the host computes nothing."""
    places = plan.engine.expert_places
    if places is None or not places.host_sizes:
        return None
    log.info("loading %s of experts for the host's cores", format_bytes(places.host_bytes))
    dtype = DTYPES[plan.dtype]
    layout = exchange_layout(spec, places, plan.limits.max_num_seqs, dtype.itemsize)
    size = -(-layout.nbytes // PAGE_BYTES) * PAGE_BYTES
    layers = load_host_experts(spec, checkpoint, places.layers, plan.engine.quantize)
    # One core launches the GPU's kernels meanwhile.
    threads = max(1, processor().cores - 1)
    return ExpertHost(layers, layout, PinnedMemory([size], device), dtype, device, threads)


def expert_tier(plan: Plan, places: ExpertPlaces, pinned_bytes: int) -> LowerTier:
    """Once experts are in place. `pinned_bytes`: as measured, the exchange with the host included."""
    host = memory()
    terms = [MemoryTerm(tier="ram", term="experts", planned_bytes=places.pinned_bytes, measured_bytes=pinned_bytes)]
    if places.host_sizes:
        terms.append(MemoryTerm(tier="ram", term="experts_cpu", planned_bytes=places.host_bytes))
    return LowerTier(
        tier="ram",
        total_bytes=host.total_bytes,
        free_bytes=host.available_bytes + pinned_bytes + places.host_bytes,
        limited_by=host.limited_by,
        terms=terms,
    )


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
