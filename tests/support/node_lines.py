"""What the head and a node write while they wait for each other, as the engine words it. Nothing is connected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes import addresses, hub, join
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.errors import EngineError
from holdfast.execution.parallel.sockets.listen import listen_at
from holdfast.observability.line_format import line_format

PORT = 29501
WAITED_S = 0.05
REPORT = NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="1", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


@dataclass(frozen=True)
class NodeLines:
    head: str
    seeks: str
    """Of a node, while there is no head."""
    no_head: list[str]
    """Its error at last."""
    waits: str
    """Of the head, while a node is missing."""
    no_node: list[str]


def node_lines(head: str, why: OSError) -> NodeLines:
    """With the head at that address, or name of 10.0.0.5. `why`: a node does not reach it."""

    def refuse(*_: object) -> None:
        raise why

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "resolved", lambda name: ["10.0.0.5"])
        patch.setattr(join, "_join", refuse)
        patch.setattr(join, "TRY_EVERY_S", WAITED_S)
        patch.setattr(hub, "LOOK_S", WAITED_S)
        patch.setattr(hub, "_listen", lambda address, port: listen_at("127.0.0.1", 0, backlog=1))
        patch.setattr(hub.NodeHub, "port", PORT)
        config = EngineConfig(
            tensor_parallel_size=2, nnodes=2, node_rank=1, node_secret="a secret of tests", device="cpu",
            master_addr=head, master_port=PORT, node_timeout=WAITED_S,
        )  # fmt: skip
        with _written() as seeks, pytest.raises(EngineError) as no_head:
            join.join_head(config, lambda: REPORT)
        opened = hub.NodeHub(head, PORT, "a secret of tests", REPORT, 1, 2)
        with _written() as waits, pytest.raises(EngineError) as no_node:
            opened.await_nodes(2 * WAITED_S, lambda done, total: None)
        opened.close(again=False)
    errors = [f"holdfast: {error.value}".splitlines() for error in (no_head, no_node)]
    return NodeLines(head, seeks[-1], errors[0], waits[-1], errors[1])


@contextmanager
def _written() -> Iterator[list[str]]:
    """Lines of the log, as they stand in it."""
    found, shape = list[str](), line_format("holdfast")

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(shape.format(record))

    log, kept = logging.getLogger("holdfast"), Kept()
    before = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(kept)
        log.setLevel(before)
