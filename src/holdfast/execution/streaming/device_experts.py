"""Experts of layers that do not all stay on a GPU: some lie there in a stack of their own, the others wait in pinned
memory, a piece a layer. Products find an expert by its layer's table of places:

    places[expert] = p    p >= 0: the p-th of those that stay; p < 0: the (-1 - p)-th of those that wait

    many tokens    all that wait come into a slot, which layers take turns in:

        layer        0        1        2        3                two slots; those of the next layer come while one is
        the link   ─1─►│─2──────►│─3──────►│─0──────►           computed, in the order of layers, in the next step too

    few tokens     kernels fetch what was chosen over the link, to its place in the slot; or the host computes with it,
                   see `expert_host`. Before such a step one that waits may change places with one that stays, which
                   was used less

Knows nothing of products.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import msgspec
import torch

from holdfast.errors import EngineError
from holdfast.execution.memory import Arena
from holdfast.execution.streaming.copies import Copies, back_rate
from holdfast.execution.streaming.expert_exchange import Apart, FetchedPieces, bytes_of
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.expert_uses import ExpertUses, Swap
from holdfast.execution.streaming.layer_turns import ExpertSlot
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.footprint.expert_places import LINK_SHARE, ExpertPlaces
from holdfast.footprint.streamed import with_gaps
from holdfast.held_interrupts import interrupts_put_off
from holdfast.observability.decisions import Decision
from holdfast.records import ExpertUse, LinkUse
from holdfast.units import format_bytes

log = logging.getLogger("holdfast")

FEW_TOKENS = 16
"""Of a step for which only the experts come that it chose. With more, most of those that wait are chosen by some token:
16 that choose 8 of 128 alike take 64% of them, 32 take 87%."""
SWAPS_A_STEP = 2
"""Experts that change places before a step, at most: a tenth of a millisecond each on PCIe 5."""
MEASURED_LAYERS = 8
"""Copied to see how fast the link is."""

Take = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""(planes of those that stay, if any; planes of those that wait, in their slot): a layer's products use these."""


