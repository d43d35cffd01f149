"""The plan of a server whose model is larger than its GPU: layers wait in pinned RAM, and on a disk where RAM is too
small as well. Refused, with numbers, where that would leave the host without memory.

Owns the host's budget and the words; which layers stay is chosen in `fit.placement`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from holdfast.config import EngineConfig
from holdfast.footprint.structured_output import FEW_CORES, forms_bytes
from holdfast.hardware import Memory
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.placement import Placement, can_stream, place
from holdfast.planner.fit.result import Plan
from holdfast.planner.serve import refusals
from holdfast.planner.serve.streamed import disk_room
from holdfast.units import GIB, MIB, counted, format_bytes

HOST_ENGINE_BYTES = 3 * GIB
"""Of the engine's process in RAM beside pinned memory: torch with CUDA and its libraries, kernels being compiled. An
assumption on the safe side."""
HOST_SHARE = 0.9
"""Of the RAM that is free, where --ram is not set: pinned memory cannot be swapped out, and what is left is for page
cache and neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """RAM and disk beside a GPU, as far as layers may wait there."""

    machine: Memory
    ram_bytes: int
    """Of this server."""
    other_bytes: int
    """Of it, not for layers: both processes, structured output."""
    disk_bytes: int | None
    """None: there is no folder for layers."""
    as_set: bool

    @property
    def pinned_bytes(self) -> int:
        return max(0, self.ram_bytes - self.other_bytes)

    @property
    def reason(self) -> str:
        free = f"{format_bytes(self.machine.available_bytes)} free ({self.machine.limited_by})"
        share = f"--ram; {free}" if self.as_set else f"{HOST_SHARE:g} of {free}"
        return f"{share}, less {format_bytes(self.other_bytes)} for the server's processes"


def host_share(machine: Memory, config: EngineConfig, spec: ModelSpec, front_bytes: int) -> HostShare:
    if config.ram is not None and config.ram > machine.available_bytes:
        raise refusals.budget_is_not_there(config.ram, machine)
    forms = forms_bytes(spec.vocab_size, config.sequences, os.cpu_count() or FEW_CORES)
    return HostShare(
        machine=machine,
        ram_bytes=int(machine.available_bytes * HOST_SHARE) if config.ram is None else config.ram,
        other_bytes=HOST_ENGINE_BYTES + front_bytes + (0 if config.skip_tokenizer_init else forms),
        disk_bytes=None if config.nvme_path is None else disk_room(config.nvme_path, config.nvme),
        as_set=config.ram is not None,
    )


def with_offload(found: Plan, config: EngineConfig, host: HostShare) -> Plan:
    """`found` does not fit on its GPU; nor does what is returned, where streaming layers does not help."""
    if not can_stream(found.question):
        return found
    machine = replace(found.question.machine, ram_bytes=host.pinned_bytes, nvme_bytes=host.disk_bytes)
    placed = place(replace(found.question, machine=machine), config.kv_cache_memory_bytes or 0)
    if placed is None:
        return found
    if not placed.fits:
        raise _host_is_short(placed, host, config)
    return replace(placed.plan, decisions=(*placed.plan.decisions, *_decisions(placed, host)))


def _decisions(placed: Placement, host: HostShare) -> list[Decision]:
    streamed, layers = placed.streamed, len(placed.plan.question.model.spec.layers)
    value = f"{len(streamed.layers)} of {layers}, {format_bytes(streamed.weights_bytes)}"
    reason = "the others stay in VRAM; these are copied to the GPU for every step; --no-offload refuses instead"
    found = [
        Decision("streamed_layers", value, reason, "planner", lowered=True),
        Decision("pinned_ram", format_bytes(streamed.pinned_bytes), f"of {host.reason}", "planner"),
    ]
    if streamed.on_disk:
        on_disk = f"{len(streamed.on_disk)} of {len(streamed.layers)}, {format_bytes(streamed.file_bytes)}"
        reason = "RAM holds the others; these are read from the disk of --nvme-path for every step"
        found.append(Decision("layers_on_disk", on_disk, reason, "planner", lowered=True))
    return found


def _host_is_short(placed: Placement, host: HostShare, config: EngineConfig) -> refusals.PlanRefusal:
    streamed, plan = placed.streamed, placed.plan
    name, gpu, layers = plan.question.model.name, plan.device.name, counted(len(streamed.layers), "layer")
    if placed.ram_short_bytes or config.nvme_path is None:
        return refusals.PlanRefusal(
            f"{name} does not fit on {gpu}, and the layers that would wait in pinned RAM do not fit there",
            needed=f"{format_bytes(streamed.pinned_bytes)} of pinned RAM for {layers}",
            found=f"{format_bytes(host.pinned_bytes)}: {host.reason}: {format_bytes(placed.ram_short_bytes)} short",
            fix="--nvme-path DIR on a fast disk, more RAM, or a quantized model"
            if config.nvme_path is None
            else "a larger --ram, or a quantized model",
            field="ram",
        )
    return refusals.PlanRefusal(
        f"{name} does not fit on {gpu}, and the layers that RAM does not hold do not fit in {config.nvme_path}",
        needed=f"{format_bytes(streamed.file_bytes)} for {counted(len(streamed.on_disk), 'layer')}",
        found=f"{format_bytes(host.disk_bytes or 0)}: {format_bytes(placed.disk_short_bytes)} short",
        changes=({"nvme": f"{-(-streamed.file_bytes // MIB)}MiB"},) if config.nvme is not None else (),
        fix="--nvme-path on a larger disk, or a larger --ram",
        field="nvme_path",
    )
