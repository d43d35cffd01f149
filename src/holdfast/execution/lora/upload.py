"""Copies of LoRA adapters on their way from RAM to a GPU: on a stream of their own, and in pieces.

Small packets of steps share the way: a piece is as much as they can wait for. Knows rows and places, not adapters.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress

import torch

from holdfast.execution.streaming.pinned_memory import forget_error, unpin

log = logging.getLogger("holdfast")

PIECE_BYTES = 32 << 20
"""About a millisecond of a PCIe link."""


class PlaceSender:
    """From rows of `copies` to rows of `places`. All calls come from the thread that launches steps."""

    def __init__(self, copies: torch.Tensor, places: torch.Tensor) -> None:
        self._copies, self._places = copies, places
        self._stream = torch.cuda.Stream(places.device)
        self._sent = [torch.cuda.Event() for _ in range(len(places))]
        self._piece = max(1, PIECE_BYTES // places.dtype.itemsize)
        # A start may fail before anybody closes this; memory that the driver has pinned must not be another's then.
        self._end = weakref.finalize(self, unpin, copies, places.device) if self._pin() else None
        if self._end is not None:
            self._end.atexit = False  # The driver does it then.

    def _pin(self) -> bool:
        """What is not pinned is copied while the host waits: right, and slower."""
        if not self._copies.nbytes:
            return False
        told = int(torch.cuda.cudart().cudaHostRegister(self._copies.data_ptr(), self._copies.nbytes, 0))
        if told:
            log.warning(
                "memory for copying LoRA adapters could not be pinned (CUDA error %d): steps wait for the copies", told
            )
            forget_error(self._places.device)
        return not told

    def follow_steps(self) -> None:
        """What is sent from now on arrives after all that was launched: a step may still compute with the place."""
        self._stream.wait_stream(torch.cuda.current_stream(self._places.device))

    def send_flags(self, flags: torch.Tensor, target: torch.Tensor) -> None:
        """Small enough for the driver to take before it returns: they need not be pinned."""
        with torch.cuda.stream(self._stream):
            target.copy_(flags, non_blocking=True)

    def send(self, row: int, place: int, first: int) -> int:
        """The next piece, from number `first` on; where the one after it begins."""
        end = min(first + self._piece, self._places.shape[1])
        with torch.cuda.stream(self._stream):
            self._places[place, first:end].copy_(self._copies[row, first:end], non_blocking=True)
            self._sent[place].record()
        return end

    def arrived(self, place: int) -> bool:
        there: bool = self._sent[place].query()
        return there

    def wait(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        with suppress(RuntimeError):  # A device that has failed copies nothing any more.
            self._stream.synchronize()
        if self._end is not None:
            self._end()
