"""Who may join an engine on several nodes, and what is said to who may not: within seconds, with the node and the
cause. No rank is started here."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from free_ports import free_port
from rank_engines import make

from holdfast.config import EngineConfig
from holdfast.engine.ranks.messages import StartRank
from holdfast.engine.ranks.nodes import agent as agent_module
from holdfast.engine.ranks.nodes import hub as hub_module
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes import report as report_module
from holdfast.engine.ranks.nodes.agent import NodeAgent
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head
from holdfast.engine.ranks.nodes.link import NodeRank
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.engine.ranks.nodes.report import checkpoint_digests, report_of
from holdfast.engine.ranks.nodes.secret import with_secret
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.engine.startup.build import find_model
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.parallel.segment import SegmentLayout
from holdfast.execution.parallel.sockets.key_proof import proof
from holdfast.hardware.nvidia import NvidiaMachine
from holdfast.records import Failure

pytestmark = pytest.mark.usefixtures("forked_starts")

SECRET = "a secret of tests"
SOON_S = 30.0


def settings(port: int, **changed) -> EngineConfig:
    given = {
        "device": "cpu",
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": 1,
        "master_port": port,
        "node_secret": SECRET,
        "node_timeout": SOON_S,
    }
    return EngineConfig(**given | changed)


REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="1", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


@contextmanager
def hub(nodes: int = 2) -> Iterator[NodeHub]:
    own = msgspec.structs.replace(REPORT, nodes=nodes)
    opened = NodeHub("127.0.0.1", 0, SECRET, own, 1, nodes)
    try:
        yield opened
    finally:
        opened.close(again=False)


def join(head: NodeHub, *, node: int = 1, secret: str = SECRET, **changed):
    """As an agent does."""
    said = msgspec.structs.replace(head.own, node=node, **changed)
    nodes = max(head.spread.nodes, node + 1)
    config = settings(
        head.port, node_secret=secret, nnodes=nodes, tensor_parallel_size=nodes, node_rank=node, node_timeout=2.0
    )
    return join_head(config, lambda: said)


def test_a_node_with_the_secret_is_let_in_with_its_address() -> None:
    with hub() as head:
        wire = join(head)
        head.await_nodes(SOON_S, lambda done, total: None)
        assert [report.node for report in head.reports] == [0, 1]
        assert head.reports[1].host == "127.0.0.1"
        wire.close()


def test_a_node_whose_driver_takes_its_time_is_let_in(monkeypatch) -> None:
    """It is asked before the head is: that one lets no stranger be silent for long."""
    monkeypatch.setattr(hub_module, "HANDSHAKE_S", 0.5)

    def slow() -> NodeReport:
        time.sleep(1.0)
        return msgspec.structs.replace(REPORT, node=1)

    with hub() as head:
        wire = join_head(settings(head.port, node_timeout=2.0), slow)
        head.await_nodes(SOON_S, lambda done, total: None)
        wire.close()


@pytest.fixture
def without_gpus(monkeypatch) -> None:
    """A machine whose driver knows none any more."""
    monkeypatch.setattr(report_module, "probe", NvidiaMachine)


@pytest.mark.usefixtures("without_gpus")
def test_a_head_hears_of_a_node_whose_gpu_is_gone(tiny_model) -> None:
    with hub() as head:
        config = settings(head.port, device="cuda", model=str(tiny_model), load_format="dummy")
        files = find_model(config, text=False).files
        for ended in (
            lambda: join_head(config, partial(report_of, config, files)),
            lambda: head.await_nodes(SOON_S, lambda done, total: None),
        ):
            with pytest.raises(ConfigurationError, match=r"node 1 \(.*\): rank 0 of this node has no GPU") as told:
                ended()
            assert told.value.code == "HF133"


@pytest.mark.usefixtures("without_gpus")
def test_a_node_whose_gpu_is_gone_says_so_where_there_is_no_head(tiny_model, port: int, caplog) -> None:
    """At once, and at last."""
    config = settings(port, device="cuda", model=str(tiny_model), load_format="dummy", node_timeout=1.0)
    files = find_model(config, text=False).files
    with pytest.raises(ConfigurationError, match="rank 0 of this node has no GPU") as told:
        join_head(config, partial(report_of, config, files))
    assert told.value.code == "HF133"
    assert len([one for one in caplog.messages if one.startswith("node 1 cannot join, which the head at")]) == 1


def test_another_secret_is_refused_and_the_head_waits_on() -> None:
    with hub() as head:
        began_s = time.monotonic()
        with pytest.raises(ConfigurationError, match="different secrets") as refused:
            join(head, secret="another secret of tests")
        assert refused.value.code == "HF139"
        assert time.monotonic() - began_s < SOON_S
        wire = join(head)
        head.await_nodes(SOON_S, lambda done, total: None)
        wire.close()


def test_a_node_that_lies_about_its_proof_is_refused() -> None:
    """Without the secret, but an agent that does not mind: the head does."""
    with hub() as head:
        wire = Wire(socket.create_connection(("127.0.0.1", head.port)))
        wire.send(messages.encode(messages.NodeHello(b"n" * 32)))
        wire.receive()
        wire.send(messages.encode(messages.Join(b"p" * 32, msgspec.structs.replace(REPORT, node=1))))
        answer = messages.decode_from_head(wire.receive())
        assert isinstance(answer, messages.Refused)
        with pytest.raises(EngineError, match="node 1"):
            head.await_nodes(0.3, lambda done, total: None)
        wire.close()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"nodes": 3}, "nnodes"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"version": "2"}, "version"),
        ({"checkpoint": {"config": "abd"}}, "another checkpoint"),
        ({"checkpoint": {"config": "abc", "model.safetensors": "5 bytes"}}, "another checkpoint"),
        ({"kernels": False}, "compiled kernels"),
    ],
)
def test_a_node_that_is_not_as_the_head_ends_both(changed: dict[str, object], named: str) -> None:
    with hub() as head:
        with pytest.raises(ConfigurationError, match=named) as refused:
            join(head, **changed)
        with pytest.raises(ConfigurationError, match=named) as ended:
            head.await_nodes(SOON_S, lambda done, total: None)
        for error in (refused.value, ended.value):
            assert error.code == "HF139"
            assert "node 1 (here, rank 1)" in error.message


def test_two_nodes_of_one_number_are_not_let_in() -> None:
    with hub() as head:
        first = join(head)
        with pytest.raises(ConfigurationError, match="node 1 has joined already: here, pid 1"):
            join(head)
        first.close()


def test_an_agent_that_joins_again_takes_its_own_place() -> None:
    """It has seen the end of its connection, and the head has not: were it refused, the head would wait in vain."""
    with hub() as head:
        first = join(head, agent="one")
        head.await_nodes(SOON_S, lambda done, total: None)
        second = join(head, agent="one")
        head.await_nodes(SOON_S, lambda done, total: None)
        with pytest.raises((EOFError, OSError)):
            first.receive()
        with pytest.raises(ConfigurationError, match="has joined already"):
            join(head, agent="another")
        second.close()


def test_a_node_that_is_lost_before_all_are_there_is_awaited_again() -> None:
    with hub(3) as head:
        join(head, node=1).close()
        until_s = time.monotonic() + SOON_S
        while (link := head._links.get(1)) is None or not link.lost:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        second = join(head, node=2)
        with pytest.raises(EngineError, match=r"node 1 \(rank 1\) has not joined"):
            head.await_nodes(0.3, lambda done, total: None)
        first = join(head, node=1)
        head.await_nodes(SOON_S, lambda done, total: None)
        first.close()
        second.close()


def test_nobody_is_let_in_by_a_head_that_has_ended() -> None:
    """An agent would wait for ever for what nobody says."""
    with hub() as head:
        wire, nonce = Wire(socket.create_connection(("127.0.0.1", head.port))), b"n" * 32
        wire.wait_at_most(SOON_S)
        wire.send(messages.encode(messages.NodeHello(nonce)))
        challenge = messages.decode_from_head(wire.receive())
        assert isinstance(challenge, messages.Challenge)
        head.close(again=True)
        shown = proof(secret.derive_key(SECRET), secret.AGENT, nonce, challenge.nonce)
        wire.send(messages.encode(messages.Join(shown, msgspec.structs.replace(REPORT, node=1))))
        with pytest.raises((EOFError, ConnectionError)):
            wire.receive()
        wire.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_rank_that_is_killed_ends_its_node_as_the_engine_ends(again: bool) -> None:
    """A node hears one word of its end: after an orderly one it is not to look for another head."""
    with hub() as head:
        wire = join(head)
        head.await_nodes(SOON_S, lambda done, total: None)
        head.expect_end(again=again)
        NodeRank(1, head._links[1]).kill()
        assert messages.decode_from_head(wire.receive()[1:]) == messages.EndNode(again)
        wire.close()


def test_ranks_that_cannot_be_started_are_told_of_and_the_node_joins_again(monkeypatch, caplog) -> None:
    """It is no connection that has ended, and nothing waits for threads that never began."""

    class Head:
        """A wire whose head says once what to start."""

        closed = False

        def wait_at_most(self, seconds: float) -> None: ...

        def send(self, message: bytes) -> None: ...

        def receive(self) -> bytes:
            return messages.MESSAGE

        def close(self) -> None:
            self.closed = True

    def no_process(*arguments) -> None:
        raise OSError("no process is left")

    start = StartRank(rank=1, size=2, config={}, plan=SimpleNamespace(engine=None), threads=1)
    monkeypatch.setattr(messages, "decode_from_head", lambda frame: messages.StartNode([start]))
    monkeypatch.setattr(agent_module, "segment_layout", lambda engine: SegmentLayout(2, 4096))
    monkeypatch.setattr(agent_module, "RankProcess", no_process)
    head = Head()
    assert agent_module._Followed(head, lambda start: start).run()
    assert head.closed
    assert "could not be started: no process is left" in caplog.text
    assert "connection" not in caplog.text


def test_a_node_beyond_the_last_is_told_so() -> None:
    with hub() as head, pytest.raises(ConfigurationError, match="there is no place for a node 2"):
        join(head, node=2)


def test_missing_nodes_are_named() -> None:
    seen = list[tuple[int, int]]()
    with hub(3) as head:
        wire = join(head, node=2)
        with pytest.raises(EngineError, match=r"node 1 \(rank 1\) has not joined") as missing:
            head.await_nodes(0.5, lambda done, total: seen.append((done, total)))
        wire.close()
    assert missing.value.code == "HF446"
    assert (2, 3) in seen


def test_a_node_without_a_head_gives_up_in_time() -> None:
    port, began_s = free_port(), time.monotonic()
    with pytest.raises(EngineError, match=f"node 1 has not reached the head at 127.0.0.1 port {port}") as lost:
        join_head(settings(port, node_timeout=1.0), lambda: REPORT)
    assert lost.value.code == "HF446"
    assert time.monotonic() - began_s < SOON_S


def test_a_port_that_another_has_is_refused_with_the_cause() -> None:
    with hub() as head, pytest.raises(ConfigurationError, match="rank 0 cannot listen") as refused:
        NodeHub("127.0.0.1", head.port, SECRET, REPORT, 1, 2)
    assert refused.value.code == "HF139"


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n\r\n", struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"\xff\xff\xff", b""]
)
def test_strangers_do_not_keep_nodes_out(said: bytes) -> None:
    with hub() as head:
        strangers = [socket.create_connection(("127.0.0.1", head.port)) for _ in range(5)]
        for stranger in strangers:
            stranger.sendall(said)
        wire = join(head)
        head.await_nodes(SOON_S, lambda done, total: None)
        for stranger in strangers:
            stranger.close()
        wire.close()


def test_strangers_that_speak_slowly_do_not_keep_nodes_out(monkeypatch) -> None:
    """As many as are answered at a time, each with a byte now and then of a message that never ends."""
    monkeypatch.setattr(hub_module, "HANDSHAKE_S", 0.5)
    with hub() as head:
        places = range(hub_module.MOST_STRANGERS)
        strangers = [socket.create_connection(("127.0.0.1", head.port)) for _ in places]
        for stranger in strangers:
            stranger.sendall(struct.pack("<I", 60_000))
        ended = threading.Event()

        def speak() -> None:
            while not ended.wait(0.1):
                for stranger in strangers:
                    with contextlib.suppress(OSError):
                        stranger.send(b"a")

        speaking = threading.Thread(target=speak, daemon=True)
        speaking.start()
        join(head).close()
        ended.set()
        speaking.join(SOON_S)
        for stranger in strangers:
            stranger.close()


def test_a_head_without_the_secret_learns_nothing_of_a_node() -> None:
    """What answers at the head's address and cannot prove itself is told no more than that."""
    listener, heard = socket.create_server(("127.0.0.1", 0)), list[object]()

    def pretend() -> None:
        wire = Wire(listener.accept()[0])
        messages.decode_hello(wire.receive())
        wire.send(messages.encode(messages.Challenge(b"n" * 32, b"p" * 32)))
        heard.append(messages.decode_from_agent(wire.receive()))
        wire.close()

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    with listener, pytest.raises(ConfigurationError, match="different secrets"):
        join_head(settings(listener.getsockname()[1]), lambda: REPORT)
    thread.join(SOON_S)
    assert heard == [messages.OtherSecret()]


