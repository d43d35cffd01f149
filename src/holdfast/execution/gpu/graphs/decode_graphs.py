"""Decode steps as captured graphs, one for each padded number of rows and kind of work: captured when first needed.

A graph bakes in addresses, so everything it touches must be allocated before and stay. Knows no plans.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast.execution.gpu.batch_sizes import padded
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory.oom import is_shortage
from holdfast.execution.gpu.sampling import Work

log = logging.getLogger("holdfast")

STEPS_BETWEEN_TRIES = 256
"""A capture that failed is tried again after so many steps."""


@contextlib.contextmanager
def _collector_held() -> Iterator[None]:
    """An engine that nobody holds any more may be in a cycle: the memory of its pages goes back once the device is
    waited for, which no capture allows."""
    held = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()


class DecodeGraphs:
    """`run(rows, work, adapted)`: launches the step of so many padded rows on static buffers; `adapted`: with what
    LoRA adapters add to its products. `around(rows)`: around every launch of a graph."""

    def __init__(
        self,
        most: int,
        run: Callable[[int, Work, bool], None],
        device: torch.device,
        around: Callable[[int], AbstractContextManager[None]] | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: with other ranks, whose graphs are captured when theirs are: a step is launched once, because each
        launch waits for one of theirs."""
        self._shared = shared
        self._most, self._run, self._device = most, run, device
        self._around = around or (lambda rows: contextlib.nullcontext())
        self._graphs: dict[tuple[int, Work, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch has no public name for it.
        self._steps_to_wait = 0
        self.room: GraphsRoom | None = None
        """What they may take; None: a start has captured some, and the plan has counted the others."""
        # One for all captures: torch gives cuBLAS 32 MiB of its own for every stream that multiplies.
        self._side = torch.cuda.Stream(device)

    @property
    def captured(self) -> tuple[tuple[int, Work, bool], ...]:
        return tuple(sorted(self._graphs))

    def padded(self, rows: int) -> int:
        return padded(rows, self._most)

    def replay(self, size: int, work: Work, adapted: bool = False) -> None:
        """The step of so many rows. The first of its size is run as it is, which loads what a capture may not load, and
        is captured for the next."""
        graph = self._graphs.get((size, work, adapted))
        if graph is not None:
            try:
                with self._around(size):
                    graph.replay()
                return
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                del self._graphs[size, work, adapted]
                self._steps_to_wait = STEPS_BETWEEN_TRIES
                log.warning(
                    "out of GPU memory for the CUDA graph of batch size %d: such steps run without a graph for now",
                    size,
                )
        self._run(size, work, adapted)
        if self._steps_to_wait:
            self._steps_to_wait -= 1
            return
        if self.room is not None and not self.room.may_capture():
            return
        try:
            with contextlib.nullcontext() if self.room is None else self.room.counted():
                self._graphs[size, work, adapted] = self._capture(size, work, adapted)
        except RuntimeError as error:
            # The step itself is done. Without its graph the next is slower, and right.
            self._steps_to_wait = STEPS_BETWEEN_TRIES
            said = "no GPU memory" if is_shortage(error) else str(error).splitlines()[0]
            log.warning(
                "CUDA graph capture failed for batch size %d, such steps run without a graph for now: %s", size, said
            )

    def _capture(self, size: int, work: Work, adapted: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # What other threads of the process do with the GPU meanwhile is no business of this graph.
        with torch.cuda.stream(self._side), _collector_held():
            try:  # Ctrl-C may come when it has begun: all that this stream is given later would be captured.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                self._run(size, work, adapted)
            except BaseException:
                # What went wrong first is what is said; where nothing had begun, there is nothing to end.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        # The first launch may need memory too: it is made where the step is done already, and does the same again.
        if not self._shared:
            with self._around(size):
                graph.replay()
            torch.cuda.synchronize(self._device)
        self._pool = self._pool or graph.pool()
        return graph

    def close(self) -> None:
        """Nothing that was captured may be on its way. What is needed afterwards is captured anew."""
        self._graphs.clear()
        self._pool = None  # It goes with the last of them.
