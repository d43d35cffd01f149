"""How often each expert was used in steps with few tokens, as a GPU counts it: looked at now and then, without waiting;
and which of those that wait should change places with one that stays. Moves nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch

STEPS_BETWEEN = 32
"""From one look to the next."""
KEPT = 0.98
"""Of what was counted before, at each look: uses are forgotten after some thousand steps."""
DEVIATIONS = 5.0
"""That two counts must differ by. Where all experts are used alike, the most used of those that wait and the least used
of those that stay differ by chance, and changing places would gain nothing."""
MOST_SWAPS = 64
"""After one look."""


class Swap(NamedTuple):
    number: int
    """Of the layer, among those whose experts do not all stay."""
    comes: int
    """The expert that stays from now on."""
    leaves: int


class ExpertUses:
    """`places` int32 [layers, experts] on the host, as `device_experts` has it on the GPU."""

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places
        self.pairs, self.hits, self.swaps = 0, 0, 0
        """So far: of a token and an expert, of these whose expert was on the GPU, and changes of places."""
        self._before, self._recent = torch.zeros_like(places), torch.zeros(places.shape)
        self._seen: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._coming, self._steps = False, 0

    def look_at(self, uses: torch.Tensor) -> list[Swap]:
        """To be called before each step; `uses` int32 [layers, experts] only grow. What should change places now: most
        times nothing."""
        if self._seen is None:
            pin = uses.device.type == "cuda"
            self._seen = torch.zeros(uses.shape, dtype=torch.int32, pin_memory=pin)
            self._arrived = torch.cuda.Event() if pin else None
        self._steps += 1
        if self._coming and (self._arrived is None or self._arrived.query()):
            self._coming = False
            self._count(self._seen)
            return self._wanted()
        if not self._coming and self._steps >= STEPS_BETWEEN:
            self._steps, self._coming = 0, True
            self._seen.copy_(uses, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
        return []

    def most_used(self, number: int) -> list[int]:
        """All experts of a layer, the most used lately first; of equals those that stay."""
        recent, table = self._recent[number].tolist(), self.places[number].tolist()
        return sorted(range(len(table)), key=lambda expert: (-recent[expert], table[expert] < 0, expert))

    def placed(self, number: int, row: torch.Tensor) -> None:
        """The places of a layer are these from now on."""
        self.places[number] = row

    def swapped(self, swap: Swap) -> None:
        row = self.places[swap.number]
        comes, leaves = row[swap.comes].item(), row[swap.leaves].item()
        assert comes < 0 <= leaves, "one waits, and the other stays"
        row[swap.comes], row[swap.leaves] = leaves, comes
        self.swaps += 1

    def _count(self, seen: torch.Tensor) -> None:
        found = seen - self._before
        self._before.copy_(seen)
        self.pairs += int(found.sum())
        self.hits += int(found[self.places >= 0].sum())
        self._recent.mul_(KEPT).add_(found)

    def _wanted(self) -> list[Swap]:
        """One of each layer at most, the most useful first."""
        found = []
        waits, stays = self._recent.clone(), self._recent.clone()
        waits[self.places >= 0] = -1.0
        stays[self.places < 0] = float("inf")
        most, least = waits.max(1), stays.min(1)
        for number in range(len(waits)):
            used, other = float(most.values[number]), float(least.values[number])
            if used - other > DEVIATIONS * (used + other) ** 0.5:
                found.append((used - other, Swap(number, int(most.indices[number]), int(least.indices[number]))))
        found.sort(reverse=True)
        return [swap for _, swap in found[:MOST_SWAPS]]
