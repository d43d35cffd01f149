"""The memory around a KV pool, as breathing sees it: on a CPU what the system has, on a GPU what the driver tells. Lets
a pool breathe where that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.config import EngineConfig
from holdfast.engine.core.breathing import Breathing, PoolMemory, WholeBudget
from holdfast.engine.core.neighbours import DeviceSample, Neighbours, NeighbourWatch
from holdfast.hardware import family_bytes, memory, resident
from holdfast.hardware.nvidia import device_use
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from holdfast.engine.core.loop import EngineCore

LEAST_MARGIN_BYTES, LEAST_VRAM_MARGIN_BYTES = 512 * MIB, GIB
"""That stay free for neighbours, of RAM and of a GPU."""


class VramShares(PoolMemory, WholeBudget, Protocol):
    @property
    def movable(self) -> bool:
        """Whether layers or experts may come to stay, and leave."""

    @property
    def reserved_bytes(self) -> int:
        """Of all of it now, but for room of graphs that are not captured."""


class RamPool:
    """A pool on a CPU: `touched` says how many of its pages have memory, at most those that may be used."""

    def __init__(self, page_bytes: int, touched: Callable[[], int]) -> None:
        self._page_bytes, self._touched = page_bytes, touched

    @property
    def pool_bytes(self) -> int:
        return self._touched() * self._page_bytes

    def blocks_of(self, pool_bytes: int) -> int:
        return pool_bytes // self._page_bytes

    def blocks_within_free(self, margin_bytes: int) -> int:
        return self._touched() + max(0, memory().available_bytes - margin_bytes) // self._page_bytes

    def full_blocks(self, blocks: int) -> int:
        return blocks

    def budget_was_set(self) -> None:
        """What is free is looked at whenever it matters."""

    def budget_with_pool(self) -> int | None:
        return None


def sample_ram(front: int) -> DeviceSample | None:
    """`front`: the process of this server that started all others of it, which are not its neighbours: the front end
    itself, grammar workers, ranks."""
    machine, own = memory(), resident()
    if own is None:
        return None
    family = family_bytes(front, but=os.getpid())
    return DeviceSample(machine.total_bytes, machine.available_bytes, own.now_bytes - own.files_bytes + family)


def sample_gpu(uuid: str, own_bytes: Callable[[], int]) -> DeviceSample | None:
    """`own_bytes`: as this engine counts it, for drivers that do not tell processes apart."""
    found = device_use(uuid, os.getpid())
    if found is None:
        return None
    own = own_bytes() if found.own_bytes is None else found.own_bytes
    return DeviceSample(found.total_bytes, found.free_bytes, own)


def breathe_in_ram(core: EngineCore, config: EngineConfig) -> None:
    page_bytes = core.scheduler.kv.layout.page_bytes
    pool = RamPool(page_bytes, lambda: core.scheduler.kv.blocks_touched + 1)
    front = os.getppid()
    core.breathing = _breathing(config, pool, lambda: sample_ram(front))


def breathe_in_vram(core: EngineCore, config: EngineConfig, plan: Plan, vram: VramShares) -> None:
    # What was set by hand stays so.
    weights_too = vram.movable and not plan.question.settings.offload.by_hand
    if config.yield_to_neighbours and (weights_too or config.kv_cache_memory_bytes is None):
        vram.most_budget_bytes = config.vram or int(plan.device.total_bytes * plan.utilization)
    uuid, budget = "" if plan.engine.gpu is None else plan.engine.gpu.uuid, vram if weights_too else None
    core.breathing = _breathing(config, vram, lambda: sample_gpu(uuid, lambda: vram.reserved_bytes), budget)


def breathing_decisions(config: EngineConfig, plan: Plan, total_bytes: int) -> list[Decision]:
    """What the pool will do by itself. `total_bytes`: of the memory that it is in."""
    layout, limits = plan.engine.layout, plan.limits
    floor = (1 + layout.peak_blocks(limits.max_model_len, limits.max_num_batched_tokens)) * layout.page_bytes
    least = f"{format_bytes(floor)}, one sequence of full length"
    found = list[Decision]()
    if config.idle_release:
        said = f"without a request for so long the KV pool shrinks to {least}, and grows with the next"
        found.append(Decision("idle_release", f"{config.idle_release:g} s", said, "set"))
    if config.yield_to_neighbours:
        margin = Neighbours(_least_margin(config)).margin_bytes(total_bytes)
        of = "the KV pool"
        if plan.engine.streamed is not None or plan.engine.expert_places is not None:
            of = "layers or experts, which then wait in RAM, and of the KV pool"
        said = f"others that leave less than {format_bytes(margin)} free get memory of {of}, down to {least}"
        found.append(Decision("yield_to_neighbours", "on", said, "set"))
    return found


def _least_margin(config: EngineConfig) -> int:
    return LEAST_VRAM_MARGIN_BYTES if config.device == "cuda" else LEAST_MARGIN_BYTES


def _pools(config: EngineConfig) -> int:
    """Of this server in the same memory: engines on GPUs have one each."""
    return 1 if config.device == "cuda" else config.data_parallel_size


def _breathing(
    config: EngineConfig,
    pool: PoolMemory,
    sample: Callable[[], DeviceSample | None],
    budget: WholeBudget | None = None,
) -> Breathing | None:
    """None: nothing of it was asked for. `budget`: None: neighbours get memory of the pool alone."""
    if not config.idle_release and not config.yield_to_neighbours:
        return None
    return Breathing(
        pool,
        idle_release_s=config.idle_release or None,
        neighbours=Neighbours(_least_margin(config), _pools(config)) if config.yield_to_neighbours else None,
        watch=NeighbourWatch(sample) if config.yield_to_neighbours else None,
        budget=budget,
        most_kv_bytes=config.kv_cache_memory_bytes,
    )
