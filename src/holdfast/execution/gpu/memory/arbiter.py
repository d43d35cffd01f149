"""One arbiter of a GPU's memory: what every named share of the budget may take, and what is left for the KV pool.

    budget ┬ context, weights, buffers, activations, logits, adapters, graphs     as measured, with what may still come
           ├ unaccounted      what the driver counts as ours and no share does
           └ kv_pool          the rest: the share that gives way, and gets what others leave

Shares are reserved, so what a step needs at its worst is there when it comes. Moves no pages: it is told how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.errors import DoesNotFitError
from holdfast.execution.gpu.memory.accounting import GpuMemory
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.records import VramBudget, VramGrant
from holdfast.units import format_bytes


class VramArbiter:
    """`shares`: what each but the KV pool holds or may still take. `planned_bytes`: of all of them as a start would
    plan them; no budget is granted that the next start would refuse."""

    def __init__(
        self, memory: GpuMemory, kv: KVRange, budget_bytes: int, shares: Mapping[str, int], planned_bytes: int
    ) -> None:
        self.memory, self._kv = memory, kv
        self.budget_bytes, self.shares, self._planned = budget_bytes, dict(shares), planned_bytes

    def own_bytes(self) -> int:
        return self.memory.own_bytes()

    def free_bytes(self) -> int:
        """On the GPU for more KV pages, with what other shares may still take left free."""
        held = self.memory.held()
        return held.free_bytes - max(0, self._reserved() - held.own_bytes)

    def _reserved(self) -> int:
        return sum(self.shares.values()) + self._kv.nbytes

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        """Another budget, the KV pool being what it leaves. Of one that is too small everything is given back that can
        be: the pool keeps `least_blocks` pages. Raises DoesNotFitError, and changes nothing, where more was asked for
        than is there. `resize_kv`: moves what must be kept, then resizes the pool."""
        reserved = self._reserved()
        # A driver that does not tell processes apart leaves our own count.
        own, free = self.memory.told_bytes() or reserved, self.memory.held().free_bytes
        others = sum(self.shares.values()) + max(0, own - reserved)
        wanted = min(asked.budget_bytes, own + free) if asked.at_most_free else asked.budget_bytes
        budget = max(wanted, max(others, self._planned) + self._kv.backed_bytes(least_blocks))
        if budget > max(own + free, self.budget_bytes):
            raise _not_there(budget, own, free)
        room = budget - others if asked.kv_bytes is None else min(budget - others, asked.kv_bytes)
        blocks = max(least_blocks, self._kv.blocks_within(room))
        try:
            resize_kv(blocks)
        except RangeError as error:
            if not error.out_of_memory:
                raise
            raise _not_there(budget, own, self.memory.held().free_bytes) from error
        self.budget_bytes = budget
        self.memory.look_again()
        return VramGrant(budget_bytes=budget, blocks=blocks, kv_bytes=self._kv.nbytes)


def _not_there(budget: int, own: int, free: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"a budget of {format_bytes(budget)} was requested, but less is free on the GPU",
        needed=format_bytes(budget),
        found=f"{format_bytes(own)} that this engine holds, and {format_bytes(free)} free",
        fix="POST /memory with less, or stop other processes that use this GPU (see nvidia-smi)",
        field="vram",
    )
