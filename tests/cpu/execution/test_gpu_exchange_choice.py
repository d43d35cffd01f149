"""Which way ranks on GPUs exchange numbers, and what is said of it: peer access that is missing, variables and settings
that rule it out, and NCCL in its place. The GPUs, their links and NCCL are made up."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_copies import unpinned_memory

from holdfast.engine.ranks.gpu import rank as ranks
from holdfast.engine.ranks.gpu.rank import OpenedGpu
from holdfast.errors import ConfigurationError, EngineError, HoldfastError
from holdfast.execution.parallel.gpu.together import (
    BETWEEN_NODES,
    LINES_BY,
    THROUGH_RAM,
    JoinedGpus,
    SmallAndLarge,
    against_exchange,
    exchange_decisions,
)
from holdfast.execution.parallel.rank_link import Meeting
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.footprint.gpu import line_memory_bytes

UUIDS = ["GPU-a", "GPU-b", "GPU-c"]
SLOT_BYTES = 4096


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Pairs of GPUs that do not see each other's memory, to be added to; torch counts them the other way round."""
    apart: set[tuple[int, int]] = set()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid="cba"[place]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)
    return apart


def against(uuids: list[str] = UUIDS, *, disabled: bool = False, **environment: str) -> str:
    return against_exchange(uuids, disabled=disabled, environment=environment)


def test_what_is_against_it_is_said(linked: set[tuple[int, int]]) -> None:
    assert against() == against(NCCL_P2P_DISABLE="0") == against(NCCL_P2P_DISABLE="") == ""
    assert against(NCCL_P2P_DISABLE="1") == "NCCL_P2P_DISABLE is set"
    assert against(disabled=True) == "--disable-custom-all-reduce"
    assert against(["GPU-a"] * 8) == ""
    assert against(["GPU-a"] * 9) == "9 ranks are more than 8"
    linked.add((0, 2))
    assert against() == "GPU 0 (GPU-c) has no peer access to GPU 2", "by the topology, one way is enough"
    assert against(["GPU-a", "GPU-b"]) == "", "of GPUs that have a rank"


