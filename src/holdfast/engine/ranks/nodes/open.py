"""The head of an engine on several machines while it starts: opened, and all other nodes awaited."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.report import report_of
from holdfast.engine.ranks.nodes.secret import with_secret
from holdfast.errors import HoldfastError
from holdfast.planner import Plan
from holdfast.planner.serve.nodes import NodeMemory, fit_nodes
from holdfast.records import Failure

log = logging.getLogger("holdfast")


def join_nodes(
    config: EngineConfig, files: ModelFiles, plan: Plan, progress: Callable[[str, int, int], None]
) -> tuple[NodeHub | None, Plan]:
    """With the plan as all nodes can hold it. None: there is one node."""
    if config.nnodes == 1:
        return None, plan
    config, made = with_secret(config)
    if made:
        log.warning("start the other nodes with HOLDFAST_NODE_SECRET=%s", config.node_secret)
    assert config.node_secret is not None
    own = report_of(config, files, config.node_addr or config.master_addr)
    stages = max(1, len(plan.engine.stages))
    hub = NodeHub(config.master_addr, config.master_port, config.node_secret, own, stages, plan.engine.rank_count)
    try:
        hub.await_nodes(config.node_timeout, lambda done, total: progress("nodes", done, total))
        plan = fit_nodes(plan, config, [NodeMemory(one.free_bytes, one.name) for one in hub.reports])
    except HoldfastError as error:
        hub.close(again=False, failure=Failure.of(error))
        raise
    except BaseException:
        hub.close(again=True)
        raise
    return hub, plan
