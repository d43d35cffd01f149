"""Rows of an embedding in a file: those of memory, bit for bit, wherever rows lie in pages; zeros where there is none;
and an error of the disk is one of the step."""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ctrl_c import ctrl_c
from simulated_copies import SimulatedCopies, unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution.streaming.disk import embedding_rows, layer_file
from holdfast.execution.streaming.disk.embedding_rows import EmbeddingRows
from holdfast.execution.streaming.disk.layer_file import LayerFile, ReadInto
from holdfast.footprint.streamed import with_gaps

PAGE, VOCABULARY, LAYERS = mmap.PAGESIZE, 301, 3


@contextmanager
def kept(weight: torch.Tensor, folder: Path, read: ReadInto | None = None) -> Iterator[tuple[EmbeddingRows, list[int]]]:
    """Behind layers, whose places stay as they are; how often something else was done meanwhile."""
    file = LayerFile(folder, LAYERS, PAGE, read, behind_bytes=with_gaps(weight.nbytes))
    for place in range(LAYERS):
        file.write(place, memoryview(unpinned_memory([PAGE]).pieces[0].fill_(place + 1).numpy()))
    meanwhile = list[int]()
    (staged,) = unpinned_memory([4 * PAGE]).pieces
    rows = EmbeddingRows(file, LAYERS * PAGE, staged, SimulatedCopies(), lambda: meanwhile.append(1))
    rows.keep(weight)
    yield rows, meanwhile
    rows.close()
    for place in range(LAYERS):
        (memory,) = unpinned_memory([PAGE]).pieces
        for piece in list(file.read(place, memoryview(memory.numpy()))):
            piece.result()
        assert bool((memory == place + 1).all())
    file.close()


def step(tokens: list[list[int]], seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, len(tokens), (count,), generator=made)
    return torch.tensor(tokens), slots, torch.randint(0, len(tokens[0]), (count,), generator=made)


@pytest.mark.parametrize("hidden", [8, 448, 2048, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_memory(hidden: int, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn((VOCABULARY, hidden), generator=torch.Generator().manual_seed(hidden)).to(dtype)
    ids = [[0, VOCABULARY - 1, 7, 7, VOCABULARY, -1], [5, 300, 150, 2, 1 << 30, 0]]
    with kept(weight, tmp_path) as (rows, _):
        for seed, count in enumerate((1, 2, 33, 90)):
            tokens, slots, positions = step(ids, seed, count)
            out = torch.full((count, hidden), float("nan"), dtype=dtype)
            rows.embed(tokens, slots, positions, out)
            for at in range(count):
                token = int(tokens[slots[at], positions[at]]) if slots[at] >= 0 else -1
                wanted = weight[token] if 0 <= token < VOCABULARY else torch.zeros(hidden, dtype=dtype)
                assert torch.equal(out[at], wanted), (at, token)


def test_what_is_waited_for_lets_others_go_on(tmp_path: Path) -> None:
    weight, beats = torch.randn(VOCABULARY, 64), list[int]()
    tokens, slots, positions = step([[1, 2, 3]], 1, 3)

    class Late(SimulatedCopies):
        looks = 0

        def passed(self, mark: list) -> bool:  # type: ignore[type-arg]
            self.looks += 1
            return self.looks > 3

    with kept(weight, tmp_path) as (rows, meanwhile):
        rows._copies = Late()
        rows.embed(tokens, slots, positions, torch.empty(3, 64), lambda: beats.append(1))
        assert len(meanwhile) == len(beats) == 3


@pytest.mark.parametrize("share", range(8))
def test_ctrl_c_before_any_line_leaves_no_other_row_there(share: int, tmp_path: Path) -> None:
    """What is still read then comes when some of the next rows are there, and others are not."""
    weight, late_s = torch.randn(VOCABULARY, 64), dict[int, float]()

    def read(file: int, piece: memoryview, offset: int) -> int:
        time.sleep(late_s.get((offset - LAYERS * PAGE) // weight[0].nbytes, 0.0))
        return layer_file._pread(file, piece, offset)

    def embedded(row: list[int]) -> torch.Tensor:
        out, places = torch.empty(len(row), 64), torch.arange(len(row))
        rows.embed(torch.tensor([row]), torch.zeros_like(places), places, out)
        return out

    with kept(weight, tmp_path, read) as (rows, _):
        in_page = PAGE // weight[0].nbytes
        with ctrl_c(embedding_rows) as lines:
            embedded([0, in_page, 2 * in_page])
        for at in range(1 + share, lines.count + 1, 8):
            late_s.update({0: 0.004, in_page: 0.004, 2 * in_page: 0.004})
            with ctrl_c(embedding_rows, at):
                embedded([0, in_page, 2 * in_page])
            late_s.clear()
            late_s[5 * in_page] = 0.01
            wanted = [3 * in_page, 4 * in_page, 5 * in_page]
            assert torch.equal(embedded(wanted), weight[wanted]), at
            late_s.clear()


def test_an_error_of_the_disk_is_one_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_file, "BEFORE_RETRY_S", 0.0)
    broken = list[bool]()

    def read(file: int, piece: memoryview, offset: int) -> int:
        if broken and offset >= LAYERS * PAGE:
            raise OSError(errno.EIO, "Input/output error")
        return layer_file._pread(file, piece, offset)

    weight, (tokens, slots, positions) = torch.randn(VOCABULARY, 64), step([[1, 2, 3]], 1, 40)
    with kept(weight, tmp_path, read) as (rows, _):
        broken.append(True)
        with pytest.raises(EngineError) as caught:
            rows.embed(tokens, slots, positions, torch.empty(40, 64))
        assert caught.value.code == "HF443"
        broken.clear()
        out = torch.empty(40, 64)
        rows.embed(tokens, slots, positions, out)
        ids = tokens[slots.clamp(min=0), positions]
        assert torch.equal(out, torch.where((slots >= 0)[:, None], weight[ids], 0.0))
