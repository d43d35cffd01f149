"""The command of an engine on several machines, once for each: the head's first. Knows how engines are told of other
machines, and no plan.

    --nnodes 2 --node-rank 0 --master-addr HEAD               the head, which serves the API
    --nnodes 2 --node-rank 1 --master-addr HEAD --headless    the other
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.planner.engines.command import Command

HEAD = "HEAD"
"""Stands for what only the user knows."""
_HEAD_SAID = f"{HEAD}: the address of node 0 at which the other nodes reach it; the same in all of them"
_SECRET_SAID = "first, on every node: export HOLDFAST_NODE_SECRET=SECRET, the same on all (openssl rand -hex 32)"
SGLANG_PORT = 20000


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
