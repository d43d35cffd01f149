"""Slots in RAM that layers of a file take turns in. Each streamed layer has one slot, so its tensors keep their
addresses:

    layer    0   1   2   3   4   5   6   7        slots: 2; streamed: 1, 3, 5, 7; the others stay where they are
    slot         A       B       A       B
             ──► computed ──►      while 3 is computed in B, 5 is read into A, and after 7 comes 1 again

The order is always the same, so what comes next is known, and nothing is ever guessed. Knows nothing of products.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import msgspec
import torch

from holdfast.execution.memory import Arena
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.footprint.streamed import StreamedLayers
from holdfast.observability.decisions import Decision
from holdfast.records import LinkUse
from holdfast.units import format_bytes

MEASURED_PLACES = 8
"""Read to see how fast the disk is."""


class LayerSlots:
    """`file`: has a place for each of them. Closed with this."""

    def __init__(self, streamed: StreamedLayers, file: LayerFile) -> None:
        self._file = file
        self._place = {layer: place for place, layer in enumerate(streamed.layers)}
        self._slots = [_Slot(streamed.place_bytes) for _ in range(streamed.slots)]
        self._possible = 0.0

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return len(self._slots) * self._file.place_bytes

    @property
    def file_bytes(self) -> int:
        return self._file.nbytes

    def __contains__(self, layer: int) -> bool:
        return layer in self._place

    def arena(self, layer: int) -> Arena:
        """Where this layer's tensors are to be made."""
        return Arena(self._slot(layer).tensor)

    def keep(self, layer: int) -> None:
        """What was made in its slot goes to the file."""
        self._file.write(self._place[layer], self._slot(layer).memory)

    def begin(self, layer: int, beat: Callable[[], None] | None = None) -> None:
        """It is in its slot when this returns. `beat`: called while it comes, which may take long."""
        if layer not in self._place:
            return
        slot, place = self._slot(layer), self._place[layer]
        if slot.place != place:
            self._fill(slot, place)
        try:
            with self._file.awaited():
                for piece in slot.coming:
                    piece.result()
                    if beat is not None:
                        beat()
        except BaseException:
            slot.place = None  # Its other pieces may still be on their way: whoever fills it next waits for them.
            raise
        slot.coming = []

    def end(self, layer: int) -> None:
        """It was computed: whoever is next in its slot may come."""
        if layer in self._place:
            place = self._place[layer] + len(self._slots)
            self._fill(self._slot(layer), place if place < len(self._place) else place % len(self._slots))

    def decision(self) -> Decision:
        """How fast the disk reads, measured as steps read it, and what follows of it."""
        began_s, places = time.monotonic(), min(len(self._place), MEASURED_PLACES)
        for place in range(places):
            self._fill(self._slots[place % len(self._slots)], place)
        for slot in self._slots:
            for piece in slot.coming:
                piece.result()
        self._possible = rate = places * self._file.place_bytes / max(time.monotonic() - began_s, 1e-6)
        step = f"a step reads {format_bytes(self.file_bytes)} and takes at least {self.file_bytes / rate:.2f} s"
        how = "" if self._file.direct else "; through the page cache, since this file system has no direct reads"
        return Decision("nvme_read", f"{rate / 1e9:.2f} GB/s", f"{step}{how}", "measured")

    def use(self) -> LinkUse:
        """Of the way from the disk."""
        return msgspec.structs.replace(self._file.use(), possible_bytes_per_s=self._possible)

    def _fill(self, slot: _Slot, place: int) -> None:
        if slot.asking:
            self._file.stop_reading()  # Some of its pieces may be on their way that nobody knows.
        wait(slot.coming)  # Of another layer, which nobody has waited for.
        slot.place, slot.coming, slot.asking = None, [], True  # Until all of it is asked for.
        for piece in self._file.read(place, slot.memory):
            slot.coming.append(piece)
        slot.place, slot.asking = place, False

    def _slot(self, layer: int) -> _Slot:
        return self._slots[self._place[layer] % len(self._slots)]

    def close(self) -> None:
        self._file.close()
        for slot in self._slots:
            slot.coming = []


class _Slot:
    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.place: int | None = None
        """Of the file, whose content is in it or on its way."""
        self.coming: list[Future[None]] = []
        self.asking = False
        """For what shall be in it; still so where that was interrupted, by Ctrl-C say."""
