"""Resizes of the KV pool: before one that somebody asked for makes it smaller, what it would lose goes to RAM beside
steps; and how long steps stood still for each. Decides how long that is waited for; the loop resizes.

    asked ──── pages go to RAM, answers go on ────► ready ──── the last pages, moving, unmapping ────► smaller
                       PREPARE_S at most                        steps stand still: this is counted
"""

from __future__ import annotations

import logging

from holdfast.scheduler import Scheduler

log = logging.getLogger("holdfast")

PREPARE_S = 0.5
"""The longest that pages go to RAM beside steps: whoever asked for memory has it within a second."""


class PoolResizes:
    """Of one engine."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self.total, self.stood_still_total_s, self.stood_still_s, self.resizing_s = 0, 0.0, 0.0, 0.0
        """`stood_still_s`: for the last change, which may have been of several resizes. `resizing_s`: of all resizes,
        with what steps that were in flight took."""
        self.parts: dict[str, float] = {}
        """Seconds of the last resize, by what took them."""

    @property
    def preparing(self) -> bool:
        """Steps are to be planned, be it without rows: pages go to RAM."""
        return self._until_s is not None

    def prepare(self, scheduler: Scheduler, blocks: int, now_s: float) -> None:
        """The pool will have so many pages, the null page included."""
        tiers, fewer = scheduler.kv.tiers, scheduler.kv.blocks_total + 1 - blocks
        if tiers is not None and tiers.host.total and fewer > 0:
            self._until_s = now_s + PREPARE_S
            tiers.begin_sparing(fewer)

    def ready(self, scheduler: Scheduler, now_s: float) -> bool:
        """It may be resized: all is in RAM that goes there, or that takes too long."""
        tiers = scheduler.kv.tiers
        return self._until_s is None or tiers is None or now_s >= self._until_s or tiers.spared

    def end_preparing(self, scheduler: Scheduler) -> None:
        if self._until_s is not None and scheduler.kv.tiers is not None:
            scheduler.kv.tiers.spare_wanted = 0
        self._until_s = None

    def begin_change(self) -> None:
        """What is counted from now on is of another change."""
        self.stood_still_s = 0.0

    def note(self, seconds: float) -> None:
        """Steps stood still for so long."""
        self.stood_still_s += seconds
        self.stood_still_total_s += seconds

    def note_resize(self, before: int, blocks: int, laps: Laps) -> None:
        """From so many pages to so many."""
        self.total, self.resizing_s = self.total + 1, self.resizing_s + sum(laps.parts.values())
        self.parts = laps.parts
        self.note(laps.stood_still_s)
        said = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in laps.parts.items())
        stood = f"steps stood still for {laps.stood_still_s * 1000:.0f} ms"
        log.info("KV pool: %s blocks instead of %s; %s (%s)", f"{blocks - 1:,}", f"{before - 1:,}", stood, said)


class Laps:
    """Where the time of one resize goes. `now_s`: when it begins."""

    STEPS = "steps in flight"

    def __init__(self, now_s: float) -> None:
        self._last_s, self.parts = now_s, dict[str, float]()

    def lap(self, name: str, now_s: float) -> None:
        """Since the last one it was this."""
        self.parts[name] = self.parts.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def stood_still_s(self) -> float:
        """With steps in flight answers go on."""
        return sum(seconds for name, seconds in self.parts.items() if name != self.STEPS)
