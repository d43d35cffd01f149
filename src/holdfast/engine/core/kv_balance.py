"""KV or layers, while serving: beside layers that come for every step the KV pool begins small. Layers leave the GPU
for more of it when requests want more pages than there are, and come back when these are gone for a while.

Decides when. What is worth it, and at which price, the arbiter of the GPU's memory knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.records import VramGrant
from holdfast.scheduler import Scheduler

LOOK_S = 0.5
"""Between two looks: what a change costs is about a step."""
GONE_S = 10.0
"""For which fewer pages must be enough before layers come back: answers that follow each other keep theirs."""
AHEAD_TOKENS = 256
"""That every sequence is to have pages for, beyond those it has: it goes on growing."""


class LayersOrKV(Protocol):
    base_blocks: int
    """Pages of the pool for which no layer has left."""

    def make_room(self, blocks: int, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant | None:
        """Layers leave for a pool of so many pages, or as many as are worth it; None: none."""

    def take_back(self, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant | None:
        """Those that had left come back; None: none had."""


class KVBalance:
    def __init__(self, vram: LayersOrKV) -> None:
        self._vram = vram
        self._next_s, self._enough_since_s, self._in_vain = 0.0, None, 0
        """`in_vain`: pages that were wanted when nothing was to be gained by more."""

    _enough_since_s: float | None

    def look(self, scheduler: Scheduler, now_s: float, resize_kv: Callable[[int], None]) -> VramGrant | None:
        """What was changed, if something was. Cheap enough to be called for every step."""
        if now_s < self._next_s:
            return None
        self._next_s = now_s + LOOK_S
        wanted, least = scheduler.blocks_wanted(AHEAD_TOKENS), scheduler.least_blocks
        if wanted > scheduler.kv.blocks_total + 1:
            self._enough_since_s = None
            if wanted <= self._in_vain:
                return None
            found = self._vram.make_room(wanted, least, resize_kv)
            self._in_vain = wanted if found is None else 0
            return found
        self._in_vain = 0
        if wanted > self._vram.base_blocks:
            self._enough_since_s = None
            return None
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        if now_s - self._enough_since_s < GONE_S:
            return None
        self._enough_since_s = None
        return self._vram.take_back(least, resize_kv)
