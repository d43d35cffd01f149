"""Layers of a model whose GPU does not hold all of them: some stay there, the others come for every step to slots that
they take turns in (layer_turns.py). Measures how fast they come. Between steps layers may come to stay, or leave, where
all of them have ranges of addresses: which of them, and when, is somebody else's to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import msgspec
import torch

from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.execution.streaming.copies import Copies, back_rate
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.execution.streaming.layer_pieces import BOTH
from holdfast.execution.streaming.layer_turns import LayerTurns
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.streamed import StreamedLayers, ahead_of, one_less, one_more, whole_grains
from holdfast.held_interrupts import interrupts_put_off
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse
from holdfast.units import format_bytes

MEASURED_LAYERS = 8
"""Copied to see how fast the link is."""
BROUGHT_BYTES = 128 << 20
"""At least, between two looks at how many came: the link rests for each look."""


class DeviceLayers(LayerTurns):
    """As LayerTurns. `ranges`: layers may come and go. `room`: bytes of RAM that may still be pinned for layers that
    leave."""

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
        super().__init__(streamed, device, copies, memory, file, ranges)
        self._room = room
        self._unread: set[int] = set()
        """Those that are to stay, and are not there yet: a disk may hang."""
        self._brought = 0
        """Layers that came to be measured, beside steps."""
        self._possible = self._possible_disk = 0.0
        self.possible_back = 0.0
        """Bytes a second to the host, as measured at the start."""
        self.host_bytes = 0
        """Of RAM, for what the host computes from."""
        self.kv_to_come: Callable[[], int] = lambda: 0  # Bytes of RAM that will still be pinned, for KV pages.

    @property
    def link_bytes_per_s(self) -> float:
        """As measured at the start; 0: it was not. For any thread, while another launches steps."""
        return self._possible

    @property
    def comes(self) -> bool:
        return bool(self._unread) or super().comes

    def begin(self, layer: int, beat: Callable[[], None] | None = None) -> None:
        if not self._paused:
            self._do_without_unread()
        super().begin(layer, beat)

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

    def bring_more(self) -> tuple[float, int]:
        """Some of the layers that wait in RAM come as for a step, others with each call; the seconds and bytes of all
        copies so far, when they are there. Between steps, for the thread that launches them."""
        layers = [layer for layer in self._order if layer in self._in_ram]
        coming = list[int]()
        while len(coming) < len(layers) and self.moved_with(coming) < BROUGHT_BYTES:
            coming.append(layers[self._brought % len(layers)])
            self._brought += 1
        self._bring(coming)
        return self._copies.timed()

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
