"""Decode steps as captured graphs, one for each padded number of rows: captured when first needed, or ahead of time.

A graph bakes in addresses, so everything it touches must be allocated before and stay. Knows no plans.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def padded_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: every step up to `most` is padded to the next of them."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most + 64, 64)]
    sizes = [size for size in steps if size < most]
    return (*sizes, most)


class DecodeGraphs:
    """`run(rows)`: launches the step of so many padded rows on static buffers."""

    def __init__(self, most: int, run: Callable[[int], None], device: torch.device) -> None:
        self.sizes = padded_sizes(most)
        self._run, self._device = run, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        return tuple(sorted(self._graphs))

    def padded(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def replay(self, size: int) -> None:
        """The step of so many rows. The first of its size is run as it is, which loads what a capture may not load, and
        is captured for the next."""
        if size in self._graphs:
            self._graphs[size].replay()
            return
        self._run(size)
        self._graphs[size] = self._capture(size)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            graph.capture_begin(*(() if self._pool is None else (self._pool,)))
            try:
                self._run(size)
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self._device)
        self._pool = self._pool or graph.pool()
        return graph

    def close(self) -> None:
        self._graphs.clear()
