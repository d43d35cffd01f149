"""What surrounds the capture of a graph, with a stand-in for CUDA's graphs: here is no GPU."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from holdfast.execution.gpu.graphs import DecodeGraphs
from holdfast.execution.gpu.sampling import Work


class Graph:
    def capture_begin(self, **settings: Any) -> None:
        assert not gc.isenabled()

    def capture_end(self) -> None:
        assert not gc.isenabled()

    def replay(self) -> None:
        pass

    def pool(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """An engine before this one, which only the collector finds, waits for the device before its memory goes back."""
    for name, stand_in in {
        "CUDAGraph": Graph, "Stream": lambda device: None, "synchronize": lambda device: None,
        "stream": lambda stream: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    enabled = list[bool]()

    def run(size: int, work: Work, adapted: bool) -> None:
        enabled.append(gc.isenabled())
        if fails:
            raise RuntimeError("no graph of this")

    graphs = DecodeGraphs(8, run, torch.device("cpu"))
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="no graph of this") if fails else nullcontext():
        graphs._capture(8, Work.FORWARD, False)
    assert gc.isenabled()
    assert enabled == [False]
