"""Layers that come to a GPU for every step, with a simulated one: in their slots when they are computed, and until then
nothing else; whatever order the GPU does things in, wherever they wait, whatever a disk does."""

from __future__ import annotations

import errno
import mmap
import os
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from aliased_memory import AliasedMemory
from ctrl_c import ctrl_c
from simulated_copies import QueuedCopies, SimulatedCopies, unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution.gpu.memory import layer_ranges
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.streaming import device_layers, layer_pieces, layer_turns
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk import layer_file, read_ahead
from holdfast.execution.streaming.disk.layer_file import LayerFile, ReadInto
from holdfast.execution.streaming.disk.read_ahead import ReadAhead
from holdfast.footprint.streamed import PLACE_GRAIN_BYTES, StreamedLayers, all_apart, beside_gpu, streamed_layers

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


@cache
def content(layer: int, size: int, packed: bool) -> torch.Tensor:
    found = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(layer))
    for first, last in planes(layer, size) if packed else ():
        found[first:last] &= 15
    return found


def planes(layer: int, size: int) -> list[tuple[int, int]]:
    """Some layers have none; they may begin and end where halves do, and next to each other."""
    first, rest = cut(layer), (size - cut(layer)) // 8
    return [
        [],
        [(0, 2), (2, 100), (first + rest, first + 3 * rest)],
        [(8, 256), (first, first + 2 * rest), (size - 64, size)],
    ][layer % 3]