def test_checkpoints_are_told_apart_by_size_and_header(tmp_path, tiny_model) -> None:
    files = find_model(settings(0, model=str(tiny_model), load_format="dummy"), text=False).files
    weights = tmp_path / "model.safetensors"
    found = list[str]()
    for content in (b"a" * 100, b"a" * 101, b"a" * 99 + b"b", b"a" * 100):
        weights.write_bytes(content)
        found.append(checkpoint_digests(with_weights(files, weights), dummy=False)["model.safetensors"])
    assert len(set(found[:3])) == 3
    assert found[0] == found[3]
    assert report_of(settings(0), files, "host").node == 1


def with_weights(files, *weights):
    return replace(files, weights=weights)


def test_a_checkpoint_of_many_files_is_heard_and_compared(tmp_path, tiny_model) -> None:
    """Before the secret is proven little is listened to: neighbours have one digest together."""
    files = find_model(settings(0, model=str(tiny_model), load_format="dummy"), text=False).files
    paths = [tmp_path / f"{number:05}-{'of a long name ' * 15}.safetensors" for number in range(1, 601)]
    for path in paths:
        path.write_bytes(b"a")
    ours = checkpoint_digests(with_weights(files, *paths), dummy=False)
    paths[7].write_bytes(b"b")
    theirs = checkpoint_digests(with_weights(files, *reversed(paths)), dummy=False)
    assert [name for name in ours if ours[name] != theirs[name]] == [f"{paths[5].name} and 4 more"]
    with hub() as head:
        head.own = msgspec.structs.replace(head.own, checkpoint=ours)
        wire = join(head, agent="one", checkpoint=ours)
        head.await_nodes(SOON_S, lambda done, total: None)
        wire.close()
        with pytest.raises(ConfigurationError, match="another checkpoint than the head") as refused:
            join(head, agent="one", checkpoint=theirs)
    assert "and 4 more" in refused.value.found


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"node_rank": 2}, "node_rank is 2, of 2"),
        ({"tensor_parallel_size": 3}, "3 ranks"),
        ({"master_addr": "0.0.0.0"}, "which no other node can reach"),
        ({"node_secret": "short"}, "too short"),
        ({"data_parallel_size": 2}, "on one machine"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changed: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        settings(0, **changed)
    assert refused.value.code == "HF139"


def test_the_secret_comes_from_a_file_or_is_made_by_the_head(tmp_path) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret in a file\nand more\n")
    config, made = with_secret(settings(0, node_secret=None, node_secret_file=str(file)))
    assert (config.node_secret, made) == ("a secret in a file", False)
    head, made = with_secret(settings(0, node_secret=None, node_rank=0))
    assert made
    assert head.node_secret is not None
    assert len(head.node_secret) >= 32
    with pytest.raises(ConfigurationError, match="node 1 has no secret"):
        with_secret(settings(0, node_secret=None))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        with_secret(settings(0, node_secret=None, node_secret_file=str(tmp_path / "none")))


class RunningAgent:
    """The agent of node 1, in a thread; no rank is started, because no head says so."""

    def __init__(self, config: EngineConfig) -> None:
        files = find_model(config, text=False).files
        self.error: Exception | None = None
        self.told = list[bool]()
        agent = NodeAgent(config, files, on_joined=self.told.append)
        self._thread = threading.Thread(target=self._run, args=(agent,), daemon=True)
        self._thread.start()

    def _run(self, agent: NodeAgent) -> None:
        try:
            agent.run()
        except Exception as error:
            self.error = error

    def ended(self, timeout_s: float = SOON_S) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def node(tiny_model, port: int) -> EngineConfig:
    return settings(port, model=str(tiny_model), load_format="dummy", node_timeout=SOON_S)


def head_at(node: EngineConfig) -> NodeHub:
    files = find_model(node, text=False).files
    own = msgspec.structs.replace(report_of(node, files, "127.0.0.1"), node=0)
    return NodeHub("127.0.0.1", node.master_port, SECRET, own, 1, 2)


def test_a_node_joins_the_next_head_and_ends_with_it(node: EngineConfig) -> None:
    """Of three heads at one address: the first dies without a word, the second is followed by another, the third ends
    in order."""
    agent = RunningAgent(node)
    for again in (None, True, False):
        head = head_at(node)
        head.await_nodes(SOON_S, lambda done, total: None)
        if again is None:
            for link in head._links.values():
                link.close()
        head.close(again=bool(again) or again is None)
        assert agent.ended(0.1 if again is not False else SOON_S) == (again is False)
    assert agent.error is None


def test_who_called_is_known_after_the_call_has_ended() -> None:
    """A node that leaves as soon as it was let in is named all the same, and so is listened to: without that its end
    would never be noticed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        called = Wire(listener.accept()[0])
        calling.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        calling.close()
        with pytest.raises(ConnectionResetError):
            called.receive()
        assert (called.own_host, called.other_host) == ("127.0.0.1", "127.0.0.1")
        called.close()


def test_a_message_that_is_sent_in_part_ends_the_connection() -> None:
    """Nobody reads for a while: what was sent next would be read as the rest of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        sender, receiver = Wire(connection), Wire(listener.accept()[0])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 200)
    with pytest.raises(OSError, match="has not read what was sent"):
        sender.send(b"a" * (64 << 20))
    for wire in (sender, receiver):
        wire.wait_at_most(SOON_S)
        with pytest.raises((EOFError, ConnectionError)):  # Neither silence nor another message.
            wire.receive()
    with pytest.raises(BrokenPipeError):
        sender.send(b"b")
    sender.close()
    receiver.close()


