"""The head of an engine on several machines while it starts: opened, all other nodes awaited, and what is free on them
known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from holdfast.checkpoints import ModelFiles, StoredTensor, match, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.config.nodes import WRONG_NODES
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.report import named_ranks, report_of
from holdfast.engine.ranks.nodes.secret import with_secret
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.hardware import Memory, memory, processor
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner import Plan, make_cpu_plan
from holdfast.planner.serve.shares.nodes import (
    NodeMemory,
    NodeRefusal,
    available_everywhere,
    fit_nodes,
    with_node_remedies,
)
from holdfast.records import Failure
from holdfast.units import counted

log = logging.getLogger("holdfast")


def join_nodes(
    config: EngineConfig,
    files: ModelFiles,
    plan: Plan,
    progress: Callable[[str, int, int], None],
    *,
    again: bool = False,
) -> tuple[NodeHub | None, Plan]:
    """With the plan as all nodes can hold it. None: there is one node. `again`: these nodes have served, and shall come
    again where this start fails: another follows. Where it is the first one, they end with what is wrong."""
    if config.nnodes == 1:
        return None, plan

    def held(hub: NodeHub) -> Plan:
        return _held(plan, config, [NodeMemory(one.free_bytes, one.name) for one in hub.reports], files)

    return _joined(config, files, plan, progress, held, again)


def join_gpu_nodes(
    config: EngineConfig,
    files: ModelFiles,
    plan: Plan,
    progress: Callable[[str, int, int], None],
    planned: Callable[[Sequence[NvidiaGpu]], Plan],
    *,
    again: bool = False,
) -> tuple[NodeHub | None, Plan]:
    """The same of ranks on GPUs. `planned`: for these GPUs, one for each rank, with what is free on them."""
    if config.nnodes == 1:
        return None, plan
    return _joined(config, files, plan, progress, lambda hub: planned(_gpus_of_all(hub)), again)


def _gpus_of_all(hub: NodeHub) -> list[NvidiaGpu]:
    for report in hub.reports:
        if len(report.gpus) != hub.spread.each:
            ranks = named_ranks(hub.spread.ranks_of(report.node))
            raise ConfigurationError(
                f"node {report.node} ({report.name}) has no GPUs for {ranks}, and the head computes on GPUs",
                code=WRONG_NODES,
                needed=f"{counted(hub.spread.each, 'GPU')} on each node",
                found=f"{counted(len(report.gpus), 'GPU')} there",
                fix="a driver, and a torch with CUDA, on that node and no --device cpu there; or --device cpu on all",
                field="device",
            )
    return [gpu for report in hub.reports for gpu in report.gpus]


def _joined(
    config: EngineConfig,
    files: ModelFiles,
    plan: Plan,
    progress: Callable[[str, int, int], None],
    settled: Callable[[NodeHub], Plan],
    again: bool,
) -> tuple[NodeHub, Plan]:
    """`settled`: the plan for what all nodes have, or a refusal, of which they hear."""
    if config.node_rank > 0:
        raise ConfigurationError(
            f"node_rank is {config.node_rank}, and an engine is started by the head alone, which is node 0",
            code=WRONG_NODES,
            needed="node_rank 0 here; other nodes are started with holdfast serve",
            fix=f"holdfast serve MODEL --nnodes {config.nnodes} --node-rank {config.node_rank} --headless",
            field="node_rank",
        )
    config, made = with_secret(config)
    if made:
        log.warning("start the other nodes with HOLDFAST_NODE_SECRET=%s", config.node_secret)
    assert config.node_secret is not None
    host = config.node_addr or config.master_addr
    own, stages = report_of(config, files, host), max(1, len(plan.engine.stages))
    hub = NodeHub(host, config.master_port, config.node_secret, own, stages, plan.engine.rank_count)
    try:
        hub.await_nodes(config.node_timeout, lambda done, total: progress("nodes", done, total))
        plan = settled(hub)
    except HoldfastError as error:
        hub.close(again=again, failure=Failure.of(error))
        raise
    except BaseException:
        hub.close(again=True)
        raise
    return hub, plan


def _held(plan: Plan, config: EngineConfig, machines: Sequence[NodeMemory], files: ModelFiles) -> Plan:
    """By each of these; what to set where one cannot is planned for what it has."""
    try:
        return fit_nodes(plan, config, machines)
    except NodeRefusal as refusal:
        spec = plan.question.model.spec
        stored = None if config.load_format == "dummy" else match(spec, open_checkpoint(files))
        again = partial(_planned_again, plan, stored, files.format == "gguf")
        raise with_node_remedies(refusal, plan, config, machines, again) from None


def _planned_again(before: Plan, stored: Mapping[str, StoredTensor] | None, gguf: bool, config: EngineConfig) -> Plan:
    """With other settings, for the memory of the head as it was planned for."""
    model, settings, device = before.question.model, before.question.settings, before.device
    machine = Memory(
        total_bytes=device.total_bytes // settings.nodes,
        available_bytes=device.free_bytes // settings.nodes,
        limited_by=device.limited_by,
    )
    return make_cpu_plan(
        model.spec,
        stored,
        config,
        machine,
        processor(),
        name=model.name,
        gguf=gguf,
        compiled_kernels=before.question.machine.compiled_kernels,
        front_bytes=settings.front_bytes,
    )


def available_bytes(config: EngineConfig, plan: Plan, ranks: Sequence[Measured]) -> int:
    """After loading, for the KV pool and for what stays free; of several nodes what they have together, as far as the
    one with the least room lets them."""
    each = len(ranks) // config.nnodes
    nodes = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    given_back = [sum(rank.given_back_bytes for rank in node) for node in nodes]
    if len(nodes) == 1:
        return memory().available_bytes - given_back[0]
    return available_everywhere(plan, config, [min(rank.free_bytes for rank in node) for node in nodes], given_back)
