"""Layers read ahead from a file: what is taken is right, whatever interrupted the reading of it."""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from ctrl_c import ctrl_c
from deadlines import PATIENCE_S
from simulated_copies import SimulatedCopies, unpinned_memory

from holdfast.execution.streaming.disk import layer_file, read_ahead
from holdfast.execution.streaming.disk.layer_file import LayerFile, ReadInto
from holdfast.execution.streaming.disk.read_ahead import ReadAhead

PAGE = mmap.PAGESIZE
LAYERS, PIECES = 4, 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_file, "PIECE_BYTES", PAGE)


def made(folder: Path, read: ReadInto | None = None) -> tuple[ReadAhead, LayerFile]:
    """Every byte of a layer is its number and one."""
    file = LayerFile(folder, LAYERS, PIECES * PAGE, read)
    ahead = ReadAhead(range(LAYERS), file, unpinned_memory([PIECES * PAGE] * 2).pieces, SimulatedCopies())
    for layer in range(LAYERS):
        ahead.write(layer, partial(fill, layer + 1))
    return ahead, file


def fill(number: int, memory: torch.Tensor) -> None:
    memory.fill_(number)


class Interrupted:
    """A `submit` that Ctrl-C comes in, once: before the piece is asked for, or when it is."""

    def __init__(self, file: LayerFile, at: int, *, asked: bool) -> None:
        self._file, self._at, self._asked, self._numbers = file, at, asked, count()
        self._submit = file._threads.submit

    def __call__(self, *call: Any) -> Future[None]:
        if next(self._numbers) != self._at:
            return self._submit(*call)
        if self._asked:
            self._submit(*call)
        raise KeyboardInterrupt


def steps(ahead: ReadAhead) -> None:
    for layer in (*range(LAYERS), *range(LAYERS)):
        memory, _ = ahead.take(layer)
        assert set(memory.tolist()) == {layer + 1}
        ahead.release()
        ahead.go_on()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("at", range(PIECES * (LAYERS + 2)))
def test_ctrl_c_at_any_piece_leaves_no_layer_half_read(
    at: int, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that was asked for and not heard of must not arrive in a later layer: it is slow."""

    def read(file: int, piece: memoryview, offset: int) -> int:
        time.sleep(0.002)
        return os.preadv(file, [piece], offset)

    ahead, file = made(tmp_path, read)
    with monkeypatch.context() as patch:
        patch.setattr(file._threads, "submit", Interrupted(file, at, asked=asked))
        with pytest.raises(KeyboardInterrupt):
            steps(ahead)
    steps(ahead)
    assert len(ahead._copied) + len(ahead._reading) == 2
    ahead.close()


def test_a_disk_that_is_slow_is_waited_for_with_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when what was expected is dropped first."""
    monkeypatch.setattr(read_ahead, "BEAT_S", 0.001)
    beaten, missed = threading.Semaphore(0), list[int]()

    def read(file: int, piece: memoryview, offset: int) -> int:
        if not beaten.acquire(timeout=PATIENCE_S):
            missed.append(offset)
        return os.preadv(file, [piece], offset)

    ahead, _ = made(tmp_path, read)
    for layer in (0, 3):  # The one that nobody expects second.
        memory, _ = ahead.take(layer, beaten.release)
        assert set(memory.tolist()) == {layer + 1}
        assert missed == []
    beaten.release(100)
    ahead.close()


def test_ctrl_c_in_what_is_fetched_at_once_leaves_nothing_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: int, piece: memoryview, offset: int) -> int:
        time.sleep(0.002)
        return os.preadv(file, [piece], offset)

    ahead, file = made(tmp_path, read)
    for at in range(PIECES):
        for asked in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(file._threads, "submit", Interrupted(file, at, asked=asked))
                with pytest.raises(KeyboardInterrupt):
                    ahead.fetch(2)
            steps(ahead)
    at, struck = 0, True
    while struck:
        at += 1
        with ctrl_c(read_ahead, at) as lines:
            assert set(ahead.fetch(2).tolist()) == {3}
        struck = lines.count >= at
        if at % 4 == 0:
            ahead.follow(range(LAYERS))
        steps(ahead)
    assert at > 20, "each of them was one"
    ahead.close()
