"""Texts of other machines, which the head repeats in its log and in errors: bounded, and without what steers a
terminal, whether or not the machine has proven anything."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from node_processes import SECRET

from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head
from holdfast.engine.ranks.nodes.link import NodeLink, NodeRank
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.execution.parallel.sockets.key_proof import proof
from holdfast.records import Failure

pytestmark = pytest.mark.usefixtures("forked_starts")

SOON_S = 10.0
MOST_CHARS = 5000
HOSTILE = "\x1b[2J\n2026-11-18 14:15:10 ERROR holdfast: all is lost\r\u202e" + "x" * 9000
REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="9.8", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


@pytest.fixture
def head(caplog) -> Iterator[NodeHub]:
    caplog.set_level(logging.INFO, logger="holdfast")
    opened = NodeHub("127.0.0.1", 0, SECRET, REPORT, 1, 2)
    yield opened
    opened.close(again=False)


def assert_plain(text: str) -> None:
    """And it was there: else this would show nothing."""
    assert "\\x1b[2J\\n2026" in text
    assert text.isprintable()
    assert len(text) < MOST_CHARS


def assert_plain_error(error: HoldfastError) -> None:
    assert_plain(error.message)
    for text in (error.needed, error.found, error.fix):
        assert text is None or (text.isprintable() and len(text) < MOST_CHARS)


def connect(head: NodeHub) -> Wire:
    wire = Wire(socket.create_connection(("127.0.0.1", head.port)))
    wire.wait_at_most(SOON_S)
    return wire


def joined(head: NodeHub, **changed) -> Wire:
    config = EngineConfig(
        device="cpu", tensor_parallel_size=2, nnodes=2, node_rank=1, master_port=head.port, node_secret=SECRET,
        node_timeout=SOON_S,
    )  # fmt: skip
    return join_head(config, lambda: msgspec.structs.replace(REPORT, node=1, **changed))


def test_the_version_of_a_stranger(head: NodeHub, caplog) -> None:
    """Who has no secret is logged too, where it speaks another protocol."""
    wire = connect(head)
    wire.send(messages.encode(messages.NodeHello(b"n" * 32, protocol=77, version=HOSTILE)))
    wire.receive()
    wire.send(msgspec.msgpack.encode({"type": "JoinOtherwise", "proof": b""}))
    answer = messages.decode_from_head(wire.receive())
    wire.close()
    assert isinstance(answer, messages.Refused)
    assert_plain(answer.failure.message)
    assert_plain(caplog.messages[-1])
    assert caplog.messages[-1].startswith("a node at 127.0.0.1 was refused: holdfast ")


def test_the_name_of_a_node_that_joins(head: NodeHub, caplog) -> None:
    wire = joined(head, name=HOSTILE)
    head.await_nodes(SOON_S, lambda done, total: None)
    [said] = [line for line in caplog.messages if "has joined" in line]
    assert_plain(said)
    assert_plain(head.reports[1].name)
    with pytest.raises(ConfigurationError, match="has joined already") as second:
        joined(head)
    assert_plain(second.value.message)
    wire.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"version": HOSTILE},
        {"sources": HOSTILE},
        {"checkpoint": {HOSTILE: HOSTILE}},
        {"checkpoint": {"config": HOSTILE}},
    ],
    ids=["version", "sources", "file", "digest"],
)
def test_what_a_node_reports_that_is_refused(head: NodeHub, caplog, changed: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        joined(head, name=HOSTILE, **changed)
    with pytest.raises(ConfigurationError) as ended:
        head.await_nodes(SOON_S, lambda done, total: None)
    for error in (refused.value, ended.value):
        assert_plain_error(error)
        assert error.found is not None
        assert "\\x1b[2J" in error.found
    assert_plain(caplog.messages[-1])


def test_why_a_node_cannot_join(head: NodeHub) -> None:
    wire, nonce = connect(head), os.urandom(messages.NONCE_BYTES)
    wire.send(messages.encode(messages.NodeHello(nonce)))
    challenge = messages.decode_from_head(wire.receive())
    assert isinstance(challenge, messages.Challenge)
    shown = proof(secret.derive_key(SECRET), secret.AGENT, nonce, challenge.nonce)
    why = Failure.of(ConfigurationError(HOSTILE, needed=HOSTILE, found=HOSTILE, fix=HOSTILE))
    wire.send(messages.encode(messages.CannotJoin(shown, 1, HOSTILE, why)))
    with pytest.raises(ConfigurationError) as ended:
        head.await_nodes(SOON_S, lambda done, total: None)
    wire.close()
    assert_plain_error(ended.value)


def test_how_a_rank_of_another_node_has_ended() -> None:
    here, there = socket.create_server(("127.0.0.1", 0)), socket.socket()
    there.connect(here.getsockname())
    link = NodeLink(Wire(there), msgspec.structs.replace(REPORT, node=1), range(1, 2))
    rank = NodeRank(1, link)
    link._ranks[1] = rank
    link._hear(messages.RankEnded(1, HOSTILE))
    there.close()
    here.close()
    assert_plain(rank.ending())
