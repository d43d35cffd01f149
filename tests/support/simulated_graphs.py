"""Graphs of a runner without a GPU. A graph reads what lies at its addresses and waits for nothing, so the step that is
replayed does not wait for layers: with one that was not there its tokens would be others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.gpu.sampling import Work
from holdfast.execution.streaming.device_layers import DeviceLayers


class _Graph:
    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class SimulatedGraphs(DecodeGraphs):
    def __init__(self, runner: GpuRunner, layers: DeviceLayers, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        super().__init__(runner.limits.max_num_seqs, runner._run_decode, runner.device)
        self._layers, self.replayed = layers, 0

    def _capture(self, size: int, work: Work, adapted: bool) -> torch.cuda.CUDAGraph:
        assert not self._layers.comes, "a capture waits for nothing"

        def replay() -> None:
            self.replayed += 1
            with self._layers.as_they_are():
                self._run(size, work, adapted)

        return _Graph(replay)  # type: ignore[return-value]
