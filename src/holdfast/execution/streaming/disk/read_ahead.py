"""Layers of a file on their way to a GPU: read in their order, round and round, into pinned buffers ahead of need.

A buffer is filled again when its copy to the GPU is over. Knows nothing of slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.disk.layer_file import LayerFile

BEAT_S = 0.25
"""A disk may take long, and whoever watches wants to hear meanwhile that it is waited for."""
COPY_POLL_S = 0.001


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    copied: Any
    """Passed when what was in it is on the GPU."""
    layer: int | None = None
    """None: not all of its pieces were asked for."""
    coming: list[Future[None]] = field(default_factory=list)


class ReadAhead:
    """`layers`: those of the file, by place. `buffers`: pinned, of a place each. Whatever interrupts it, also between
    any two of its lines: what is taken next is right."""

    def __init__(self, layers: Sequence[int], file: LayerFile, buffers: Sequence[torch.Tensor], copies: Copies) -> None:
        self._file, self._copies = file, copies
        self._order = tuple(layers)
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._buffers = [_Buffer(memory, copies.mark()) for memory in buffers]
        self._copied = deque(self._buffers)
        """What was in them was asked to be copied, the oldest first."""
        self._reading: deque[_Buffer] = deque()
        """In the order of the layers."""
        self._next = 0
        """In the order."""

    def follow(self, layers: Sequence[int]) -> None:
        """Those that are read from now on, in their order, round and round. Waits for nothing: who takes what others
        were read for finds it, or lets them go."""
        self._order, self._next = tuple(layers), 0

    def write(self, layer: int, put: Callable[[torch.Tensor], None]) -> None:
        """What this puts into pinned memory goes to the file; nothing may be on its way."""
        self._drop()
        memory = self._copied[0].memory
        put(memory)
        self._file.write(self._place[layer], _view(memory))

    def fetch(self, layer: int) -> torch.Tensor:
        """What is in the file, in pinned memory until anything else is read; nothing may be on its way."""
        self._drop()
        buffer = self._copied.popleft()
        buffer.layer, buffer.coming = None, []
        self._reading.append(buffer)
        buffer.coming = list(self._file.read(self._place[layer], _view(buffer.memory)))
        for piece in buffer.coming:
            piece.result()
        buffer.layer = layer
        self._drop()
        return buffer.memory

    def go_on(self) -> None:
        """Begins to read as many as there are buffers that nobody copies from any more."""
        try:
            while self._order and self._copied and self._copies.passed(self._copied[0].copied):
                buffer, at = self._copied.popleft(), self._next
                buffer.layer, buffer.coming = None, []
                self._reading.append(buffer)
                buffer.coming = list(self._file.read(self._place[self._order[at]], _view(buffer.memory)))
                self._next = (at + 1) % len(self._order)
                buffer.layer = self._order[at]
        except BaseException:
            self._drop()
            raise

    def ready(self, layer: int) -> bool:
        """Whether `take` would not wait."""
        return (
            bool(self._reading) and self._reading[0].layer == layer and all(p.done() for p in self._reading[0].coming)
        )

    def take(self, layer: int, beat: Callable[[], None] | None = None) -> tuple[torch.Tensor, Any]:
        """Its bytes, and the mark that is to be passed when they were copied. Waits until they are here. They stay
        until `release`, and may be taken in parts."""
        try:
            if not self._reading or self._reading[0].layer != layer:
                self._restart(layer, beat)
            buffer = self._reading[0]
            with self._file.awaited():
                for piece in buffer.coming:
                    _wait_for([piece], beat)
                    piece.result()
                    self.go_on()
                    if beat is not None:
                        beat()
        except BaseException:
            self._drop()
            raise
        return buffer.memory, buffer.copied

    def release(self) -> None:
        """What was taken last: its copies are asked for."""
        self._copied.append(self._reading.popleft())

    def _restart(self, layer: int, beat: Callable[[], None] | None) -> None:
        """With this one: something else was expected, or did not come."""
        self._drop(beat)
        self._next = self._order.index(layer)
        copied = self._copied[0].copied
        while beat is not None and not self._copies.passed(copied):
            beat()
            time.sleep(COPY_POLL_S)
        self._copies.wait(copied)
        self.go_on()

    def _drop(self, beat: Callable[[], None] | None = None) -> None:
        """All buffers are free then: an interruption may have left one on neither side."""
        if any(buffer.layer is None for buffer in self._reading):
            self._file.stop_reading()  # Some pieces of it may be on their way that nobody knows.
        _wait_for([piece for buffer in self._reading for piece in buffer.coming], beat)
        known = [*self._reading, *self._copied]
        self._reading.clear()
        self._copied = deque([*known, *(buffer for buffer in self._buffers if all(buffer is not one for one in known))])

    def close(self) -> None:
        self._file.close()
        self._reading.clear()
        self._copied.clear()
        self._buffers.clear()


def _wait_for(pieces: Sequence[Future[None]], beat: Callable[[], None] | None) -> None:
    while wait(pieces, None if beat is None else BEAT_S).not_done:
        if beat is not None:
            beat()


def _view(memory: torch.Tensor) -> memoryview:
    return memory.numpy().data
