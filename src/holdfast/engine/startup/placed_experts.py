"""Experts that do not all fit on the GPU, from a plan: where they wait, and the host that computes with them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.startup.streamed_layers import check_ram, layers_share, room_for_more, room_to_pin
from holdfast.execution.device import DTYPES, Device
from holdfast.execution.native import ExpertLayer
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.host_copies import load_host_experts
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.expert_places import ExpertPlaces, exchange_layout
from holdfast.hardware import memory, processor
from holdfast.models import ModelSpec
from holdfast.planner import Plan
from holdfast.planner.fit.expert_placement import exchange_bytes
from holdfast.records import LowerTier, MemoryTerm
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

PAGE_BYTES = 4096


def device_experts(
    config: EngineConfig, plan: Plan, device: Device, progress: Callable[[int, int], None]
) -> DeviceExperts | None:
    """None: all experts stay on the GPU, or whole layers come. `progress`: of the bytes that are pinned."""
    places = plan.engine.expert_places
    if places is None:
        return None
    what = f"the experts of {counted(len(places.layers), 'layer')}"
    check_ram(places.pinned_bytes + places.host_bytes, what)
    log.info("pinning %s of RAM for %s", format_bytes(places.pinned_bytes), what)
    share, held = layers_share(config, plan), list[weakref.ref[DeviceExperts]]()

    def room() -> int:
        """Of RAM that may still be pinned."""
        now = held[0]()
        assert now is not None, "who asks has it"
        return room_for_more(share, now.pinned_bytes + now.exchange_bytes + places.host_bytes, now.kv_to_come())

    # One layer's after the other, while those of the first are loaded.
    order = range(len(places.layers))
    pinned = PinnedMemory(places.pinned_sizes, device, progress, background=order, room=room_to_pin)
    made = DeviceExperts(places, device, CudaCopies(device), pinned, room=room)
    made.kv_to_come = lambda: plan.engine.kv_ram_bytes
    held.append(weakref.ref(made))
    return made


@contextmanager
def host_layers(
    plan: Plan, spec: ModelSpec, checkpoint: Checkpoint | None
) -> Iterator[Callable[[], list[ExpertLayer]] | None]:
    """Of experts that wait, once more for the host's cores: they are loaded beside what is done within, and what this
    gives waits for them. None: the host computes nothing."""
    places = plan.engine.expert_places
    if places is None or not places.host_sizes:
        yield None
        return
    log.info("loading %s of experts for the host's cores", format_bytes(places.host_bytes))
    given_up = threading.Event()
    with ThreadPoolExecutor(1, "host-experts") as thread:
        loaded = thread.submit(load_host_experts, spec, checkpoint, places.layers, plan.engine.quantize, given_up)
        try:
            yield loaded.result
        except BaseException:  # Nobody needs the others.
            given_up.set()
            raise


def expert_host(plan: Plan, spec: ModelSpec, layers: list[ExpertLayer], device: Device) -> ExpertHost:
    """`layers`: those of the plan's places."""
    places, dtype = plan.engine.expert_places, DTYPES[plan.dtype]
    assert places is not None
    layout = exchange_layout(spec, places, plan.limits.max_num_seqs, dtype.itemsize)
    size = -(-layout.nbytes // PAGE_BYTES) * PAGE_BYTES
    # One core launches the GPU's kernels meanwhile.
    threads = max(1, processor().cores - 1)
    return ExpertHost(layers, layout, PinnedMemory([size], device), dtype, device, threads)


def expert_tier(plan: Plan, places: ExpertPlaces, pinned_bytes: int, exchanged_bytes: int) -> LowerTier:
    """Once experts are in place; as measured: of those that wait, and of the exchange with the host."""
    host, planned = memory(), {"experts": places.pinned_bytes}
    measured = {"experts": pinned_bytes, "exchange": exchanged_bytes}
    if places.host_sizes:
        planned |= {"experts_cpu": places.host_bytes, "exchange": exchange_bytes(plan, places)}
    terms = [
        MemoryTerm(tier="ram", term=name, planned_bytes=size, measured_bytes=measured.get(name))
        for name, size in planned.items()
    ]
    return LowerTier(
        tier="ram",
        total_bytes=host.total_bytes,
        free_bytes=host.available_bytes + pinned_bytes + exchanged_bytes + places.host_bytes,
        limited_by=host.limited_by,
        terms=terms,
    )
