"""Layers and KV pages on one disk: layers never wait, pages do and are never forgotten, and what fails or hangs of one
holds up nobody of the other."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from deadlines import PATIENCE_S
from prefix_pages import PAGE_BYTES, get, key_of, opened, put, until

from holdfast.errors import EngineError
from holdfast.execution.link import disk_turns
from holdfast.execution.link.disk_turns import SHARE, DiskTurns, Use, turns_of
from holdfast.execution.streaming.disk import layer_file
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.prefix_store import PrefixStore, reading
from holdfast.prefix_store.files.calls import Calls

LAYERS, LAYER_PIECES, PAGES = 4, 6, 16


def test_the_share_is_that_of_one_piece_beside_those_of_layers() -> None:
    layers = layer_file.DEPTH * layer_file.PIECE_BYTES
    assert disk_turns.PAGES_BYTES / (disk_turns.PAGES_BYTES + layers) == pytest.approx(SHARE)


@pytest.mark.parametrize("while_layers_are_read", [True, False])
def test_the_earliest_deadline_goes_first(while_layers_are_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_turns, "CALM_S", 60.0)
    turns, begun, threads = DiskTurns(), list[str](), list[threading.Thread]()
    size, now_s = disk_turns.PAGES_BYTES, time.monotonic()
    asked: dict[str, tuple[Use, float]] = {
        "fresh write": ("write", now_s), "last read": ("read", now_s - 1), "old write": ("write", now_s - 1.5),
        "first read": ("read", now_s - 2),
    }  # fmt: skip

    def ask(name: str) -> None:
        use, since_s = asked[name]
        with turns.pages(use, size, since_s):
            begun.append(name)

    with ExitStack() as layer:
        layer.enter_context(turns.layer())
        with turns.pages("read", size, now_s - 3):
            for name in asked:
                threads.append(threading.Thread(target=ask, args=(name,), daemon=True))
                threads[-1].start()
                until(lambda: len(turns._waiting) == len(threads))
            if not while_layers_are_read:
                layer.close()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert begun == ["first read", "old write", "last read", "fresh write"]
    assert min(turns.waits().values()) > 0


def test_a_write_waits_for_a_pause_or_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for behind_s, pause in ((60.0, True), (0.02, False)):
        monkeypatch.setattr(disk_turns, "WRITE_BEHIND_S", behind_s)
        turns, written = DiskTurns(), threading.Event()

        def write(turns: DiskTurns = turns, written: threading.Event = written) -> None:
            with turns.pages("write", 1, time.monotonic()):
                written.set()

        with ExitStack() as layer:
            layer.enter_context(turns.layer())
            threading.Thread(target=write, daemon=True).start()
            until(lambda turns=turns, written=written: bool(turns._waiting) or written.is_set())
            if pause:
                assert not written.is_set()
                layer.close()
            assert written.wait(PATIENCE_S)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_asks_gets_a_turn_and_pages_never_crowd_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_turns, "WRITE_BEHIND_S", 0.005)
    turns, lock, crowded, ended = DiskTurns(), threading.Lock(), list[list[int]](), itertools.count()
    on_way = list[int]()

    def work(number: int) -> None:
        choice = random.Random(f"{seed} {number}")
        for _ in range(20):
            size = choice.choice((1, 2, 5)) << 20
            with suppress(OSError):
                if number < 4:
                    with turns.layer():
                        time.sleep(choice.random() * 1e-3)
                else:
                    with turns.pages(choice.choice(("read", "write")), size, time.monotonic()):
                        with lock:
                            on_way.append(size)
                            if len(on_way) > 1 and sum(on_way) > disk_turns.PAGES_BYTES:
                                crowded.append(list(on_way))
                        time.sleep(choice.random() * 1e-3)
                        with lock:
                            on_way.remove(size)
                        if choice.random() < 0.2:
                            raise OSError(errno.EIO, "injected")
            next(ended)

    with turns.layer(), ThreadPoolExecutor(12) as pool:  # One of another file, all the time.
        over = [pool.submit(work, number) for number in range(12)]
        for one in over:
            one.result(PATIENCE_S)
    assert next(ended) == 12 * 20
    assert not crowded
    assert turns._pages_bytes == turns._layers == 0


class Disk(Calls):
    """Of which each piece takes a while. `crowd`: at each piece of a layer, the pieces of pages that it finds there.
    `largest`: of these."""

    def __init__(self) -> None:
        self.crowd, self.pages, self.layers, self.largest = list[int](), 0, 0, 0
        self.fails = ""
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()

    def layer(self, file: int, piece: memoryview, offset: int) -> int:
        self.crowd.append(self.pages)
        time.sleep(0.001)
        if self.fails == "layers":
            raise OSError(errno.EIO, "injected")
        self.layers += 1
        return os.preadv(file, [piece], offset)

    def read_into(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._page(buffers, lambda: super(Disk, self).read_into(file, buffers, offset))

    def write_from(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._page(buffers, lambda: super(Disk, self).write_from(file, buffers, offset))

    def _page(self, buffers: Sequence[memoryview], call: Callable[[], int]) -> int:
        with self._lock:
            self.pages += 1
            self.largest = max(self.largest, sum(map(len, buffers)))
        try:
            assert self.answers.wait(PATIENCE_S)
            time.sleep(0.002)
            if self.fails == "pages":
                raise OSError(errno.EIO, "injected")
            return call()
        finally:
            with self._lock:
                self.pages -= 1


class Both:
    """A file of layers and a store in one folder. `streaming`: within, layers are read round and round."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk()
        size = LAYER_PIECES * mmap.PAGESIZE
        self.file = LayerFile(folder, LAYERS, size, self.disk.layer)
        self.memory = [mmap.mmap(-1, size) for _ in range(2)]
        for layer in range(LAYERS):
            self.memory[0][:] = bytes([layer + 1]) * size
            self.file.write(layer, self.memory[0])
        self.store: PrefixStore = opened(folder / "kv", calls=self.disk, turns=turns_of(folder.stat().st_dev))
        self._stop = threading.Event()

    def read_layers(self) -> None:
        """Once, while the next one is on its way."""
        coming = [list(self.file.read(layer, self.memory[layer % 2])) for layer in range(2)]
        for layer in range(LAYERS):
            for piece in coming[layer]:
                piece.result(PATIENCE_S)
            assert set(self.memory[layer % 2][:]) == {layer + 1}
            coming.append(list(self.file.read((layer + 2) % LAYERS, self.memory[layer % 2])))
        for piece in (*coming[-1], *coming[-2]):
            piece.result(PATIENCE_S)

    def streaming(self) -> ExitStack:
        self._stop.clear()
        self.disk.crowd.clear()
        pool, within = ThreadPoolExecutor(1), ExitStack()
        steps = pool.submit(self._stream)
        within.callback(pool.shutdown)
        within.callback(lambda: steps.result(PATIENCE_S))
        within.callback(self._stop.set)
        until(lambda: bool(self.disk.crowd))
        return within

    def _stream(self) -> None:
        while not self._stop.is_set():
            self.read_layers()


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """Every piece is one page: of either."""
    monkeypatch.setattr(layer_file, "PIECE_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(reading, "LEAST_PIECE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(disk_turns, "PAGES_BYTES", PAGE_BYTES)
    monkeypatch.setattr(DiskTurns, "piece_bytes", PAGE_BYTES)
    made = Both(tmp_path)
    yield made
    made.disk.answers.set()
    made.store.close(PATIENCE_S)
    made.file.close()


def test_a_layer_finds_one_piece_of_pages_before_it_and_all_pages_come(both: Both) -> None:
    keys = [key_of(number) for number in range(PAGES)]
    assert all(put(both.store, keys))
    with both.streaming():
        assert get(both.store, keys)[0].valid == (True,) * PAGES
        assert all(put(both.store, [key_of(PAGES + number) for number in range(4)]))
    assert max(both.disk.crowd) <= 1
    assert both.disk.largest == PAGE_BYTES, "written in pieces, too"
    assert sum(both.disk.crowd) > 0, "they were there at the same time"


def test_waiting_for_a_turn_is_no_time_of_the_disk(tmp_path: Path) -> None:
    turns, written = DiskTurns(), list[bool]()
    store = opened(tmp_path, turns=turns)
    with turns.layer(), turns.pages("read", disk_turns.PAGES_BYTES, time.monotonic()):
        store.write(key_of(1), memoryview(bytes(PAGE_BYTES)), written.append)
        until(lambda: bool(turns._waiting))
        assert not store._write_rate._under_way
    until(lambda: written == [True])
    with turns.layer(), turns.pages("read", disk_turns.PAGES_BYTES, time.monotonic()):
        ticket = store.read([(key_of(1), memoryview(bytearray(PAGE_BYTES)))], lambda result: None)
        until(lambda: bool(turns._waiting))
        ticket.cancel()
    assert ticket.wait(PATIENCE_S)
    assert store._read_rate._busy_s == 0 < store._write_rate._busy_s
    store.close(PATIENCE_S)


def test_what_fails_or_hangs_of_one_does_not_hold_up_the_other(both: Both) -> None:
    keys = [key_of(number) for number in range(PAGES)]
    assert all(put(both.store, keys))
    both.disk.fails = "layers"
    with pytest.raises(EngineError, match="HF443"):
        both.read_layers()
    both.file.stop_reading()
    assert get(both.store, keys)[0].valid == (True,) * PAGES
    both.disk.fails = "pages"
    with both.streaming():
        assert get(both.store, keys[:4])[0].valid == (False,) * 4
        both.disk.fails = ""
        both.disk.answers.clear()
        ticket = both.store.read([(key, memoryview(bytearray(PAGE_BYTES))) for key in keys[4:]], lambda result: None)
        before = both.disk.layers
        until(lambda: both.disk.pages == 1 and both.disk.layers > before + LAYERS * LAYER_PIECES)
        ticket.cancel()
        both.disk.answers.set()
        assert ticket.wait(PATIENCE_S)
        assert both.store.stats().missed["cancelled"] == PAGES - 5, "only the one that was begun is read"
        assert get(both.store, keys[4:])[0].valid == (True,) * (PAGES - 4)