class Noted:
    """Collectives that do nothing but say so."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.rank, self.size, self._said = name, 1, 2, said

    def __getattr__(self, called: str) -> Any:
        return lambda *_: self._said.append(f"{self.name} {called}")


def test_what_fits_at_once_goes_the_short_way() -> None:
    said: list[str] = []
    both = SmallAndLarge(Noted("small", said), Noted("large", said), SLOT_BYTES)
    assert (both.rank, both.size, both.name) == (1, 2, "small up to 4.00 KiB, large beyond")
    for count, way in ((1024, "small"), (1025, "large")):
        numbers = torch.zeros(count)
        both.all_reduce(numbers)
        both.add_reduced(numbers, numbers)
        both.broadcast(numbers)
        assert said == [f"{way} all_reduce", f"{way} add_reduced", f"{way} broadcast"]
        said.clear()
    # All ranks choose alike: by the widest part, whichever is one's own.
    for widths, way in (((512, 100), "small"), ((513, 100), "large")):
        both.gather(torch.zeros(2, 100), widths, None)
        assert said.pop() == f"{way} gather"
    for called in ("limit", "check", "give_up", "close"):
        getattr(both, called)(*([1.0] if called == "limit" else []))
        assert sorted(said) == [f"large {called}", f"small {called}"], "of both"
        said.clear()


def decisions(collectives: str | None, stage: bool, reason: str, uuids: list[str] = UUIDS, nodes: int = 1) -> list[str]:
    own: Any = None if collectives is None else Noted(collectives, [])
    lines: Any = SimpleNamespace(count=2) if stage else None
    return [one.line() for one in exchange_decisions(JoinedGpus(own, lines), reason, uuids, nodes)]


def test_the_way_and_its_reason_are_a_decision() -> None:
    seen = "each GPU reads the memory of all others"
    assert decisions("CUDA IPC", False, "") == [f"all_reduce = CUDA IPC (hardware): {seen}"]
    assert decisions("NCCL", False, "NCCL_P2P_DISABLE is set") == [
        "all_reduce = NCCL (hardware): not over CUDA IPC: NCCL_P2P_DISABLE is set"
    ]
    assert decisions("CUDA IPC", False, "", ["GPU-a"] * 2) == [
        "all_reduce = CUDA IPC (hardware): ranks of one GPU map one another's memory"
    ]
    lines = f"stage_lines = {LINES_BY} (hardware): {seen}; NCCL's sends wait for whoever receives"
    assert decisions(None, True, "") == [lines]
    assert decisions("CUDA IPC", True, "")[1] == lines
    assert decisions(None, True, "NCCL_P2P_DISABLE is set") == [
        f"stage_lines = {THROUGH_RAM} (hardware): not over CUDA IPC: NCCL_P2P_DISABLE is set;"
        " NCCL's sends wait for whoever receives"
    ]
    waits = "stages are on 2 nodes; NCCL's sends wait for whoever receives"
    assert decisions("CUDA IPC", True, "", ["GPU-a", "GPU-b"] * 2, nodes=2) == [
        f"all_reduce = CUDA IPC (hardware): {seen}",
        f"stage_lines = {BETWEEN_NODES} (hardware): {waits}",
    ]


def opened(monkeypatch: pytest.MonkeyPatch, *, nccl: bool, peers: bool, stages: int = 0) -> Any:
    """A rank that has opened its GPU, and mapped the others where it has `peers`."""
    own: Any = object.__new__(OpenedGpu)
    engine = SimpleNamespace(stages=[None] * stages, shards=[None] * 2, slot_bytes=SLOT_BYTES)
    own.rank, own._plan, own._uuids, own.device = 0, SimpleNamespace(engine=engine), UUIDS[:2], torch.device("cpu")
    own._peers, own._places = SimpleNamespace(close=lambda: None) if peers else None, [1, 2]
    own._spread = Spread(2 * max(1, stages), max(1, stages))
    monkeypatch.setattr(ranks, "nccl_available", lambda: nccl)
    monkeypatch.setattr(ranks, "ExchangeCollectives", lambda *_, **__: Noted("CUDA IPC", []))
    monkeypatch.setattr(ranks, "NcclCollectives", lambda *_, **__: Noted("NCCL", []))
    return own


STORE: Any = object()
"""Where ranks find one another for NCCL; there is none for ranks of one GPU."""


def meeting(store: Any) -> Meeting | None:
    return None if store is None else Meeting(store)


@pytest.mark.parametrize(
    ("nccl", "store", "reason", "name"),
    [
        (True, STORE, "", "CUDA IPC up to 4.00 KiB, NCCL beyond"),
        (False, STORE, "", "CUDA IPC"),
        (True, None, "", "CUDA IPC"),
        (True, STORE, "GPU 0 has no peer access to GPU 1", "NCCL"),
    ],
)
def test_ranks_take_what_there_is(
    nccl: bool, store: Any, reason: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = opened(monkeypatch, nccl=nccl, peers=True)
    assert own.join(meeting(store), reason, 1.0, lambda waited_s: None).collectives.name == name
    assert (own._peers is None) == bool(reason), "memory that nobody maps is given back"


@pytest.mark.parametrize(
    ("nccl", "store", "stages", "said"),
    [
        (True, None, 0, "ranks that share a GPU exchange numbers over CUDA IPC alone"),
        (False, STORE, 0, "this torch has no NCCL"),
        (True, STORE, 2, "stages of 2 GPUs each add up over CUDA IPC alone"),
    ],
)
def test_where_there_is_nothing_the_reason_is_said(
    nccl: bool, store: Any, stages: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = opened(monkeypatch, nccl=nccl, peers=False, stages=stages)
    with pytest.raises(HoldfastError, match=said) as caught:
        own.join(meeting(store), "NCCL_P2P_DISABLE is set", 1.0, lambda waited_s: None)
    assert caught.value.found == "NCCL_P2P_DISABLE is set"


def test_on_several_nodes_it_is_the_gpus_of_one_that_have_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their sums alone: what stages hand on could go through RAM."""
    own = opened(monkeypatch, nccl=True, peers=False, stages=2)
    own._spread = Spread(4, 2, 2)
    with pytest.raises(ConfigurationError, match="stages of 2 GPUs each add up over CUDA IPC alone") as caught:
        own.join(None, "on node 1: GPU 0 (GPU-c) has no peer access to GPU 2", 1.0, lambda waited_s: None)
    assert caught.value.needed == "peer access among the 2 GPUs of each node"
    assert caught.value.found == "on node 1: GPU 0 (GPU-c) has no peer access to GPU 2"
    assert caught.value.fix == "-tp 1 -pp 4, whose stages hand on through RAM; or --device cpu"
    assert caught.value.code == "HF138"


