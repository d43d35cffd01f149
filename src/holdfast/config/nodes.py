"""Settings of one model over several machines (nodes), in vLLM's words; and what of them contradicts each other."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.config.setting import number, optional, setting, text, whole
from holdfast.errors import ConfigurationError
from holdfast.units import counted

WRONG_NODES = "HF139"
DEFAULT_PORT = 29501
LEAST_SECRET = 16
"""Characters that a secret has: whoever can call the head can try guesses at home (engine/ranks/nodes/secret.py)."""
MAKE_SECRET = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
DEFAULT_TIMEOUT_S = 600.0


class NodeSettings(Protocol):
    """Those of an engine that have to do with nodes."""

    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def master_addr(self) -> str: ...
    @property
    def node_secret(self) -> str | None: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...


def address(field: str, value: Any) -> str:
    """Of IPv6 with the brackets that a URL would have, or without them."""
    given = text(field, value).strip()
    return given[1:-1] if given.startswith("[") and given.endswith("]") else given


def nnodes_setting() -> Any:
    return setting(
        1,
        "number of machines (nodes) that the ranks of -tp and -pp are on, as many on each; every node is started by"
        " itself, with the same sizes",
        whole(1, 1024),
        flags=("-n",),
    )


def node_rank_setting() -> Any:
    return setting(0, "number of this node; 0 is the head, which serves the API", whole(0, 1023), flags=("-r",))


def master_addr_setting() -> Any:
    return setting(
        "127.0.0.1",
        "address of the head, at which it awaits the other nodes and they reach it",
        address,
        metavar="ADDRESS",
    )


def master_port_setting() -> Any:
    return setting(DEFAULT_PORT, "port of the head for the other nodes", whole(0, 65535), metavar="PORT")


def node_addr_setting() -> Any:
    return setting(
        None,
        "address of this machine at which other nodes reach it; default: the one that it reaches the head from, and of"
        " the head master_addr, at which it listens then",
        optional(address),
        metavar="ADDRESS",
    )


def node_secret_setting() -> Any:
    return setting(
        None,
        "what nodes prove to one another that they know, the same on all; default: the head makes one and prints it."
        " Better in HOLDFAST_NODE_SECRET or a file than here, where others see it",
        optional(text),
        metavar="SECRET",
    )


def node_secret_file_setting() -> Any:
    return setting(None, "file whose first line is the node secret", optional(text), metavar="FILE")


def node_timeout_setting() -> Any:
    return setting(
        DEFAULT_TIMEOUT_S,
        "seconds that the head waits for all nodes, at start and after a fault, and that a node looks for the head",
        number(1, 86400),
        metavar="SECONDS",
    )


def check_nodes(config: NodeSettings) -> None:
    """Raises where sizes contradict each other. Nothing is read and nobody is asked."""
    nodes, ranks = config.nnodes, config.tensor_parallel_size * config.pipeline_parallel_size
    if config.node_rank >= nodes:
        raise _wrong(
            f"node_rank is {config.node_rank}, of {nodes}",
            needed=f"0 to {nodes - 1}; nodes are counted from 0",
            field="node_rank",
        )
    if nodes == 1:
        return
    if config.master_addr in ("0.0.0.0", "::", ""):
        raise _wrong(
            f"master_addr is {config.master_addr!r}, which no other node can reach",
            needed="an address or a name of the head, the same on all nodes",
            field="master_addr",
        )
    if ranks % nodes:
        raise _wrong(
            f"{counted(ranks, 'rank')} (-tp {config.tensor_parallel_size} x -pp {config.pipeline_parallel_size})"
            f" cannot be on {nodes} nodes, as many on each",
            needed="a number of ranks that nnodes divides",
            fix=f"-pp {nodes}, with -tp for the ranks of one node",
            field="nnodes",
        )
    if config.data_parallel_size > 1:
        raise _wrong(
            "engines of data_parallel_size are on one machine so far",
            needed="nnodes or data_parallel_size",
            fix="leave --data-parallel-size out",
            field="data_parallel_size",
        )
    if config.node_secret is not None and len(config.node_secret) < LEAST_SECRET:
        raise _wrong(
            f"the node secret is too short: {len(config.node_secret)} characters",
            needed=f"{LEAST_SECRET} characters or more, the same on all nodes",
            fix=f"a secret that {MAKE_SECRET} prints, in HOLDFAST_NODE_SECRET on all nodes",
            field="node_secret",
        )


def _wrong(message: str, *, needed: str, field: str, fix: str | None = None) -> ConfigurationError:
    return ConfigurationError(message, code=WRONG_NODES, needed=needed, fix=fix, field=field)
