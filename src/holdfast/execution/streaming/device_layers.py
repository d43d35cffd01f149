"""Slots on a GPU that layers take turns in. Each streamed layer has one slot, so its tensors keep their addresses:

    layer     0   1   2   3   4   5   6   7          one slot; streamed: 1, 3, 5, 7; the others stay on the GPU
    the link    ─1m─►│3a ─3m─────►│5a ─5m─────►│7a    a: attention's half, m: the MLP's. A half of the next layer comes
                                                      as soon as the same half was computed from, in the next step too:
                                                      after 7 comes 1 again

What travels is packed (layer_pieces.py), and spread in its slot before it is read.

With two slots both halves of the next layer come while one is computed. Layers wait in pinned memory, or in a file,
from which they pass through pinned buffers. The host asks for everything ahead of the GPU; fences on it keep a copy
behind the last reader of its place, and a reader behind its copy. The order is always the same, so nothing is ever
guessed. Between steps layers may come to stay, or leave, where all of them have ranges of addresses. Knows nothing of
products, nor which layers should stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch

from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.execution.memory import ALIGNED_BYTES, Arena
from holdfast.execution.streaming.copies import Copies, back_rate
from holdfast.execution.streaming.disk.embedding_rows import EmbeddingRows
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.execution.streaming.disk.read_ahead import ReadAhead
from holdfast.execution.streaming.layer_pieces import BOTH, LayerPieces
from holdfast.execution.streaming.layer_slots import DeviceSlot, SlotHalf
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.footprint.streamed import StreamedLayers, ahead_of, one_less, one_more, whole_grains
from holdfast.held_interrupts import interrupts_put_off
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse
from holdfast.units import format_bytes

MEASURED_LAYERS = 8
"""Copied to see how fast the link is."""


class DeviceLayers:
    """`memory`: pieces of its `pinned_sizes`. It, `file` and `ranges` are closed with this. `ranges`: addresses of all
    layers, which may then come and go; None: those that are streamed have slots here for good, and others are made
    elsewhere. `room`: bytes of RAM that may still be pinned for layers that leave."""

    def __init__(
        self,
        streamed: StreamedLayers,
        device: torch.device,
        copies: Copies,
        memory: PinnedMemory,
        file: LayerFile | None = None,
        ranges: LayerRanges | None = None,
        room: Callable[[], int] = lambda: 0,
    ) -> None:
        self._streamed, self._copies, self._memory, self._file = streamed, copies, memory, file
        self.link = copies
        """Which others may use as well, behind layers."""
        self._device, self._ranges, self._room = device, ranges, room
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
        self._unread: set[int] = set()
        """Those that are to stay, and are not there yet: a disk may hang."""
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
        self._paused, self._possible, self._possible_disk = False, 0.0, 0.0
        self.possible_back = 0.0
        """Bytes a second to the host, as measured at the start."""
        self.hosted: frozenset[int] = frozenset()
        """Whose second halves stay where they wait, in the step that is launched: the host computes from them."""
        self.host_bytes = 0
        """Of RAM, for what it computes from."""
        self.kv_to_come: Callable[[], int] = lambda: 0  # Bytes of RAM that will still be pinned, for KV pages.

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
    def link_bytes_per_s(self) -> float:
        """As measured at the start; 0: it was not. For any thread, while another launches steps."""
        return self._possible

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
        self._do_without_unread()
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

    def use(self) -> LinkUse:
        return msgspec.structs.replace(self._copies.use(), possible_bytes_per_s=self._possible)

    def disk_use(self) -> LinkUse | None:
        """None: nothing waits on a disk."""
        if self._file is None:
            return None
        return msgspec.structs.replace(self._file.use(), possible_bytes_per_s=self._possible_disk)

    def decisions(self) -> list[Decision]:
        """How fast layers come, measured as steps bring them, and what follows of it."""
        found = []
        if self._in_ram:
            size, rate = self.moved_with(list(self._in_ram)), self._rate(list(self._in_ram))
            step = f"a step copies {format_bytes(size)} from RAM and takes at least {size / rate:.2f} s"
            self._possible, self.possible_back = rate, self._rate_back(next(iter(self._in_ram)))
            found.append(Decision("link_copy", f"{rate / 1e9:.1f} GB/s", step, "measured"))
        if self._on_disk is not None and self._file is not None:
            size, rate = self.moved_with(self._streamed.on_disk), self._rate(list(self._streamed.on_disk))
            self._possible_disk = rate
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
        return self.moved_with(layers) / max(time.monotonic() - began_s, 1e-6)

    def _rate_back(self, layer: int) -> float:
        """Bytes a second, of what goes back to where it waits, as it is there already: packed."""
        self._bring([layer])
        pairs = self.pieces.pairs(layer, self._in_ram[layer], self.place(layer), *BOTH)
        waiting, here = max(pairs, key=lambda pair: len(pair[0]))
        return back_rate(self._copies, here, waiting)

    def _bring(self, layers: list[int]) -> None:
        for layer in layers:
            for half in self._slot(layer).halves:
                self._ask(layer, half.number)
                if half.waiting:
                    self._send(half)
        for half in (half for slot in self._slots for half in slot.halves):
            self._copies.wait(half.copied)

    # Layers come to stay, and leave.

    def slots_for(self, layers: Sequence[int]) -> int:
        """That these would take turns in."""
        return min(1 + ahead_of(layers, self._streamed.ahead), len(layers))

    def bytes_with(self, layers: Sequence[int]) -> int:
        """On the device, of slots and of all layers that would stay, if these were streamed."""
        assert self._ranges is not None
        apart = set(layers)
        stay = sum(self._ranges.bytes_of(layer) for layer in self._sizes if layer not in apart)
        return stay + self.slots_for(layers) * self._ranges.slot_bytes

    def moved_with(self, layers: Sequence[int]) -> int:
        """In every step, if these were streamed."""
        return self.pieces.nbytes(layers)

    def one_more(self, layers: Sequence[int]) -> tuple[int, ...] | None:
        """With one more streamed than these; None: there is none, or RAM has no room for it."""
        kept = {*self._in_ram, *self._streamed.on_disk}
        room = self._room() - sum(self._waiting_bytes(layer) for layer in layers if layer not in kept)
        others = [layer for layer in self._sizes if layer not in set(layers)]
        able = [layer for layer in others if layer in kept or self._waiting_bytes(layer) <= room]
        found = one_more(layers, len(self._sizes), able, kept)
        return None if found is None else tuple(sorted((*layers, found)))

    def one_less(self, layers: Sequence[int]) -> tuple[int, ...]:
        """With one fewer streamed than these: those of the disk come to stay first."""
        gone = one_less(layers, len(self._sizes), self._streamed.on_disk)
        return tuple(layer for layer in layers if layer != gone)

    def change(self, layers: Sequence[int]) -> None:
        """These are streamed from the next step on, and the others stay. Where the device has no memory for one that
        was to stay it is streamed like before. Raises EngineError, and changes nothing, where RAM cannot be had for one
        that leaves. Between steps only; what was launched is waited for."""
        with torch.inference_mode(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._change(layers)

    def _change(self, layers: Sequence[int]) -> None:
        self._do_without_unread()
        self._copies.settle()
        for layer in layers:
            if layer not in self._number:
                self._save(layer)
        try:
            with interrupts_put_off(however_often=True):  # Meanwhile nothing is behind some of them.
                self._move(layers)
            for layer in sorted(self._unread):
                assert self._on_disk is not None
                self.pieces.fetch(layer, self._on_disk.fetch(layer), self.place(layer), self._copies)
                self._unread.discard(layer)
        finally:  # A disk may fail, or hang until Ctrl-C.
            self._do_without_unread()

    def _move(self, layers: Sequence[int]) -> None:
        """What is behind them is another; those that come to stay have to be read."""
        assert self._ranges is not None, "layers without ranges of addresses cannot change places"
        leaving = [layer for layer in layers if layer not in self._number]
        coming = [layer for layer in self._order if layer not in set(layers)]
        self._coming.difference_update(leaving)
        for layer in (*leaving, *coming):
            self._ranges.drop(layer)
        slots = self._make_slots(self.slots_for(layers))
        self._take_turns(layers, slots)
        while self._ranges.slots > slots:
            self._ranges.drop_slot()
        for number, layer in enumerate(coming):
            try:
                self._ranges.own(layer)
            except RangeError as error:
                if not error.out_of_memory:
                    raise
                self._stay_streamed(coming[number:])
                return
            (self._coming if layer in self._in_ram else self._unread).add(layer)

    def _do_without_unread(self) -> None:
        """Layers that did not come from the disk to stay are streamed like before. Where that was interrupted, too, it
        is done by whoever comes next."""
        if self._unread:
            with interrupts_put_off(however_often=True):
                self._stay_streamed(sorted(self._unread))

    def _make_slots(self, wanted: int) -> int:
        """As many, or those that there are where somebody else took the memory that layers have left."""
        assert self._ranges is not None
        while self._ranges.slots < wanted:
            try:
                self._ranges.add_slot()
            except RangeError as error:
                if not error.out_of_memory or not self._ranges.slots:
                    raise
                return self._ranges.slots
        return wanted

    def _stay_streamed(self, layers: Sequence[int]) -> None:
        """These, too; and others that wait somewhere as well, where a slot finds memory no other way."""
        assert self._ranges is not None
        back = list(layers)
        others = [layer for layer in self._sizes if layer not in {*self._order, *back} and self._waits(layer)]
        for layer in back:
            self._ranges.drop(layer)
        while not self._ranges.slots:
            try:
                self._ranges.add_slot()
            except RangeError as error:
                if not error.out_of_memory or not others:
                    raise
                back.append(others.pop())
                self._ranges.drop(back[-1])
        self._coming.difference_update(back)
        self._take_turns(sorted((*self._order, *back)), self._ranges.slots)
        self._unread.difference_update(back)

    def _waits(self, layer: int) -> bool:
        """It is somewhere from where it may come, whether it stays or not."""
        return layer in self._in_ram or layer in self._streamed.on_disk

    def _save(self, layer: int) -> None:
        """It is where it may wait."""
        if self._waits(layer):
            return
        memory = self._memory.add(self._waiting_bytes(layer))
        try:
            self._put(layer, memory)
        except BaseException:
            self._memory.drop(memory)
            raise
        self._in_ram[layer] = memory

    def _waiting_bytes(self, layer: int) -> int:
        """Of RAM, for one that leaves."""
        return whole_grains(self.moved_with([layer]))

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
