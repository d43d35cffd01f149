"""When decode steps are graphs, where layers may come to stay and leave: not while anything comes, or is copied for the
host's cores, and not without room for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.execution.gpu.memory.kept_graphs import KeptGraphs


class Graphs:
    def __init__(self) -> None:
        self.captured: tuple[int, ...] = (1, 2)

    def close(self) -> None:
        self.captured = ()


class Runner(KeptGraphs):
    device = torch.device("cpu")

    def __init__(self, **decoder: Any) -> None:
        super().__init__(SimpleNamespace(slots=None, experts=None, nbytes=0))  # type: ignore[arg-type]
        self._decoder = SimpleNamespace(**{"streamed": None, "host_mlps": None, "experts": None, **decoder})
        self._graphs = Graphs()  # type: ignore[assignment]

    @property
    def decoder(self) -> Any:
        return self._decoder

    def _here(self) -> AbstractContextManager[None]:
        return nullcontext()


def layers(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"movable": True, "embedding_rows": None, "comes": False, **more})


def test_of_a_model_that_stays_they_always_hold() -> None:
    runner = Runner()
    assert runner.may_capture
    assert runner.graphs_now is runner._graphs


@pytest.mark.parametrize("never", [{"movable": False}, {"embedding_rows": object()}])
def test_of_layers_that_never_stay_there_are_none(never: dict[str, Any]) -> None:
    assert not Runner(streamed=layers(**never)).may_capture


def test_they_hold_while_nothing_comes_and_there_is_room_for_them() -> None:
    runner = Runner(streamed=layers())
    assert runner.may_capture
    assert runner.graphs_now is None, "nobody has counted them"
    runner.keep_graphs(True)
    assert runner.graphs_now is runner._graphs
    runner.decoder.streamed.comes = True
    assert runner.graphs_now is None
    runner.decoder.streamed.comes = False
    runner.keep_graphs(False)
    assert runner.graphs_now is None
    assert runner._graphs is not None
    assert runner._graphs.captured == ()


def test_none_is_captured_while_a_thread_copies_for_the_hosts_cores() -> None:
    """It waits for the whole device when it is done, which invalidates a capture."""
    hosts = SimpleNamespace(decided=False)
    runner = Runner(streamed=layers(), host_mlps=hosts)
    runner.keep_graphs(True)
    assert runner.graphs_now is None
    hosts.decided = True
    assert runner.graphs_now is runner._graphs
