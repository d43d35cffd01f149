"""One budget of a GPU over layers and KV: who gives way to whom, and that nobody takes more than there is."""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from simulated_vram import LAYERS, LEAST_BLOCKS, OTHERS, PAGE, STREAMED, ExpertGpu, Experts, Gpu

from holdfast.engine.core.kv_balance import GONE_S, KVBalance
from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution.gpu.memory.arbiter import LEAST_SPEED
from holdfast.execution.gpu.memory.virtual_memory import OUT_OF_MEMORY, RangeError
from holdfast.execution.streaming.pinned_memory import NOT_PINNED
from holdfast.records import VramBudget

GRAPHS = 10 * PAGE


def test_a_larger_budget_takes_layers_in_and_a_smaller_one_sends_them_out() -> None:
    gpu = Gpu()
    whole = gpu.driver.whole(gpu.size)
    more = gpu.change(gpu.budget + 3 * whole)
    assert len(gpu.layers.streamed) == STREAMED - 3
    assert gpu.held_bytes() == gpu.budget + 3 * whole
    assert len(more.layers.streamed) == STREAMED - 3
    assert more.layers.moved_bytes == (STREAMED - 3) * gpu.size
    less = gpu.change(gpu.budget - 4 * whole)
    assert len(gpu.layers.streamed) == STREAMED + 5, "and one more for a second slot"
    assert gpu.held_bytes() <= gpu.budget - 4 * whole == less.budget_bytes
    assert less.kv_bytes >= 40 * PAGE, "layers go before KV that is wanted"
    least = gpu.change(PAGE)
    assert len(gpu.layers.streamed) == LAYERS
    assert least.kv_bytes == gpu.kv.backed_bytes(LEAST_BLOCKS)
    assert gpu.held_bytes() == least.budget_bytes == OTHERS + gpu.layers.nbytes + gpu.kv.nbytes
    gpu.change(gpu.budget)
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED, 40)
    all_of_it = gpu.change(gpu.total)
    assert all_of_it.layers.streamed == ()
    assert gpu.held_bytes() == gpu.total
    assert all_of_it.kv_bytes > 300 * PAGE, "all layers stay, and KV has the rest"
    gpu.close()


