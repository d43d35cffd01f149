"""Which bytes of a layer travel: all but half of its four-bit zero points, which products read a byte each.

    place    [ codes | scales | a b c d | codes | ... ]      where it is computed from
    travels  [ codes | scales | ac bd ] [ codes | ... ]      where it waits, and on the link: one piece behind the other

Two zero points that lie half a plane apart share the byte of the first, so a plane is spread where it lies.
Knows nothing of matrices, nor when anything is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.execution.streaming.copies import Copies, Piece

Extent = tuple[int, int]
"""(first byte of a layer's place, the one behind the last)"""


BOTH = (0, 1)


class LayerPieces:
    """`most`: bytes that a layer may take where it waits, known before it is made. `place`, of any layer: where it is
    computed from."""

    def __init__(self, most: Mapping[int, int]) -> None:
        self._moved = dict(most)
        self._halves: dict[int, tuple[_Half, _Half]] = {}
        self._planes: list[Extent] = []
        """Of the layer that is being made."""

    def begin(self) -> None:
        """A layer is being made."""
        self._planes = []

    def pack(self, place: torch.Tensor, numbers: torch.Tensor) -> None:
        """These of its bytes are below 16, and may travel two in one."""
        if numbers.nbytes % 2 == 0:
            first = numbers.data_ptr() - place.data_ptr()
            self._planes.append((first, first + numbers.nbytes))

    def made(self, layer: int, cut: int, used: int) -> None:
        """All of it: so many bytes, of which `cut` are its first half."""
        self._halves[layer] = _half(0, cut, self._planes), _half(cut, used, self._planes)
        self._moved[layer] = sum(half.nbytes for half in self._halves[layer])

    def nbytes(self, layers: Sequence[int]) -> int:
        """That these take where they wait, and move."""
        return sum(self._moved[layer] for layer in layers)

    def packed(self, layer: int, number: int) -> bool:
        """Whether this half is to be spread once it came."""
        return bool(self._halves[layer][number].planes)

    def spread(self, layer: int, place: torch.Tensor, *numbers: int) -> None:
        """These halves, which came packed, and once only."""
        for number in numbers:
            self._halves[layer][number].spread(place)

    def pairs(self, layer: int, memory: torch.Tensor, place: torch.Tensor, *numbers: int) -> list[Piece]:
        """Of these halves, from where it waits to its place."""
        found, first = list[Piece](), 0
        for number, half in enumerate(self._halves[layer]):
            for begin, end in half.pieces:
                last = first + end - begin
                if number in numbers:
                    found.append((memory[first:last], place[begin:end]))
                first = last
        return found

    def put(self, layer: int, memory: torch.Tensor, place: torch.Tensor, copies: Copies) -> None:
        """From its place, which stays as it is whatever interrupts this, to where it waits."""
        for number, half in enumerate(self._halves[layer]):
            pairs = self.pairs(layer, memory, place, number)
            for waiting, here in pairs:
                copies.now(here, waiting)
            for (waiting, _), (first, last) in zip(pairs, half.planes, strict=False):  # What follows them has none.
                low, high = place[first:last].chunk(2)
                copies.now((high << 4).bitwise_or_(low), waiting[len(waiting) - len(low) :])

    def fetch(self, layer: int, memory: torch.Tensor, place: torch.Tensor, copies: Copies) -> None:
        """The reverse."""
        for waiting, here in self.pairs(layer, memory, place, *BOTH):
            copies.now(waiting, here)
        copies.launch(partial(self.spread, layer, place, *BOTH))


@dataclass(frozen=True, slots=True)
class _Half:
    pieces: tuple[Extent, ...]
    """That travel, in their order: each to the middle of a plane, and what is behind the last."""
    planes: tuple[Extent, ...]
    """Of zero points, whose second halves do not."""

    @property
    def nbytes(self) -> int:
        """That travel."""
        return sum(last - first for first, last in self.pieces)

    def spread(self, place: torch.Tensor) -> None:
        for first, last in self.planes:
            low, high = place[first:last].chunk(2)
            torch.bitwise_right_shift(low, 4, out=high)
            low.bitwise_and_(15)


def _half(first: int, last: int, planes: Sequence[Extent]) -> _Half:
    own, pieces, at = sorted(plane for plane in planes if first <= plane[0] < last), list[Extent](), first
    for begin, end in own:
        pieces.append((at, (begin + end) // 2))
        at = end
    if at < last:
        pieces.append((at, last))
    return _Half(tuple(pieces), tuple(own))
