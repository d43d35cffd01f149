"""What layers take that do not stay in memory: slots in RAM that they take turns in, and a file that has them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.units import MIB

SLOTS = 2
"""One is computed from while the other is filled. More would only help where computing takes longer than reading."""
PLACE_GRAIN_BYTES = MIB // 16
"""A place is a whole number of these: whole pages of the disk and of memory, and room for the gaps between tensors."""


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    layers: tuple[int, ...]
    """In their order."""
    place_bytes: int
    """Of the largest."""
    weights_bytes: int
    """Of all of them, as they would lie in memory."""

    @property
    def slots(self) -> int:
        return min(SLOTS, len(self.layers))

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.place_bytes

    @property
    def file_bytes(self) -> int:
        return len(self.layers) * self.place_bytes


def streamed_layers(by_layer: Sequence[int], streamed: int) -> StreamedLayers:
    """So many of the layers, whose bytes are given; spread evenly: while those between are computed, the next one is on
    its way."""
    count = len(by_layer)
    chosen = tuple(layer for layer in range(count) if (layer + 1) * streamed // count > layer * streamed // count)
    largest = max((by_layer[layer] for layer in chosen), default=0)
    place = (largest // PLACE_GRAIN_BYTES + 2) * PLACE_GRAIN_BYTES if chosen else 0
    return StreamedLayers(chosen, place, sum(by_layer[layer] for layer in chosen))
