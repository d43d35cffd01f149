"""What a rank that finds no memory says, on a CPU or a GPU: which code, what it needed, what helps. The group adds its
number."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import DoesNotFitError, EngineError
from holdfast.hardware import memory
from holdfast.planner import Plan
from holdfast.units import format_bytes

NO_MEMORY, NO_ROOM = "HF447", "HF448"
"""For a step; and to start."""
RAM, VRAM = "memory", "GPU memory"


class _Ways(NamedTuple):
    """Out of a shortage."""

    others: str
    setting: str
    field: str


_WAYS = {
    RAM: _Ways(
        "stop other processes that hold memory, raise the limit of this one (ulimit -v, its container's)",
        "a smaller --ram",
        "ram",
    ),
    VRAM: _Ways(
        "stop other processes that use the GPUs (see nvidia-smi)",
        "a smaller --gpu-memory-utilization or --vram",
        "gpu_memory_utilization",
    ),
}


def no_memory_for_step(lacked: str, error: Exception) -> EngineError:
    """`lacked`: RAM or VRAM. All ranks are started again: the others have begun what this one cannot."""
    ways = _WAYS[lacked]
    return EngineError(
        f"out of {lacked} in a step, which all ranks have begun",
        code=NO_MEMORY,
        found=_said(lacked, error),
        fix=f"{ways.others}, or {ways.setting}",
    )


def no_room_at_start(lacked: str, plan: Plan, rank: int, error: Exception) -> DoesNotFitError:
    engine, ways = plan.engine, _WAYS[lacked]
    pool = engine.blocks * engine.layout_of(rank).page_bytes
    return DoesNotFitError(
        f"out of {lacked} while it started, though the plan fits what was free",
        code=NO_ROOM,
        needed=f"weights {format_bytes(engine.rank_weights[rank])} and KV pool {format_bytes(pool)}, beside what a step"
        " takes",
        found=_said(lacked, error),
        fix=f"{ways.others}, or {ways.setting}",
        field=ways.field,
    )


def _said(lacked: str, error: Exception) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0]
    return said if lacked == VRAM else f"{said}; {format_bytes(memory().available_bytes)} free on its machine"
