"""Slots on a GPU that layers take turns in. Each streamed layer has one slot, so its tensors keep their addresses:

    layer     0   1   2   3   4   5   6   7          one slot; streamed: 1, 3, 5, 7; the others stay on the GPU
    the link    ─1m─►│3a ─3m─────►│5a ─5m─────►│7a    a: attention's half, m: the MLP's. A half of the next layer comes
                                                      as soon as the same half was computed from, in the next step too:
                                                      after 7 comes 1 again

With two slots both halves of the next layer come while one is computed. Layers wait in pinned memory, or in a file,
from which they pass through pinned buffers. The host asks for everything ahead of the GPU; fences on it keep a copy
behind the last reader of its place, and a reader behind its copy. The order is always the same, so nothing is ever
guessed. Knows nothing of products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from holdfast.execution.memory import ALIGNED_BYTES, Arena
from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.layer_file import LayerFile
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.execution.streaming.read_ahead import ReadAhead
from holdfast.footprint.streamed import StreamedLayers
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse
from holdfast.units import format_bytes

MEASURED_LAYERS = 8
"""Copied to see how fast the link is."""


class DeviceLayers:
    """`memory`: pieces of its `pinned_sizes`. It and `file` are closed with this."""

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
        self._cuts: dict[int, int] = {}
        """Bytes of the first half, by layer."""
        self._arena: Arena | None = None
        self._paused, self._possible = False, 0.0
        self.hosted: frozenset[int] = frozenset()
        """Whose second halves stay where they wait, in the step that is launched: the host computes from them."""

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(slot.tensor.nbytes for slot in self._slots)

    @property
    def pinned_bytes(self) -> int:
        """On the host."""
        return self._memory.nbytes

    def __contains__(self, layer: int) -> bool:
        return layer in self._number

    def arena(self, layer: int) -> Arena:
        """Where this layer's tensors are to be made: those of its first half, `divide`, then the others."""
        for half in self._slot(layer).halves:
            half.layer = None
        self._arena = Arena(self._slot(layer).tensor[: self._sizes[layer]])
        return self._arena

    def divide(self, layer: int) -> None:
        assert self._arena is not None, "an arena was given out"
        self._cuts[layer] = -(-self._arena.used_bytes // ALIGNED_BYTES) * ALIGNED_BYTES

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
        for half in slot.halves:
            half.layer = layer

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within, layers are computed from whatever is in their slots: to load kernels, whose results nobody reads."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def begin(self, layer: int, beat: Callable[[], None] | None = None) -> None:
        """What is launched from now on finds its first half in its slot. `beat`: called while a disk is waited for."""
        if layer in self._number and not self._paused:
            self._await(layer, 0, beat)

    def halfway(self, layer: int, beat: Callable[[], None] | None = None) -> None:
        """All that reads its first half was launched; what comes now finds the second."""
        if layer not in self._number or self._paused:
            return
        after = self._after(layer)
        # Another kind of layer may be divided further behind, where this one is still read.
        if after != layer and self._cuts[after] <= self._cuts[layer]:
            self._ask(after, 0)
        if layer not in self.hosted:
            self._await(layer, 1, beat)

    def end(self, layer: int) -> None:
        """All of it was launched: whoever is next in its slot may come."""
        if layer not in self._number or self._paused:
            return
        after = self._after(layer)
        if after != layer:
            if self._slot(layer).halves[0].layer != after:
                self._ask(after, 0)
            if layer not in self.hosted and (second := self._second_after(layer)) != layer:
                self._ask(second, 1)
        if self._on_disk is not None:
            self._on_disk.go_on()
            for half in (half for slot in self._slots for half in slot.halves):
                if half.waiting and half.layer is not None and self._on_disk.ready(half.layer):
                    self._send(half)

    def _after(self, layer: int) -> int:
        """The next in the same slot."""
        number = self._number[layer] + len(self._slots)
        return self._streamed.layers[number if number < len(self._number) else number % len(self._slots)]

    def _second_after(self, layer: int) -> int:
        """The next in the same slot whose second half comes."""
        after = self._after(layer)
        while after in self.hosted:
            after = self._after(after)
        return after

    def _await(self, layer: int, number: int, beat: Callable[[], None] | None) -> None:
        half = self._slot(layer).halves[number]
        if half.layer != layer:
            self._ask(layer, number)
        if half.waiting:
            self._send(half, beat)
        self._copies.await_copy(half.copied)

    def _ask(self, layer: int, number: int) -> None:
        half, other = (self._slot(layer).halves[at] for at in (number, 1 - number))
        if other.layer is not None and (self._cuts[layer] - self._cuts[other.layer]) * (1 - 2 * number) > 0:
            other.layer = None  # This one comes to lie over it: after a step that did not get to its end.
        self._copies.after_launched(half.read)
        half.layer, half.waiting = layer, True
        if layer in self._in_ram:
            self._send(half)

    def _send(self, half: _Half, beat: Callable[[], None] | None = None) -> None:
        layer = half.layer
        assert layer is not None
        half.layer = None  # A disk may fail.
        first, last = (0, self._cuts[layer]) if half.number == 0 else (self._cuts[layer], self._sizes[layer])
        source, marks = self._source(layer, beat)
        self._copies.copy(source[first:last], half.slot[first:last], half.read, [half.copied, *marks])
        if self._on_disk is not None and marks and half.number == 1:
            self._on_disk.release()
        half.layer, half.waiting = layer, False

    def _source(self, layer: int, beat: Callable[[], None] | None = None) -> tuple[torch.Tensor, list[Any]]:
        """Its bytes in pinned memory, and what is to be marked when they were copied."""
        if layer in self._in_ram:
            return self._in_ram[layer], []
        assert self._on_disk is not None
        memory, copied = self._on_disk.take(layer, beat)
        return memory, [copied]

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
        self._bring(layers[:1])  # What is only done once is done.
        began_s = time.monotonic()
        self._bring(layers)
        return sum(self._sizes[layer] for layer in layers) / max(time.monotonic() - began_s, 1e-6)

    def _bring(self, layers: list[int]) -> None:
        for layer in layers:
            for half in self._slot(layer).halves:
                self._ask(layer, half.number)
                if half.waiting:
                    self._send(half)
        for half in (half for slot in self._slots for half in slot.halves):
            self._copies.wait(half.copied)

    def close(self) -> None:
        if self._on_disk is not None:
            self._on_disk.close()
        self._copies.close()
        self._memory.close()
        self._slots.clear()
        self._in_ram.clear()
        self._cuts.clear()
        self._embedding = self._arena = None


class _DeviceSlot:
    def __init__(self, tensor: torch.Tensor, copies: Copies) -> None:
        self.tensor = tensor
        self.halves = tuple(_Half(tensor, number, copies) for number in (0, 1))


class _Half:
    """Of whichever layer is in the slot: its first bytes, which attention reads, or the others."""

    def __init__(self, slot: torch.Tensor, number: int, copies: Copies) -> None:
        self.slot, self.number = slot, number
        self.layer: int | None = None
        """Whose bytes are in it, or asked for."""
        self.waiting = False
        """For a disk: the copy is not launched."""
        self.read, self.copied = copies.mark(), copies.mark()
