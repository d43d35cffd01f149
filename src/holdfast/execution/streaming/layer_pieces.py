"""Which bytes of a layer travel: all but half of its four-bit zero points, which products read a byte each.

    place    [ codes | scales | a b c d | codes | ... ]      where it is computed from
    travels  [ codes | scales | ac bd ] [ codes | ... ]      where it waits, and on the link: one piece behind the other

Two zero points that lie half a plane apart share the byte of the first, so a plane is packed and spread where it lies.
Knows nothing of matrices, nor who copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Extent = tuple[int, int]
"""(first byte of a layer's place, the one behind the last)"""


@dataclass(frozen=True, slots=True)
class HalfLayer:
    pieces: tuple[Extent, ...]
    """That travel, in their order."""
    planes: tuple[Extent, ...]
    """Of zero points, whose second halves do not."""

    @property
    def nbytes(self) -> int:
        """That travel."""
        return sum(last - first for first, last in self.pieces)

    def of(self, place: torch.Tensor) -> list[torch.Tensor]:
        """The pieces, in this place."""
        return [place[first:last] for first, last in self.pieces]

    def pack(self, place: torch.Tensor) -> None:
        for first, last in self.planes:
            low, high = place[first:last].chunk(2)
            high.bitwise_left_shift_(4)
            low.bitwise_or_(high)

    def spread(self, place: torch.Tensor) -> None:
        """What was packed, once."""
        for first, last in self.planes:
            low, high = place[first:last].chunk(2)
            torch.bitwise_right_shift(low, 4, out=high)
            low.bitwise_and_(15)


def divided(cut: int, used: int, planes: Sequence[Extent]) -> tuple[HalfLayer, HalfLayer]:
    """A layer of `used` bytes, of which `cut` are its first half. `planes`: of numbers below 16, an even count each."""
    return _half(0, cut, planes), _half(cut, used, planes)


def _half(first: int, last: int, planes: Sequence[Extent]) -> HalfLayer:
    own, pieces, at = sorted(plane for plane in planes if first <= plane[0] < last), list[Extent](), first
    for begin, end in own:
        pieces.append((at, (begin + end) // 2))
        at = end
    if at < last:
        pieces.append((at, last))
    return HalfLayer(tuple(pieces), tuple(own))
