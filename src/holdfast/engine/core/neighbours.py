"""Whether an engine shall give memory to other processes of the same device, or take back what they left: of its KV
pool, or of its whole budget where weights may leave too. Decides by samples of the device, which a thread takes; moves
nothing.

    free  0 ─────── margin ─────── 2 x margin ─────── 3 x margin ─────────►
          others grow: shrink to ──►│                  │◄── 10 s long: grow to 2 x margin

A neighbour takes what is free before anybody can see it, so a margin is kept for its first steps; what it took since
the last look is given once more, so that one that goes on taking finds it. One that comes again soon after memory was
taken back is waited for longer the next time: layers do not go to and fro with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.units import MIB, format_bytes

log = logging.getLogger("holdfast")

SAMPLE_S = 1.0
NOISE_BYTES = 32 * MIB
"""Less than this is no neighbour's growth: counts of a driver, and of a system, are never still."""
GONE_S = 10.0
"""For which memory must be free before it is taken back; longer where a neighbour comes again and again."""
AGAIN_WITHIN, MOST_PATIENCE = 6.0, 16.0
"""A neighbour that comes again within so many times that wait, after memory was taken back, doubles the next; up to so
many times GONE_S."""
MARGIN_SHARE = 0.05
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class DeviceSample:
    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Of this server: in RAM with its front end and all that this started, on a GPU of this process."""

    @property
    def others_bytes(self) -> int:
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall be held from now on, and why."""

    nbytes: int
    reason: str


class Neighbours:
    """`least_margin_bytes`: of the device that stays free for others, which is otherwise a share of its memory.
    `pools`: of this server on the same device. Each takes its part of what was left: none would see the others take it,
    since they are no neighbours. Each gives all that is wanted: the others may have nothing to give."""

    def __init__(self, least_margin_bytes: int, pools: int = 1) -> None:
        self._least, self._pools = least_margin_bytes, pools
        self._seen: int | None = None
        """What others held when there was room for them, or when they were given some."""
        self._roomy_since_s: float | None = None
        self._patience = 1.0
        """Of GONE_S, so many times."""
        self._took_back_s: float | None = None

    def margin_bytes(self, total_bytes: int) -> int:
        return max(self._least, int(total_bytes * MARGIN_SHARE))

    def judge(self, sample: DeviceSample, held_bytes: int, full_bytes: int, now_s: float) -> Wish | None:
        """None: it stays as it is. `held_bytes`: of what may become less; `full_bytes`: of it with no neighbours."""
        margin, others = self.margin_bytes(sample.total_bytes), sample.others_bytes
        seen = others if self._seen is None else self._seen
        grew = others - seen
        if self._seen is None or sample.free_bytes >= margin or grew < 0:
            self._seen = others
        if sample.free_bytes < margin and grew >= NOISE_BYTES:
            self._seen, self._roomy_since_s = others, None
            self._note_again(now_s)
            held = f"others hold {format_bytes(others)}, {format_bytes(grew)} more than before"
            return Wish(
                held_bytes - (2 * margin + grew - sample.free_bytes),
                f"{held}, and {format_bytes(sample.free_bytes)} were free (margin {format_bytes(margin)})",
            )
        if held_bytes >= full_bytes or sample.free_bytes <= 3 * margin:
            self._roomy_since_s = None
            return None
        if self._roomy_since_s is None:
            self._roomy_since_s = now_s
        gone_s = GONE_S * self._patience
        if now_s - self._roomy_since_s < gone_s:
            return None
        self._roomy_since_s = None
        free = f"{format_bytes(sample.free_bytes)} were free for {gone_s:g} s"
        return Wish(
            min(full_bytes, held_bytes + (sample.free_bytes - 2 * margin) // self._pools),
            f"{free}, and others hold {format_bytes(others)}",
        )

    def took_back(self, now_s: float) -> None:
        """What `judge` wished was taken. Only who takes it knows: of less than a piece of memory nothing comes, and
        that is wished again and again."""
        self._took_back_s = now_s

    def _note_again(self, now_s: float) -> None:
        """A neighbour needs memory: was it only just taken back?"""
        if self._took_back_s is None:
            return
        soon = now_s - self._took_back_s < AGAIN_WITHIN * GONE_S * self._patience
        self._patience = min(MOST_PATIENCE, 2 * self._patience) if soon else 1.0
        self._took_back_s = None


class NeighbourWatch:
    """Samples in a thread, about once a second: a driver may take its time, and no step waits for it. `sample`: None:
    the device does not tell now."""

    def __init__(self, sample: Callable[[], DeviceSample | None], every_s: float = SAMPLE_S) -> None:
        self._sample, self._every_s = sample, every_s
        self._latest: DeviceSample | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour-watch", daemon=True)
        self._thread.start()

    def take(self) -> DeviceSample | None:
        """The newest one, once."""
        found, self._latest = self._latest, None
        return found

    def _run(self) -> None:
        silent = False
        while not self._stop.wait(self._every_s):
            try:
                found = self._sample()
            except Exception as error:  # Whatever a driver or a system says: it is asked again.
                found = None
                log.debug("yield_to_neighbours: %s: %s", type(error).__name__, error)
            if found is None and not silent:
                log.warning("yield_to_neighbours: the device does not tell what is free; nothing gives way")
            silent = found is None
            self._latest = found or self._latest

    def close(self) -> None:
        """Does not wait for a driver that hangs."""
        self._stop.set()
        self._thread.join(CLOSE_S)
