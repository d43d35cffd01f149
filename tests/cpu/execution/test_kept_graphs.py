"""When decode steps are graphs, where layers may come to stay and leave: not while anything comes, or is copied for the
host's cores, and not without room for them. What each takes is measured, here of a GPU that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.graphs.graphs_room import STEPS_BETWEEN_LOOKS, GraphsRoom
from holdfast.execution.gpu.graphs.kept_graphs import KeptGraphs
from holdfast.execution.gpu.memory.accounting import GpuHeld
from holdfast.execution.gpu.sampling import Work
from holdfast.units import MIB

CPU, FIRST, ALL, TOTAL = torch.device("cpu"), 160 * MIB, 200 * MIB, 1000 * MIB


class Memory:
    """`tells`: the driver, what this process holds of what is taken of the GPU."""

    def __init__(self, tells: bool = True) -> None:
        self.own, self.taken, self.tells, self.kept_torch = 300 * MIB, 400 * MIB, tells, 0

    def held(self) -> GpuHeld:
        """Untold, nothing is the engine's: somebody had more of it when the engine came."""
        return GpuHeld(self.own if self.tells else 0, TOTAL - self.taken, TOTAL)

    def told_bytes(self) -> int | None:
        return self.own if self.tells else None

    def kept_by_torch(self) -> int:
        return self.kept_torch

    def take(self, nbytes: int) -> None:
        self.own, self.taken = self.own + nbytes, self.taken + nbytes


class Graphs(DecodeGraphs):
    """Each takes the next of `costs`, and fails where that is its opposite."""

    def __init__(self, memory: Memory, costs: list[int]) -> None:
        super().__init__(64, lambda size, work, adapted: None, CPU)
        self.takes_of_torch = 0
        self._memory, self._costs = memory, costs

    def _capture(self, size: int, work: Work, adapted: bool) -> Any:
        cost = self._costs.pop(0)
        self._memory.take(abs(cost))
        self._memory.kept_torch += self.takes_of_torch
        if cost < 0:
            raise RuntimeError("no capture of this")
        return SimpleNamespace(replay=lambda: None)


class Runner(KeptGraphs):
    """`comes_back`: when graphs are closed; None: what they took."""

    device = CPU
    comes_back: int | None = None
    comes_back_of_torch = 0

    def __init__(self, memory: Memory, costs: list[int], **decoder: Any) -> None:
        super().__init__(SimpleNamespace(slots=None, experts=None, nbytes=0))  # type: ignore[arg-type]
        self._decoder = SimpleNamespace(**{"streamed": None, "host_mlps": None, "experts": None, **decoder})
        self.memory, self.graphs = memory, Graphs(memory, costs)
        self._graphs = self.graphs

    @property
    def decoder(self) -> Any:
        return self._decoder

    @contextmanager
    def _closing(self) -> Iterator[None]:
        assert self._graphs_room is not None
        yield
        back = self._graphs_room.taken_bytes if self.comes_back is None else self.comes_back
        self.memory.take(-back)
        self.memory.kept_torch -= self.comes_back_of_torch

    def _here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _forget_graphs(self, graphs: DecodeGraphs) -> None:
        with self._closing():
            super()._forget_graphs(graphs)

    def steps(self, *sizes: int) -> None:
        for size in sizes:
            graphs = self.graphs_now
            if graphs is not None:
                graphs.replay(size, Work.DRAW)
                self._close_too_large_graphs()

    @property
    def captured(self) -> list[int]:
        return [size for size, _, _ in self.graphs.captured]


@pytest.fixture(autouse=True)
def _no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)


def layers(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"movable": True, "embedding_rows": None, "comes": False, **more})


def roomy(*costs: int, budget: int = TOTAL, tells: bool = True, **decoder: Any) -> tuple[Runner, GraphsRoom]:
    """All layers stay, and graphs have room."""
    memory = Memory(tells)
    runner, room = Runner(memory, list(costs), **{"streamed": layers(), **decoder}), GraphsRoom(memory, FIRST, ALL)
    room.budget = lambda: budget
    runner.limit_graphs(room)
    room.give(room.wanted_bytes)
    return runner, room


def test_of_a_model_that_stays_they_always_hold() -> None:
    runner = Runner(Memory(), [])
    assert runner.may_capture
    assert runner.graphs_now is runner._graphs


@pytest.mark.parametrize("never", [{"movable": False}, {"embedding_rows": object()}])
def test_of_layers_that_never_stay_there_are_none(never: dict[str, Any]) -> None:
    assert not Runner(Memory(), [], streamed=layers(**never)).may_capture


def test_they_hold_while_nothing_comes_and_there_is_room_for_them() -> None:
    assert Runner(Memory(), [], streamed=layers()).graphs_now is None, "nobody has counted them"
    runner, room = roomy(MIB)
    assert runner.may_capture
    assert runner.graphs_now is runner._graphs
    runner.decoder.streamed.comes = True
    assert runner.graphs_now is None
    runner.decoder.streamed.comes = False
    runner.steps(8)
    assert runner.captured == [8]
    runner.close_graphs()
    room.give(0)
    assert runner.graphs_now is None
    assert runner.captured == []


