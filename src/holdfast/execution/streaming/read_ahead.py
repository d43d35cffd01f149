"""Layers of a file on their way to a GPU: read in their order, round and round, into pinned buffers ahead of need.

A buffer is filled again when its copy to the GPU is over. Knows nothing of slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.layer_file import LayerFile


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    copied: Any
    """Passed when what was in it is on the GPU."""
    layer: int = -1
    coming: list[Future[None]] = field(default_factory=list)


class ReadAhead:
    """`layers`: those of the file, by place. `buffers`: pinned, of a place each."""

    def __init__(self, layers: Sequence[int], file: LayerFile, buffers: Sequence[torch.Tensor], copies: Copies) -> None:
        self._layers, self._file, self._copies = tuple(layers), file, copies
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._copied = deque(_Buffer(memory, copies.mark()) for memory in buffers)
        """What was in them was asked to be copied, the oldest first."""
        self._reading: deque[_Buffer] = deque()
        """In the order of the layers."""
        self._next = 0

    def write(self, layer: int, device: torch.Tensor) -> None:
        """What lies on the device goes to the file; nothing may be on its way."""
        self._drop()
        memory = self._copied[0].memory
        self._copies.now(device, memory)
        self._file.write(self._place[layer], _view(memory))

    def go_on(self) -> None:
        """Begins to read as many as there are buffers that nobody copies from any more."""
        while self._copied and self._copies.passed(self._copied[0].copied):
            buffer = self._copied.popleft()
            self._reading.append(buffer)  # First: asking for its pieces may be interrupted.
            buffer.layer, buffer.coming = self._layers[self._next], []
            for piece in self._file.read(self._next, _view(buffer.memory)):
                buffer.coming.append(piece)
            self._next = (self._next + 1) % len(self._layers)

    def ready(self, layer: int) -> bool:
        """Whether `take` would not wait."""
        return (
            bool(self._reading) and self._reading[0].layer == layer and all(p.done() for p in self._reading[0].coming)
        )

    def take(self, layer: int, beat: Callable[[], None] | None = None) -> tuple[torch.Tensor, Any]:
        """Its bytes, and the mark that is to be passed when they were copied. Waits until they are here. They stay
        until `release`, and may be taken in parts."""
        if not self._reading or self._reading[0].layer != layer:
            self._restart(layer)
        buffer = self._reading[0]
        try:
            for piece in buffer.coming:
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

    def _restart(self, layer: int) -> None:
        """With this one: something else was expected, or did not come."""
        self._drop()
        self._next = self._place[layer]
        self._copies.wait(self._copied[0].copied)
        self.go_on()

    def _drop(self) -> None:
        for buffer in self._reading:
            wait(buffer.coming)
            buffer.layer = -1
        self._copied.extendleft(reversed(self._reading))
        self._reading.clear()

    def close(self) -> None:
        self._file.close()
        self._reading.clear()
        self._copied.clear()


def _view(memory: torch.Tensor) -> memoryview:
    return memory.numpy().data
