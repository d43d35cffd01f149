"""One arbiter of a GPU's memory: what every named share of the budget may take, and what is left for layers and KV.

    budget ┬ context, weights, buffers, activations, logits, adapters, graphs     as measured, with what may still come
           ├ unaccounted      what the driver counts as ours and no share does
           ├ layers           those that stay, and slots of those that come for every step: as many stay as there is
           │                  room for beside the KV that is wanted; while all of them stay, graphs of steps as well
           └ kv_pool          the rest: the share that gives way, and gets what others leave

Shares are reserved, so what a step needs at its worst is there when it comes. Moves nothing itself: it is told how.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory.accounting import GpuMemory
from holdfast.execution.gpu.memory.arbiter_lines import not_there, say_no_graphs, say_price
from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.memory.movable import Movable, MovableExperts, MovableLayers
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.execution.streaming.pinned_memory import NOT_PINNED
from holdfast.footprint.streamed import page_tables_bytes
from holdfast.held_interrupts import interrupts_put_off
from holdfast.records import ExpertsGrant, LayersGrant, VramBudget, VramGrant
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

LEAST_SPEED = 0.8
"""Of what every step moves before layers leave for KV: no more is given up of the speed of one sequence."""
WANTED_SHARE = 0.97
"""Of the KV that a start has left over: for the rest (whole pieces of memory, kernels that were loaded since) no layer
leaves."""
LEAST_GAIN = 1.02
"""In tokens a second of all, for which layers leave."""


class _Target(NamedTuple):
    """What another budget comes to."""

    budget: int
    own: int
    """Held by this process now."""
    unaccounted: int
    """Of that, what no share and no pool has."""
    streamed: tuple[int, ...]
    staying: int
    """Experts."""
    movable_bytes: int
    """Of layers, or experts, then, and of graphs of them."""
    graphs_bytes: int
    """Room of these; 0: there is none."""


class VramArbiter:
    """`shares`: what each but the KV pool holds or may still take. `planned_bytes`: of all of them as a start would
    plan them; no budget is granted that the next start would refuse. `layers`: which may come and go, and are in
    `shares` as weights and layer_slots; beside them the pool is what is wanted, and what no layer has room in.
    `experts`: in their place, as weights and expert_slots, and `change_experts` lets so many stay. `graphs`: room of
    graphs of steps whose layers stay; None: there are none. `close_graphs`: gives their memory back, before a layer
    leaves. `graphs_planned`: their room is in `shares` and in `planned_bytes` already."""

    def __init__(
        self,
        memory: GpuMemory,
        kv: KVRange,
        budget_bytes: int,
        shares: Mapping[str, int],
        planned_bytes: int,
        layers: MovableLayers | None = None,
        experts: MovableExperts | None = None,
        change_experts: Callable[[int], None] | None = None,
        graphs: GraphsRoom | None = None,
        close_graphs: Callable[[], None] = lambda: None,
        *,
        graphs_planned: bool = False,
    ) -> None:
        self.memory, self._kv, self._layers = memory, kv, layers
        self._experts, self._change_experts = experts, change_experts
        self._graphs, self._close_graphs, self._lack_said = graphs, close_graphs, False
        self._graphs_kept_bytes = 0
        """Of shares, what the driver kept of graphs that are gone."""
        self._graphs_bytes = graphs.wanted_bytes if graphs is not None and graphs_planned else 0
        """Of shares, what goes back when a layer leaves."""
        if graphs is not None:
            graphs.budget = lambda: self.budget_bytes
            graphs.give(self._graphs_bytes)
        self.budget_bytes, self.shares = budget_bytes, dict(shares)
        self._base_kv = self._wanted_kv = self.base_blocks = 0
        """`base_blocks`: pages of the pool for which no layer has left."""
        self._planned_others = planned_bytes - self._layers_bytes()
        self._resident = self._layers_bytes() - self._slots_bytes() - self._graphs_bytes
        pinned = sum(page_tables_bytes(one.pinned_bytes) for one in (layers, experts) if one is not None)
        self._other_tables = max(0, self.shares.get("page_tables", 0) - pinned)
        """Of RAM that is pinned for KV pages."""
        self.most_budget_bytes = budget_bytes
        """That it may have when neighbours have left."""
        self._base_streamed: tuple[int, ...] = ()
        """Those that were streamed before layers left for KV."""

    def pool_is_backed(self) -> None:
        """The KV pool is what it shall be beside layers, as long as requests do not want more."""
        self.base_blocks = self._kv.blocks
        self._base_kv = self._wanted_kv = int(WANTED_SHARE * self._kv.nbytes)

    def _layers_bytes(self) -> int:
        """Of layers, or experts, that may come and go, and of graphs that go before a layer does."""
        movable = self._layers or self._experts
        return 0 if movable is None else movable.resident_bytes + movable.nbytes + self._graphs_bytes

    def _slots_bytes(self) -> int:
        movable = self._layers or self._experts
        return 0 if movable is None else movable.nbytes

    def own_bytes(self) -> int:
        return self.memory.own_bytes()

    def free_bytes(self) -> int:
        """On the GPU for more KV pages, with what other shares may still take left free."""
        held = self.memory.held()
        return held.free_bytes - max(0, self._reserved() - held.own_bytes)

    def _others(self) -> int:
        """Of shares, what is neither of layers nor of the pool."""
        return sum(self.shares.values()) - self._layers_bytes()

    def _reserved(self) -> int:
        return sum(self.shares.values()) + self._kv.nbytes

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        """Another budget: layers come to stay, or leave, beside the KV that is wanted, and the pool is what they leave.
        Of one that is too small everything is given back that can be: the pool keeps `least_blocks` pages. Raises
        DoesNotFitError, and changes nothing, where more was asked for than is there. What a neighbour takes when layers
        have moved already is the pool's lack: what is granted is what is kept to then. `resize_kv`: moves what must be
        kept, then resizes the pool."""
        target = self._target(asked, least_blocks)
        unaccounted, placed, blocks = target.unaccounted, self._placed(), self._kv.blocks
        graphs_bytes = self._graphs_bytes

        def blocks_beside(layers_bytes: int) -> int:
            return self._blocks_beside(asked, target.budget, unaccounted, least_blocks, layers_bytes)

        def resize(pages: int) -> None:
            more = self._kv.backed_bytes(pages) - self._kv.nbytes
            # A range takes piece by piece until the driver refuses: neighbours would find nothing meanwhile.
            if more > 0 and more > (free := self.memory.held().free_bytes):
                raise not_there(target.budget, target.own, free)
            try:
                resize_kv(pages)
            except RangeError as error:
                if not error.out_of_memory:
                    raise
                raise not_there(target.budget, target.own, self.memory.held().free_bytes) from error

        budget = target.budget
        try:
            # A RangeError of layers is no refusal: nothing may be behind one of them then.
            if self._layers is not None:
                self._move_layers(self._layers, target, blocks_beside, resize)
                if graphs_bytes and not self._graphs_bytes:  # What was reserved for them may have hidden some.
                    unaccounted = max(unaccounted, (self.memory.told_bytes() or 0) - self._reserved())
            if self._experts is not None:
                self._move_experts(self._experts, target.staying, blocks_beside, resize)
                # Memory of tensors comes and goes in pieces that torch divides.
                unaccounted = max(unaccounted, (self.memory.told_bytes() or 0) - self._reserved())
            resize(blocks_beside(self._layers_bytes()))
        except DoesNotFitError as error:
            if self._placed() == placed and self._kv.blocks != blocks:
                with suppress(DoesNotFitError):  # It made room for what did not come.
                    resize(blocks)
            if self._placed() == placed and self._kv.blocks == blocks:
                self._leave_room_for_graphs(graphs_bytes)
                raise
            # What was in force stays so where it was not to become less: others may leave again.
            budget = max(self.kept_bytes, min(target.budget, self.budget_bytes))
            log.warning(
                "the KV pool stays at %s, of a budget of %s: %s",
                format_bytes(self._kv.nbytes), format_bytes(budget), error.message,
            )  # fmt: skip
        self.budget_bytes = budget
        self.memory.look_again()
        self._say_graphs_lack()
        return self.granted()

    def _placed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers that are streamed, and experts that stay."""
        layers, experts = self._layers, self._experts
        return () if layers is None else layers.streamed, () if experts is None else experts.resident_counts

    def blocks_with(self, asked: VramBudget, least_blocks: int) -> int:
        """Pages that the pool would have after `change`, as far as is known before: memory of tensors comes and goes in
        pieces. Raises DoesNotFitError as it does, and changes nothing."""
        target = self._target(asked, least_blocks)
        return self._blocks_beside(asked, target.budget, target.unaccounted, least_blocks, target.movable_bytes)

    def _target(self, asked: VramBudget, least_blocks: int, wanted_kv: int | None = None) -> _Target:
        """`wanted_kv`: bytes of KV that layers leave for; None: as now."""
        reserved = self._reserved()
        # A driver that does not tell processes apart leaves our own count.
        own, free = self.memory.told_bytes() or reserved, self.memory.held().free_bytes
        unaccounted = max(0, own - reserved)
        others = self._others() + unaccounted
        wanted = min(asked.budget_bytes, own + free) if asked.at_most_free else asked.budget_bytes
        least = max(others, self._planned_others) + self._kv.backed_bytes(least_blocks)
        # No layer leaves for more KV than the pool may have.
        wanted_kv = self._wanted_kv if wanted_kv is None else wanted_kv
        wanted_kv = wanted_kv if asked.kv_bytes is None else min(wanted_kv, asked.kv_bytes)
        kv_bytes = max(wanted_kv, self._kv.backed_bytes(least_blocks))
        streamed, staying = self._streamed_within(wanted - others, kv_bytes), self._staying(wanted - others, kv_bytes)
        movable_bytes = 0 if self._layers is None else self._layers.bytes_with(streamed)
        if self._experts is not None:
            movable_bytes = self._experts.bytes_with(staying)
        # KV gives way to graphs, as at a start; no layer does, which is larger than all of them, and slower to lack.
        graphs_bytes = 0
        if self._layers is not None and not streamed and self._graphs is not None:
            graphs_bytes = self._graphs.wanted_bytes
            graphs_bytes *= least + movable_bytes + graphs_bytes <= wanted
        movable_bytes += graphs_bytes
        budget = max(wanted, least + movable_bytes)
        if budget > max(own + free, self.budget_bytes):
            raise not_there(budget, own, free)
        return _Target(budget, own, unaccounted, streamed, staying, movable_bytes, graphs_bytes)

    def _blocks_beside(
        self, asked: VramBudget, budget: int, unaccounted: int, least_blocks: int, layers_bytes: int
    ) -> int:
        room = budget - self._others() - unaccounted - layers_bytes
        return max(least_blocks, self._kv.blocks_within(room if asked.kv_bytes is None else min(room, asked.kv_bytes)))

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

    def _staying(self, room: int, kv_bytes: int) -> int:
        """As many experts as leave so much to KV of what there is; where RAM does not take the others, more."""
        experts = self._experts
        if experts is None:
            return 0
        # One by one: where one fewer of a layer stays, slots become larger for all.
        counts = range(experts.most_resident, -1, -1)
        chosen = next((count for count in counts if experts.bytes_with(count) + kv_bytes <= room), 0)
        most = max(chosen, sum(experts.resident_counts))
        return bisect_left(range(most), True, lo=chosen, key=experts.fits_ram)

    def _move_experts(
        self,
        experts: MovableExperts,
        staying: int,
        blocks_beside: Callable[[int], int],
        resize_kv: Callable[[int], None],
    ) -> None:
        if staying == sum(experts.resident_counts):
            return
        assert self._change_experts is not None
        if experts.bytes_with(staying) > self._layers_bytes():  # The pool makes room first.
            resize_kv(min(self._kv.blocks, blocks_beside(experts.bytes_with(staying))))
        with interrupts_put_off():
            self._change_experts(staying)
            self._count(experts, "expert_slots")

    def _move_layers(
        self,
        layers: MovableLayers,
        target: _Target,
        blocks_beside: Callable[[int], int],
        resize_kv: Callable[[int], None],
    ) -> None:
        if set(target.streamed) == set(layers.streamed):
            self._leave_room_for_graphs(target.graphs_bytes)
            return
        if target.movable_bytes > self._layers_bytes():  # The pool makes room first.
            resize_kv(min(self._kv.blocks, blocks_beside(target.movable_bytes)))
        try:
            with interrupts_put_off():
                self._leave_room_for_graphs(0)
                try:
                    layers.change(target.streamed)
                finally:  # What some were pinned for stays where one could not be.
                    self._count(layers, "layer_slots")
                self._leave_room_for_graphs(0 if layers.streamed else target.graphs_bytes)
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

    @interrupts_put_off()
    def _leave_room_for_graphs(self, nbytes: int) -> None:
        """Or with 0 take it, with the memory of those that there are; of that, what the driver keeps stays counted."""
        graphs = self._graphs
        if graphs is None or nbytes == self._graphs_bytes:
            return
        if not nbytes:
            self._close_graphs()
        graphs.give(nbytes)
        more = nbytes - self._graphs_bytes + graphs.kept_bytes - self._graphs_kept_bytes
        self.shares["graphs"] = self.shares.get("graphs", 0) + more
        self._graphs_bytes, self._graphs_kept_bytes = nbytes, graphs.kept_bytes

    def _say_graphs_lack(self) -> None:
        """Once, where all layers stay and graphs have no room beside them."""
        layers, graphs = self._layers, self._graphs
        if layers is None or layers.streamed or graphs is None or self._graphs_bytes or not graphs.wanted_bytes:
            return
        if not self._lack_said:
            say_no_graphs(graphs.wanted_bytes, self.budget_bytes)
        self._lack_said = True

    def _count(self, moved: Movable, slots: str) -> None:
        """Its shares, as they are now."""
        # Weights are not all of these.
        self.shares["weights"] = self.shares.get("weights", 0) + moved.resident_bytes - self._resident
        self.shares[slots] = moved.nbytes
        if "page_tables" in self.shares:  # More is pinned where one left for the first time.
            self.shares["page_tables"] = page_tables_bytes(moved.pinned_bytes) + self._other_tables
        self._resident = moved.resident_bytes

    def moves(self, asked: VramBudget, least_blocks: int) -> bool:
        """Whether `change` would move anything: layers, experts, graphs, pages. Raises DoesNotFitError as it does."""
        target = self._target(asked, least_blocks)
        blocks = self._blocks_beside(asked, target.budget, target.unaccounted, least_blocks, target.movable_bytes)
        experts = 0 if self._experts is None else sum(self._experts.resident_counts)
        streamed = () if self._layers is None else self._layers.streamed
        if target.graphs_bytes != self._graphs_bytes:
            return True
        return set(target.streamed) != set(streamed) or target.staying != experts or blocks != self._kv.blocks

    @property
    def movable(self) -> bool:
        """Whether weights may come to stay, and leave."""
        return self._layers is not None or self._experts is not None

    @property
    def kept_bytes(self) -> int:
        """Of all shares and the pool, with what the driver counts beyond them: what a budget must hold now."""
        return max(self.memory.told_bytes() or 0, self._reserved())

    # A pool that breathes

    @property
    def pool_bytes(self) -> int:
        return self._kv.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Of all shares and the pool; of graphs, those that there are: what a capture takes then is no neighbour's."""
        untaken = 0 if self._graphs is None else self._graphs_bytes - self._graphs.taken_bytes
        return self._reserved() - untaken

    def blocks_of(self, pool_bytes: int) -> int:
        """Pages of a pool with no more memory than this."""
        return self._kv.blocks_within(pool_bytes)

    def blocks_within_free(self, margin_bytes: int) -> int:
        """Pages that the pool could have now, with so much of the GPU left free, and what other shares may take."""
        return self._kv.blocks_within(self._kv.nbytes + max(0, self.free_bytes() - margin_bytes))

    def full_blocks(self, blocks: int) -> int:
        """Pages that the pool would have if nobody else held anything of the GPU: as the share was set of which the
        budget is what was free at the start."""
        if self.most_budget_bytes <= self.budget_bytes:
            return blocks
        return max(blocks, self._kv.blocks_within(self.most_budget_bytes - self._others() - self._layers_bytes()))

    def budget_was_set(self) -> None:
        self.most_budget_bytes = self.budget_bytes

    def budget_with_pool(self) -> int | None:
        """Of a pool that took what a neighbour left; None: the budget held it already."""
        self.memory.look_again()
        if self._reserved() <= self.budget_bytes:
            return None
        self.budget_bytes = min(self.most_budget_bytes, self._reserved())
        return self.budget_bytes

    # KV or layers

    def make_room(self, blocks: int, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant | None:
        """Layers leave for a pool of so many pages, or of as many as are worth it; None: none, and nothing changes.
        A step takes as long as its layers come, and as many answers go on in it as the pool holds: it is worth it while
        the pool grows by a larger share than the bytes of a step."""
        layers, needed = self._layers, self._kv.backed_bytes(min(blocks, self._kv.most_blocks))
        if layers is None or not layers.streamed:
            return None
        before = streamed = layers.streamed
        held, kv = self._layers_bytes(), self._kv.nbytes
        most_moved = layers.moved_with(self._base_streamed or streamed) / LEAST_SPEED
        best, chosen, wanted = kv / layers.moved_bytes * LEAST_GAIN, None, kv
        while (found := layers.one_more(streamed)) is not None and wanted < needed:
            streamed = found
            wanted, moved = kv + held - layers.bytes_with(streamed), layers.moved_with(streamed)
            if moved > most_moved:
                break
            if min(wanted, needed) / moved > best:
                best, chosen = min(wanted, needed) / moved, wanted
        if chosen is None:
            return None
        granted = self._balance(chosen, self.budget_bytes, least_blocks, resize_kv, "left for")
        if granted is not None:
            self._base_streamed = self._base_streamed or before
        return granted

    def take_back(self, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant | None:
        """Layers that had left for KV come back, as many as there is memory for; None: none had, or there is memory for
        none. That is looked up first: to try costs what is in all slots, and takes what neighbours find free."""
        layers = self._layers
        if layers is None or self._wanted_kv <= self._base_kv:
            return None
        there = min(self.budget_bytes, self.kept_bytes + self.free_bytes())
        try:
            with_all, with_these = (
                len(self._target(VramBudget(budget_bytes=budget), least_blocks, self._base_kv).streamed)
                for budget in (self.budget_bytes, there)
            )
        except DoesNotFitError:  # Of what other shares may still take, a neighbour has some.
            return None
        granted, now = None, len(layers.streamed)
        if with_these < now:
            granted = self._balance(self._base_kv, there, least_blocks, resize_kv, "came back, with")
        elif with_all >= now:  # The budget became such that no more of them would stay.
            self._wanted_kv = self._base_kv
        if self._wanted_kv <= self._base_kv:
            self._base_streamed = ()
        return granted

    def _balance(
        self, kv_bytes: int, there_bytes: int, least_blocks: int, resize_kv: Callable[[int], None], said: str
    ) -> VramGrant | None:
        """`there_bytes`: of the budget, what is kept to. The budget stays as it is."""
        assert self._layers is not None
        before, wanted, budget = self.granted(), self._wanted_kv, self.budget_bytes
        self._wanted_kv = kv_bytes
        try:
            expected = self._target(VramBudget(budget_bytes=budget), least_blocks).streamed
            self.change(VramBudget(budget_bytes=there_bytes), least_blocks, resize_kv)
        except DoesNotFitError as error:  # A neighbour, or what else takes RAM: it goes on as it is.
            self._wanted_kv = wanted
            log.warning("the KV pool stays at %s: %s", format_bytes(self._kv.nbytes), error.message)
            return None
        self.budget_bytes = max(budget, self.budget_bytes)  # Neighbours may leave it again.
        if len(self._layers.streamed) > len(expected):  # A neighbour took what was theirs: they come back later.
            self._wanted_kv = wanted
        granted = self.granted()
        say_price(before, granted, said, self._layers.use().possible_bytes_per_s)
        return granted

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
                streamed=layers.streamed,
                moved_bytes=layers.moved_bytes,
                weights_bytes=self.shares["weights"],
                slots_bytes=layers.nbytes,
                pinned_bytes=layers.pinned_bytes,
                graphs_bytes=self._graphs_bytes,
            ),
            experts=None if self._experts is None else self._experts_granted(self._experts),
        )

    def _experts_granted(self, experts: MovableExperts) -> ExpertsGrant:
        return ExpertsGrant(
            resident=experts.resident_counts,
            weights_bytes=self.shares["weights"],
            slots_bytes=experts.nbytes,
            pinned_bytes=experts.pinned_bytes,
        )
