"""Addresses of layers that stay while the memory behind them changes: their own, or a slot's that others share."""

from __future__ import annotations

import mmap
import random

import pytest
import torch
from aliased_memory import NEW, POISON, AliasedMemory
from ctrl_c import Lines, ctrl_c

from holdfast.execution.gpu.memory import layer_ranges
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.gpu.memory.virtual_memory import RangeError

CPU, PAGE = torch.device("cpu"), mmap.PAGESIZE


def test_layers_of_a_slot_have_the_same_memory_and_others_their_own() -> None:
    memory = AliasedMemory()
    ranges = LayerRanges([2 * PAGE, 3 * PAGE - 5, PAGE], CPU, memory)
    ranges.add_slot()
    for layer in (0, 2):
        ranges.lend(layer, 0)
    ranges.own(1)
    views = [ranges.view(layer) for layer in range(3)]
    assert [len(view) for view in views] == [2 * PAGE, 3 * PAGE, PAGE]
    views[0].fill_(7)
    views[1].fill_(8)
    assert views[2].eq(7).all()
    assert (ranges.own_bytes, ranges.slots_bytes) == (3 * PAGE, 3 * PAGE)
    ranges.own(2)
    assert ranges.view(2) is views[2]
    assert views[2].eq(NEW).all()
    assert views[0].eq(7).all()
    ranges.lend(1, 0)
    assert views[1][: 2 * PAGE].eq(7).all()
    assert memory.handles.keys() == {ranges._slots[0], ranges._own[2]}
    ranges.close()
    assert (memory.handles, memory.mapped, memory.reserved) == ({}, {}, {})


def test_too_little_memory_is_said_and_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = AliasedMemory(memory_bytes=3 * PAGE)
    ranges = LayerRanges([2 * PAGE, 2 * PAGE], CPU, memory)
    ranges.add_slot()
    ranges.lend(0, 0)
    ranges.view(0).fill_(5)
    for refused in (ranges.add_slot, lambda: ranges.own(0)):
        with pytest.raises(RangeError) as error:
            refused()
        assert error.value.out_of_memory
    ranges.lend(0, 0)
    assert ranges.view(0).eq(5).all()
    memory.memory_bytes = 4 * PAGE
    with monkeypatch.context() as patch:
        patch.setattr(memory, "allow", lambda address, nbytes: (_ for _ in ()).throw(RangeError("access", 2)))
        with pytest.raises(RangeError):
            ranges.own(1)
    assert list(memory.handles) == ranges._slots
    ranges.close()
    assert memory.handles == {}


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_changes_leaks_nothing(seed: int) -> None:
    dice, memory = random.Random(seed), AliasedMemory()
    sizes = [dice.randrange(1, 4 * PAGE) for _ in range(6)]
    ranges = LayerRanges(sizes, CPU, memory)
    ranges.add_slot()
    ranges.add_slot()
    own = dict[int, int]()
    for number in range(60):
        layer = dice.randrange(6)
        if dice.random() < 0.5:
            ranges.lend(layer, dice.randrange(2))
            own.pop(layer, None)
        elif layer not in own:
            ranges.own(layer)
            own[layer] = number
            ranges.view(layer).fill_(number)
        for kept, value in own.items():
            assert ranges.view(kept).eq(value).all()
        assert ranges.own_bytes == sum(memory.whole(sizes[kept]) for kept in own)
        assert sum(memory.handles.values()) == ranges.own_bytes + ranges.slots_bytes
    ranges.close()
    assert (memory.handles, memory.mapped) == ({}, {})


def changed(at: int) -> Lines:
    """Until Ctrl-C comes before that line; then others, and it is closed."""
    memory = AliasedMemory()
    ranges = LayerRanges([2 * PAGE, 3 * PAGE, PAGE], CPU, memory)
    with ctrl_c(layer_ranges, at) as lines:
        ranges.add_slot()
        ranges.add_slot()
        ranges.own(0)
        ranges.lend(1, 0)
        ranges.lend(0, 1)
        ranges.lend(0, 0)
        ranges.own(1)
        ranges.drop(1)
        ranges.drop_slot()
        ranges.own(2)
        ranges.drop(0)
    assert sum(memory.handles.values()) == ranges.own_bytes + ranges.slots_bytes
    for layer in range(3):
        ranges.own(layer)
        ranges.view(layer).fill_(layer)
    while ranges.slots:
        ranges.drop_slot()
    ranges.add_slot()
    ranges.lend(1, 0)
    assert sum(memory.handles.values()) == ranges.own_bytes + ranges.slots_bytes == 6 * PAGE
    with ctrl_c(layer_ranges, at - lines.count) as closing:
        ranges.close()
    ranges.close()
    assert (memory.handles, memory.mapped, memory.reserved) == ({}, {}, {})
    lines.count += closing.count
    return lines


def test_ctrl_c_before_any_line_leaves_books_as_the_driver_has_them() -> None:
    count = changed(0).count
    assert count > 80
    for at in range(1, count + 1):
        changed(at)


def test_what_nothing_lies_behind_reads_as_poison() -> None:
    """Or tests that use this memory would prove less."""
    memory = AliasedMemory()
    address, handle = memory.reserve(PAGE), memory.create(PAGE)
    memory.map(address, PAGE, handle)
    memory.allow(address, PAGE)
    view = memory.view(address, PAGE)
    assert view.eq(NEW).all()
    memory.unmap(address, PAGE)
    assert view.eq(POISON).all()
