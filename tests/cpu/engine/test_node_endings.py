"""Nodes of one engine that do not come, or go: the head hears why, nobody waits for one after the other, and nothing of
a start that fails is left open. No rank is started here."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace

import msgspec
import pytest
from free_ports import free_port
from node_processes import SECRET

from holdfast.config import EngineConfig, ServerConfig
from holdfast.engine.ranks import group as group_module
from holdfast.engine.ranks.following import NO_ROOM
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import RankFailed, encode
from holdfast.engine.ranks.nodes import hub as hub_module
from holdfast.engine.ranks.nodes import link as link_module
from holdfast.engine.ranks.nodes import messages
from holdfast.engine.ranks.nodes.agent import NodeAgent
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head, tell_cannot_join
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.engine.ranks.nodes.open import join_nodes
from holdfast.engine.ranks.nodes.report import report_of
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.engine.ranks.together import load_ranks
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.errors import ConfigurationError, DoesNotFitError, EngineDiedError, EngineError, ModelNotFoundError
from holdfast.records import Failure

pytestmark = pytest.mark.usefixtures("forked_starts")

SOON_S = 10.0
REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="1", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


def settings(port: int, nodes: int = 2, **changed) -> EngineConfig:
    given = {
        "device": "cpu",
        "tensor_parallel_size": nodes,
        "nnodes": nodes,
        "node_rank": 1,
        "master_port": port,
        "node_secret": SECRET,
        "node_timeout": SOON_S,
    }
    return EngineConfig(**given | changed)


@contextmanager
def joined(nodes: int = 2) -> Iterator[tuple[NodeHub, list[Wire]]]:
    """A head with all others, which say nothing more."""
    own = msgspec.structs.replace(REPORT, nodes=nodes, tensor_parallel_size=nodes)
    hub, wires = NodeHub("127.0.0.1", 0, SECRET, own, 1, nodes), list[Wire]()
    try:
        for node in range(1, nodes):
            report = msgspec.structs.replace(own, node=node)
            config = settings(hub.port, nodes, node_rank=node)
            wires.append(join_head(config, lambda report=report: report))
        hub.await_nodes(SOON_S, lambda done, total: None)
        yield hub, wires
    finally:
        hub.close(again=False)
        for wire in wires:
            wire.close()


def test_a_group_that_cannot_be_made_leaves_no_listener(monkeypatch, tiny_model) -> None:
    """The next engine of the head listens at the same port, and its nodes are to join that one."""
    config = settings(0, node_rank=0, model=str(tiny_model), load_format="dummy", ram=2 << 30)
    model = find_model(config, text=False)

    def no_memory(layout: object) -> None:
        raise OSError("no memory to share")

    monkeypatch.setattr(group_module, "Segment", no_memory)
    with joined() as (hub, wires):
        port = hub.port
        with pytest.raises(OSError, match="no memory to share"):
            load_ranks(config, model.files, model.spec, plan_model(config, model), lambda *at: None, cores=1, hub=hub)
        assert messages.decode_from_head(wires[0].receive()[1:]) == messages.EndNode(again=True)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


class Stuck:
    """A rank that hangs in the system, however it is killed."""

    ended, connection = False, SimpleNamespace(close=lambda: None)

    def kill(self) -> None: ...

    def await_end(self, timeout_s: float) -> bool:
        time.sleep(max(0.0, timeout_s))
        return False


def test_ranks_that_do_not_end_are_awaited_together(monkeypatch) -> None:
    monkeypatch.setattr(group_module, "KILLED_S", 0.3)
    monkeypatch.setattr(group_module, "LEAVE_S", 0.1)
    group = object.__new__(RankGroup)
    group._ending = group._failed = False
    group._hub, group._ranks = None, [Stuck() for _ in range(8)]
    group.order = lambda order: None
    group.link = SimpleNamespace(close=lambda: None)
    group._segment = SimpleNamespace(close=lambda: pytest.fail("a rank may still write there"))
    began_s = time.monotonic()
    group.close()
    assert time.monotonic() - began_s < 1.5


class Refused(Stuck):
    """A rank that has ended, whose last word nobody has read: as one without memory at start."""

    name, ended = "rank 1", True

    def __init__(self) -> None:
        self.number, (self.connection, says) = 1, Pipe(duplex=False)
        says.send_bytes(encode(RankFailed(Failure.of(DoesNotFitError("out of memory", code=NO_ROOM)))))
        says.close()

    def await_end(self, timeout_s: float) -> bool:
        return True


class Listening(Refused):
    name, ended = "rank 2", False

    def kill(self) -> None:
        self.ended = True


def test_a_rank_that_ended_with_a_refusal_leaves_no_other_behind() -> None:
    """And why is said in its words, whatever else failed because of it."""
    group, closed = object.__new__(RankGroup), list[str]()
    group._ending = group._failed = False
    group._hub, group._ranks = None, [Refused(), Listening()]
    group.link = SimpleNamespace(close=lambda: closed.append("link"))
    group._segment = SimpleNamespace(close=lambda: closed.append("segment"))
    group.close()
    assert group._ranks[1].ended
    assert closed == ["link", "segment"]
    group._ranks = [Refused()]
    cause = group.explained(EngineDiedError("rank 1 did not come"))
    assert (cause.code, cause.message) == (NO_ROOM, "rank 1: out of memory")


def test_nodes_that_do_not_hear_their_end_are_awaited_together(monkeypatch) -> None:
    monkeypatch.setattr(link_module, "HEARD_S", 0.5)
    with joined(5) as (hub, wires):
        began_s = time.monotonic()
        hub.close(again=False)
        assert time.monotonic() - began_s < 1.5
        for wire in wires:
            assert messages.decode_from_head(wire.receive()[1:]) == messages.EndNode(again=False)


def test_nodes_that_start_no_ranks_are_awaited_together_and_the_front_hears_of_it(monkeypatch) -> None:
    monkeypatch.setattr(hub_module, "STARTED_S", 0.5)
    beats = list[int]()
    with joined(4) as (hub, _):
        for link in hub._links.values():
            link._say = lambda message: None
        began_s = time.monotonic()
        with pytest.raises(EngineDiedError, match=r"node 1 \(here\) has not started its ranks: nothing was heard"):
            hub.start([], SimpleNamespace(), lambda: None, lambda: beats.append(1))
        assert time.monotonic() - began_s < SOON_S
        assert len(beats) >= 3


@contextmanager
def waiting_head(port: int) -> Iterator[list[BaseException]]:
    """What ends its waiting."""
    hub, ended = NodeHub("127.0.0.1", port, SECRET, REPORT, 1, 2), list[BaseException]()

    def wait() -> None:
        try:
            hub.await_nodes(SOON_S, lambda done, total: None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield ended
        thread.join(SOON_S)
    finally:
        hub.close(again=False)


def test_a_head_hears_of_a_node_that_has_no_such_model(tmp_path) -> None:
    from holdfast.cli.servers.node import run_node

    port = free_port()
    began_s = time.monotonic()
    with waiting_head(port) as ended, pytest.raises(ModelNotFoundError, match=r"node 1 \(.*\): no model at"):
        run_node(settings(port, model=str(tmp_path / "none")), ServerConfig(), {}, ())
    assert time.monotonic() - began_s < SOON_S
    assert [type(error) for error in ended] == [ModelNotFoundError]


def test_a_head_hears_of_a_node_that_cannot_read_its_files(tiny_model, monkeypatch) -> None:
    from holdfast.engine.ranks.nodes import agent as agent_module

    port = free_port()
    config = settings(port, model=str(tiny_model), load_format="dummy")
    agent = NodeAgent(config, find_model(config, text=False).files)

    def fail(*given: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(agent_module, "digests_for", fail)
    with waiting_head(port) as ended, pytest.raises(EngineError, match="cannot read what it needs: not yours"):
        agent.run()
    assert len(ended) == 1
    assert "not yours" in str(ended[0])


def test_a_node_that_cannot_join_says_why_before_there_is_a_head(caplog) -> None:
    """And in the end raises that, not that there was no head."""
    config = settings(free_port(), node_timeout=1.0)
    with pytest.raises(ConfigurationError, match="its own trouble"):
        tell_cannot_join(config, ConfigurationError("its own trouble"))
    assert "node 1 cannot join" in caplog.text
    assert "its own trouble" in caplog.text


def test_a_node_ends_with_what_its_head_could_not_find(tiny_model) -> None:
    """An error that is of the system's kind too, and no end of a connection."""
    port = free_port()
    config = settings(port, model=str(tiny_model), load_format="dummy")
    files, raised = find_model(config, text=False).files, list[BaseException]()

    def follow() -> None:
        try:
            NodeAgent(config, files).run()
        except BaseException as error:
            raised.append(error)

    own = msgspec.structs.replace(report_of(config, files, "127.0.0.1"), node=0)
    hub, agent = NodeHub("127.0.0.1", port, SECRET, own, 1, 2), threading.Thread(target=follow, daemon=True)
    agent.start()
    hub.await_nodes(SOON_S, lambda done, total: None)
    hub.close(again=False, failure=Failure.of(ModelNotFoundError("no such model")))
    agent.join(SOON_S)
    assert [type(error) for error in raised] == [ModelNotFoundError]


