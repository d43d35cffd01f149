"""Addresses of layers on a GPU that stay theirs whether they stay there or come for every step. Behind a layer is
memory of its own, or a slot's, which any number of layers have behind them at once:

    addresses   [ layer 0 ][ layer 1 ][ layer 2 ][ layer 3 ][ layer 4 ]       each as long as the largest
                     │          └────┐     │      ┌───┘          │
    memory       [ own 0 ]         [ slot 0 ]──────          [ own 4 ]        layers 1 and 3 take turns in it
                                  (2: own)

So a layer comes to stay, or leaves, without any tensor, descriptor or graph being made again. Copies nothing. Ctrl-C
waits until the books say what the driver has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.execution.gpu.memory.virtual_memory import DriverMemory, RangeError
from holdfast.held_interrupts import interrupts_put_off


class LayerRanges:
    """`sizes`: bytes of every layer. There is memory behind none, and no slot, at first. Before memory goes from behind
    a layer all that was launched is waited for; what was there is lost. `memory`: the driver's."""

    def __init__(self, sizes: Sequence[int], device: torch.device, memory: DriverMemory | None = None) -> None:
        self._memory = DriverMemory(device) if memory is None else memory
        self._sizes = [self._memory.whole(size) for size in sizes]
        self.slot_bytes = max(self._sizes)
        self._own: dict[int, Any] = {}
        self._slots: list[Any] = []
        self._lent: dict[int, int] = {}
        """Slots by layer."""
        self._views: dict[int, torch.Tensor] = {}
        self._address: int | None = self._memory.reserve(len(sizes) * self.slot_bytes)

    @property
    def own_bytes(self) -> int:
        """Of layers that have memory of their own."""
        return sum(self._sizes[layer] for layer in self._own)

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def slots_bytes(self) -> int:
        return len(self._slots) * self.slot_bytes

    def bytes_of(self, layer: int) -> int:
        """That memory of its own has."""
        return self._sizes[layer]

    def view(self, layer: int) -> torch.Tensor:
        """Its bytes, the same tensor always; only what is backed may be touched."""
        if layer not in self._views:
            self._views[layer] = self._memory.view(self._at(layer), self._sizes[layer])
        return self._views[layer]

    @interrupts_put_off()
    def own(self, layer: int) -> None:
        """Memory of its own. Raises RangeError where there is too little: then nothing is behind it."""
        if layer in self._own:
            return
        self.drop(layer)
        handle = self._memory.create(self._sizes[layer])
        try:
            self._back(layer, self._sizes[layer], handle)
        except BaseException:
            self._memory.release(handle)
            raise
        self._own[layer] = handle

    @interrupts_put_off()
    def lend(self, layer: int, slot: int) -> None:
        """A slot, in place of memory of its own, which is given back."""
        if self._lent.get(layer) == slot:
            return
        self.drop(layer)
        self._back(layer, self.slot_bytes, self._slots[slot])
        self._lent[layer] = slot

    @interrupts_put_off()
    def add_slot(self) -> None:
        """Raises RangeError and changes nothing where there is too little."""
        self._slots.append(self._memory.create(self.slot_bytes))

    @interrupts_put_off()
    def drop_slot(self) -> None:
        """The last, which no layer has behind it."""
        assert len(self._slots) - 1 not in self._lent.values(), "no layer has it"
        self._memory.release(self._slots[-1])
        self._slots.pop()

    def _back(self, layer: int, nbytes: int, handle: Any) -> None:
        self._memory.map(self._at(layer), nbytes, handle)
        try:
            self._memory.allow(self._at(layer), nbytes)
        except BaseException:
            self._memory.unmap(self._at(layer), nbytes)
            raise

    @interrupts_put_off()
    def drop(self, layer: int) -> None:
        """Nothing is behind it from now on; memory of its own is given back."""
        if layer in self._own or layer in self._lent:
            self._memory.wait()
        if layer in self._own:
            self._memory.unmap(self._at(layer), self._sizes[layer])
            self._memory.release(self._own.pop(layer))
        elif layer in self._lent:
            self._memory.unmap(self._at(layer), self.slot_bytes)
            del self._lent[layer]

    def _at(self, layer: int) -> int:
        assert self._address is not None, "it is closed"
        return self._address + layer * self.slot_bytes

    @interrupts_put_off()
    def close(self) -> None:
        if self._address is None:
            return
        self._views.clear()
        with contextlib.suppress(RangeError, RuntimeError):  # A device that has failed takes nothing back.
            for layer in (*self._own, *self._lent):
                self.drop(layer)
            while self._slots:
                self.drop_slot()
        self._memory.free_addresses(self._address, len(self._sizes) * self.slot_bytes)
        self._address = None

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None and not sys.is_finalizing():
            self.close()
