"""The command of an engine on several machines, once for each: the head's first. Knows how engines are told of other
machines, and chooses how many only where a plan names more GPUs than Holdfast's ranks of one machine can be.

    --nnodes 2 --node-rank 0 --master-addr HEAD               the head, which serves the API
    --nnodes 2 --node-rank 1 --master-addr HEAD --headless    the other
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.footprint.gpu import MOST_EXCHANGE_RANKS
from holdfast.planner.engines.command import Command
from holdfast.planner.fit.result import Plan
from holdfast.units import counted

HEAD = "HEAD"
"""Stands for what only the user knows."""
_HEAD_SAID = f"{HEAD}: the address of node 0 at which the other nodes reach it; the same in all of them"
_SECRET_SAID = "first, on every node: export HOLDFAST_NODE_SECRET=SECRET, the same on all (openssl rand -hex 32)"
SGLANG_PORT = 20000


def machines_meant(fit: Plan) -> int:
    """Of Holdfast, over how many machines stages are spread where more GPUs were named than ranks of one machine map
    the memory of: the fewest with whole stages on each. As many as were asked for where there are no more, or where
    GPUs differ or are those of this machine."""
    settings, devices = fit.question.settings, [rank.device for rank in fit.ranks]
    ranks, stages, first = len(devices), fit.pipeline_parallel, devices[0]
    own = settings.nodes, settings.data_parallel
    if own != (1, 1) or first.kind != "gpu" or ranks <= MOST_EXCHANGE_RANKS or first.gpu is None:
        return settings.nodes
    if any(device.measured or device.gpu != first.gpu for device in devices):
        return settings.nodes
    able = (nodes for nodes in range(2, stages + 1) if stages % nodes == 0 and ranks // nodes <= MOST_EXCHANGE_RANKS)
    return next(able, 1)


def machines_said(fit: Plan, nodes: int) -> tuple[str, ...]:
    """Where they were not asked for."""
    first, each = fit.ranks[0].device, len(fit.ranks) // nodes
    if nodes == fit.question.settings.nodes or first.gpu is None:
        return ()
    again = f"--gpu {first.gpu.key}{f'x{each}' if each > 1 else ''} --nnodes {nodes}"
    return (
        f"taken as {nodes} machines with {counted(each, 'GPU')} each, since no more than {MOST_EXCHANGE_RANKS} ranks of"
        f" one map one another's memory; {again} and these sizes plan them so, with the network between them",
    )


def on_nodes(command: Command, nodes: int) -> Command:
    """As it is where there is one, or where there is no command."""
    if nodes == 1 or not command.text:
        return command
    if command.engine == "llama.cpp":
        alone = "llama-server is one process on one machine; its RPC servers on others are not planned"
        return replace(command, text="", available=False, notes=(alone,), lacks=(alone,))
    said = (_SECRET_SAID, _HEAD_SAID) if command.engine == "holdfast" else (_HEAD_SAID,)
    each = tuple(f"{command.text} {_place(command.engine, node, nodes)}" for node in range(nodes))
    return replace(command, text=each[0], nodes=each, notes=(*said, *command.notes))


def _place(engine: str, node: int, nodes: int) -> str:
    if engine == "sglang":
        return f"--nnodes {nodes} --node-rank {node} --dist-init-addr {HEAD}:{SGLANG_PORT}"
    return f"--node-rank {node} --master-addr {HEAD}{' --headless' if node else ''}"
