"""What the machine has free now, and which other processes hold the rest, by tier. Looked at only while somebody asks.

A look reads a file of every process, and asks the driver, which may hang: so it has a thread of its own that nobody
waits for, and whoever asks gets what is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from holdfast.hardware import largest_holders, memory
from holdfast.hardware.nvidia import probe

LOOK_S = 10.0
"""Between two looks."""
FIRST_LOOK_S = 1.0
"""The most that whoever asks first waits."""
HOLDERS = 5


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    held_bytes: int | None
    """None: the driver does not say."""


class MachineTier(msgspec.Struct, frozen=True, kw_only=True):
    tier: str
    """ram or vram."""
    name: str
    total_bytes: int
    free_bytes: int
    """Now."""
    ours: bool
    """Whether this server's engine is here; of several GPUs it is on one."""
    holders: list[Holder]
    """Other processes, those that hold most first."""


def look(own_pids: Collection[int], tier: str) -> list[MachineTier]:
    """`tier`: where the engine's weights are. GPUs are looked at only where that is one."""
    ram = memory()
    others = [Holder(name=one.name, pid=one.pid, held_bytes=one.nbytes) for one in largest_holders(HOLDERS, own_pids)]
    found = [
        MachineTier(
            tier="ram",
            name="RAM" if ram.limited_by == "machine" else f"RAM of the {ram.limited_by}",
            total_bytes=ram.total_bytes,
            free_bytes=ram.available_bytes,
            ours=True,
            holders=others,
        )
    ]
    gpus = probe().gpus if tier == "vram" else ()
    # In a container the driver's pids are not ours: then it is the first that CUDA shows.
    own = next((gpu for gpu in gpus if any(one.pid in own_pids for one in gpu.processes)), gpus[0] if gpus else None)
    for gpu in gpus:
        held = [one for one in gpu.processes if one.pid not in own_pids]
        held.sort(key=lambda one: one.nbytes or 0, reverse=True)
        found.append(
            MachineTier(
                tier="vram",
                name=f"GPU {gpu.index}: {gpu.name}",
                total_bytes=gpu.total_bytes,
                free_bytes=gpu.free_bytes,
                ours=gpu is own,
                holders=[Holder(name=one.name, pid=one.pid, held_bytes=one.nbytes) for one in held[:HOLDERS]],
            )
        )
    return found


class MachineWatch:
    """Use on one asyncio loop."""

    def __init__(self, look: Callable[[Collection[int], str], list[MachineTier]] = look) -> None:
        self._look = look
        self._known: list[MachineTier] = []
        self._looked_s: float | None = None
        self._looking: asyncio.Event | None = None

    async def tiers(self, own_pids: Collection[int], tier: str) -> list[MachineTier]:
        """As they were at the last look; one that is too long ago starts another."""
        stale = self._looked_s is None or time.monotonic() - self._looked_s >= LOOK_S
        if stale and self._looking is None:
            self._looking = asyncio.Event()
            loop, ended = asyncio.get_running_loop(), self._looking
            threading.Thread(
                target=self._work, args=(loop, ended, frozenset(own_pids), tier), name="machine-look", daemon=True
            ).start()
        if self._looked_s is None and self._looking is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._looking.wait(), FIRST_LOOK_S)
        return self._known

    def _work(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event, own_pids: frozenset[int], tier: str) -> None:
        try:
            found = self._look(own_pids, tier)
        except Exception:  # A process that ends while it is looked at, a driver that is replaced.
            found = self._known
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(self._take, found, ended)

    def _take(self, found: list[MachineTier], ended: asyncio.Event) -> None:
        self._known, self._looked_s, self._looking = found, time.monotonic(), None
        ended.set()
