"""The most spans of time that overlap, out of any number of them, in bounded room.

Spans come nearly in the order of their ends, as logs have them. The newest are kept and counted exactly; what is older
is folded into slots of time, each with the most it saw. A span that began before what is kept adds one to the slots it
reaches back over, so that a request of many hours is not lost.

    slots, folded ──────────────┤ kept moments, sorted
    [7][9][8][12][11][10] ...   ^ folded_until_s       + - + + - -
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

KEPT_MOMENTS = 1 << 17
MAX_SLOTS = 1 << 16


@dataclass(slots=True)
class Overlaps:
    kept_limit: int = KEPT_MOMENTS
    moments: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (when, +1 or -1): at the same moment an end comes before a start."""
    running: int = 0
    """At folded_until_s."""
    folded_until_s: float = float("-inf")
    slot_s: float = 1.0
    most: dict[int, int] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    """Changes from slot to slot by those that came after their time."""

    def add(self, start_s: float, end_s: float) -> None:
        if start_s >= self.folded_until_s:
            heapq.heappush(self.moments, (start_s, 1))
            heapq.heappush(self.moments, (end_s, -1))
        else:
            self._change(start_s, 1)
            # The slot in which the folded part ends may count it twice: one too many there rather than one too few.
            self._change(min(end_s, self.folded_until_s) + self.slot_s, -1)
            if end_s > self.folded_until_s:
                self.running += 1
                heapq.heappush(self.moments, (end_s, -1))
        if len(self.moments) > self.kept_limit:
            self._fold(self.kept_limit // 2)

    def peak(self) -> int:
        """Of everything so far. Ends the counting: what is kept is folded too."""
        self._fold(0)
        highest = extra = 0
        for slot in sorted(self.most.keys() | self.late.keys()):
            extra += self.late.get(slot, 0)
            highest = max(highest, self.most.get(slot, 0) + extra)
        return highest

    def _change(self, when_s: float, by: int) -> None:
        slot = int(when_s // self.slot_s)
        self.late[slot] = self.late.get(slot, 0) + by
        self._coarsen()

    def _fold(self, keep: int) -> None:
        while len(self.moments) > keep:
            when_s, change = heapq.heappop(self.moments)
            self.running += change
            self.folded_until_s = when_s
            slot = int(when_s // self.slot_s)
            self.most[slot] = max(self.most.get(slot, 0), self.running)
        self._coarsen()

    def _coarsen(self) -> None:
        while len(self.most) > MAX_SLOTS or len(self.late) > MAX_SLOTS:
            self.slot_s *= 2
            most, late = self.most, self.late
            self.most, self.late = {}, {}
            for slot, count in most.items():
                self.most[slot // 2] = max(self.most.get(slot // 2, 0), count)
            for slot, change in late.items():
                self.late[slot // 2] = self.late.get(slot // 2, 0) + change
