"""What surrounds the capture of a graph, with a stand-in for CUDA's graphs: here is no GPU."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.sampling import Work


class Graph:
    """`interrupted`: Ctrl-C comes before a capture begins, or when it has begun."""

    capturing, interrupted = False, ""

    def capture_begin(self, **settings: Any) -> None:
        assert not gc.isenabled()
        if Graph.interrupted == "before":
            raise KeyboardInterrupt
        Graph.capturing = True
        if Graph.interrupted == "begun":
            raise KeyboardInterrupt

    def capture_end(self) -> None:
        assert not gc.isenabled()
        if not Graph.capturing:
            raise RuntimeError("Capture must end on the same stream it began on.")
        Graph.capturing = False

    def replay(self) -> None:
        pass

    def pool(self) -> None:
        pass


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {
        "CUDAGraph": Graph, "Stream": lambda device: None, "synchronize": lambda device: None,
        "stream": lambda stream: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Graph, "capturing", False)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_captured(fails: bool) -> None:
    """An engine before this one, which only the collector finds, waits for the device before its memory goes back."""
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


@pytest.mark.parametrize("interrupted", ["before", "begun"])
def test_ctrl_c_while_a_capture_begins_leaves_none_begun(monkeypatch: pytest.MonkeyPatch, interrupted: str) -> None:
    """All that the stream is given later would be captured as well, by whoever goes on."""
    monkeypatch.setattr(Graph, "interrupted", interrupted)
    graphs = DecodeGraphs(8, lambda size, work, adapted: None, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        graphs._capture(8, Work.FORWARD, False)
    assert not Graph.capturing
    assert gc.isenabled()