def halves(layer: int, size: int, packed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Divided elsewhere in some layers, as those of another kind are."""
    first, second = content(layer, size, packed).split((cut(layer), size - cut(layer)))
    return first, second


def cut(layer: int) -> int:
    return 256 * (1 + layer % 3)


def made(
    streamed: StreamedLayers,
    copies: QueuedCopies | SimulatedCopies,
    folder: Path,
    read: ReadInto | None = None,
    driver: AliasedMemory | None = None,
    room: Callable[[], int] | None = None,
    *,
    packed: bool = False,
) -> DeviceLayers:
    """With something else in each layer. `driver`: all layers have ranges of it. `packed`: some bytes travel two in
    one."""
    file = LayerFile(folder, len(streamed.on_disk), streamed.waiting_bytes, read) if streamed.on_disk else None
    memory = unpinned_memory(streamed.pinned_sizes)
    if driver is None:
        layers = DeviceLayers(streamed, CPU, copies, memory, file)
        sizes = list(zip(streamed.layers, streamed.sizes, strict=True))
    else:
        sizes = list(enumerate(streamed.all_sizes))
        driver.computing = copies if isinstance(copies, QueuedCopies) else None
        ranges = LayerRanges(streamed.all_sizes, CPU, driver)
        layers = DeviceLayers(streamed, CPU, copies, memory, file, ranges, room or (lambda: 1 << 40))
    for layer, size in sizes:
        arena, (first, second) = layers.arena(layer), halves(layer, size, packed)
        arena.tensor(first.shape, torch.uint8, CPU).copy_(first)
        layers.divide(layer)
        arena.tensor(second.shape, torch.uint8, CPU).copy_(second)
        for begin, end in planes(layer, size) if packed else ():
            layers.pieces.pack(layers.place(layer), layers.place(layer)[begin:end])
        layers.keep(layer)
    return layers


def less(sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    """What each layer of these sizes has less where it waits."""
    return tuple(sum(last - first for first, last in planes(layer, size)) // 2 for layer, size in enumerate(sizes))


class Reader:
    """Launches what looks at each half of a layer in its slot, twice, and is wrong if something else is there."""

    def __init__(
        self, layers: DeviceLayers, streamed: StreamedLayers, copies: QueuedCopies, *, packed: bool = False
    ) -> None:
        self._layers, self._copies, self._packed, self.read = layers, copies, packed, 0
        self._sizes = dict(zip(streamed.layers, streamed.sizes, strict=True))
        if streamed.resident_sizes is not None:  # All of them, wherever they are.
            self._sizes = dict(enumerate(streamed.all_sizes))
        self._slots = {layer: layers.place(layer) for layer in self._sizes}

    def step(self, layers: int) -> None:
        self.compute(range(layers))

    def compute(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._layers.begin(layer)
            self.look_at(layer, 0)
            self._layers.halfway(layer)
            self.look_at(layer, 1)
            self._layers.end(layer)
            self._copies.run_some()

    def look_at(self, layer: int, half: int) -> None:
        if layer in self._sizes:
            self._copies.launch(lambda: self._look(layer, half))
            self._copies.launch(lambda: self._look(layer, half))
        self._copies.run_some()

    def _look(self, layer: int, half: int) -> None:
        size = self._sizes[layer]
        place = self._slots[layer][: cut(layer)] if half == 0 else self._slots[layer][cut(layer) : size]
        assert torch.equal(place, halves(layer, size, self._packed)[half]), (layer, half)
        self.read += 1


@pytest.mark.parametrize("seed", range(60))
def test_a_layer_is_in_its_slot_while_it_is_computed(seed: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    rng, packed = random.Random(seed), bool(seed % 2)
    count = rng.randint(1, 9)
    several = rng.randint(1, count)
    streamed = streamed_layers([rng.randint(1, 4 * PAGE) for _ in range(count)], several, rng.randint(0, several))
    streamed = replace(streamed, ahead=rng.randint(0, 2))
    copies = QueuedCopies(seed)
    layers = made(streamed, copies, tmp_path, packed=packed)
    reader, looked = Reader(layers, streamed, copies, packed=packed), 0
    for _ in range(6):
        through = count if rng.random() < 0.8 else rng.randint(1, count)  # A step may fail in the middle.
        reader.step(through)
        looked += 4 * sum(layer < through for layer in streamed.layers)
        if through < count and rng.random() < 0.5:  # Or within a layer.
            layers.begin(through)
            reader.look_at(through, 0)
            looked += 2 * (through in streamed.layers)
    copies.run_all()
    assert reader.read == looked
    layers.close()


@pytest.mark.parametrize("seed", range(16))
def test_layers_come_to_stay_and_leave_between_steps(seed: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    rng, packed = random.Random(seed), bool(seed % 2)
    by_layer = [rng.randint(1, 4 * PAGE) for _ in range(rng.randint(1, 9))]
    several = rng.randint(1, len(by_layer))
    streamed = streamed_layers(by_layer, several, rng.choice([0, 0, rng.randint(0, several)]))
    streamed = replace(beside_gpu(streamed, by_layer), ahead=rng.choice([0, 1, 1, 2]))
    copies, driver = QueuedCopies(seed), AliasedMemory()
    if packed:
        streamed = replace(streamed, saved=less(streamed.all_sizes))
    layers = made(streamed, copies, tmp_path, driver=driver, packed=packed)
    assert packed == any(layers.moved_with([layer]) < streamed.all_sizes[layer] for layer in range(len(by_layer)))
    reader, counts = Reader(layers, streamed, copies, packed=packed), set[int]()
    for _ in range(8):
        reader.step(len(by_layer) if rng.random() < 0.8 else rng.randint(0, len(by_layer)))
        wanted = layers.streamed
        for _ in range(rng.randint(0, 4)):
            fewer = rng.random() < 0.5 and wanted
            wanted = layers.one_less(wanted) if fewer else layers.one_more(wanted) or wanted
        if rng.random() < 0.2:  # Nobody who counts would choose these.
            wanted = tuple(layer for layer in range(len(by_layer)) if rng.random() < 0.5)
        foreseen = layers.bytes_with(wanted)
        layers.change(wanted)
        assert layers.streamed == wanted
        assert layers.nbytes + layers.resident_bytes == foreseen == sum(driver.handles.values())
        counts.add(len(wanted))
    reader.step(len(by_layer))
    copies.run_all()
    assert reader.read > 0
    assert len(counts) > 1
    layers.close()
    assert (driver.handles, driver.mapped, driver.reserved) == ({}, {}, {})


def test_a_layer_that_finds_no_memory_to_stay_in_is_streamed_like_before(tmp_path) -> None:
    by_layer = [PAGE] * 6
    streamed = beside_gpu(streamed_layers(by_layer, 4, 0), by_layer)
    copies, driver = QueuedCopies(3), AliasedMemory()
    layers = made(streamed, copies, tmp_path, driver=driver)
    reader = Reader(layers, streamed, copies)
    driver.memory_bytes = sum(driver.handles.values()) + driver.whole(streamed.sizes[0])
    layers.change(())
    assert len(layers.streamed) == 2  # One of the two that were found memory became their slot.
    reader.step(6)
    layers.change(layers.one_more(layers.streamed) or ())
    reader.step(6)
    copies.run_all()
    layers.close()


def test_layers_take_turns_in_fewer_slots_where_somebody_took_the_memory(tmp_path) -> None:
    """That others have left: they go on, a little slower."""
    by_layer = [PAGE] * 6
    streamed = beside_gpu(streamed_layers(by_layer, 1, 0), by_layer)
    copies, driver = QueuedCopies(5), AliasedMemory()
    layers = made(streamed, copies, tmp_path, driver=driver)
    reader = Reader(layers, streamed, copies)
    more = tuple(sorted({*streamed.layers, 0, 1, 2}))
    assert layers.slots_for(more) == 2
    left = len(more) - 1
    driver.memory_bytes = sum(driver.handles.values()) - left * driver.whole(streamed.sizes[0])
    layers.change(more)
    assert (layers.streamed, layers.nbytes) == (more, driver.whole(streamed.sizes[0]))
    reader.step(6)
    copies.run_all()
    layers.close()


def test_a_layer_leaves_only_for_ram_that_is_there(tmp_path) -> None:
    by_layer, room = [PAGE] * 6, [0]
    streamed = beside_gpu(streamed_layers(by_layer, 2, 0), by_layer)
    copies, driver = SimulatedCopies(), AliasedMemory()
    layers = made(streamed, copies, tmp_path, driver=driver, room=lambda: room[0])
    assert layers.one_more(layers.streamed) is None
    layers.change(layers.one_less(layers.streamed))
    assert layers.one_more(layers.streamed) == streamed.layers, "its bytes still wait in RAM"
    room[0] = streamed.sizes[0]
    more = layers.one_more(streamed.layers)
    assert more is not None
    assert layers.one_more(more) is None
    before = layers.pinned_bytes
    layers.change(more)
    assert layers.pinned_bytes == before + streamed.sizes[0]
    layers.close()


def test_packed_layers_that_leave_take_no_more_ram_than_there_is(tmp_path) -> None:
    """Whole places, also on a kernel of large pages."""
    by_layer = [8292, 70_000, 8292, 140_000, 8292, 70_000]
    streamed = beside_gpu(streamed_layers(by_layer, 1, 0), by_layer)
    streamed = replace(streamed, saved=less(streamed.all_sizes))
    for room in (0, 117_760, 122_880, 235_520, 239_616, 393_216, 1 << 30):
        layers = made(streamed, SimulatedCopies(), tmp_path, driver=AliasedMemory(), packed=True)
        budget = layers.pinned_bytes + room
        layers._room = lambda layers=layers, budget=budget: budget - layers.pinned_bytes
        while (more := layers.one_more(layers.streamed)) is not None:
            layers.change(more)
        assert layers.pinned_bytes <= budget
        assert all(piece.nbytes % PLACE_GRAIN_BYTES == 0 for piece in layers._memory.pieces)
        assert (len(layers.streamed) == 6) == (room == 1 << 30)
        layers.close()


def test_few_change_places_and_they_stay_apart(tmp_path) -> None:
    by_layer = [PAGE] * 80
    streamed = beside_gpu(streamed_layers(by_layer, 30, 0), by_layer)
    layers = made(streamed, SimulatedCopies(), tmp_path, driver=AliasedMemory())
    found = layers.streamed
    for count in range(29, 14, -1):
        found = layers.one_less(found)
        assert len(found) == count
        assert all_apart(found)
    for _ in range(15):
        more = layers.one_more(found)
        assert more is not None
        found = more
        assert all_apart(found)
    assert layers.slots_for(found) == 1
    assert layers.slots_for(range(10)) == 2
    layers.close()


@pytest.mark.parametrize("lost", ["await_copy", "after_launched"])
def test_the_simulation_finds_a_fence_that_is_missing(lost: str, tmp_path, monkeypatch) -> None:
    """Or the tests above would prove nothing."""
    monkeypatch.setattr(QueuedCopies, lost, lambda copies, mark: None)
    streamed, wrong = streamed_layers([2 * PAGE] * 6, 4, 0), 0
    for seed in range(10):
        copies = QueuedCopies(seed)
        layers = made(streamed, copies, tmp_path)
        try:
            for _ in range(3):
                Reader(layers, streamed, copies).step(6)
            copies.run_all()
        except AssertionError:
            wrong += 1
    assert wrong > 5


def test_each_layer_crosses_the_link_once_a_step(tmp_path) -> None:
    streamed, copies = streamed_layers([PAGE] * 8, 6, 0), SimulatedCopies()
    layers = made(streamed, copies, tmp_path)
    for step in range(4):
        for layer in range(8):
            layers.begin(layer)
            layers.halfway(layer)
            layers.end(layer)
        asked = len(copies.copied)
        # The first of the next step are on their way before it begins, and nothing twice.
        assert asked == 2 * ((step + 1) * len(streamed.layers) + streamed.slots)
    layers.close()


def test_a_layer_that_has_a_slot_for_itself_is_copied_once(tmp_path) -> None:
    copies = SimulatedCopies()
    layers = made(streamed_layers([PAGE] * 3, 1, 0), copies, tmp_path)
    for _ in range(3):
        for layer in range(3):
            layers.begin(layer)
            layers.halfway(layer)
            layers.end(layer)
    assert copies.copied == []
    layers.close()


def test_a_disk_that_fails_is_an_error_and_the_next_step_reads_what_is_right(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(layer_file, "BEFORE_RETRY_S", 0.0)
    broken = [False]

    def read(file: int, piece: memoryview, offset: int) -> int:
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, [piece], offset)

    streamed, copies = streamed_layers([3 * PAGE] * 6, 6, 4), QueuedCopies(1)
    layers = made(streamed, copies, tmp_path, read)
    reader = Reader(layers, streamed, copies)
    reader.step(6)
    broken[0] = True
    with pytest.raises(EngineError, match="HF443"):
        reader.compute([*range(6), *range(6)])  # Some were read before it broke.
    broken[0] = False
    reader.step(6)
    reader.step(6)
    copies.run_all()
    layers.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["broken", "hung"])
def test_a_layer_that_does_not_come_from_the_disk_to_stay_is_streamed_like_before(
    error: BaseException, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(layer_file, "BEFORE_RETRY_S", 0.0)
    broken, by_layer = [False], [PAGE] * 6

    def read(file: int, piece: memoryview, offset: int) -> int:
        if broken[0]:
            raise error
        return os.preadv(file, [piece], offset)

    streamed = beside_gpu(streamed_layers(by_layer, 6, 6), by_layer)
    copies = QueuedCopies(1)
    layers = made(streamed, copies, tmp_path, read, AliasedMemory())
    reader = Reader(layers, streamed, copies)
    reader.step(6)
    broken[0] = True
    with pytest.raises((EngineError, KeyboardInterrupt)):
        layers.change((0, 2, 4))
    broken[0] = False
    reader.step(6)
    assert layers.streamed == tuple(range(6))
    layers.change((0, 2, 4))
    assert layers.streamed == (0, 2, 4)
    reader.step(6)
    copies.run_all()
    layers.close()


@pytest.mark.parametrize("seed", range(40))
def test_ctrl_c_before_any_line_leaves_no_layer_half_there(seed: int, tmp_path, monkeypatch) -> None:
    """A caller in the same process goes on with other prompts."""
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    rng, by_layer = random.Random(seed), [2 * PAGE + 64 * layer for layer in range(6)]
    streamed = streamed_layers(by_layer, 4, rng.choice([0, 0, 2]))
    copies, driver = QueuedCopies(seed), AliasedMemory()
    placed = replace(beside_gpu(streamed, by_layer), ahead=rng.randint(0, 1))
    placed = replace(placed, saved=less(placed.all_sizes))
    layers = made(placed, copies, tmp_path, driver=driver, packed=True)
    reader = Reader(layers, placed, copies, packed=True)
    for _ in range(6):
        if rng.random() < 0.5:  # A layer that came to stay arrives in the next step.
            layers.change(layers.one_less(layers.streamed) if len(layers.streamed) > 2 else streamed.layers)
        with ctrl_c(layer_turns, rng.randint(1, 300)):
            reader.step(6)
        reader.step(6)
    copies.run_all()
    layers.close()


class LinkFirst(QueuedCopies):
    """Nothing is computed while anything may be copied."""

    def run_some(self) -> None:
        pass

    def _run_one(self) -> bool:
        return self._moves()

    def _moves(self) -> bool:
        return any(queue and self._step(queue) for queue in (self._link, self._computing))


def test_ctrl_c_before_any_line_leaves_no_layer_half_arrived(tmp_path) -> None:
    """That comes to stay."""
    by_layer = [2 * PAGE] * 2
    placed = beside_gpu(streamed_layers(by_layer, 2, 0), by_layer)
    placed = replace(placed, saved=(0, less(placed.all_sizes)[1]))
    copies = LinkFirst(0)
    layers = made(placed, copies, tmp_path, driver=AliasedMemory(), packed=True)
    reader, lines = Reader(layers, placed, copies, packed=True), 0
    for at in range(1, 200):
        layers.change((0,))
        with ctrl_c(layer_turns, at) as struck:
            reader.compute([1])
        reader.compute([1])
        copies.run_all()
        layers.change((0, 1))
        lines = max(lines, struck.count)
    assert 10 < lines < 200, "each of them was one"
    layers.close()


def leaves(seed: int, tmp_path: Path) -> tuple[QueuedCopies, DeviceLayers, Reader]:
    """All but one layer stay, packed, and have nowhere to wait yet."""
    by_layer = [2 * PAGE + 64 * layer for layer in range(6)]
    placed = beside_gpu(streamed_layers(by_layer, 1, 0), by_layer)
    placed = replace(placed, saved=less(placed.all_sizes))
    copies = QueuedCopies(seed)
    layers = made(placed, copies, tmp_path, driver=AliasedMemory(), packed=True)
    return copies, layers, Reader(layers, placed, copies, packed=True)


@pytest.mark.parametrize("at", [*range(1, 60, 2), 400])
def test_ctrl_c_while_layers_are_packed_leaves_those_that_stay_whole(at: int, tmp_path) -> None:
    copies, layers, reader = leaves(at, tmp_path)
    with ctrl_c(layer_pieces, at) as struck:
        layers.change((1, 2, 4))
    assert (struck.count > 60) == (at == 400), "the first ones come before it is over"
    reader.step(6)
    layers.change((1, 2, 4))
    reader.step(6)
    copies.run_all()
    layers.close()


@pytest.mark.parametrize("disk", ["works", "hangs"])
@pytest.mark.parametrize(
    "module", [device_layers, layer_turns, layer_ranges, read_ahead], ids=["layers", "turns", "ranges", "disk"]
)
def test_ctrl_c_while_layers_change_leaves_something_behind_each(
    module: ModuleType, disk: str, tmp_path, monkeypatch
) -> None:
    """From RAM and from a disk, and for the first time; also where it comes again after a disk that hung."""
    by_layer, fetch, hangs = [2 * PAGE] * 6, ReadAhead.fetch, [False]

    def fetch_or_hang(ahead: ReadAhead, layer: int) -> torch.Tensor:
        found = fetch(ahead, layer)
        if hangs[0]:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(ReadAhead, "fetch", fetch_or_hang)
    streamed = beside_gpu(streamed_layers(by_layer, 4, 2), by_layer)
    leaving = next(layer for layer in range(6) if layer not in streamed.layers)
    targets = [tuple(sorted((leaving, *streamed.in_ram[1:]))), streamed.layers, ()]
    for at in range(1, 1000, 3):
        copies, driver = QueuedCopies(at), AliasedMemory()
        layers, lines = made(streamed, copies, tmp_path, driver=driver), 0
        reader = Reader(layers, streamed, copies)
        reader.step(6)
        for target in targets:
            hangs[0] = disk == "hangs"
            with ctrl_c(module, at) as struck:
                layers.change(target)
            hangs[0], lines = False, max(lines, struck.count)
            assert layers.nbytes + layers.resident_bytes == sum(driver.handles.values())
            reader.step(6)
            layers.change(target)
            assert layers.streamed == target
        reader.step(6)
        copies.run_all()
        layers.close()
        assert (driver.handles, driver.mapped) == ({}, {})
        if lines < at:
            break
    assert 20 < at < 900, "it came in all parts of it"


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_layer_that_cannot_be_copied_to_where_it_would_wait_stays_whole(nth: int, tmp_path, monkeypatch) -> None:
    copies, layers, reader = leaves(nth, tmp_path)
    before, now, count = layers.streamed, copies.now, 0

    def no_more(source: torch.Tensor, target: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise KeyboardInterrupt
        now(source, target)

    monkeypatch.setattr(copies, "now", no_more)
    with pytest.raises(KeyboardInterrupt):
        layers.change((1, 2, 4))
    assert layers.streamed == before
    assert len(layers._memory.pieces) == len(layers._in_ram), "what it would have waited in is given back"
    reader.step(6)
    copies.run_all()
    layers.close()


def test_nothing_moves_where_results_are_not_read(tmp_path) -> None:
    copies = SimulatedCopies()
    layers = made(streamed_layers([PAGE] * 6, 4, 0), copies, tmp_path)
    with layers.as_they_are():
        for layer in range(6):
            layers.begin(layer)
            layers.halfway(layer)
            layers.end(layer)
    assert copies.copied == []
    layers.begin(layers._streamed.layers[0])
    assert len(copies.copied) == 1
    layers.close()


def test_nothing_of_the_pinned_memory_is_kept_once_they_are_closed(tmp_path) -> None:
    layers = made(streamed_layers([PAGE] * 6, 4, 2), SimulatedCopies(), tmp_path)
    pieces = [weakref.ref(piece) for piece in layers._memory.pieces]
    layers.close()
    assert [piece() for piece in pieces] == [None] * len(pieces)
    assert layers._arena is None


def test_the_link_is_measured_and_told(tmp_path) -> None:
    layers = made(streamed_layers([PAGE] * 6, 6, 2), SimulatedCopies(), tmp_path)
    before = [bytes(memory.numpy()) for memory in layers._in_ram.values()]
    assert [decision.field for decision in layers.decisions()] == ["link_copy", "nvme_read"]
    assert [bytes(memory.numpy()) for memory in layers._in_ram.values()] == before, "one went back to where it waits"
    there, disk = layers.use(), layers.disk_use()
    assert disk is not None
    assert (there.link, disk.link) == ("ram-vram", "nvme-ram")
    assert all(rate > 0 for rate in (there.possible_bytes_per_s, disk.possible_bytes_per_s, layers.possible_back))
    assert disk.copied_bytes >= layers._streamed.read_bytes
    assert 0 < disk.busy_s <= disk.over_s
    layers.close()


def test_who_waits_on_no_disk_has_no_link_to_one(tmp_path) -> None:
    layers = made(beside_gpu(streamed_layers([PAGE] * 6, 6, 0), [PAGE] * 6), SimulatedCopies(), tmp_path)
    assert layers.disk_use() is None
    layers.close()


@pytest.mark.parametrize(("layers", "apart"), [((1, 3, 5, 7), True), ((0,), True), ((1, 2, 4), False), ((), True)])
def test_one_slot_is_enough_where_layers_stay_between(layers: tuple[int, ...], apart: bool) -> None:
    assert all_apart(layers) == apart