def test_none_is_captured_while_a_thread_copies_for_the_hosts_cores() -> None:
    """It waits for the whole device when it is done, which invalidates a capture."""
    hosts = SimpleNamespace(decided=False)
    runner, _ = roomy(host_mlps=hosts)
    assert runner.graphs_now is None
    hosts.decided = True
    assert runner.graphs_now is runner._graphs


def test_the_next_is_captured_while_what_it_may_take_is_left_of_the_room(caplog: pytest.LogCaptureFixture) -> None:
    """By the largest so far, with a margin; what the first sets up for all is not in it once there is a second."""
    runner, room = roomy(60 * MIB, 40 * MIB, 30 * MIB, 30 * MIB)
    with caplog.at_level("INFO"):
        for size, needed in ((8, FIRST), (4, 75 * MIB), (2, 50 * MIB), (1, 50 * MIB)):
            assert room.next_bytes == needed
            runner.steps(size, size)
        assert runner.captured == [1, 2, 4, 8]
        runner.steps(16, 24, 8)
    assert runner.captured == [1, 2, 4, 8], "40 MiB are left, and 50 may be needed"
    assert room.taken_bytes == 160 * MIB
    assert caplog.text.count("steps of other sizes are launched without") == 1
    assert "160.00 MiB of 200.00 MiB (MiB each: 60.0, 40.0, 30.0, 30.0;" in caplog.text


def test_a_graph_that_took_more_than_the_room_is_closed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    runner, room = roomy(ALL + MIB)
    with caplog.at_level("INFO"):
        runner.steps(8)
        assert (runner.captured, runner.memory.own) == ([], 300 * MIB)
        runner.steps(8, 4)
    assert runner.captured == []
    assert caplog.text.count("201.00 MiB of 200.00 MiB") == 1
    assert (room.wanted_bytes, room.nbytes, runner.graphs_now) == (0, 0, None)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("comes_back", "of_torch", "kept"), [(102, 82, 0), (43, 40, 17), (102, 92, 10), (30, 10, 30)])
def test_what_comes_back_is_measured(comes_back: int, of_torch: int, kept: int, tells: bool) -> None:
    """MiB, of 60 with 40 of torch's. More, where what other streams had for products goes as well, which hides nothing
    that the driver keeps; or less."""
    runner, room = roomy(60 * MIB, 60 * MIB, tells=tells)
    runner.graphs.takes_of_torch = 40 * MIB
    runner.comes_back, runner.comes_back_of_torch = comes_back * MIB, of_torch * MIB
    runner.steps(8)
    runner.close_graphs()
    assert (room.given_back_bytes, room.kept_bytes, room.taken_bytes) == (comes_back * MIB, kept * MIB, 0)
    assert room.measured == [60 * MIB], "to be looked at"
    runner.close_graphs()
    assert room.given_back_bytes == comes_back * MIB, "there are none"
    room.give(ALL)
    runner.steps(8)
    assert room.measured == [60 * MIB]


@pytest.mark.parametrize("tells", [True, False])
def test_nothing_is_captured_without_that_room_on_the_gpu(tells: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What others hold beyond their shares, or a neighbour, has taken it. It is looked at again, and said once."""
    runner, room = roomy(MIB, budget=300 * MIB + FIRST, tells=tells)
    lacking = MIB if tells else TOTAL - 400 * MIB - FIRST + MIB
    with caplog.at_level("INFO"):
        runner.memory.take(lacking)
        runner.steps(*([8] * (STEPS_BETWEEN_LOOKS + 2)))
        assert runner.captured == []
        runner.memory.take(-lacking)
        runner.steps(8)
        assert runner.captured == [], "it is not asked for every step"
        runner.steps(*([8] * STEPS_BETWEEN_LOOKS))
    assert runner.captured == [8]
    assert caplog.text.count("159.00 MiB is left of the budget on the GPU") == 1
    assert room.measured == [MIB]


def test_a_capture_that_fails_is_counted_and_comes_back() -> None:
    runner, room = roomy(-20 * MIB)
    runner.steps(8)
    assert (runner.captured, room.taken_bytes) == ([], 20 * MIB)
    assert room.next_bytes == FIRST, "the next is the first that sets up what all share"
    runner.close_graphs()
    assert (runner.memory.own, room.given_back_bytes) == (300 * MIB, 20 * MIB)


def test_what_a_neighbour_gives_back_meanwhile_is_not_a_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver does not tell processes apart: torch tells the least that it took."""
    runner, room = roomy(30 * MIB, tells=False)
    capture = Graphs._capture

    def beside(self: Graphs, *which: Any) -> Any:
        runner.memory.taken -= 100 * MIB
        runner.memory.kept_torch += 22 * MIB
        return capture(self, *which)

    monkeypatch.setattr(Graphs, "_capture", beside)
    runner.steps(8)
    assert room.measured == [22 * MIB]