@pytest.mark.parametrize("more", [3, -3])
def test_ctrl_c_comes_when_layers_have_moved_and_are_counted(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in it: a caller in the same process goes on."""
    gpu = Gpu()
    whole, change = gpu.driver.whole(gpu.size), gpu.layers.change

    def struck(streamed: tuple[int, ...]) -> None:
        signal.raise_signal(signal.SIGINT)
        change(streamed)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(gpu.layers, "change", struck)
        with pytest.raises(KeyboardInterrupt):
            gpu.change(gpu.budget + more * whole)
    assert len(gpu.layers.streamed) != STREAMED
    assert gpu.arbiter.shares["weights"] == gpu.layers.resident_bytes
    assert gpu.arbiter.shares["layer_slots"] == gpu.layers.nbytes
    again = gpu.change(gpu.budget)
    assert (len(again.layers.streamed), gpu.held_bytes()) == (STREAMED, gpu.budget)
    gpu.close()


def test_page_tables_of_what_is_pinned_for_layers_that_leave_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.execution.gpu.memory.arbiter.page_tables_bytes", lambda pinned: pinned // 16)
    gpu = Gpu()
    before = gpu.layers.pinned_bytes
    gpu.arbiter.shares["page_tables"] = before // 16
    budget = gpu.budget + before // 16 - 4 * gpu.driver.whole(gpu.size)
    gpu.change(budget)
    assert gpu.layers.pinned_bytes > before
    assert gpu.held_bytes() + gpu.layers.pinned_bytes // 16 <= budget
    gpu.close()


def test_page_tables_of_what_was_pinned_are_counted_where_more_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.execution.gpu.memory.arbiter.page_tables_bytes", lambda pinned: pinned // 16)
    gpu = Gpu()
    before, add = gpu.layers.pinned_bytes, gpu.layers._memory.add

    def once(nbytes: int) -> torch.Tensor:
        if gpu.layers.pinned_bytes > before:
            raise EngineError("no more RAM", code=NOT_PINNED)
        return add(nbytes)

    monkeypatch.setattr(gpu.layers._memory, "add", once)
    gpu.arbiter.shares["page_tables"] = before // 16
    with pytest.raises(DoesNotFitError):
        gpu.change(gpu.budget - 4 * gpu.driver.whole(gpu.size))
    assert gpu.layers.pinned_bytes == before + gpu.size
    assert gpu.arbiter.shares["page_tables"] == gpu.layers.pinned_bytes // 16
    gpu.close()


def test_layers_that_ram_does_not_hold_stay_and_the_budget_is_what_can_be_kept_to() -> None:
    gpu = Gpu(ram_layers=2)
    granted = gpu.change(PAGE)
    assert len(gpu.layers.streamed) == STREAMED + 2
    assert granted.kv_bytes == gpu.kv.backed_bytes(LEAST_BLOCKS)
    assert granted.budget_bytes == gpu.held_bytes() > PAGE
    gpu.close()


def test_what_is_not_there_is_refused_and_nothing_changes() -> None:
    gpu = Gpu()
    before = gpu.layers.streamed, gpu.kv.blocks
    with pytest.raises(DoesNotFitError, match="less is free"):
        gpu.change(gpu.total + PAGE)
    assert (gpu.layers.streamed, gpu.kv.blocks) == before
    gpu.close()


def faster(gpu: Gpu) -> Callable[[int], None]:
    """A neighbour takes all that the pool would grow by, whenever it would."""

    def resize(blocks: int) -> None:
        if blocks > gpu.kv.blocks:
            raise RangeError("memory", OUT_OF_MEMORY)
        gpu.resize_kv(blocks)

    return resize


@pytest.mark.parametrize("make", [Gpu, ExpertGpu])
def test_what_a_neighbour_takes_when_weights_have_come_is_lacking_in_the_pool_and_in_the_budget(
    make: type[Gpu], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = make()
    asked = VramBudget(budget_bytes=gpu.total)
    granted = gpu.arbiter.change(asked, LEAST_BLOCKS, faster(gpu))
    if granted.layers is not None:
        assert granted.layers.streamed == gpu.layers.streamed == ()
    else:
        assert gpu.experts.count == gpu.experts.most_resident
    assert gpu.budget < granted.budget_bytes == gpu.arbiter.budget_bytes == gpu.held_bytes() < gpu.total
    assert "the KV pool stays at" in caplog.text
    with pytest.raises(DoesNotFitError, match="less is free"):  # Nothing moves this time.
        gpu.arbiter.change(asked, LEAST_BLOCKS, faster(gpu))
    assert gpu.arbiter.granted() == granted
    assert gpu.change(gpu.total).budget_bytes == gpu.held_bytes() == gpu.total
    gpu.close()


def test_the_pool_takes_back_the_room_that_it_made_for_what_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    before, asked = gpu.arbiter.granted(), VramBudget(budget_bytes=gpu.budget, kv_bytes=LEAST_BLOCKS * PAGE)
    monkeypatch.setattr(gpu.layers, "change", Mock(side_effect=EngineError("no more RAM", code=NOT_PINNED)))
    with pytest.raises(DoesNotFitError, match="RAM does not hold"):
        gpu.arbiter.change(asked, LEAST_BLOCKS, gpu.resize_kv)
    assert gpu.arbiter.granted() == before
    lacking = gpu.arbiter.change(asked, LEAST_BLOCKS, faster(gpu))
    assert lacking.blocks == gpu.kv.blocks < before.blocks, "and says so where a neighbour has that too"
    gpu.close()


def test_a_layer_that_nothing_lies_behind_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step would read addresses without memory: the process ends instead, and another serves on."""
    gpu = Gpu()
    gpu.change(gpu.total)
    assert gpu.layers.streamed == ()
    ranges = gpu.layers._ranges
    assert ranges is not None
    monkeypatch.setattr(ranges, "add_slot", Mock(side_effect=RangeError("memory", OUT_OF_MEMORY)))
    with pytest.raises(RangeError):
        gpu.change(gpu.budget)


@pytest.mark.parametrize("graphs_bytes", [0, 10 * PAGE])
@pytest.mark.parametrize("seed", range(4))
def test_any_budgets_are_kept_to_and_every_layer_is_itself(seed: int, graphs_bytes: int) -> None:
    gpu, dice, captured = Gpu(graphs_bytes=graphs_bytes), random.Random(seed), 0
    for _ in range(12):
        gpu.most_own, before = 0, gpu.arbiter.budget_bytes
        budget = dice.randrange(gpu.total)
        expected = gpu.arbiter.blocks_with(VramBudget(budget_bytes=budget), LEAST_BLOCKS)
        assert gpu.arbiter.budget_bytes == before
        granted = gpu.change(budget)
        assert abs(granted.blocks - expected) <= 32, "but for pieces that memory goes in"
        assert gpu.held_bytes() <= granted.budget_bytes
        assert gpu.most_own <= max(before, granted.budget_bytes), "nor meanwhile"
        for _ in range(4):
            gpu.step()
        assert gpu.most_own <= max(before, granted.budget_bytes), "with what was captured"
        captured += gpu.captured_bytes > 0
    assert (captured > 0) == (graphs_bytes > 0)
    gpu.close()


def all_stay_bytes(gpu: Gpu) -> int:
    """Others and all layers."""
    return OTHERS + gpu.layers.bytes_with(())


def test_graphs_are_there_while_all_layers_stay_and_their_memory_goes_back_before_one_leaves() -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    gpu.step()
    assert gpu.captured_bytes == 0
    granted = gpu.change(gpu.total)
    assert granted.layers.streamed == ()
    assert granted.layers.graphs_bytes == gpu.arbiter.shares["graphs"] == GRAPHS
    assert gpu.arbiter.reserved_bytes == gpu.held_bytes() == gpu.total - GRAPHS, "KV leaves them room"
    gpu.step()
    assert gpu.captured_bytes == 0, "layers that came are copied by the first step"
    for _ in range(20):
        gpu.step()
    assert gpu.captured_bytes == sum(gpu.room.measured) == GRAPHS - PAGE, "the next may take more than a page"
    assert gpu.arbiter.reserved_bytes == gpu.held_bytes(), "or a capture would be a neighbour's growth"
    gpu.change(gpu.total - 2 * GRAPHS)
    assert (gpu.room.nbytes, gpu.captured_bytes) == (GRAPHS, GRAPHS - PAGE), "of KV there is enough"
    less = gpu.change(gpu.budget)
    assert len(gpu.layers.streamed) == STREAMED
    assert (gpu.room.nbytes, gpu.captured_bytes, gpu.room.given_back_bytes) == (0, 0, GRAPHS - PAGE)
    assert (less.layers.graphs_bytes, gpu.arbiter.shares["graphs"]) == (0, 0)
    assert gpu.kv.blocks == 40, "nothing is kept for graphs that cannot be"
    gpu.close()


def test_kv_gives_way_to_graphs_and_layers_do_not(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    wanted, least = 40 * PAGE, gpu.kv.backed_bytes(LEAST_BLOCKS)
    granted = gpu.change(all_stay_bytes(gpu) + wanted)
    assert (granted.layers.streamed, granted.layers.graphs_bytes) == ((), GRAPHS)
    assert granted.kv_bytes == wanted - GRAPHS
    assert not gpu.arbiter.moves(VramBudget(budget_bytes=gpu.arbiter.budget_bytes), LEAST_BLOCKS)
    gpu.close()
    gpu = Gpu(ram_layers=-STREAMED, graphs_bytes=GRAPHS)  # None that came to stay can leave again.
    gpu.change(gpu.total)
    gpu.step()
    gpu.step()
    gpu.layers.one_more = lambda layers: None  # type: ignore[method-assign]
    fits = gpu.change(all_stay_bytes(gpu) + least + GRAPHS)
    assert (fits.layers.graphs_bytes, fits.kv_bytes) == (GRAPHS, least)
    assert gpu.captured_bytes == gpu.first_graph_bytes
    with caplog.at_level("INFO"):
        for _ in range(2):
            short = gpu.change(all_stay_bytes(gpu) + least + GRAPHS - PAGE)
    assert (short.layers.streamed, short.layers.graphs_bytes, gpu.captured_bytes) == ((), 0, 0)
    assert gpu.held_bytes() <= short.budget_bytes == all_stay_bytes(gpu) + least + GRAPHS - PAGE
    assert caplog.text.count("steps are launched without CUDA graphs: these may take 40.00 KiB") == 1
    gpu.close()


def test_graphs_that_take_more_than_their_room_go_and_kv_has_it_again(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    gpu.first_graph_bytes = GRAPHS + PAGE
    without = gpu.change(gpu.total - 2 * GRAPHS).kv_bytes + GRAPHS
    with caplog.at_level("INFO"):
        for _ in range(4):
            gpu.step()
    assert (gpu.captured_bytes, len(gpu.room.measured)) == (0, 1), "it is not captured again"
    assert caplog.text.count("more than the room") == 1
    assert "1 CUDA graph took 44.00 KiB of 40.00 KiB" in caplog.text
    assert gpu.arbiter.moves(VramBudget(budget_bytes=gpu.arbiter.budget_bytes), LEAST_BLOCKS)
    granted = gpu.change(gpu.total - 2 * GRAPHS)
    assert (granted.kv_bytes, granted.layers.graphs_bytes) == (without, 0)
    gpu.step()
    assert gpu.captured_bytes == 0
    gpu.close()


@pytest.mark.parametrize("told", [True, False])
def test_what_the_driver_keeps_of_graphs_stays_counted(told: bool) -> None:
    """Also by one that does not tell processes apart."""
    gpu = Gpu(graphs_bytes=GRAPHS)
    gpu.graphs_kept_bytes, gpu.tells = 2 * PAGE, told
    for kept in (2 * PAGE, 4 * PAGE):
        gpu.change(gpu.total - OTHERS)
        gpu.step()
        gpu.step()
        assert gpu.captured_bytes == gpu.first_graph_bytes
        granted = gpu.change(gpu.budget)
        assert gpu.arbiter.shares["graphs"] == gpu.room.kept_bytes == kept
        assert gpu.held_bytes() <= granted.budget_bytes == gpu.budget
    gpu.close()


def test_what_room_for_graphs_has_hidden_is_counted_when_they_go() -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    gpu.change(gpu.total)
    gpu.unaccounted_bytes = GRAPHS // 2
    granted = gpu.change(gpu.budget)
    assert len(gpu.layers.streamed) == STREAMED
    assert gpu.held_bytes() <= granted.budget_bytes == gpu.budget
    gpu.close()


def test_graphs_stay_where_no_layer_could_leave() -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    gpu.change(gpu.total)
    refused = Mock(side_effect=EngineError("no more RAM", code=NOT_PINNED))
    gpu.layers.change = refused  # type: ignore[method-assign]
    with pytest.raises(DoesNotFitError):
        gpu.change(gpu.budget)
    assert refused.called
    assert (gpu.room.nbytes, gpu.arbiter.shares["graphs"]) == (GRAPHS, GRAPHS)
    gpu.close()


@pytest.mark.parametrize("leave", [False, True])
def test_ctrl_c_finds_graphs_counted_as_they_are_kept(leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(graphs_bytes=GRAPHS)
    if leave:
        gpu.change(gpu.total)
        gpu.step()
        gpu.step()
    change = gpu.layers.change

    def struck(streamed: tuple[int, ...]) -> None:
        signal.raise_signal(signal.SIGINT)
        change(streamed)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(gpu.layers, "change", struck)
        with pytest.raises(KeyboardInterrupt):
            gpu.change(gpu.budget if leave else gpu.total)
    assert (gpu.room.nbytes > 0) == (not gpu.layers.streamed) == (not leave)
    assert gpu.arbiter.shares["graphs"] == gpu.room.nbytes
    gpu.step()
    gpu.step()
    assert gpu.held_bytes() <= gpu.total
    gpu.close()


def wants(gpu: Gpu, blocks: int) -> SimpleNamespace:
    kv = SimpleNamespace(blocks_total=gpu.kv.blocks - 1)
    return SimpleNamespace(blocks_wanted=lambda ahead: blocks, least_blocks=LEAST_BLOCKS, kv=kv)


def test_layers_leave_for_kv_that_is_wanted_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu()
    balance, whole = KVBalance(gpu.arbiter), gpu.driver.whole(gpu.size) // PAGE
    assert balance.look(wants(gpu, 40), 1.0, gpu.resize_kv) is None  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        granted = balance.look(wants(gpu, 35 + whole), 2.0, gpu.resize_kv)  # type: ignore[arg-type]
    assert granted is not None
    assert len(gpu.layers.streamed) == STREAMED + 1
    assert granted.blocks == 40 + whole
    assert "1 layer left for a KV pool of 288.00 KiB (160.00 KiB before)" in caplog.text
    assert " GB a step" in caplog.text
    assert gpu.held_bytes() <= gpu.budget
    assert balance.look(wants(gpu, 2), 3.0, gpu.resize_kv) is None  # type: ignore[arg-type]
    assert balance.look(wants(gpu, 2), 2.5 + GONE_S, gpu.resize_kv) is None  # type: ignore[arg-type]
    granted = balance.look(wants(gpu, 2), 3.1 + GONE_S, gpu.resize_kv)  # type: ignore[arg-type]
    assert granted is not None
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED, 40)
    assert balance.look(wants(gpu, 2), 99.0, gpu.resize_kv) is None  # type: ignore[arg-type]
    gpu.close()


@pytest.mark.parametrize("pool_grows", [False, True])
def test_layers_whose_room_a_neighbour_took_come_back_when_it_has_left(
    pool_grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pool_grows`: the neighbour leaves some before, which the pool has first."""
    gpu = Gpu()
    balance, whole = KVBalance(gpu.arbiter), gpu.driver.whole(gpu.size) // PAGE
    assert balance.look(wants(gpu, 35 + whole), 1.0, faster(gpu)) is not None  # type: ignore[arg-type]
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED + 1, 40)
    assert gpu.arbiter.budget_bytes == gpu.budget, "which others may leave it again"
    resize = gpu.resize_kv if pool_grows else faster(gpu)
    with monkeypatch.context() as meanwhile:
        refuse = Mock(side_effect=RangeError("memory", OUT_OF_MEMORY))
        meanwhile.setattr(gpu.layers._ranges, "own", refuse)
        for second in range(2, 30):
            balance.look(wants(gpu, 2), float(second), resize)  # type: ignore[arg-type]
        assert refuse.called
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED + 1, 40 + pool_grows * whole)
    for second in range(30, 50):
        balance.look(wants(gpu, 2), float(second), gpu.resize_kv)  # type: ignore[arg-type]
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED, 40)
    gpu.close()


def bounded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its drivers refuse what it does not have. What they left free, each time that they gave some."""
    left, create, create_kv = list[int](), gpu.driver.create, gpu.kv_driver.cuMemCreate

    def for_layers(nbytes: int) -> object:
        if nbytes > gpu.held().free_bytes:
            raise RangeError("memory", OUT_OF_MEMORY)
        handle = create(nbytes)
        left.append(gpu.held().free_bytes)
        return handle

    def for_pages(nbytes: int, *given: object) -> tuple[int, ...]:
        if nbytes > gpu.held().free_bytes:
            return OUT_OF_MEMORY, 0
        made = create_kv(nbytes, *given)  # type: ignore[arg-type]
        left.append(gpu.held().free_bytes)
        return made

    monkeypatch.setattr(gpu.driver, "create", for_layers)
    monkeypatch.setattr(gpu.kv_driver, "cuMemCreate", for_pages)
    return left


def raced(gpu: Gpu) -> Callable[[int], None]:
    """A neighbour takes all that is free before the pool grows, and keeps it."""

    def resize(blocks: int) -> None:
        if blocks > gpu.kv.blocks:
            gpu.total = gpu.held_bytes()
        gpu.resize_kv(blocks)

    return resize


def test_nothing_is_tried_while_a_neighbour_holds_the_room_of_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A try costs what is in all slots, and for a moment what is free. As many come back as there is room for."""
    monkeypatch.setattr("holdfast.execution.gpu.memory.arbiter.LEAST_SPEED", 0.5)
    gpu = Gpu()
    gpu.total, whole = gpu.budget, gpu.driver.whole(gpu.size)
    balance, taken = KVBalance(gpu.arbiter), bounded(gpu, monkeypatch)
    assert balance.look(wants(gpu, 35 + 3 * whole // PAGE), 1.0, raced(gpu)) is not None  # type: ignore[arg-type]
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED + 4, 40), "one of them for a second slot"
    changed = Mock(wraps=gpu.layers.change)
    monkeypatch.setattr(gpu.layers, "change", changed)
    taken.clear()
    caplog.clear()
    for second in range(2, 60):
        gpu.total += (second == 30) * (whole - 2 * PAGE)  # The pool would give the other pages, but for one.
        assert balance.look(wants(gpu, 2), float(second), gpu.resize_kv) is None  # type: ignore[arg-type]
    assert (changed.called, taken, caplog.text) == (False, [], "")
    gpu.total += 2 * PAGE
    seen = set[int]()
    for second in range(60, 120):
        gpu.total = gpu.budget if second > 90 else gpu.total
        balance.look(wants(gpu, 2), float(second), gpu.resize_kv)  # type: ignore[arg-type]
        seen.add(len(gpu.layers.streamed))
        assert gpu.arbiter.budget_bytes == gpu.budget
    assert seen == {STREAMED + 4, STREAMED + 3, STREAMED}
    assert (changed.call_count, gpu.kv.blocks) == (2, 40)
    assert "the KV pool stays" not in caplog.text
    gpu.close()


def test_a_pool_that_cannot_grow_takes_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    gpu.total = gpu.budget
    balance, taken = KVBalance(gpu.arbiter), bounded(gpu, monkeypatch)
    assert balance.look(wants(gpu, 60), 1.0, raced(gpu)) is not None  # type: ignore[arg-type]
    gpu.total += 20 * PAGE
    taken.clear()
    with pytest.raises(DoesNotFitError, match="less is free"):
        gpu.change(gpu.budget)
    assert (taken, gpu.kv.blocks) == ([], 40)
    gpu.total = gpu.budget
    assert gpu.change(gpu.budget).blocks > 60
    gpu.close()


def test_layers_that_a_smaller_budget_keeps_away_are_not_waited_for() -> None:
    gpu = Gpu()
    balance, whole, first = KVBalance(gpu.arbiter), gpu.driver.whole(gpu.size), gpu.layers.streamed
    assert balance.look(wants(gpu, 35 + whole // PAGE), 1.0, gpu.resize_kv) is not None  # type: ignore[arg-type]
    asked = VramBudget(budget_bytes=gpu.budget - whole, kv_bytes=40 * PAGE)
    before = gpu.arbiter.change(asked, LEAST_BLOCKS, gpu.resize_kv)
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED + 1, 40)
    for second in range(2, 40):
        assert balance.look(wants(gpu, 2), float(second), gpu.resize_kv) is None  # type: ignore[arg-type]
    assert gpu.arbiter.granted() == before
    assert gpu.change(gpu.budget).layers.streamed == first
    gpu.close()


def test_no_more_speed_of_one_sequence_is_given_up_than_a_share() -> None:
    gpu = Gpu()
    balance = KVBalance(gpu.arbiter)
    for look in range(4):  # However often, and however much is wanted.
        balance.look(wants(gpu, 1000 + look), float(look), gpu.resize_kv)  # type: ignore[arg-type]
    assert STREAMED < len(gpu.layers.streamed) <= STREAMED / LEAST_SPEED
    gpu.close()


def test_experts_come_with_a_larger_budget_and_leave_with_a_smaller_one() -> None:
    gpu = ExpertGpu()
    more = gpu.change(gpu.budget + 20 * Experts.size)
    assert gpu.experts.count == gpu.experts.most_resident
    assert more.experts.resident == (7, 7, 7, 7)
    assert more.kv_bytes > 40 * PAGE, "the rest is KV"
    assert gpu.held_bytes() <= gpu.most_own <= gpu.budget + 20 * Experts.size
    less = gpu.change(gpu.budget - 4 * Experts.size)
    assert gpu.experts.count < 16
    assert less.kv_bytes >= 0.9 * 40 * PAGE, "experts go before KV that is wanted"
    assert gpu.held_bytes() <= gpu.budget - 4 * Experts.size == less.budget_bytes
    assert less.experts.weights_bytes == gpu.experts.resident_bytes
    least = gpu.change(PAGE)
    assert gpu.experts.count == 0
    assert least.kv_bytes == gpu.kv.backed_bytes(LEAST_BLOCKS)
    assert least.budget_bytes == gpu.held_bytes()
    back = gpu.change(gpu.budget)
    assert (gpu.experts.count, back.experts.pinned_bytes) == (16, 16 * Experts.size)
    gpu.close()


@pytest.mark.parametrize("make", [Gpu, ExpertGpu])
def test_while_nobody_wants_kv_no_more_leaves_than_is_asked_for(make: type[Gpu]) -> None:
    gpu = make()
    gpu.resize_kv(LEAST_BLOCKS)
    given = 3 * Experts.size if make is ExpertGpu else 3 * gpu.driver.whole(gpu.size)
    before = gpu.held_bytes()
    asked = VramBudget(budget_bytes=before - given, at_most_free=True, kv_bytes=LEAST_BLOCKS * PAGE)
    assert gpu.arbiter.moves(asked, LEAST_BLOCKS)
    granted = gpu.arbiter.change(asked, LEAST_BLOCKS, gpu.resize_kv)
    assert granted.blocks == gpu.kv.blocks == LEAST_BLOCKS
    assert given <= before - gpu.held_bytes() <= given * 4 // 3
    assert not gpu.arbiter.moves(asked, LEAST_BLOCKS)
    gpu.close()


def test_experts_that_ram_does_not_hold_stay() -> None:
    gpu = ExpertGpu(ram=18)
    found = gpu.change(gpu.budget - 10 * Experts.size)
    assert gpu.experts.count == 14
    assert found.budget_bytes == gpu.held_bytes() or found.kv_bytes < 40 * PAGE
    gpu.close()


@pytest.mark.parametrize("seed", range(8))
def test_budgets_at_random_over_experts_and_kv(seed: int) -> None:
    rng, gpu = random.Random(seed), ExpertGpu()
    for _ in range(30):
        asked = rng.randrange(PAGE, gpu.total)
        gpu.most_own, before = 0, gpu.arbiter.budget_bytes
        granted = gpu.change(asked)
        assert gpu.held_bytes() <= granted.budget_bytes
        assert gpu.most_own <= max(before, granted.budget_bytes)
        assert granted.budget_bytes == asked or (
            gpu.experts.count == 0 and gpu.kv.nbytes == gpu.kv.backed_bytes(LEAST_BLOCKS)
        )
        assert sum(gpu.arbiter.shares.values()) + gpu.kv.nbytes == gpu.held_bytes()
    gpu.close()


def test_a_pool_that_breathes_leaves_what_others_may_still_take_and_grows_to_its_share() -> None:
    gpu = Gpu()
    before = gpu.kv.blocks
    gpu.resize_kv(LEAST_BLOCKS)
    free = gpu.held().free_bytes
    assert gpu.arbiter.blocks_within_free(0) == gpu.kv.blocks_within(gpu.kv.nbytes + free)
    assert gpu.arbiter.blocks_within_free(100 * PAGE) == gpu.kv.blocks_within(gpu.kv.nbytes + free - 100 * PAGE)
    gpu.arbiter.shares["activations"] = 10 * PAGE  # May come, and is not held.
    assert gpu.arbiter.blocks_within_free(0) == gpu.kv.blocks_within(gpu.kv.nbytes + free - 10 * PAGE)
    del gpu.arbiter.shares["activations"]
    assert gpu.arbiter.full_blocks(before) == before, "its budget is all it was given"
    assert gpu.arbiter.budget_with_pool() is None
    gpu.arbiter.most_budget_bytes = gpu.budget + 50 * PAGE
    assert gpu.arbiter.full_blocks(before) == before + 50
    gpu.resize_kv(before + 50)
    assert gpu.arbiter.budget_with_pool() == gpu.budget + 50 * PAGE == gpu.held_bytes()
    gpu.change(gpu.budget)
    gpu.arbiter.budget_was_set()
    assert gpu.arbiter.full_blocks(before) == before, "what was set holds from then on"
    gpu.close()
