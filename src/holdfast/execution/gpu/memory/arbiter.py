"""One arbiter of a GPU's memory: what every named share of the budget may take, and what is left for layers and KV.

    budget ┬ context, weights, buffers, activations, logits, adapters, graphs     as measured, with what may still come
           ├ unaccounted      what the driver counts as ours and no share does
           ├ layers           those that stay, and slots of those that come for every step: as many stay as there is
           │                  room for beside the KV that is wanted
           └ kv_pool          the rest: the share that gives way, and gets what others leave

Shares are reserved, so what a step needs at its worst is there when it comes. Moves nothing itself: it is told how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution.gpu.memory.accounting import GpuMemory
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.execution.streaming.pinned_memory import NOT_PINNED
from holdfast.records import LayersGrant, VramBudget, VramGrant
from holdfast.units import format_bytes


class MovableLayers(Protocol):
    """Layers that may come to stay on the GPU, and leave it."""

    @property
    def streamed(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Of slots."""

    @property
    def resident_bytes(self) -> int: ...

    @property
    def pinned_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int:
        """In every step."""

    def bytes_with(self, layers: Sequence[int]) -> int:
        """Of slots and of layers that stay, if these were streamed."""

    def one_more(self, layers: Sequence[int]) -> tuple[int, ...] | None: ...

    def one_less(self, layers: Sequence[int]) -> tuple[int, ...]: ...

    def change(self, layers: Sequence[int]) -> None:
        """These are streamed from now on; more of them where memory for one that was to stay is not there."""


class VramArbiter:
    """`shares`: what each but the KV pool holds or may still take. `planned_bytes`: of all of them as a start would
    plan them; no budget is granted that the next start would refuse. `layers`: which may come and go, and are in
    `shares` as weights and layer_slots; beside them the pool is `wanted_kv_bytes`, and what no layer has room in."""

    def __init__(
        self,
        memory: GpuMemory,
        kv: KVRange,
        budget_bytes: int,
        shares: Mapping[str, int],
        planned_bytes: int,
        layers: MovableLayers | None = None,
        wanted_kv_bytes: int = 0,
    ) -> None:
        self.memory, self._kv, self._layers = memory, kv, layers
        self.budget_bytes, self.shares, self.wanted_kv_bytes = budget_bytes, dict(shares), wanted_kv_bytes
        self._planned_others = planned_bytes - self._layers_bytes()
        self._resident = 0 if layers is None else layers.resident_bytes

    def _layers_bytes(self) -> int:
        return 0 if self._layers is None else self._layers.resident_bytes + self._layers.nbytes

    def own_bytes(self) -> int:
        return self.memory.own_bytes()

    def free_bytes(self) -> int:
        """On the GPU for more KV pages, with what other shares may still take left free."""
        held = self.memory.held()
        return held.free_bytes - max(0, self._reserved() - held.own_bytes)

    def _reserved(self) -> int:
        return sum(self.shares.values()) + self._kv.nbytes

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        """Another budget: layers come to stay, or leave, beside the KV that is wanted, and the pool is what they leave.
        Of one that is too small everything is given back that can be: the pool keeps `least_blocks` pages. Raises
        DoesNotFitError, and changes nothing, where more was asked for than is there. `resize_kv`: moves what must be
        kept, then resizes the pool."""
        reserved = self._reserved()
        # A driver that does not tell processes apart leaves our own count.
        own, free = self.memory.told_bytes() or reserved, self.memory.held().free_bytes
        others = sum(self.shares.values()) + max(0, own - reserved) - self._layers_bytes()
        wanted = min(asked.budget_bytes, own + free) if asked.at_most_free else asked.budget_bytes
        least = max(others, self._planned_others) + self._kv.backed_bytes(least_blocks)
        streamed = self._streamed_within(wanted - others, max(self.wanted_kv_bytes, self._kv.backed_bytes(least_blocks)))
        budget = max(wanted, least + (0 if self._layers is None else self._layers.bytes_with(streamed)))
        if budget > max(own + free, self.budget_bytes):
            raise _not_there(budget, own, free)

        def blocks_beside(layers_bytes: int) -> int:
            room = budget - others - layers_bytes
            return max(least_blocks, self._kv.blocks_within(room if asked.kv_bytes is None else min(room, asked.kv_bytes)))

        try:
            if self._layers is not None:
                self._move_layers(self._layers, streamed, blocks_beside, resize_kv)
            resize_kv(blocks_beside(self._layers_bytes()))
        except RangeError as error:
            if not error.out_of_memory:
                raise
            raise _not_there(budget, own, self.memory.held().free_bytes) from error
        self.budget_bytes = budget
        self.memory.look_again()
        return self.granted()

    def _streamed_within(self, room: int, kv_bytes: int) -> tuple[int, ...]:
        """As few layers as leave so much to KV of what there is; where RAM does not take enough of them, as many as
        it takes."""
        layers = self._layers
        if layers is None:
            return ()
        found: tuple[int, ...] | None = layers.streamed
        chosen = layers.streamed
        while found is not None and layers.bytes_with(chosen := found) + kv_bytes > room:
            found = layers.one_more(found)
        while chosen and layers.bytes_with(fewer := layers.one_less(chosen)) + kv_bytes <= room:
            chosen = fewer
        return chosen

    def _move_layers(
        self,
        layers: MovableLayers,
        streamed: tuple[int, ...],
        blocks_beside: Callable[[int], int],
        resize_kv: Callable[[int], None],
    ) -> None:
        if set(streamed) == set(layers.streamed):
            return
        before = self._layers_bytes()
        if layers.bytes_with(streamed) > before:  # The pool makes room first.
            resize_kv(min(self._kv.blocks, blocks_beside(layers.bytes_with(streamed))))
        try:
            layers.change(streamed)
        except EngineError as error:
            if error.code != NOT_PINNED:
                raise
            raise DoesNotFitError(
                "RAM does not hold the layers that would leave the GPU",
                needed=error.needed,
                found=error.found,
                fix="POST /memory with more vram, or stop other processes that use RAM",
                field="vram",
            ) from error
        # Weights are not all of layers.
        self.shares["weights"] = self.shares.get("weights", 0) + layers.resident_bytes - self._resident
        self.shares["layer_slots"] = layers.nbytes
        self._resident = layers.resident_bytes

    def granted(self) -> VramGrant:
        """What is kept to now."""
        layers, kv = self._layers, self._kv
        return VramGrant(
            budget_bytes=self.budget_bytes,
            blocks=kv.blocks,
            kv_bytes=kv.nbytes,
            layers=None
            if layers is None
            else LayersGrant(
                streamed=len(layers.streamed),
                moved_bytes=layers.moved_bytes,
                weights_bytes=self.shares["weights"],
                slots_bytes=layers.nbytes,
                pinned_bytes=layers.pinned_bytes,
            ),
        )


def _not_there(budget: int, own: int, free: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"a budget of {format_bytes(budget)} was requested, but less is free on the GPU",
        needed=format_bytes(budget),
        found=f"{format_bytes(own)} that this engine holds, and {format_bytes(free)} free",
        fix="POST /memory with less, or stop other processes that use this GPU (see nvidia-smi)",
        field="vram",
    )