class DeviceExperts:
    """`memory`: pieces of its `pinned_sizes`. It is closed with this. `room`: bytes of RAM that may still be pinned for
    experts that leave."""

    def __init__(
        self,
        places: ExpertPlaces,
        device: torch.device,
        copies: Copies,
        memory: PinnedMemory,
        few_tokens: int = FEW_TOKENS,
        room: Callable[[], int] = lambda: 0,
    ) -> None:
        self._copies, self.link, self._memory, self.few_tokens = copies, copies, memory, few_tokens
        self._device, self._room = device, room
        self.host: ExpertHost | None = None
        self.kv_to_come: Callable[[], int] = lambda: 0
        """Bytes of RAM that will still be pinned, for KV pages."""
        self._number = {layer: number for number, layer in enumerate(places.layers)}
        self._layers, self._resident, self._sizes = places.layers, list(places.resident), list(places.pinned_sizes)
        self._pieces = list(memory.pieces)
        self._takes: dict[int, Take] = {}
        self._expert_sizes = places.sizes
        self._slots = self._made_slots(places.slots_used)
        self._fetched: dict[int, FetchedPieces] = {}
        self._exchanged: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By number: planes of those that stay, and of those that wait, where they do; bytes [experts, ..]."""
        self._planes: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """By number: as products have them, of those that wait and of those that stay."""
        self._shapes: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        """By number: of one expert in each plane."""
        self._bounds: dict[int, list[tuple[int, int]]] = {}
        """By number: where each plane of those that wait begins, in their piece as in the slot, and its bytes."""
        self._swaps: deque[Swap] = deque()
        first = [[*range(stay), *range(-1, stay - places.experts - 1, -1)] for stay in places.resident]
        self.places = torch.tensor(first, dtype=torch.int32, device=device).view(-1, places.experts)
        """[layers, experts]"""
        self._uses = torch.zeros_like(self.places)
        self._counted = ExpertUses(self.places.cpu().clone())
        self._over_link = 0
        """Pairs that were computed with what came over the link, as told last."""
        self._paused, self._possible, self.possible_back = False, 0.0, 0.0
        self.slots: torch.Tensor | None = None  # Of the rows of the step that is being launched, which is then padded.

    @property
    def nbytes(self) -> int:
        """On the device: slots and tables."""
        return sum(slot.tensor.nbytes for slot in self._slots) + self.places.nbytes + self._uses.nbytes

    @property
    def pinned_bytes(self) -> int:
        """On the host."""
        return self._memory.nbytes

    @property
    def comes(self) -> bool:
        """Whether steps wait for anything of the link now."""
        return any(self._sizes)

    @property
    def exchange_bytes(self) -> int:
        """Of RAM, through which the host computes experts."""
        return 0 if self.host is None else self.host.pinned_bytes

    def __contains__(self, layer: int) -> bool:
        return layer in self._number

    def resident(self, layer: int) -> int:
        """Experts that stay: the first ones, when they are loaded."""
        return self._resident[self._number[layer]]

    def waiting(self, layer: int) -> int:
        return self.places.shape[1] - self.resident(layer)

    def arena(self, layer: int) -> Arena:
        """Where the tensors of its other experts are to be made."""
        slot = self._slot(layer)
        slot.layer = None
        return Arena(slot.tensor[: self._size(layer)])

    def keep(self, layer: int) -> None:
        """What was made in its slot goes to where it waits from now on."""
        slot = self._slot(layer)
        self._memory.wait(self._number[layer])  # It may not be pinned yet.
        self._copies.now(slot.tensor[: self._size(layer)], self._piece(layer))
        slot.layer = layer

    def _made_slots(self, count: int) -> list[ExpertSlot]:
        made = [torch.empty(max(self._sizes), dtype=torch.uint8, device=self._device) for _ in range(count)]
        return [ExpertSlot(tensor, self._copies) for tensor in made]

    def know(
        self,
        layer: int,
        waiting: Sequence[torch.Tensor],
        resident: Sequence[torch.Tensor],
        take: Take | None = None,
    ) -> None:
        """Its planes, with all of an expert in one piece of each: of those that wait, in the layer's slot, and of those
        that stay, in the same order, if any. `take`: lets its products use others; None: they cannot."""
        number, slot = self._number[layer], self._slot(layer).tensor
        if take is not None:
            self._takes[number] = take
        self._planes[number] = list(waiting), list(resident)
        self._shapes[number] = [
            ((plane.shape[0] // self.waiting(layer), *plane.shape[1:]), plane.dtype) for plane in waiting
        ]
        self._exchanged.pop(number, None)
        self._bounds[number] = bounds = [(plane.data_ptr() - slot.data_ptr(), plane.nbytes) for plane in waiting]
        piece = self._piece(layer)
        mapped = as_device_memory(piece, self._device)
        self._fetched[layer] = FetchedPieces.of(
            waiting, [mapped[first : first + nbytes] for first, nbytes in bounds], self.waiting(layer)
        )
        if resident:
            stay, wait = self.resident(layer), self.waiting(layer)
            self._exchanged[number] = [
                (plane.view(torch.uint8).view(stay, -1), piece[first : first + nbytes].view(wait, -1))
                for plane, (first, nbytes) in zip(resident, bounds, strict=True)
            ]

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Around all that launches or captures a step of so many tokens."""
        # A graph would do once more, whenever it is launched, what is done here.
        if tokens <= self.few_tokens and not self._paused and not self._copies.capturing():
            self._empty_slots()
            self._swaps.extend(self._counted.look_at(self._uses))
            for _ in range(min(SWAPS_A_STEP, len(self._swaps))):
                with interrupts_put_off():  # Half of an expert would stay where the other half is another's.
                    self._swap(self._swaps.popleft())
        with nullcontext() if self.host is None or tokens > self.few_tokens else self.host.step(tokens):
            yield

    def _empty_slots(self) -> None:
        """What is launched from now on may write to them."""
        for slot in self._slots:
            if slot.layer is not None:
                self._copies.await_copy(slot.copied)
                slot.layer = None

    def compute_on_host(self, host: ExpertHost) -> None:
        """In steps with few tokens it computes with experts that wait. It is closed with this."""
        self.host, self.few_tokens = host, host.tokens

    def _swap(self, swap: Swap) -> None:
        """In the order of what is launched; slots hold nothing now, and nothing is on its way to them."""
        if swap.number not in self._exchanged:
            return
        table = self._counted.places[swap.number]
        waits, stays = -1 - int(table[swap.comes]), int(table[swap.leaves])
        if min(waits, stays) < 0:  # It was wanted twice, before it was done.
            return
        for resident, waiting in self._exchanged[swap.number]:
            between = self._slots[0].tensor[: resident.shape[1]]
            between.copy_(resident[stays])
            resident[stays].copy_(waiting[waits], non_blocking=True)
            waiting[waits].copy_(between, non_blocking=True)
        self.places[swap.number, swap.comes].fill_(stays)
        self.places[swap.number, swap.leaves].fill_(-1 - waits)
        self._counted.swapped(swap)

    def check(self) -> None:
        """Raises what went wrong on the host, whose answers then mean nothing."""
        if self.host is not None:
            self.host.check()

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within, layers are computed from whatever is in their slots: to load kernels, whose results nobody reads."""
        self._paused = True
        self._empty_slots()  # Steps of few tokens are among what is computed.
        try:
            yield
        finally:
            self._paused = False

    def begin(self, layer: int, tokens: int) -> Apart:
        """What is launched from now on finds its experts so, for a step of so many tokens."""
        number, fetched = self._number[layer], self._there(layer)
        places, uses = self.places[number], self._uses[number]
        if tokens <= self.few_tokens:
            exchange = None if self.host is None or not self.host.beside else self.host.exchanges[number]
            return Apart(places, uses, fetched, exchange, self.slots)
        if not self._paused:
            slot = self._slot(layer)
            if slot.layer != layer:
                self._ask(layer)
            self._copies.await_copy(slot.copied)
        return Apart(places, uses)

    def _there(self, layer: int) -> FetchedPieces:
        """Raises where a change was not done to its end."""
        if layer not in self._fetched:
            raise EngineError(
                f"experts of layer {layer} are not where they were, nor where they should be",
                found="a change of how many stay that was interrupted",
                fix="start the engine again",
            )
        return self._fetched[layer]

    def end(self, layer: int, tokens: int) -> None:
        """All of it was launched: whoever is next in its slot may come."""
        if tokens <= self.few_tokens or self._paused:
            return
        number = self._number[layer] + len(self._slots)
        after = self._layers[number if number < len(self._layers) else number % len(self._slots)]
        if after != layer:
            self._ask(after)

    def _ask(self, layer: int) -> None:
        slot = self._slot(layer)
        # Steps with few tokens write to slots, and would not wait for a copy that nobody knows.
        with interrupts_put_off(however_often=True):
            slot.layer = None  # Until all of it is asked for.
            self._copies.after_launched(slot.read)
            self._copies.copy(self._piece(layer), slot.tensor[: self._size(layer)], slot.read, [slot.copied])
            slot.layer = layer

    def _slot(self, layer: int) -> ExpertSlot:
        return self._slots[self._number[layer] % len(self._slots)]

    def _piece(self, layer: int) -> torch.Tensor:
        return self._pieces[self._number[layer]]

    def _size(self, layer: int) -> int:
        return self._sizes[self._number[layer]]

    # Experts come to stay, and leave.

    @property
    def movable(self) -> bool:
        return len(self._takes) == len(self._layers)

    @property
    def resident_counts(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(self._resident)

    @property
    def resident_bytes(self) -> int:
        """Of those that stay."""
        return sum(count * size for count, size in zip(self._resident, self._expert_sizes, strict=True))

    @property
    def most_resident(self) -> int:
        """Of all layers: each has one that waits at least."""
        return len(self._layers) * (self.places.shape[1] - 1)

    def spread(self, count: int) -> tuple[int, ...]:
        """So many of all layers, as evenly as can be."""
        each, more = divmod(count, len(self._layers))
        return tuple(each + (number < more) for number in range(len(self._layers)))

    def bytes_with(self, count: int) -> int:
        """On the device, if so many stayed: of these, of slots and of tables."""
        resident = self.spread(count)
        kept = sum(one * size for one, size in zip(resident, self._expert_sizes, strict=True))
        slots = len(self._slots) * max(self._pinned_with(resident))
        return kept + slots + self.places.nbytes + self._uses.nbytes

    def fits_ram(self, count: int) -> bool:
        """If so many stayed, with what is taken meanwhile: a piece more, and a layer's experts once more."""
        sizes = self._pinned_with(self.spread(count))
        meanwhile = max(sizes) + self.places.shape[1] * max(self._expert_sizes)
        return sum(sizes) + meanwhile <= self.pinned_bytes + self._room()

    def _pinned_with(self, resident: Sequence[int]) -> list[int]:
        experts = self.places.shape[1]
        return [with_gaps((experts - one) * size) for one, size in zip(resident, self._expert_sizes, strict=True)]

    def change(self, count: int) -> None:
        """So many stay from the next step on, those that were used most lately; fewer where memory for them is not
        there. Between steps only; what was launched is waited for. Nothing that was captured may be launched again.
        Where it raises, no step may begin any more, nor another change."""
        on_gpu = self._device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self._device) if on_gpu else nullcontext():
            for layer in self._layers:
                self._there(layer)
            self._copies.settle()
            for kept in (self._swaps, self._fetched, self._exchanged):  # Of memory that others will have.
                kept.clear()
            before, slots = self.resident_counts, len(self._slots)
            self._slots = []
            for number, layer in enumerate(self._layers):  # Nothing has the old slots then.
                self._lay(layer, self._piece(layer), self._planes[number][1])
            self._give_back()
            self._restack_all(self.spread(count))
            try:
                self._slots = self._made_slots(slots)
            except torch.OutOfMemoryError:
                log.warning("no more experts stay than before: the GPU has no memory for slots beside them")
                self._restack_all([min(pair) for pair in zip(before, self._resident, strict=True)])
                self._slots = self._made_slots(slots)
            for number, layer in enumerate(self._layers):
                self.know(layer, *self._lay(layer, self._slot(layer).tensor, self._planes[number][1]))

    def _restack_all(self, wanted: Sequence[int]) -> None:
        """So many of each layer stay, where there is memory for them; those leave first that do."""
        for number in sorted(range(len(wanted)), key=lambda number: wanted[number] - self._resident[number]):
            if wanted[number] != self._resident[number]:
                self._restack(number, wanted[number])

    def _restack(self, number: int, wanted: int) -> None:
        """So many of a layer stay; as many as before where RAM or the device has no room for that."""
        layer, before, old = self._layers[number], self._resident[number], self._pieces[number]
        order, all_of_it = self._counted.most_used(number), self._gathered(number)
        size = with_gaps((self.places.shape[1] - wanted) * self._expert_sizes[number])
        try:
            piece = self._memory.add(size)
        except EngineError as error:
            log.warning("experts of layer %d stay where they are: %s", layer, error.message)
            return
        self._takes[number]([], self._planes[number][0])  # Nothing has those that stay then.
        self._planes[number] = self._planes[number][0], []
        self._exchanged.pop(number, None)
        self._give_back()  # Else torch would take a part of that memory for the next, and keep the rest.
        try:
            resident = self._made(number, wanted)
        except torch.OutOfMemoryError:
            log.warning("experts of layer %d stay where they are: the GPU has no memory for more", layer)
            self._memory.drop(piece)
            wanted, size, piece = before, self._sizes[number], old
            resident = self._made(number, wanted)
        self._resident[number], self._sizes[number], self._pieces[number] = wanted, size, piece
        self._bounds[number] = self._bounds_in(piece[:size], number, self.places.shape[1] - wanted)
        waiting, _ = self._lay(layer, piece, resident)
        row = torch.empty(len(order), dtype=torch.int32)
        row[order[:wanted]] = torch.arange(wanted, dtype=torch.int32)
        row[order[wanted:]] = -1 - torch.arange(len(order) - wanted, dtype=torch.int32)
        for whole, stay in zip(all_of_it, resident, strict=False):
            bytes_of(stay, wanted).copy_(whole[order[:wanted]])
        for whole, wait in zip(all_of_it, waiting, strict=True):
            bytes_of(wait, len(order) - wanted).copy_(whole[order[wanted:]])
        self.places[number].copy_(row)
        self._counted.placed(number, row)
        if piece is not old:
            self._memory.drop(old)

    def _give_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _gathered(self, number: int) -> list[torch.Tensor]:
        """All experts of a layer in the host's memory, by plane: bytes [experts, ..]."""
        table, found = self._counted.places[number], []
        stay, wait = self._resident[number], len(table) - self._resident[number]
        _, resident = self._planes[number]
        for at, (first, nbytes) in enumerate(self._bounds[number]):
            whole = torch.empty((len(table), nbytes // wait), dtype=torch.uint8)
            waits, stays = table < 0, table >= 0
            whole[waits] = self._pieces[number][first : first + nbytes].view(wait, -1)[(-1 - table[waits]).long()]
            if resident:
                whole[stays] = bytes_of(resident[at], stay).cpu()[table[stays].long()]
            found.append(whole)
        return found

    def _made(self, number: int, experts: int) -> list[torch.Tensor]:
        """Planes on the device for so many."""
        if not experts:
            return []
        shapes = self._shapes[number]
        return [torch.empty((rows * experts, *rest), dtype=kind, device=self._device) for (rows, *rest), kind in shapes]

    def _lay(
        self, layer: int, memory: torch.Tensor, resident: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A layer's products find those that wait in `memory`, laid out as in their piece, and these stay."""
        number, wait = self._number[layer], self.waiting(layer)
        waiting = [
            memory[first : first + nbytes].view(kind).view(rows * wait, *rest)
            for ((rows, *rest), kind), (first, nbytes) in zip(self._shapes[number], self._bounds[number], strict=True)
        ]
        self._takes[number](resident, waiting)
        self._planes[number] = waiting, resident
        return waiting, resident

    def _bounds_in(self, piece: torch.Tensor, number: int, wait: int) -> list[tuple[int, int]]:
        """Of planes for so many that wait, one behind the other. What was loaded may lie in another order."""
        arena = Arena(piece)
        made = [arena.tensor((rows * wait, *rest), kind, piece.device) for (rows, *rest), kind in self._shapes[number]]
        return [(plane.data_ptr() - piece.data_ptr(), plane.nbytes) for plane in made]

    def use(self) -> LinkUse:
        return msgspec.structs.replace(self._copies.use(), possible_bytes_per_s=self._possible)

    def expert_use(self) -> ExpertUse:
        host, waited = self.host, self._counted.pairs - self._counted.hits
        # The host counts at once, and the GPU's counts are looked at later: what it has not told of is left out.
        on_host = 0 if host is None else min(host.pairs, waited - self._over_link)
        self._over_link = waited - on_host
        return ExpertUse(
            pairs=self._counted.pairs,
            hits=self._counted.hits,
            host_pairs=on_host,
            host_s=0.0 if host is None else host.computed_s,
            swaps=self._counted.swaps,
        )

    def decisions(self) -> list[Decision]:
        """How fast experts come, measured as steps with many tokens bring them, and what follows of it."""
        layers, size = self._layers[:MEASURED_LAYERS], sum(self._sizes)
        self._bring(layers[:1])  # What is only done once is done.
        began_s = time.monotonic()
        self._bring(layers)
        self._possible = sum(self._size(layer) for layer in layers) / max(time.monotonic() - began_s, 1e-6)
        last = layers[-1]  # It goes back to where it waits, as it is there already.
        self.possible_back = back_rate(self._copies, self._slot(last).tensor[: self._size(last)], self._piece(last))
        step = (
            f"a step of more than {self.few_tokens} tokens copies {format_bytes(size)} of experts from RAM and takes at"
            f" least {size / self._possible:.2f} s"
        )
        found = [Decision("link_copy", f"{self._possible / 1e9:.1f} GB/s", step, "measured")]
        if self.host is not None:
            # Both read the host's memory at the same time, and the GPU multiplies only what has come.
            rate = self.host.measure(self._expert_sizes)
            share = LINK_SHARE * self._possible / (self._possible + rate)
            self.host.share_with_link(share)
            why = f"in steps of up to {self.few_tokens} tokens; the GPU fetches {share:.0%} of those that wait itself"
            found.append(Decision("host_experts", f"{rate / 1e9:.1f} GB/s", why, "measured"))
        return found

    def _bring(self, layers: tuple[int, ...]) -> None:
        for layer in layers:
            self._ask(layer)
        for slot in self._slots:
            self._copies.wait(slot.copied)

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
            self.host = None
        self._copies.close()
        for kept in (self._fetched, self._exchanged, self._planes, self._takes, self._pieces):
            kept.clear()
        self._memory.close()
        self._slots.clear()
        self.slots = None
