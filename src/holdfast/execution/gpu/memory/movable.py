"""What the arbiter of a GPU's memory asks of weights that may come to stay there, and leave: layers, or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.records import LinkUse


class Movable(Protocol):
    """Weights that may come to stay on the GPU, and leave it."""

    @property
    def nbytes(self) -> int:
        """On the GPU, of slots for those that come for a step, and of tables of places."""

    @property
    def resident_bytes(self) -> int:
        """On the GPU, of those that stay."""

    @property
    def pinned_bytes(self) -> int:
        """In RAM."""


class MovableLayers(Movable, Protocol):
    @property
    def streamed(self) -> tuple[int, ...]: ...

    @property
    def moved_bytes(self) -> int:
        """In every step."""

    def bytes_with(self, layers: Sequence[int]) -> int:
        """Of slots and of layers that stay, if these were streamed."""

    def moved_with(self, layers: Sequence[int]) -> int:
        """In every step, if these were streamed."""

    def use(self) -> LinkUse: ...

    def one_more(self, layers: Sequence[int]) -> tuple[int, ...] | None: ...

    def one_less(self, layers: Sequence[int]) -> tuple[int, ...]: ...

    def change(self, layers: Sequence[int]) -> None:
        """These are streamed from now on; more of them where memory for one that was to stay is not there."""


class MovableExperts(Movable, Protocol):
    """So many of all layers stay, spread evenly."""

    @property
    def resident_counts(self) -> tuple[int, ...]: ...

    @property
    def most_resident(self) -> int: ...

    def bytes_with(self, count: int) -> int:
        """Of slots, tables and those that stay, if so many did."""

    def fits_ram(self, count: int) -> bool:
        """Whether RAM would hold the others."""
