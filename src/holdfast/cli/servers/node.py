"""A node of several that is not the head, as `holdfast serve --node-rank 1` runs it: no API, ranks for the head."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from holdfast.cli.servers.registry import NodeState
from holdfast.config import EngineConfig, ServerConfig
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.engine.ranks.nodes.agent import NodeAgent

log = logging.getLogger("holdfast")


class _Ended(BaseException):
    """By a signal."""


def check_headless(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    if server_config.headless and engine_config.node_rank == 0:
        raise ConfigurationError(
            "headless is for nodes that are not the head, and this is node 0, which serves the API",
            needed="--node-rank 1 or more",
            fix="leave --headless out",
            field="headless",
        )


def run_node(
    engine_config: EngineConfig, server_config: ServerConfig, given: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Until the head says that it is over. `given`: settings, and `words`: all that was typed, for its entry."""
    from holdfast.checkpoints import DEFAULT_MODEL
    from holdfast.cli.servers.register import ServerEntry
    from holdfast.engine.ranks.nodes.agent import NodeAgent
    from holdfast.engine.ranks.nodes.join import head_hears_failure
    from holdfast.engine.ranks.nodes.secret import with_secret
    from holdfast.engine.startup.build import find_model
    from holdfast.engine.startup.select_device import settle_device

    named = engine_config.model or DEFAULT_MODEL
    entry = ServerEntry(node_state(engine_config), model=named, settings=given, certificate=None, words=words)
    config, _ = with_secret(engine_config)
    with head_hears_failure(config):
        config = settle_device(config)
        model = find_model(config, text=False)
    entry.found(names=(model.files.name,), path=model.files.path)
    log.info("node %d of %d: model %s", config.node_rank, config.nnodes, model.files.name)
    agent = NodeAgent(config, model.files, on_joined=entry.joined)
    with _ended_by_signal(agent, server_config.drain_timeout):
        try:
            agent.run()
        except _Ended:
            log.warning("ended by a signal before the head was")
            return 128 + signal.SIGTERM
    log.info("the head has ended")
    return 0


def node_state(config: EngineConfig) -> NodeState:
    """Before it looks for the head."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    each = ranks // config.nnodes
    return NodeState(
        rank=config.node_rank,
        nodes=config.nnodes,
        head=f"{config.master_addr}:{config.master_port}",
        first=config.node_rank * each,
        ranks=each,
        all_ranks=ranks,
        joined=False,
        since_s=time.time(),
    )


@contextmanager
def _ended_by_signal(agent: NodeAgent, drain_s: float) -> Iterator[None]:
    """The first asks to end: the head, which may have got the same, has its time to finish what it streams, and tells
    this node when it is over. The second, or that time, ends it; the first does where there is no head yet."""
    asked = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if asked.is_set() or not agent.joined:
            raise _Ended
        asked.set()
        log.info("waiting up to %g s for the head to finish; a second signal ends this node at once", drain_s)
        timer = threading.Timer(drain_s, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