def test_a_node_whose_head_does_not_come_back_ends_with_an_error(node: EngineConfig) -> None:
    head = head_at(node)  # Before it is looked for: the time to find one is short here.
    agent = RunningAgent(replace(node, node_timeout=2.0))
    head.await_nodes(SOON_S, lambda done, total: None)
    head.close(again=True)
    assert agent.ended()
    assert isinstance(agent.error, EngineError)
    assert agent.error.code == "HF446"
    assert agent.told == [True, False]


def test_a_node_hears_why_its_head_does_not_start(node: EngineConfig) -> None:
    agent, head = RunningAgent(node), head_at(node)
    head.await_nodes(SOON_S, lambda done, total: None)
    head.close(again=False, failure=Failure.of(ConfigurationError("node 2 is another", code="HF139")))
    assert agent.ended()
    assert isinstance(agent.error, ConfigurationError)
    assert agent.error.message == "node 2 is another"


def test_a_node_joins_the_next_head_also_where_this_one_has_not_started_again(node: EngineConfig, caplog) -> None:
    agent, head = RunningAgent(node), head_at(node)
    head.await_nodes(SOON_S, lambda done, total: None)
    head.close(again=True, failure=Failure.of(EngineError("node 2 (rank 2) has not joined", code="HF446")))
    head = head_at(node)
    head.await_nodes(SOON_S, lambda done, total: None)
    assert "the head has not started again: node 2 (rank 2) has not joined" in caplog.messages
    head.close(again=False)
    assert agent.ended()
    assert agent.error is None


def test_an_engine_of_another_node_than_the_head_is_refused(tiny_model) -> None:
    with pytest.raises(ConfigurationError, match="started by the head alone") as refused:
        make(tiny_model, 2, nnodes=2, node_rank=1, node_secret=SECRET)
    assert refused.value.code == "HF139"
