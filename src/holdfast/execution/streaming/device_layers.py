"""Slots on a GPU that layers take turns in. Each streamed layer has one slot, so its tensors keep their addresses:

    layer     0   1   2   3   4   5   6   7         slots: 2; streamed: 1, 3, 5, 7; the others stay on the GPU
    slot          A       B       A       B
    the link  ──3─►B ──5─►A ──7─►B ──1─►A ──3─►B    the next copy is asked for as soon as a slot was computed from,
                                                    for the next step too: after 7 comes 1 again

Layers wait in pinned memory, or in a file, from which they pass through pinned buffers. The host asks for everything
ahead of the GPU; fences on it keep a copy behind the last reader of its slot, and a reader behind its copy. The order
is always the same, so nothing is ever guessed. Knows nothing of products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from holdfast.execution.memory import Arena
from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.layer_file import LayerFile
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.execution.streaming.read_ahead import ReadAhead
from holdfast.footprint.streamed import PLACE_GRAIN_BYTES, StreamedLayers
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse
from holdfast.units import format_bytes

MEASURED_LAYERS = 8
"""Copied to see how fast the link is."""


def pinned_sizes(streamed: StreamedLayers) -> list[int]:
    """A piece for each layer in RAM, then the buffers for those of a file, then the embedding where it is in RAM."""
    apart, sizes = set(streamed.on_disk), zip(streamed.layers, streamed.sizes, strict=True)
    embedding = [streamed.embedding_bytes + PLACE_GRAIN_BYTES] if streamed.embedding_bytes else []
    buffers = [streamed.place_bytes] * streamed.read_slots
    return [*(size for layer, size in sizes if layer not in apart), *buffers, *embedding]


class DeviceLayers:
    """`memory`: pieces of `pinned_sizes`. It and `file` are closed with this."""

    def __init__(
        self,
        streamed: StreamedLayers,
        device: torch.device,
        copies: Copies,
        memory: PinnedMemory,
        file: LayerFile | None = None,
    ) -> None:
        self._streamed, self._copies, self._memory, self._file = streamed, copies, memory, file
        self._number = {layer: number for number, layer in enumerate(streamed.layers)}
        self._sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
        self._in_ram = dict(zip(streamed.in_ram, memory.pieces, strict=False))
        buffers = memory.pieces[len(self._in_ram) :][: streamed.read_slots]
        self._embedding = as_device_memory(memory.pieces[-1], device) if streamed.embedding_bytes else None
        self._on_disk = None if file is None else ReadAhead(streamed.on_disk, file, buffers, copies)
        self._slots = [
            _DeviceSlot(torch.empty(streamed.place_bytes, dtype=torch.uint8, device=device), copies)
            for _ in range(streamed.slots)
        ]
        self._paused, self._possible = False, 0.0

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(slot.tensor.nbytes for slot in self._slots)

    def __contains__(self, layer: int) -> bool:
        return layer in self._number

    def arena(self, layer: int) -> Arena:
        """Where this layer's tensors are to be made."""
        slot = self._slot(layer)
        slot.layer = None
        return Arena(slot.tensor[: self._sizes[layer]])

    @property
    def embedding(self) -> Arena | None:
        """Where the embedding is to be made, which is gathered over the link; None: on the GPU."""
        return None if self._embedding is None else Arena(self._embedding)

    def keep(self, layer: int) -> None:
        """What was made in its slot goes to where it waits from now on."""
        slot = self._slot(layer)
        whole = slot.tensor[: self._sizes[layer]]
        if layer in self._in_ram:
            self._copies.now(whole, self._in_ram[layer])
        else:
            assert self._on_disk is not None
            self._on_disk.write(layer, whole)
        slot.layer = layer

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within, layers are computed from whatever is in their slots: to load kernels, whose results nobody reads."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def begin(self, layer: int, beat: Callable[[], None] | None = None) -> None:
        """What is launched from now on finds it in its slot. `beat`: called while a disk is waited for."""
        if layer not in self._number or self._paused:
            return
        slot = self._slot(layer)
        if slot.layer != layer:
            self._ask(slot, layer)
        if slot.waiting:
            self._send(slot, beat)
        self._copies.await_copy(slot.copied)

    def end(self, layer: int) -> None:
        """It was launched: whoever is next in its slot may come."""
        if layer not in self._number or self._paused:
            return
        number = self._number[layer] + len(self._slots)
        after = self._streamed.layers[number if number < len(self._number) else number % len(self._slots)]
        if after != layer:
            self._ask(self._slot(layer), after)
        if self._on_disk is not None:
            self._on_disk.go_on()
            for slot in self._slots:
                if slot.waiting and slot.layer is not None and self._on_disk.ready(slot.layer):
                    self._send(slot)

    def _ask(self, slot: _DeviceSlot, layer: int) -> None:
        self._copies.after_launched(slot.read)
        slot.layer, slot.waiting = layer, True
        if layer in self._in_ram:
            self._send(slot)

    def _send(self, slot: _DeviceSlot, beat: Callable[[], None] | None = None) -> None:
        layer = slot.layer
        assert layer is not None
        slot.layer = None  # A disk may fail.
        source, marks = self._source(layer, beat)
        self._copies.copy(source, slot.tensor, slot.read, [slot.copied, *marks])
        slot.layer, slot.waiting = layer, False

    def _source(self, layer: int, beat: Callable[[], None] | None = None) -> tuple[torch.Tensor, list[Any]]:
        """Its bytes in pinned memory, and what is to be marked when they were copied."""
        if layer in self._in_ram:
            return self._in_ram[layer], []
        assert self._on_disk is not None
        memory, copied = self._on_disk.take(layer, beat)
        return memory[: self._sizes[layer]], [copied]

    def _slot(self, layer: int) -> _DeviceSlot:
        return self._slots[self._number[layer] % len(self._slots)]

    def use(self) -> LinkUse:
        return msgspec.structs.replace(self._copies.use(), possible_bytes_per_s=self._possible)

    def decisions(self) -> list[Decision]:
        """How fast layers come, measured as steps bring them, and what follows of it."""
        found = []
        if self._in_ram:
            size, rate = sum(self._sizes[layer] for layer in self._in_ram), self._rate(list(self._in_ram))
            step = f"a step copies {format_bytes(size)} from RAM and takes at least {size / rate:.2f} s"
            self._possible = rate
            found.append(Decision("link_copy", f"{rate / 1e9:.1f} GB/s", step, "measured"))
        if self._on_disk is not None and self._file is not None:
            size, rate = self._streamed.read_bytes, self._rate(list(self._streamed.on_disk))
            how = "" if self._file.direct else "; through the page cache, since this file system has no direct reads"
            step = f"a step reads {format_bytes(size)} and takes at least {size / rate:.2f} s{how}"
            found.append(Decision("nvme_read", f"{rate / 1e9:.2f} GB/s", step, "measured"))
        return found

    def _rate(self, layers: list[int]) -> float:
        """Bytes a second, into their slots."""
        layers = layers[:MEASURED_LAYERS]
        self.begin(layers[0])
        self._copies.wait(self._slot(layers[0]).copied)
        began_s = time.monotonic()
        for layer in layers:
            self._ask(self._slot(layer), layer)
            if self._slot(layer).waiting:
                self._send(self._slot(layer))
        for slot in self._slots:
            if slot.layer in layers:
                self._copies.wait(slot.copied)
        return sum(self._sizes[layer] for layer in layers) / max(time.monotonic() - began_s, 1e-6)

    def close(self) -> None:
        if self._on_disk is not None:
            self._on_disk.close()
        self._copies.close()
        self._memory.close()
        self._slots.clear()
        self._embedding = None


class _DeviceSlot:
    def __init__(self, tensor: torch.Tensor, copies: Copies) -> None:
        self.tensor = tensor
        self.layer: int | None = None
        """Whose bytes are in it, or asked for."""
        self.waiting = False
        """For a disk: the copy is not launched."""
        self.read, self.copied = copies.mark(), copies.mark()
