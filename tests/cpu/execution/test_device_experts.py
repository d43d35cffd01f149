"""Experts that come to a GPU for steps with many tokens, with a simulated one: in their slot when they are computed
with, whatever order the GPU does things in, after steps with few tokens too."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from simulated_copies import QueuedCopies, unpinned_memory

from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_uses import ExpertUses, Swap
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
            self.experts.know(layer, [made], [self.resident[layer]] if len(self.resident[layer]) else [])

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