def short_of_memory(report: NodeReport) -> NodeReport:
    return msgspec.structs.replace(report, free_bytes=1 << 20)


@pytest.mark.parametrize("again", [True, False], ids=["a restart", "the first start"])
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (None, r"node 3 \(rank 3\) has not joined"),
        (ConfigurationError("its GPU is gone"), r"node 3 \(.*\): its GPU is gone"),
        (short_of_memory, r"node 3 \(.*\) cannot hold rank 3"),
    ],
    ids=["is missing", "cannot join", "has no room"],
)
def test_where_one_node_keeps_an_engine_from_starting_the_others_hear_what_becomes_of_them(
    tiny_model, trouble: object, said: str, again: bool
) -> None:
    """Of an engine that had served another start follows, which needs them; of one that had not, they go home."""
    port, heard, threads = free_port(), list[object](), list[threading.Thread]()
    both_joined = threading.Barrier(3)
    given = {"model": str(tiny_model), "load_format": "dummy", "ram": 2 << 30}
    config = settings(port, 4, node_rank=0, node_timeout=4.0, **given)
    model = find_model(config, text=False)
    plan = plan_model(config, model)

    def follow(node: int) -> None:
        own = settings(port, 4, node_rank=node, **given)
        report = report_of(own, model.files)
        if node < 3:
            wire = join_head(own, lambda: report)
            both_joined.wait(SOON_S)
            wire.wait_at_most(SOON_S)
            heard.append(messages.decode_from_head(wire.receive()[1:]))
            wire.close()
            return
        both_joined.wait(SOON_S)
        with contextlib.suppress(ConfigurationError):
            if isinstance(trouble, ConfigurationError):
                tell_cannot_join(own, trouble)
            elif trouble is not None:
                wire = join_head(own, lambda: trouble(report))
                wire.receive()
                wire.close()

    for node in (1, 2, 3):
        threads.append(threading.Thread(target=follow, args=(node,), daemon=True))
        threads[-1].start()
    with pytest.raises((ConfigurationError, EngineError), match=said):
        join_nodes(config, model.files, plan, lambda *at: None, again=again)
    for thread in threads:
        thread.join(SOON_S)
    assert [one.again for one in heard] == [again] * 2
    for one in heard:
        assert re.match(said, one.failure.message)
