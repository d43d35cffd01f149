"""An embedding in the file of layers: the rows of a step's tokens are read from it, through pinned memory.

A step needs few of its many rows, and RAM that it would take keeps layers from the disk, which are read whole. The host
must know the tokens, so it waits for the step before: that is short beside what a disk takes. Knows nothing of layers.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy
import torch

from holdfast.execution.streaming.copies import Copies
from holdfast.execution.streaming.disk.layer_file import LayerFile

READERS = 32
"""Rows that are read at the same time: small reads beside the large ones of layers."""
BEAT_S, POLL_S = 0.25, 0.0005
PAGE_BYTES = mmap.PAGESIZE
"""Reads past the page cache are of whole ones."""


class EmbeddingRows:
    """`offset`: where it begins in the file, which has room for whole pages behind it. `staged`: pinned, whole pages.
    `meanwhile`: called while something is waited for."""

    def __init__(
        self, file: LayerFile, offset: int, staged: torch.Tensor, copies: Copies, meanwhile: Callable[[], None]
    ) -> None:
        self._file, self._offset, self._staged, self._copies = file, offset, staged, copies
        self._meanwhile, self._copied = meanwhile, copies.mark()
        self._threads = ThreadPoolExecutor(READERS, "row-reader")
        self._pages: list[mmap.mmap] = []
        """Of each reader: a row need not begin where a page does."""
        self._rows = self._row_bytes = 0
        self._under_way = False
        """Rows are being read, or copied without a mark: nobody else may, until they are."""

    def keep(self, weight: torch.Tensor) -> None:
        """All rows, [vocabulary, hidden], go to the file."""
        self._rows, self._row_bytes = len(weight), weight[0].nbytes
        assert self._row_bytes <= len(self._staged), "a row fits"
        pages = -(-self._row_bytes // PAGE_BYTES) + 1
        self._pages = [mmap.mmap(-1, pages * PAGE_BYTES) for _ in range(READERS)]
        whole, memory = weight.contiguous().view(-1).view(torch.uint8), self._staged.numpy().data
        for first in range(0, len(whole), len(memory)):
            part = whole[first : first + len(memory)]
            self._copies.now(part, self._staged)
            written = -(-len(part) // PAGE_BYTES) * PAGE_BYTES
            self._file.write_at(memory[:written], self._offset + first)

    def embed(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """out[i] = row tokens[slots[i], positions[i]]; zeros where there is none, as the kernel of an embedding in
        memory has it. Launched when this returns."""
        numbers = self._numbers(tokens, slots, positions, beat)
        step = len(self._staged) // self._row_bytes
        for first in range(0, len(numbers), step):
            chosen = numbers[first : first + step]
            self._await_staged()
            self._under_way = True
            self._read(chosen, beat)
            rows = self._staged[: len(chosen) * self._row_bytes].view(out.dtype).view(len(chosen), -1)
            out[first : first + step].copy_(rows, non_blocking=True)
            self._copies.after_launched(self._copied)
            self._under_way = False

    def _await_staged(self) -> None:
        """Nobody reads into staged rows, nor copies from them."""
        if self._under_way:  # Something interrupted it: Ctrl-C comes between any two lines.
            self._threads.shutdown()
            self._threads = ThreadPoolExecutor(READERS, "row-reader")
            self._copies.settle()
        self._copies.wait(self._copied)

    def _numbers(
        self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, beat: Callable[[], None] | None
    ) -> list[int]:
        """Of rows; those that are none are negative."""
        known = (slots >= 0) & (positions >= 0)
        found = tokens[slots.clamp(min=0).long(), positions.clamp(min=0).long()].long()
        found = torch.where(known & (found < self._rows), found, -1)
        computed = self._copies.mark()
        self._copies.after_launched(computed)
        while not self._copies.passed(computed):
            self._wait(beat)
            time.sleep(POLL_S)
        numbers: list[int] = found.tolist()
        return numbers

    def _read(self, numbers: Sequence[int], beat: Callable[[], None] | None) -> None:
        """Into staged rows of this order."""
        staged = self._staged.numpy()[: len(numbers) * self._row_bytes].reshape(len(numbers), self._row_bytes)
        places = defaultdict[int, list[int]](list)
        for place, number in enumerate(numbers):
            places[number].append(place)
        if none := [place for number, at in places.items() if number < 0 for place in at]:
            staged[none] = 0
        wanted = [number for number in sorted(places) if number >= 0]
        shares = [wanted[share::READERS] for share in range(min(READERS, len(wanted)))]
        reading = [
            self._threads.submit(self._read_some, share, places, staged, pages)
            for share, pages in zip(shares, self._pages, strict=False)
        ]
        with self._file.awaited():
            while wait(reading, BEAT_S).not_done:
                self._wait(beat)
        for one in reading:
            one.result()

    def _read_some(
        self, numbers: Sequence[int], places: Mapping[int, Sequence[int]], staged: Any, pages: mmap.mmap
    ) -> None:
        memory = memoryview(pages)
        bytes_of = numpy.frombuffer(memory, dtype=numpy.uint8)
        for number in numbers:
            begin = self._offset + number * self._row_bytes
            first, last = begin // PAGE_BYTES * PAGE_BYTES, -(-(begin + self._row_bytes) // PAGE_BYTES) * PAGE_BYTES
            self._file.read_at(memory[: last - first], first)
            staged[places[number]] = bytes_of[begin - first : begin - first + self._row_bytes]

    def _wait(self, beat: Callable[[], None] | None) -> None:
        self._meanwhile()
        if beat is not None:
            beat()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._pages.clear()
