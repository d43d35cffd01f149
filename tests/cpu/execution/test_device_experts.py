"""Experts that come to a GPU for steps with many tokens, with a simulated one: in their slot when they are computed
with, whatever order the GPU does things in, after steps with few tokens too."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import simulated_copies
import torch
from ctrl_c import ctrl_c
from simulated_copies import QueuedCopies, unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution.streaming import device_experts
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_uses import ExpertUses, Swap
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.expert_places import ExpertPlaces, expert_places

CPU = torch.device("cpu")
EXPERTS, SIZE = 6, 512


def content(layer: int, expert: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * layer + expert)
    return torch.randint(0, 255, (SIZE,), dtype=torch.uint8, generator=source)


class Placed:
    """With a plane of bytes for each layer, and something else in each expert."""

    def __init__(self, places: ExpertPlaces, copies: QueuedCopies) -> None:
        self.copies, self.read = copies, 0
        self.experts = DeviceExperts(places, CPU, copies, unpinned_memory(places.pinned_sizes), few_tokens=4)
        self.resident, self.slots = {}, {}
        for layer, stay in zip(places.layers, places.resident, strict=True):
            made = self.experts.arena(layer).tensor((EXPERTS - stay, SIZE), torch.uint8, CPU)
            self.slots[layer], self.resident[layer] = made, torch.zeros((stay, SIZE), dtype=torch.uint8)
            for expert in range(EXPERTS):
                (self.resident[layer][expert] if expert < stay else made[expert - stay]).copy_(content(layer, expert))
            self.experts.keep(layer)
        for layer, made in self.slots.items():
            resident = [self.resident[layer]] if len(self.resident[layer]) else []
            self.experts.know(layer, [made], resident, partial(self.take, layer))

    def take(self, layer: int, resident: Sequence[torch.Tensor], waiting: Sequence[torch.Tensor]) -> None:
        self.resident[layer] = resident[0] if resident else torch.zeros((0, SIZE), dtype=torch.uint8)
        self.slots[layer] = waiting[0]

    def step(self, layers: int, tokens: int) -> None:
        with self.experts.step(tokens):
            for layer in list(self.slots)[:layers]:
                self.experts.begin(layer, tokens)
                for _ in range(2 if tokens > 4 else 0):
                    self.copies.launch(lambda layer=layer: self._look(layer))
                    self.copies.run_some()
                self.experts.end(layer, tokens)
                self.copies.run_some()

    def _look(self, layer: int) -> None:
        places = self.experts._counted.places[list(self.slots).index(layer)].tolist()
        for expert, place in enumerate(places):
            found = self.resident[layer][place] if place >= 0 else self.slots[layer][-1 - place]
            assert torch.equal(found, content(layer, expert)), (layer, expert)
        self.read += 1


@pytest.mark.parametrize("seed", range(30))
def test_all_experts_are_where_their_table_says(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 7)
    places = expert_places(
        dict.fromkeys(range(layers), SIZE), EXPERTS, {layer: rng.randint(0, EXPERTS - 1) for layer in range(layers)}
    )
    copies = QueuedCopies(seed)
    placed, looked = Placed(places, copies), 0
    for _ in range(8):
        through, tokens = layers if rng.random() < 0.8 else rng.randint(1, layers), rng.choice([2, 9, 9])
        placed.step(through, tokens)
        looked += 2 * through if tokens > 4 else 0
    copies.run_all()
    assert placed.read == looked
    placed.experts.close()


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(20))
def test_experts_come_and_go(seed: int) -> None:
    """As many as were asked for stay, the most used; memory in RAM is what the others have."""
    rng, layers = random.Random(seed), 1 + seed % 5
    sizes, first = dict.fromkeys(range(layers), SIZE), {layer: rng.randint(0, EXPERTS - 1) for layer in range(layers)}
    copies = QueuedCopies(seed)
    placed, looked = Placed(expert_places(sizes, EXPERTS, first), copies), 0
    experts, used = placed.experts, placed.experts._counted
    assert experts.movable
    for _ in range(8):
        if rng.random() < 0.7:
            used._recent.copy_(
                torch.rand(used._recent.shape, generator=torch.Generator().manual_seed(rng.randrange(99)))
            )
            before, count = experts.resident_counts, rng.randint(0, experts.most_resident)
            experts.change(count)
            assert experts.resident_counts == experts.spread(count)
            assert experts.resident_bytes + experts.nbytes == experts.bytes_with(count)
            assert experts.pinned_bytes == sum(piece.nbytes for piece in experts._memory.pieces)
            for number, (was, stay) in enumerate(zip(before, experts.resident_counts, strict=True)):
                staying = {expert for expert in range(EXPERTS) if used.places[number, expert] >= 0}
                assert was == stay or staying == set(used.most_used(number)[:stay])
        placed.step(layers, 9)
        looked += 2 * layers
    copies.run_all()
    assert placed.read == looked
    assert torch.equal(experts.places, used.places)
    experts.close()


@torch.inference_mode()
def test_experts_stay_where_memory_for_them_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = QueuedCopies(0)
    placed = Placed(in_threes(3), copies)
    made, added = placed.experts._made, placed.experts._memory.add
    refused = [False]

    def no_device(number: int, experts: int) -> list[torch.Tensor]:
        if number == 1 and experts > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(number, experts)

    def no_ram(nbytes: int) -> torch.Tensor:
        if refused[0]:
            raise EngineError("the driver did not pin host memory", code="HF444")
        return added(nbytes)

    monkeypatch.setattr(placed.experts, "_made", no_device)
    monkeypatch.setattr(placed.experts._memory, "add", no_ram)
    placed.experts.change(15)
    assert placed.experts.resident_counts == (5, 3, 5)
    refused[0] = True
    placed.experts.change(3)
    assert placed.experts.resident_counts == (5, 3, 5)
    placed.step(3, 9)
    copies.run_all()
    assert placed.read == 6
    placed.experts.close()


def in_threes(layers: int) -> ExpertPlaces:
    return expert_places(dict.fromkeys(range(layers), SIZE), EXPERTS, dict.fromkeys(range(layers), 3))


def test_what_kernels_were_loaded_with_is_no_layers() -> None:
    """Steps of few tokens are among what is computed then: what they fetch lies in slots, over others' experts."""
    copies = QueuedCopies(3)
    placed = Placed(in_threes(4), copies)
    placed.step(4, 9)
    with placed.experts.as_they_are():
        assert placed.experts.begin(3, 2).fetched is not None
        for layer in (2, 3):
            copies.launch(lambda layer=layer: placed.slots[layer].fill_(layer))
    placed.step(4, 9)
    copies.run_all()
    assert placed.read == 16
    placed.experts.close()


