"""Layers that are read from a disk for every step: the same tokens as without, whatever the disk does."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ctrl_c import ctrl_c
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.startup.build import build_core, find_model, plan_model
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.link.disk_turns import DiskTurns, turns_of
from holdfast.execution.memory import Arena
from holdfast.execution.streaming.disk import layer_file, layer_slots
from holdfast.execution.streaming.disk.layer_file import LayerFile, ReadInto
from holdfast.execution.streaming.disk.layer_slots import LayerSlots
from holdfast.footprint.streamed import StreamedLayers, streamed_layers
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.records import Request, SamplingParams

PAGE = mmap.PAGESIZE


def answers(model: Path, streamed: int, folder: Path, **settings: object) -> tuple[list[list[int]], list[str]]:
    """Greedy, of some prompts at once; and what was decided."""
    config = EngineConfig(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, threads=1, max_num_seqs=4,
        max_num_batched_tokens=32, max_model_len=96, kv_cache_memory_bytes=4 << 20, nvme_path=str(folder), **settings,
    )  # fmt: skip
    found = find_model(config)
    plan = plan_model(config, found)
    weights = EngineWeights(found.spec, None, plan.engine.quantize)
    by_layer = weights.by_layer(dtype=plan.dtype, expand=plan.engine.expand_weights, compiled=plan.engine.compiled)
    placed = streamed_layers(by_layer, streamed) if streamed else None
    plan = replace(plan, own=replace(plan.engine, streamed=placed))
    core, info = build_core(config, found, lambda stage, done, total: None, plan)
    for name in range(3):
        prompt = list(range(10, 30 + 11 * name))
        core.add(
            Request(request_id=str(name), prompt_token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=12))
        )
    told: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            told.setdefault(output.request_id, []).extend(output.token_ids)
    links = {link.link: link for link in core.stats().links}
    assert list(links) == (["nvme-ram"] if placed else [])
    assert all(link.possible_bytes_per_s and link.copied_bytes > placed.file_bytes for link in links.values())
    core.close()
    assert info.memory is not None
    below = [term for tier in info.memory.below for term in tier.terms]
    assert str(folder) not in repr(info)  # What clients may see.
    assert [(term.term, term.planned_bytes) for term in below] == ([("weights", placed.file_bytes)] if placed else [])
    return [told[name] for name in sorted(told)], info.decisions


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}, {"quantization": "fp8"}], ids=str
)
def test_answers_are_those_of_a_model_in_memory(tiny_model, tmp_path, settings) -> None:
    layers = len(find_model(EngineConfig(model=str(tiny_model), load_format="dummy")).spec.layers)
    plain, _ = answers(tiny_model, 0, tmp_path, **settings)
    for streamed in {1, layers - 1, layers}:
        found, decisions = answers(tiny_model, streamed, tmp_path, **settings)
        assert found == plain
        assert any(line.startswith("nvme_read = ") for line in decisions)
    assert list(tmp_path.iterdir()) == []


def test_answers_are_the_same_with_layers_and_kv_pages_on_one_disk(tiny_model, tmp_path, monkeypatch) -> None:
    used, pages = Counter[str](), DiskTurns.pages

    def counted(turns: DiskTurns, use: Any, nbytes: int, since_s: float) -> Any:
        used[use] += turns is turns_of(tmp_path.stat().st_dev)
        return pages(turns, use, nbytes, since_s)

    monkeypatch.setattr(DiskTurns, "pages", counted)
    layers = tmp_path / "layers"
    layers.mkdir()
    plain, _ = answers(tiny_model, 0, layers)
    store = {"kv_store": str(tmp_path / "kv"), "kv_store_size": 32 << 20}
    answers(tiny_model, 0, layers, **store)
    assert not used, "pages of a disk without layers wait for nobody"
    for _ in range(2):  # It is the second use that is written.
        found, decisions = answers(tiny_model, 2, layers, **store)
        assert found == plain
        assert any(line.startswith("kv_store = ") and "behind the layers" in line for line in decisions)
    assert used["read"] > 0
    assert used["write"] > 0


@pytest.mark.parametrize(("layers", "streamed"), [(1, 1), (7, 3), (24, 19), (80, 40), (5, 0)])
def test_streamed_layers_are_spread(layers: int, streamed: int) -> None:
    sizes = [100_000 + 10 * layer for layer in range(layers)]
    placed = streamed_layers(sizes, streamed)
    assert len(placed.layers) == streamed
    assert placed.weights_bytes == sum(sizes[layer] for layer in placed.layers)
    gaps = [second - first for first, second in zip(placed.layers, placed.layers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    if streamed:
        assert placed.place_bytes % PAGE == 0
        assert placed.place_bytes >= max(sizes[layer] for layer in placed.layers)


class Disk:
    """What reads give: an error, fewer bytes, or nothing for a while, each so many times."""

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)

    def __call__(self, file: int, piece: memoryview, offset: int) -> int:
        fault = self.faults.pop() if self.faults else ""
        if fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "slow":
            time.sleep(0.02)
        return os.preadv(file, [piece[: 512 if fault == "short" else len(piece)]], offset)


def filled(folder: Path, disk: ReadInto) -> tuple[LayerFile, list[bytes]]:
    file = LayerFile(folder, 3, 8 * PAGE, disk)
    contents = [random.randbytes(8 * PAGE) for _ in range(3)]
    memory = mmap.mmap(-1, 8 * PAGE)
    for place, content in enumerate(contents):
        memory[:] = content
        file.write(place, memory)
    return file, contents


@pytest.mark.parametrize("faults", [(), ("error",), ("short", "error"), ("slow",) * 6], ids=str)
def test_what_is_read_is_what_was_written(tmp_path, faults, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", 4 * PAGE)
    file, contents = filled(tmp_path, Disk(*faults))
    memory = mmap.mmap(-1, 8 * PAGE)
    for place in (2, 0, 1, 1):
        memory[:] = bytes(8 * PAGE)
        for piece in file.read(place, memory):
            piece.result()
        assert memory[:] == contents[place]
    file.close()


@pytest.mark.parametrize("fault", ["error", "short"])
def test_a_disk_that_does_not_give_it_is_an_error(tmp_path, fault) -> None:
    file, _ = filled(tmp_path, Disk(*[fault] * 3))
    (piece,) = file.read(0, mmap.mmap(-1, 8 * PAGE))
    with pytest.raises(EngineError, match="HF443"):
        piece.result()
    file.close()


def test_a_disk_without_room_is_refused(tmp_path) -> None:
    with pytest.raises(EngineError, match="not enough room"):
        LayerFile(tmp_path, 1 << 20, 1 << 40)
    with pytest.raises(EngineError, match="HF443"):
        LayerFile(tmp_path / "missing", 1, PAGE)


def test_what_is_still_on_its_way_after_an_error_does_not_overwrite_the_next_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(layer_file, "BEFORE_RETRY_S", 0.0)

    def read(descriptor: int, piece: memoryview, offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if offset == PAGE:  # Of the same layer.
            time.sleep(0.2)
        return os.preadv(descriptor, [piece], offset)

    file, contents = filled(tmp_path, read)
    slots = LayerSlots(StreamedLayers((0, 1, 2), (8 * PAGE,) * 3, 24 * PAGE, (0, 1, 2)), file)
    with pytest.raises(EngineError, match="HF443"):
        slots.begin(0)
    slots.begin(2)  # In the same slot.
    time.sleep(0.3)
    assert bytes(slots.arena(2).tensor((8 * PAGE,), torch.uint8, torch.device("cpu")).numpy()) == contents[2]
    slots.close()


@pytest.mark.parametrize("share", range(4))
def test_ctrl_c_before_any_line_leaves_no_layer_half_read(share: int, tmp_path, monkeypatch) -> None:
    """What nobody has heard of comes late, and not into the layer that is read next."""
    monkeypatch.setattr(layer_file, "PIECE_BYTES", 4 * PAGE)
    late_s = [0.0]

    def read(descriptor: int, piece: memoryview, offset: int) -> int:
        time.sleep(late_s[0])
        return os.preadv(descriptor, [piece], offset)

    file, contents = filled(tmp_path, read)
    slots = LayerSlots(StreamedLayers((0, 1, 2), (8 * PAGE,) * 3, 24 * PAGE, (0, 1, 2)), file)

    def step(layers: Iterable[int]) -> None:
        for layer in layers:
            slots.begin(layer)
            slots.end(layer)

    with ctrl_c(layer_slots) as lines:
        step((0, 1, 2))
    for at in range(1 + share, lines.count + 1, 4):
        late_s[0] = 0.005
        with ctrl_c(layer_slots, at):
            step((0, 1, 2))
        late_s[0] = 0.0
        for layer in (0, 1, 2):
            slots.begin(layer)
            time.sleep(0.006)
            found = slots.arena(layer).tensor((8 * PAGE,), torch.uint8, torch.device("cpu"))
            assert bytes(found.numpy()) == contents[layer], (at, layer)
            slots.end(layer)
    slots.close()


def test_eight_pieces_are_read_at_a_time(tmp_path, monkeypatch) -> None:
    """Past the page cache, where the file system can: the disk has that much to do at once."""
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    together = threading.Barrier(8)

    def read(descriptor: int, piece: memoryview, offset: int) -> int:
        together.wait(PATIENCE_S)
        return os.preadv(descriptor, [piece], offset)

    file, contents = filled(tmp_path, read)
    assert bool(fcntl.fcntl(file._file, fcntl.F_GETFL) & os.O_DIRECT) == file.direct
    memory = mmap.mmap(-1, 8 * PAGE)
    for piece in list(file.read(1, memory)):
        piece.result()
    assert memory[:] == contents[1]
    file.close()


def test_a_slow_disk_is_not_a_hang(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)
    file, _ = filled(tmp_path, Disk(*["slow"] * 8))
    slots, beats = LayerSlots(StreamedLayers((0, 1, 2), (8 * PAGE,) * 3, 24 * PAGE, (0, 1, 2)), file), list[int]()
    slots.begin(0, lambda: beats.append(0))
    use = slots.use()
    slots.close()
    assert len(beats) == 8
    # Eight pieces at once, by as many threads: the disk was busy for as long as one took, and the step waited for it.
    assert (use.link, use.copied_bytes) == ("nvme-ram", 8 * PAGE)
    assert 0.02 <= use.busy_s < 8 * 0.02
    assert 0.01 < use.stalled_s <= use.over_s


def test_a_disk_in_memory_is_refused(tiny_model, tmp_path, monkeypatch) -> None:
    """What is kept there would take what was to be left free, and be counted by nobody."""
    monkeypatch.setattr("holdfast.planner.serve.streamed.filesystem_type", lambda folder: "tmpfs")
    config = EngineConfig(model=str(tiny_model), load_format="dummy", ram=1 << 20, nvme_path=str(tmp_path))
    with pytest.raises(ConfigurationError, match="is tmpfs"):
        plan_model(config, find_model(config))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_is_not_kept_is_closed(tmp_path, monkeypatch) -> None:
    """A disk that becomes full in between, and a load that fails later."""
    before = descriptors()
    LayerFile(tmp_path, 1, PAGE)
    assert descriptors() == before

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left"):
        LayerFile(tmp_path, 1, PAGE)
    assert descriptors() == before


def test_file_systems_that_can_do_less(tmp_path, monkeypatch) -> None:
    """Without unnamed files or allocation, as some containers have them, reads still go past the page cache."""
    usual = LayerFile(tmp_path, 3, PAGE)

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    real = os.open
    monkeypatch.setattr(os, "open", lambda p, flags, *mode: (refuse if p == tmp_path else real)(p, flags, *mode))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file, contents = filled(tmp_path, Disk())
    memory = mmap.mmap(-1, 8 * PAGE)
    for piece in file.read(1, memory):
        piece.result()
    assert (file.direct, memory[:]) == (usual.direct, contents[1])
    assert list(tmp_path.iterdir()) == []


def test_an_arena_hands_out_what_it_has() -> None:
    arena, cpu = Arena(torch.zeros(1024, dtype=torch.uint8)), torch.device("cpu")
    first, second = arena.tensor((3, 5), torch.float32, cpu), arena.tensor((7,), torch.int8, cpu)
    first.fill_(1.0)
    second.fill_(-1)
    assert first.sum() == 15
    assert (second.data_ptr() - first.data_ptr(), arena.used_bytes) == (256, 263)
    with pytest.raises(EngineError, match="set aside"):
        arena.tensor((1024,), torch.uint8, cpu)


def test_nothing_is_streamed_without_a_layer() -> None:
    assert streamed_layers([10, 20], 0) == StreamedLayers((), (), 0, ())


def test_ctrl_c_while_others_are_stopped_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    """The second of two: a piece that the first left on its way arrives late, and in nobody's layer."""
    arrived, hurry = threading.Event(), threading.Event()

    def read(file: int, piece: memoryview, offset: int) -> int:
        if threading.current_thread() in late:
            while not stopped._shutdown:
                time.sleep(0.001)
            time.sleep(0.1)  # A signal just before the other thread waits for this one would not be seen until it has.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            hurry.wait(PATIENCE_S)
        return os.preadv(file, [piece], offset)

    def come_late() -> None:
        late.append(threading.current_thread())
        file.read_at(memoryview(slots._slots[1].memory), 0)
        arrived.set()

    late = list[threading.Thread]()
    file = LayerFile(tmp_path, 3, PAGE, read)
    slots = LayerSlots(StreamedLayers((0, 1, 2), (PAGE,) * 3, 3 * PAGE, (0, 1, 2)), file)
    for layer in range(3):
        slots.arena(layer).tensor((PAGE,), torch.uint8, torch.device("cpu")).fill_(layer + 1)
        slots.keep(layer)
    stopped, slots._slots[1].asking = file._threads, True  # Where the first came.
    stopped.submit(come_late)
    with pytest.raises(KeyboardInterrupt):
        slots._fill(slots._slots[1], 1)
    threading.Timer(0.1, hurry.set).start()
    for layer in (0, 1):
        slots.begin(layer)
    assert arrived.wait(PATIENCE_S)
    for layer in (0, 1):
        assert set(slots._slot(layer).tensor.tolist()) == {layer + 1}
    slots.close()
