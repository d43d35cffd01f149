"""Small integers on their way to the GPU: one pinned packet a step, one copy, and a view for each array in it.

A packet is not written again before its copy is done, so that the host may prepare a step while others still run.
Where pages go over the link beside steps, a kernel moves it: a copy engine would bring it behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing
import torch

from holdfast.execution.triton_kernels.host.words import move_words
from holdfast.footprint.gpu import whole_lines

Words = numpy.typing.NDArray[numpy.int32]
PACKETS = 4
"""One is being filled, two may be on their way or wait for their steps; one to spare."""


def carry(target: torch.Tensor, source: torch.Tensor, *, beside_pages: bool) -> None:
    """int32 numbers, from pinned memory to the GPU or back, in stream order. `beside_pages`: as these go."""
    if beside_pages and len(source):
        move_words(target, source)
    else:
        target.copy_(source, non_blocking=True)


class PacketRing:
    """`words`: int32 numbers of one packet. All packets arrive in the same device memory, in stream order."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.words = words
        self.arrived = torch.zeros(words, dtype=torch.int32, device=device)
        pin = device.type == "cuda"
        self._pinned = [torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=pin) for _ in range(PACKETS)]
        self._filled = [pinned.numpy() for pinned in self._pinned]
        self._copied = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(PACKETS)]
        self._next = 0
        self.beside_pages = False
        """Pages come over the link meanwhile."""

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.arrived.nbytes

    def send(self, arrays: Sequence[Words], apart: int = 0) -> list[torch.Tensor]:
        """Puts the arrays one behind the other, or each so many words behind the one before; returns where each lies
        on the device. All begin at whole lines: kernels are compiled anew for pointers that are aligned otherwise."""
        place, self._next = self._next, (self._next + 1) % PACKETS
        copied = self._copied[place]
        if copied is not None:
            copied.synchronize()
        filled, first, end, views = self._filled[place], 0, 0, list[torch.Tensor]()
        for array in arrays:
            end = first + len(array)
            filled[first:end] = array
            views.append(self.arrived[first:end])
            first += whole_lines(apart or len(array))
        carry(self.arrived[:end], self._pinned[place][:end], beside_pages=self.beside_pages)
        if copied is not None:
            copied.record()
        return views
