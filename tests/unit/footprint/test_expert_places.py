"""What experts over VRAM and RAM take: what stays, what waits, and what slots and tables are beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.footprint.expert_places import FEW_TOKENS, all_wait, exchange_layout, expert_places, spread_experts
from holdfast.footprint.gpu import padded_sizes
from holdfast.footprint.streamed import with_gaps
from holdfast.models import ExpertsSpec
from holdfast.units import MIB

SIZES = {1: 3 * MIB, 2: 2 * MIB, 4: 3 * MIB}


def test_what_stays_and_what_waits_are_all_experts_of_the_layers() -> None:
    places = spread_experts(SIZES, 8, resident=10)
    assert (places.layers, places.resident, places.waiting) == ((1, 2, 4), (4, 3, 3), (4, 5, 5))
    assert places.resident_bytes + sum(places.waiting_bytes) == 8 * sum(SIZES.values())
    assert places.resident_share == 10 / 24
    assert places.host_sizes == ()
    assert places.host_bytes == 0


def test_layers_whose_experts_all_stay_are_not_among_them() -> None:
    assert spread_experts(SIZES, 8, resident=23).layers == (4,)
    assert spread_experts(SIZES, 8, resident=24).layers == ()
    assert expert_places(SIZES, 8, {2: 8, 4: 7}).layers == (4,)


def test_slots_hold_the_largest_piece_of_a_layer() -> None:
    places = spread_experts(SIZES, 8, resident=0)
    assert places.slot_bytes == with_gaps(24 * MIB)
    assert places.slots_bytes == 2 * places.slot_bytes
    assert places.pinned_sizes == (with_gaps(24 * MIB), with_gaps(16 * MIB), with_gaps(24 * MIB))
    assert places.moved_bytes == places.pinned_bytes == sum(places.pinned_sizes)
    assert places.vram_bytes == places.slots_bytes + 3 * 8 * 8
    one = all_wait(SIZES, 8, [2])
    assert one.slots_used == 1
    assert one.slots_bytes == one.slot_bytes == with_gaps(16 * MIB)


@pytest.mark.parametrize("layers", [[1], [4, 1], [1, 2, 4]])
def test_by_hand_all_experts_of_named_layers_wait(layers: list[int]) -> None:
    places = all_wait(SIZES, 8, layers, dict.fromkeys(SIZES, 5 * MIB))
    assert places.layers == tuple(sorted(layers))
    assert set(places.resident) == {0}
    assert places.host_bytes == len(layers) * 8 * 5 * MIB
    assert places.resident_bytes == 0


@pytest.mark.parametrize("sequences", [1, 3, 6, 20, 32, 33, 256])
def test_a_token_of_each_sequence_passes_to_the_host_however_it_is_padded(sequences: int) -> None:
    layer = SimpleNamespace(experts=ExpertsSpec(count=8, per_token=2, intermediate_size=64))
    spec: Any = SimpleNamespace(layers=[layer], hidden_size=64)
    layout = exchange_layout(spec, spread_experts(SIZES, 8, resident=0), sequences, 2)
    assert layout.tokens <= FEW_TOKENS
    padded = next(size for size in padded_sizes(2048) if size >= min(sequences, FEW_TOKENS))
    assert padded <= layout.tokens
