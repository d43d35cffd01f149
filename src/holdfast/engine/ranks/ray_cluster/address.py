"""Where the Ray cluster is that a server shall use, and whether anybody answers there. Ray itself waits for minutes for
a cluster that is gone, and repeats it; so an address is asked before Ray is.
"""

from __future__ import annotations

import importlib
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from holdfast.config.parts.executors import NO_RAY
from holdfast.errors import ConfigurationError

ANSWERS_S = 3.0
"""For the head of a cluster to take a connection."""
KNOWN_VERSION = "2.60.0"
"""Of Ray, which has all that is used of it."""
A_CLUSTER = "a Ray cluster that runs, with this machine as a node of it"


def cluster_address() -> str:
    """Of the cluster that RAY_ADDRESS names, or that this machine is a node of, or was last. Somebody answers there."""
    named = os.environ.get("RAY_ADDRESS") or "auto"
    if named.startswith("ray://") or named == "local":
        raise no_cluster(
            f"RAY_ADDRESS is {named}, but rank 0 runs where the server does, on a node of the cluster",
            "the address of the cluster's head, such as 10.0.0.1:6379, on one of its nodes",
        )
    if named != "auto":
        _ask(named, f"RAY_ADDRESS is {named}", "the HOST:PORT of a cluster that runs")
        return named
    find = part_of_ray("ray._private.services", "canonicalize_bootstrap_address_or_die")
    try:
        found = str(find("auto"))
    except (ConnectionError, ValueError) as error:
        raise no_cluster(f"RAY_ADDRESS is not set, and on this machine none runs: {first_line(error)}") from None
    _ask(found, f"the last cluster that this machine was a node of was at {found}", A_CLUSTER)
    return found


def part_of_ray(module: str, name: str) -> Any:
    """What a version of Ray may not have: some of what is used is not public, and public nowhere."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"this version of Ray has no {module}.{name}, which Holdfast uses",
            code=NO_RAY,
            needed="a version of Ray that has it, the same on all nodes of the cluster",
            found=f"ray {_ray_version()}: {first_line(error)}",
            fix=f"pip install 'ray=={KNOWN_VERSION}' on all nodes, and ray stop and ray start there",
            field="distributed_executor_backend",
        ) from None


def _ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return "of an unknown version"


def _ask(address: str, source: str, needed: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise no_cluster(f"{source}, which is not HOST:PORT", needed)
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        why = f"nobody within {ANSWERS_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise no_cluster(f"{source}, where nobody answers: {why}", needed, head=address) from None


def no_cluster(why: str, needed: str = A_CLUSTER, *, head: str = "HEAD:6379") -> ConfigurationError:
    """`head`: where machines join the cluster, as far as that is known."""
    return ConfigurationError(
        "there is no Ray cluster to use",
        code=NO_RAY,
        needed=needed,
        found=why,
        fix=f"where the cluster runs at {head}: ray start --address={head} on this machine, with the cluster's Ray and"
        " Python; for a cluster of this machine alone: ray start --head, without RAY_ADDRESS",
        field="distributed_executor_backend",
    )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
