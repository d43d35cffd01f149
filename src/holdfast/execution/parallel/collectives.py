"""What the ranks of one model do together, behind one small interface. Knows no process, no model and no plan.

Every rank calls the same of these in the same order with tensors of the same sizes, because all of them follow the same
plans. Sizes follow from the batch alone and nothing is told to the host, so that what calls them can be captured in a
graph by an implementation whose transport allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Collectives(Protocol):
    @property
    def name(self) -> str:
        """Of the transport, for people."""

    @property
    def rank(self) -> int:
        """Of this process; 0 is the one with the engine loop."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """x becomes the sum of all ranks' x, added up in float32 in the same order everywhere: all ranks have the same
        bits afterwards. Contiguous."""

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        """Rank 0 has all ranks' parts [rows, widths[rank]] side by side in `out` [rows, all]; others have no `out`.
        Contiguous."""

    def broadcast(self, x: torch.Tensor) -> None:
        """x becomes rank 0's x. Contiguous."""

    def close(self) -> None: ...
