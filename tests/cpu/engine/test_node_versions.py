"""Nodes of other versions of Holdfast: both sides say so, in words, whatever else the other would have said. No rank is
started here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from free_ports import free_port
from node_processes import SECRET

import holdfast
from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.engine.ranks.nodes.report import refuse_unequal, report_of, sources_digest
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.engine.startup.build import find_model
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.parallel.sockets.key_proof import proof

pytestmark = pytest.mark.usefixtures("forked_starts")

SOON_S = 10.0
REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="9.8", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


def settings(port: int, **changed) -> EngineConfig:
    given = {"device": "cpu", "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1, "master_port": port}
    return EngineConfig(**given | {"node_secret": SECRET, "node_timeout": SOON_S} | changed)


@pytest.fixture
def head() -> Iterator[NodeHub]:
    opened = NodeHub("127.0.0.1", 0, SECRET, REPORT, 1, 2)
    yield opened
    opened.close(again=False)


def test_a_node_of_another_protocol_and_its_head_name_both_versions(head: NodeHub, monkeypatch) -> None:
    """Nothing is said between them that only one of them understands."""
    newer = messages.PROTOCOL + 5
    sent = messages.encode

    def encode(message: object) -> bytes:
        if isinstance(message, messages.Challenge):
            message = msgspec.structs.replace(message, protocol=newer)
        return sent(message)

    monkeypatch.setattr(messages, "encode", encode)
    with pytest.raises(ConfigurationError, match="do not understand each other") as refused:
        join_head(settings(head.port), lambda: REPORT)
    with pytest.raises(ConfigurationError, match="do not understand each other") as ended:
        head.await_nodes(SOON_S, lambda done, total: None)
    for error in (refused.value, ended.value):
        assert error.code == "HF139"
        assert f"holdfast {holdfast.__version__} of this node and holdfast 9.8 of the head" in error.message
        assert error.needed == f"holdfast 9.8 (protocol {newer})"
        assert error.found == f"holdfast {holdfast.__version__} (protocol {messages.PROTOCOL})"


def test_a_node_that_is_not_understood_is_told_so_and_ends_no_start(head: NodeHub) -> None:
    """It has proven nothing yet."""
    wire = Wire(socket.create_connection(("127.0.0.1", head.port)))
    wire.wait_at_most(SOON_S)
    wire.send(messages.encode(messages.NodeHello(b"n" * 32, protocol=77, version="7.7")))
    wire.receive()
    wire.send(msgspec.msgpack.encode({"type": "JoinOtherwise", "proof": b""}))
    answer = messages.decode_from_head(wire.receive())
    assert isinstance(answer, messages.Refused)
    assert answer.failure.error().message.startswith("holdfast 7.7 of this node and holdfast 9.8 of the head")
    with pytest.raises(EngineError, match="has not joined"):
        head.await_nodes(0.3, lambda done, total: None)
    wire.close()


@pytest.mark.parametrize(
    "said",
    [
        {"type": "NodeHello", "nonce": b"n", "protocol": 9, "version": "2.0", "later": [1, 2]},
        {"type": "NodeHello", "nonce": b"n"},
    ],
)
def test_a_greeting_is_understood_with_more_and_with_less(said: dict[str, object]) -> None:
    assert messages.decode_hello(msgspec.msgpack.encode(said)).nonce == b"n"


def test_what_answers_in_another_language_is_described_in_words() -> None:
    port = free_port()
    listener = socket.create_server(("127.0.0.1", port))

    def answer() -> None:
        for _ in range(20):
            try:
                wire = Wire(listener.accept()[0])
                wire.receive()
                wire.send(msgspec.msgpack.encode({"type": "Challenge", "nonce": 5}))
                wire.close()
            except (OSError, EOFError):
                return

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="what answers there is no head of nodes") as lost:
        join_head(settings(port, node_timeout=1.0), lambda: REPORT)
    listener.close()
    assert lost.value.code == "HF446"
    assert "Expected" not in lost.value.message
    assert time.monotonic() - began_s < SOON_S


def test_other_files_of_the_same_version_are_refused(tiny_model) -> None:
    """Two clones of one version compute other things, or wait for each other."""
    config = settings(0, model=str(tiny_model), load_format="dummy")
    own = report_of(config, find_model(config, text=False).files, "127.0.0.1")
    assert own.sources == sources_digest() != ""
    refuse_unequal(own, own, range(1, 2))
    with pytest.raises(ConfigurationError, match="but other files of it") as refused:
        refuse_unequal(own, msgspec.structs.replace(own, sources="another"), range(1, 2))
    assert (refused.value.code, refused.value.found) == ("HF139", "another")


def test_proofs_are_those_that_every_version_makes() -> None:
    """Another would refuse the secret before it could say what is wrong."""
    made = proof(secret.derive_key("a secret of tests"), secret.AGENT, b"a" * 32, b"b" * 32)
    assert made.hex() == "6039e56de0af23c8257b7dc411d2129b490d55a7640b6ca84eaa46dff1e392d3"