def test_nothing_changes_places_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would do so again whenever the graph is launched."""
    monkeypatch.setattr(ExpertUses, "look_at", lambda uses, counted: [Swap(0, 4, 1)] if uses.swaps == 0 else [])
    placed = Placed(in_threes(2), QueuedCopies(0))
    monkeypatch.setattr(QueuedCopies, "capturing", lambda copies: True)
    placed.step(2, 2)
    assert placed.experts.expert_use().swaps == 0
    monkeypatch.setattr(QueuedCopies, "capturing", lambda copies: False)
    placed.step(2, 2)
    assert placed.experts.expert_use().swaps == 1
    placed.experts.close()


def test_a_change_that_was_wanted_twice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertUses, "look_at", lambda uses, counted: [Swap(0, 4, 1), Swap(0, 4, 2)])
    copies = QueuedCopies(0)
    placed = Placed(in_threes(2), copies)
    placed.step(2, 2)
    placed.step(2, 9)
    copies.run_all()
    assert (placed.experts.expert_use().swaps, placed.read) == (1, 4)
    placed.experts.close()


@pytest.mark.parametrize("seed", range(30))
def test_ctrl_c_before_any_line_leaves_all_experts_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller in the same process goes on with other prompts, and some expert changes places before most steps."""
    rng = random.Random(seed)
    monkeypatch.setattr(ExpertUses, "look_at", lambda uses, counted: [some_swap(uses, rng)])
    copies = QueuedCopies(seed)
    placed = Placed(in_threes(4), copies)
    for _ in range(12):
        with ctrl_c(device_experts, rng.randint(1, 120)):
            placed.step(4, rng.choice([2, 9]))
        placed.step(4, 9)
        copies.run_all()  # Places are changed at once here.
    assert torch.equal(placed.experts.places, placed.experts._counted.places)
    assert placed.experts.expert_use().swaps > 0
    placed.experts.close()


