"""Peak number of overlapping time spans of a stream of spans, in bounded memory. Never too low, at most slightly
too high.

Spans come nearly in the order of their ends, as in logs. The newest are kept and counted exactly; older ones are folded
into time slots, each with its peak. A span that began before what is kept adds one to every slot it reaches back over,
so that a request of many hours is not lost.

    slots, folded ──────────────┤ kept moments, sorted
    [7][9][8][12][11][10] ...   ^ folded_until_s       + - + + - -
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

KEPT_MOMENTS = 1 << 17
MAX_SLOTS = 1 << 16


@dataclass(slots=True)
class Overlaps:
    kept_limit: int = KEPT_MOMENTS
    slot_limit: int = MAX_SLOTS
    moments: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (when, +1 or -1): at the same moment an end comes before a start."""
    running: int = 0
    """At folded_until_s."""
    folded_until_s: float = float("-inf")
    slot_s: float = 1.0
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(most, last) running in each slot in which something began or ended; the last lasts until the next such slot."""
    late_first: Counter[int] = field(default_factory=Counter)
    late_last: Counter[int] = field(default_factory=Counter)
    """The slots of those that came after their time."""

    def add(self, start_s: float, end_s: float) -> None:
        if start_s >= self.folded_until_s:
            heapq.heappush(self.moments, (start_s, 1))
            heapq.heappush(self.moments, (end_s, -1))
        else:
            self.late_first[self._slot(start_s)] += 1
            self.late_last[self._slot(min(end_s, self.folded_until_s))] += 1
            if end_s > self.folded_until_s:
                self.running += 1
                heapq.heappush(self.moments, (end_s, -1))
            self._coarsen()
        if len(self.moments) > self.kept_limit:
            self._fold(self.kept_limit // 2)

    def peak(self) -> int:
        """Of everything so far. Ends the counting: what is kept is folded too."""
        self._fold(0)
        highest = late = last = 0
        for slot in sorted(self.seen.keys() | self.late_first.keys() | self.late_last.keys()):
            late += self.late_first[slot]
            most, last = self.seen.get(slot, (last, last))
            highest = max(highest, most + late)
            late -= self.late_last[slot]
        return highest

    def _slot(self, when_s: float) -> int:
        return int(when_s // self.slot_s)

    def _fold(self, keep: int) -> None:
        while len(self.moments) > keep:
            when_s, change = heapq.heappop(self.moments)
            self.running += change
            self.folded_until_s = when_s
            slot = self._slot(when_s)
            # What ran when the slot began ran in it too.
            before = self.seen[slot][0] if slot in self.seen else self.running - change
            self.seen[slot] = (max(before, self.running), self.running)
        self._coarsen()

    def _coarsen(self) -> None:
        while max(len(self.seen), len(self.late_first), len(self.late_last)) > self.slot_limit:
            self.slot_s *= 2
            seen: dict[int, tuple[int, int]] = {}
            for slot in sorted(self.seen):
                most, last = self.seen[slot]
                seen[slot // 2] = (max(seen.get(slot // 2, (0, 0))[0], most), last)
            self.seen = seen
            self.late_first, self.late_last = _halved(self.late_first), _halved(self.late_last)


def _halved(slots: Counter[int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for slot, count in slots.items():
        found[slot // 2] += count
    return found
