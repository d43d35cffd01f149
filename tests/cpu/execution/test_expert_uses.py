"""Which experts should change places, by how often each was used: those that are used much more, and none by chance."""

from __future__ import annotations

import pytest
import torch

from holdfast.execution.streaming import expert_uses
from holdfast.execution.streaming.expert_uses import ExpertUses, Swap

LAYERS, EXPERTS, STAY = 3, 32, 8


def first_stay() -> torch.Tensor:
    return torch.tensor([[*range(STAY), *range(-1, STAY - EXPERTS - 1, -1)]] * LAYERS, dtype=torch.int32)


def follow(uses: ExpertUses, likely: torch.Tensor, steps: int) -> list[Swap]:
    """With two experts a layer and step, drawn so; all that is wanted is done at once."""
    source, counted, done = torch.Generator().manual_seed(1), torch.zeros(LAYERS, EXPERTS, dtype=torch.int32), []
    for _ in range(steps):
        for swap in uses.look_at(counted):
            uses.swapped(swap)
            done.append(swap)
        for layer in range(LAYERS):
            counted[layer, torch.multinomial(likely, 2, generator=source)] += 1
    return done


def test_those_that_are_used_most_come_to_stay() -> None:
    uses, likely = ExpertUses(first_stay()), torch.full((EXPERTS,), 0.1)
    hot = [3, 11, 17, 30]
    likely[hot] = 10.0
    follow(uses, likely, 3000)
    assert (uses.places[:, hot] >= 0).all()
    assert uses.hits / uses.pairs > 0.7
    for row in uses.places.tolist():  # Every place is somebody's.
        assert sorted(row) == list(range(STAY - EXPERTS, STAY))
    assert 3 * LAYERS <= uses.swaps <= 6 * LAYERS


def test_none_changes_places_by_chance() -> None:
    uses = ExpertUses(first_stay())
    assert follow(uses, torch.ones(EXPERTS), 3000) == []
    assert uses.hits / uses.pairs == pytest.approx(STAY / EXPERTS, abs=0.03)


def test_uses_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_uses, "KEPT", 0.8)
    uses, likely = ExpertUses(first_stay()), torch.full((EXPERTS,), 0.1)
    likely[[20, 21]] = 10.0
    follow(uses, likely, 1000)
    assert (uses.places[:, [20, 21]] >= 0).all()
    # As many others as stay are used from now on, which leaves no place for them. Counters go on from zero: what was
    # counted before is taken off.
    uses._before.zero_()
    likely[:] = 0.1
    likely[8:16] = 10.0
    follow(uses, likely, 3000)
    assert (uses.places[:, 8:16] >= 0).all()