@pytest.mark.parametrize("module", [device_experts, simulated_copies], ids=["experts", "copies"])
def test_ctrl_c_before_any_line_leaves_no_copy_that_few_tokens_do_not_wait_for(module: ModuleType) -> None:
    """What they fetch lies in slots."""
    for at in range(1, 2000):
        copies = QueuedCopies(at)
        placed = Placed(in_threes(4), copies)
        with ctrl_c(module, at) as struck:
            placed.step(4, 9)
        with placed.experts.step(2):
            placed.experts.begin(3, 2)
            for slot in placed.experts._slots:
                copies.launch(partial(slot.tensor.fill_, 7))
        while copies._computing and copies._step(copies._computing):
            pass
        copies.run_all()
        assert all(int(slot.tensor.min()) == int(slot.tensor.max()) == 7 for slot in placed.experts._slots), at
        placed.experts.close()
        if struck.count < at:
            break
    assert 20 < at < 1999, "each of them was one"


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_change_that_was_interrupted_lets_no_step_begin(
    nth: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tables would be of memory that others have by now."""
    monkeypatch.setattr(ExpertUses, "look_at", lambda uses, counted: [Swap(2, 4, 1)])
    placed, restacked = Placed(in_threes(3), QueuedCopies(0)), list[int]()
    restack = placed.experts._restack

    def interrupted(number: int, wanted: int) -> None:
        restacked.append(number)
        if len(restacked) == nth:
            raise KeyboardInterrupt
        restack(number, wanted)

    monkeypatch.setattr(placed.experts, "_restack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        placed.experts.change(6)
    for again in (lambda: placed.step(3, tokens), lambda: placed.experts.change(6)):
        with pytest.raises(EngineError, match="interrupted"):
            again()
    placed.experts.close()


def some_swap(uses: ExpertUses, rng: random.Random) -> Swap:
    number = rng.randrange(len(uses.places))
    row = uses.places[number].tolist()
    waits, stays = ([expert for expert in range(EXPERTS) if (row[expert] < 0) == away] for away in (True, False))
    return Swap(number, rng.choice(waits), rng.choice(stays))


def test_what_was_used_only_grows() -> None:
    """The host counts at once, the GPU's counts are looked at now and then."""
    placed = Placed(in_threes(1), QueuedCopies(0))
    experts, counted = placed.experts, placed.experts._counted
    experts.host = host = SimpleNamespace(pairs=0, computed_s=0.0, close=lambda: None)
    told = []
    for pairs, hits, on_host in ((0, 0, 40), (100, 40, 42), (100, 40, 90), (200, 80, 92), (200, 80, 140)):
        counted.pairs, counted.hits, host.pairs = pairs, hits, on_host
        use = experts.expert_use()
        told.append((use.host_pairs, use.pairs - use.hits - use.host_pairs))
    assert told == [(0, 0), (42, 18), (42, 18), (92, 28), (92, 28)]
    experts.close()


def test_what_is_not_pinned_yet_is_waited_for() -> None:
    """Layers are loaded while memory for the others is pinned."""
    places, may_pin, kept = in_threes(2), threading.Event(), list[int]()
    memory = PinnedMemory(
        places.pinned_sizes,
        CPU,
        pin=lambda address, nbytes: 0 if may_pin.wait(60) else 1,
        unpin=lambda addresses, device: None,
        background=range(2),
    )
    experts = DeviceExperts(places, CPU, QueuedCopies(0), memory, few_tokens=4)

    def load() -> None:
        for layer in range(2):
            experts.arena(layer).tensor((3, SIZE), torch.uint8, CPU).fill_(layer + 1)
            experts.keep(layer)
            kept.append(int(memory.pieces[layer][0]))

    loading = threading.Thread(target=load)
    loading.start()
    loading.join(0.1)
    assert kept == []
    may_pin.set()
    loading.join(60)
    assert kept == [1, 2]
    experts.close()


@pytest.mark.parametrize("lost", ["await_copy", "after_launched"])
def test_the_simulation_finds_a_fence_that_is_missing(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing."""
    monkeypatch.setattr(QueuedCopies, lost, lambda copies, mark: None)
    wrong = 0
    for seed in range(10):
        copies = QueuedCopies(seed)
        placed = Placed(expert_places(dict.fromkeys(range(5), SIZE), EXPERTS, dict.fromkeys(range(5), 2)), copies)
        try:
            for _ in range(3):
                placed.step(5, 9)
            copies.run_all()
        except AssertionError:
            wrong += 1
    assert wrong > 5


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(12))
def test_a_change_takes_no_more_than_before_or_after_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile too: a GPU that is full would let some experts stay where they are."""
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 1 << 18)  # Of slots hardly anything is a gap then.
    rng, placed, made = random.Random(seed), Placed(in_threes(4), QueuedCopies(seed)), list[weakref.ref[torch.Tensor]]()
    experts, most = placed.experts, 0
    new_planes, new_slots = experts._made, experts._made_slots
    fixed = experts.places.nbytes + experts._uses.nbytes

    def counted(tensors: list[torch.Tensor]) -> None:
        nonlocal most
        made.extend(weakref.ref(tensor) for tensor in tensors)
        most = max(most, fixed + sum(tensor.nbytes for one in made if (tensor := one()) is not None))

    def planes(number: int, count: int) -> list[torch.Tensor]:
        found = new_planes(number, count)
        counted(found)
        return found

    def slots(count: int) -> list[object]:
        found = new_slots(count)
        counted([slot.tensor for slot in found])
        return found

    monkeypatch.setattr(experts, "_made", planes)
    monkeypatch.setattr(experts, "_made_slots", slots)
    experts.change(0)
    for _ in range(6):
        before, count = sum(experts.resident_counts), rng.randint(0, experts.most_resident)
        most = 0
        experts.change(count)
        assert experts.resident_bytes + experts.nbytes <= experts.bytes_with(count)
        assert most <= max(experts.bytes_with(before), experts.bytes_with(count))
    experts.close()


@torch.inference_mode()
def test_slots_that_have_no_memory_let_no_more_experts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have taken it meanwhile."""
    copies = QueuedCopies(0)
    placed, refused = Placed(in_threes(3), copies), [True]
    made = placed.experts._made_slots

    def once_refused(count: int) -> list[object]:
        if refused.pop():
            refused.append(False)
            raise torch.OutOfMemoryError("CUDA out of memory")
        refused.append(False)
        return made(count)

    monkeypatch.setattr(placed.experts, "_made_slots", once_refused)
    placed.experts.change(14)
    assert placed.experts.resident_counts == (3, 3, 3)
    placed.step(3, 9)
    copies.run_all()
    assert placed.read == 6
    placed.experts.close()


def test_ram_holds_what_a_change_takes_meanwhile() -> None:
    """The layer that moves is there three times: as it was, as it will be, and between them."""
    placed, room = Placed(in_threes(2), QueuedCopies(0)), 0
    experts = placed.experts
    experts._room = lambda: room
    after = experts._pinned_with(experts.spread(4))
    room = sum(after) + max(after) - experts.pinned_bytes
    assert not experts.fits_ram(4)
    room += EXPERTS * SIZE
    assert experts.fits_ram(4)
    experts.close()