def test_stages_of_one_gpu_each_that_map_nothing_call_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both neighbours, as if they were on other nodes."""
    own, called, lines = opened(monkeypatch, nccl=True, peers=True, stages=3), list[Any](), list[Any]()
    own._spread, own._node, own.rank = Spread(3, 3), range(3), 1
    own._plan.engine.shards, own._plan.engine.stream_bytes, own._plan.engine.answer_bytes = [], 4096, 8192

    def line(*given: Any) -> Any:
        return SimpleNamespace(close=lambda: None, rank=given[-1] if given else None)

    def connected(*given: Any, **_: Any) -> Any:
        called.append(given[1:])
        return {0: line()}, {2: line()}

    monkeypatch.setattr(ranks, "connect_ranks", connected)
    monkeypatch.setattr(ranks, "NodeLineIn", line)
    monkeypatch.setattr(ranks, "NodeLineOut", line)
    monkeypatch.setattr(ranks, "pinned_line", lambda slot_bytes, device: slot_bytes)
    monkeypatch.setattr(ranks, "ExchangeLines", lambda *given, **_: lines.append(given))
    monkeypatch.setattr(ranks, "LineTo", lambda *given: given)
    own.join(Meeting(STORE), "GPU 0 (GPU-a) has no peer access to GPU 1", 1.0, lambda waited_s: None)
    assert called == [(1, [0], [2])]
    [(_, memory, *_, before, behind)] = lines
    assert memory is None, "what nobody maps is given back"
    assert (before[0], before[2].rank, behind[0], behind[2].rank) == (0, 0, 2, 2)


def test_what_was_opened_to_other_nodes_is_closed_where_ranks_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that goes on: a line has a thread, a socket and pinned memory."""
    ours, theirs = socket.socketpair()
    own = opened(monkeypatch, nccl=True, peers=False, stages=2)
    own._spread, own._node = Spread(2, 2, 2), range(1)
    own._plan.engine.shards, own._plan.engine.stream_bytes, own._plan.engine.answer_bytes = [], 4096, 4096
    pinned = list[int]()

    def memory_of(slot_bytes: int, device: torch.device) -> Any:
        if pinned:
            raise EngineError("there is no more of it", code="HF444")
        pinned.append(slot_bytes)
        return unpinned_memory([line_memory_bytes(slot_bytes)])

    monkeypatch.setattr(ranks, "connect_ranks", lambda *_, **__: ({1: ours}, {1: socket.socketpair()[0]}))
    monkeypatch.setattr(ranks, "pinned_line", memory_of)
    with pytest.raises(EngineError, match="there is no more of it"):
        own.join(Meeting(STORE), "", 1.0, lambda waited_s: None)
    assert not [one for one in threading.enumerate() if one.name.startswith("line-")]
    assert theirs.recv(1) == b"", "whoever is at the other end hears of it"
    theirs.close()
