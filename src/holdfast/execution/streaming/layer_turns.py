"""Slots on a GPU that layers take turns in. Each streamed layer has one slot, so its tensors keep their addresses:

    layer     0   1   2   3   4   5   6   7          one slot; streamed: 1, 3, 5, 7; the others stay on the GPU
    the link    ─1m─►│3a ─3m─────►│5a ─5m─────►│7a    a: attention's half, m: the MLP's. A half of the next layer comes
                                                      as soon as the same half was computed from, in the next step too:
                                                      after 7 comes 1 again

What travels is packed (layer_pieces.py), and spread in its slot before it is read.

With two slots both halves of the next layer come while one is computed. Layers wait in pinned memory, or in a file,
from which they pass through pinned buffers. The host asks for everything ahead of the GPU; fences on it keep a copy
behind the last reader of its place, and a reader behind its copy. The order is always the same, so nothing is ever
guessed. Knows nothing of products, nor which layers should stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.memory import ALIGNED_BYTES, Arena
from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.disk.embedding_rows import EmbeddingRows
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.execution.streaming.disk.read_ahead import ReadAhead
from holdfast.execution.streaming.layer_pieces import BOTH, LayerPieces
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.footprint.streamed import StreamedLayers


class DeviceSlot:
    def __init__(self, copies: Copies) -> None:
        self.halves = tuple(SlotHalf(number, copies) for number in (0, 1))


class SlotHalf:
    """Of whichever layer is in the slot: its first bytes, which attention reads, or the others."""

    def __init__(self, number: int, copies: Copies) -> None:
        self.number = number
        self.layer: int | None = None
        """Whose bytes are in it, or asked for."""
        self.waiting = False
        """For a disk: the copy is not launched."""
        self.packed = False
        """It is to be spread before it is read."""
        self.read, self.copied = copies.mark(), copies.mark()


class ExpertSlot:
    def __init__(self, tensor: torch.Tensor, copies: Copies) -> None:
        self.tensor = tensor
        self.layer: int | None = None
        """Whose experts are in it, or asked for."""
        self.read, self.copied = copies.mark(), copies.mark()


class LayerTurns:
    """`memory`: pieces of its `pinned_sizes`. It, `file` and `ranges` are closed with this. `ranges`: addresses of all
    layers, of which any may take turns; None: those that are streamed have slots here for good, and others are made
    elsewhere."""

    def __init__(
        self,
        streamed: StreamedLayers,
        device: torch.device,
        copies: Copies,
        memory: PinnedMemory,
        file: LayerFile | None = None,
        ranges: LayerRanges | None = None,
    ) -> None:
        self._streamed, self._copies, self._memory, self._file = streamed, copies, memory, file
        self.link = copies
        """Which others may use as well, behind layers."""
        self._device, self._ranges = device, ranges
        self._sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
        if ranges is not None:
            self._sizes = dict(enumerate(streamed.all_sizes))
        self.pieces = LayerPieces(dict(zip(streamed.layers, streamed.moved_sizes, strict=True)))
        self._in_ram = dict(zip(streamed.in_ram, memory.pieces, strict=False))
        """What waits there; a layer that came to stay is still there, and may leave again at no cost."""
        self._piece = {layer: number for number, layer in enumerate(self._in_ram)}
        """Which may not be pinned yet."""
        buffers = memory.pieces[len(self._in_ram) :][: streamed.read_slots]
        memory.wait(*range(len(self._in_ram), len(streamed.pinned_sizes)))
        self._on_disk = ReadAhead(streamed.on_disk, file, buffers, copies) if file and streamed.on_disk else None
        self._embedding: torch.Tensor | None = None
        self.embedding_rows: EmbeddingRows | None = None
        """Of an embedding that is in the file."""
        if streamed.embedding_on_disk:
            assert file is not None, "it is where layers are that RAM does not hold"
            staged, ahead = memory.pieces[len(streamed.pinned_sizes) - 1], self._on_disk
            meanwhile = (lambda: None) if ahead is None else ahead.go_on
            self.embedding_rows = EmbeddingRows(file, streamed.embedding_offset, staged, copies, meanwhile)
        elif streamed.embedding_bytes:
            self._embedding = as_device_memory(memory.pieces[-1], device)
        self._order: tuple[int, ...] = ()
        """Of those that are streamed now."""
        self._number: dict[int, int] = {}
        self._coming: set[int] = set()
        """Those that stay from now on, and are copied once more when they are computed next."""
        self._slots: list[DeviceSlot] = []
        self._fixed: list[torch.Tensor] = []
        """Slots that are not those of ranges."""
        if ranges is None:
            self._fixed = [
                torch.empty(streamed.place_bytes, dtype=torch.uint8, device=device) for _ in range(streamed.slots)
            ]
        else:
            for _ in range(streamed.slots):
                ranges.add_slot()
        self._take_turns(streamed.layers, streamed.slots)
        self._cuts: dict[int, int] = {}
        """Bytes of the first half, by layer."""
        self._arena: Arena | None = None
        self._paused = False
        self.hosted: frozenset[int] = frozenset()
        """Whose second halves stay where they wait, in the step that is launched: the host computes from them."""

    @property
    def nbytes(self) -> int:
        """Of slots, on the device."""
        fixed = sum(slot.nbytes for slot in self._fixed)
        return fixed if self._ranges is None else self._ranges.slots_bytes

    @property
    def resident_bytes(self) -> int:
        """Of layers that were made here and stay on the device, beside slots."""
        return 0 if self._ranges is None else self._ranges.own_bytes

    @property
    def pinned_bytes(self) -> int:
        """On the host."""
        return self._memory.nbytes

    @property
    def moved_bytes(self) -> int:
        """In every step."""
        return self.moved_with(self._order)

    @property
    def movable(self) -> bool:
        """Whether layers may come to stay, and leave."""
        return self._ranges is not None

    @property
    def streamed(self) -> tuple[int, ...]:
        """In their order; the others stay."""
        return self._order

    @property
    def comes(self) -> bool:
        """Whether steps wait for anything of the link now."""
        return bool(self._order or self._coming)

    def __contains__(self, layer: int) -> bool:
        """Whether its tensors are made here."""
        return layer in self._sizes

    def place(self, layer: int) -> torch.Tensor:
        """Where it is computed from: always the same addresses."""
        if self._ranges is not None:
            return self._ranges.view(layer)
        return self._fixed[self._number[layer] % len(self._fixed)]

    def arena(self, layer: int) -> Arena:
        """Where this layer's tensors are to be made: those of its first half, `divide`, then the others."""
        if layer in self._number:
            for half in self._slot(layer).halves:
                half.layer = None
        elif self._ranges is not None:
            self._ranges.own(layer)
        self.pieces.begin()
        self._arena = Arena(self.place(layer)[: self._sizes[layer]])
        return self._arena

    def divide(self, layer: int) -> None:
        assert self._arena is not None, "an arena was given out"
        self._cuts[layer] = -(-self._arena.used_bytes // ALIGNED_BYTES) * ALIGNED_BYTES

    @property
    def embedding(self) -> Arena | None:
        """Where the embedding is to be made, which is gathered over the link; None: on the GPU, whether it stays there
        or goes to the file."""
        return None if self._embedding is None else Arena(self._embedding)

    def keep(self, layer: int) -> None:
        """All of it was made. Of one that is streamed it goes to where it waits from now on."""
        assert self._arena is not None, "an arena was given out"
        self.pieces.made(layer, self._cuts[layer], self._arena.used_bytes)
        if layer not in self._number:
            return
        if layer in self._in_ram:
            self._memory.wait(self._piece[layer])
            self._put(layer, self._in_ram[layer])
        else:
            assert self._on_disk is not None
            self._on_disk.write(layer, lambda memory: self._put(layer, memory))
        for half in self._slot(layer).halves:
            half.layer, half.packed = layer, False

    def _put(self, layer: int, memory: torch.Tensor) -> None:
        self.pieces.put(layer, memory, self.place(layer), self._copies)

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
        if self._paused:
            return
        if layer in self._number:
            self._await(layer, 0, beat)
        elif layer in self._coming:
            self._arrive(layer)

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
        return self._order[number if number < len(self._order) else number % len(self._slots)]

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
        if half.packed:
            half.layer = None  # Ctrl-C may come between any two lines: it is spread once, or comes again.
            half.packed = False
            self._copies.launch(partial(self.pieces.spread, layer, self.place(layer), number))
            half.layer = layer

    def _ask(self, layer: int, number: int) -> None:
        half, other = (self._slot(layer).halves[at] for at in (number, 1 - number))
        if other.layer is not None and (self._cuts[layer] - self._cuts[other.layer]) * (1 - 2 * number) > 0:
            other.layer = None  # This one comes to lie over it: after a step that did not get to its end.
        self._copies.after_launched(half.read)
        half.layer, half.waiting = layer, True
        if layer in self._in_ram:
            self._send(half)

    def _send(self, half: SlotHalf, beat: Callable[[], None] | None = None) -> None:
        layer = half.layer
        assert layer is not None
        half.layer = None  # A disk may fail.
        source, marks = self._source(layer, beat)
        half.packed = self.pieces.packed(layer, half.number)
        pairs = self.pieces.pairs(layer, source, self.place(layer), half.number)
        self._copies.copy_pieces(pairs, half.read, [half.copied, *marks])
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

    def _slot(self, layer: int) -> DeviceSlot:
        return self._slots[self._number[layer] % len(self._slots)]

    def moved_with(self, layers: Sequence[int]) -> int:
        """In every step, if these were streamed."""
        return self.pieces.nbytes(layers)

    def _arrive(self, layer: int) -> None:
        """From where it waited, to stay: in its turn among those that are streamed, which is the order of need."""
        read, copied = self._copies.mark(), self._copies.mark()
        place = self.place(layer)
        self._copies.after_launched(read)  # By a step that did not get to its end, and left it half spread.
        self._copies.copy_pieces(self.pieces.pairs(layer, self._in_ram[layer], place, *BOTH), read, [copied])
        self._copies.await_copy(copied)
        self._copies.launch(partial(self.pieces.spread, layer, place, *BOTH))
        self._coming.discard(layer)

    def _take_turns(self, layers: Sequence[int], slots: int) -> None:
        """These in so many slots, which hold nothing yet; nothing may be on its way."""
        self._order = tuple(layers)
        self._number = {layer: number for number, layer in enumerate(layers)}
        self._slots = [DeviceSlot(self._copies) for _ in range(slots)]
        if self._ranges is not None:
            for number, layer in enumerate(layers):
                self._ranges.lend(layer, number % slots)
        if self._on_disk is not None:
            self._on_disk.follow([layer for layer in layers if layer not in self._in_ram])

    def close(self) -> None:
        if self.embedding_rows is not None:
            self.embedding_rows.close()
        if self._on_disk is not None:
            self._on_disk.close()
        elif self._file is not None:
            self._file.close()
        self._copies.close()
        self._memory.close()
        if self._ranges is not None:
            self._ranges.close()
        self._slots.clear()
        self._fixed.clear()
        self._in_ram.clear()
        self._cuts.clear()
        self._embedding = self._arena = None
