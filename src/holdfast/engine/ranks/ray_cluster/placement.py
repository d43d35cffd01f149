"""On how many nodes of a Ray cluster the ranks of an engine go, as many on each; or why on none. Numbers only: asks no
cluster.

    node 0       where the server runs: rank 0 is its engine process
    as few       nodes as can be, but the ranks of a stage, which add up twice a layer, on one node if any number of
                 nodes allows that; of ranks on GPUs only then
    one bundle   of the placement group for each node, with what all of its ranks take
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.errors import ConfigurationError, NoResourcesError
from holdfast.units import format_bytes

CLUSTER_TOO_SMALL = "HF155"
MOST_NAMED = 8
"""Nodes that a message names."""


class NodeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What Ray counts on one node, and what of it nobody has."""

    id: str
    address: str
    name: str
    cpus: float
    free_cpus: float
    gpus: float = 0.0
    free_gpus: float = 0.0
    memory_bytes: int = 0
    free_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    tensor_parallel: int
    pipeline_parallel: int
    kind: str = "CPU"
    """What a rank takes one of, or more: CPU or GPU."""
    threads: int | None = None
    """CPUs of a node, where that was set."""
    memory_bytes: int | None = None
    """Of a node, where that was set."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def room(self, node: NodeRoom, *, free: bool = True) -> int:
        """Ranks that a node has room for."""
        if (
            self.memory_bytes is not None
            and (node.free_memory_bytes if free else node.memory_bytes) < self.memory_bytes
        ):
            return 0
        if self.kind == "GPU":
            return int(node.free_gpus if free else node.gpus)
        cpus = int(node.free_cpus if free else node.cpus)
        return cpus if self.threads is None or cpus >= self.threads else 0

    @property
    def words(self) -> str:
        sizes = f"-tp {self.tensor_parallel} x -pp {self.pipeline_parallel}"
        many = "s" if self.ranks > 1 else ""
        each = [f"{self.threads} CPUs"] if self.threads is not None and self.kind == "CPU" else []
        each += [] if self.memory_bytes is None else [f"{format_bytes(self.memory_bytes)} of memory"]
        nodes = f", on nodes with {' and '.join(each)} free" if each else ""
        return f"{self.ranks} rank{many} ({sizes}), each with a {self.kind}{nodes}"


@dataclass(frozen=True, slots=True)
class RayPlacement:
    nodes: int
    each: int
    """Ranks on every node."""
    kind: str
    amount: int
    """Of that kind, reserved on every node."""
    memory_bytes: int | None = None

    def bundles(self, home: NodeRoom) -> list[dict[str, float]]:
        """Of the placement group. The first is held to the node where the server runs."""
        own = {self.kind: float(self.amount)}
        if self.memory_bytes is not None:
            own["memory"] = float(self.memory_bytes)
        return [own | {f"node:{home.address}": 0.001}, *(dict(own) for _ in range(1, self.nodes))]

    @property
    def strategy(self) -> str:
        """A node's ranks share its memory, which is planned by what is free there: no two bundles on one."""
        return "STRICT_PACK" if self.nodes == 1 else "STRICT_SPREAD"


def place(
    cluster: Sequence[NodeRoom], home_id: str, wanted: Wanted, *, nodes: int | None = None, head: str = "HEAD:6379"
) -> RayPlacement:
    """`home_id`: of the node where the server runs. `nodes`: their number, where an engine has them already. `head`:
    where other machines join the cluster. Raises ConfigurationError where it is too small, NoResourcesError where only
    others are in the way for now."""
    found = _best(cluster, home_id, wanted, nodes, free=True)
    if found is not None:
        return found
    if _best(cluster, home_id, wanted, nodes, free=False) is not None:
        raise NoResourcesError(
            f"the Ray cluster has no room now for {wanted.words}: other jobs have reserved it",
            code=CLUSTER_TOO_SMALL,
            needed=_needed(wanted, nodes),
            found=_found(cluster, home_id, wanted),
            fix="wait for them, or end what ray status and ray list placement-groups show",
        )
    raise ConfigurationError(
        f"the Ray cluster has no room for {wanted.words}",
        code=CLUSTER_TOO_SMALL,
        needed=_needed(wanted, nodes),
        found=_found(cluster, home_id, wanted),
        fix=_fix(cluster, home_id, wanted, head),
        field="tensor_parallel_size",
    )


def _best(
    cluster: Sequence[NodeRoom], home_id: str, wanted: Wanted, fixed: int | None, *, free: bool
) -> RayPlacement | None:
    rooms = {node.id: wanted.room(node, free=free) for node in cluster}
    home = rooms.pop(home_id, 0)
    others = sorted(rooms.values(), reverse=True)
    for count in _counts(wanted) if fixed is None else [fixed]:
        each = wanted.ranks // count
        if home < each or sum(room >= each for room in others) < count - 1:
            continue
        least = min([home, *others[: count - 1]])
        amount = each if wanted.kind == "GPU" else wanted.threads or least
        return RayPlacement(count, each, wanted.kind, max(each, amount), wanted.memory_bytes)
    return None


def _counts(wanted: Wanted) -> list[int]:
    """Numbers of nodes, the better ones first."""
    counts = [count for count in range(1, wanted.ranks + 1) if wanted.ranks % count == 0]
    if wanted.kind == "GPU":  # Those of a stage add up over CUDA IPC.
        counts = [count for count in counts if wanted.ranks // count % wanted.tensor_parallel == 0]
    return sorted(counts, key=lambda count: ((wanted.ranks // count) % wanted.tensor_parallel != 0, count))


def _needed(wanted: Wanted, fixed: int | None) -> str:
    counts = sorted(_counts(wanted) if fixed is None else [fixed])
    least = wanted.threads if wanted.threads is not None and wanted.kind == "CPU" else 0
    amounts = [(count, max(least, wanted.ranks // count)) for count in counts]
    each = " or ".join(
        f"{amount} on each of {count} nodes" if count > 1 else f"{amount} here" for count, amount in amounts
    )
    each += ", this one among them" if counts[-1] > 1 else ""
    memory = "" if wanted.memory_bytes is None else f", with {format_bytes(wanted.memory_bytes)} of memory on each"
    return f"free {wanted.kind}s: {each}{memory}"


def _found(cluster: Sequence[NodeRoom], home_id: str, wanted: Wanted) -> str:
    if not cluster:
        return "no nodes"
    ordered = sorted(cluster, key=lambda node: (node.id != home_id, -wanted.room(node)))
    shown = [_shown(node, wanted.kind, here=node.id == home_id) for node in ordered[:MOST_NAMED]]
    more = f"; {len(ordered) - MOST_NAMED} more nodes" if len(ordered) > MOST_NAMED else ""
    return "; ".join(shown) + more


def _shown(node: NodeRoom, kind: str, *, here: bool) -> str:
    free, total = (node.free_gpus, node.gpus) if kind == "GPU" else (node.free_cpus, node.cpus)
    memory = f", {format_bytes(node.free_memory_bytes)} of memory" if node.free_memory_bytes else ""
    return f"{node.name} ({node.address}{', this one' if here else ''}): {free:g} of {total:g} {kind}s free{memory}"


def _fix(cluster: Sequence[NodeRoom], home_id: str, wanted: Wanted, head: str) -> str:
    here = next((node for node in cluster if node.id == home_id), None)
    flag = "--num-gpus" if wanted.kind == "GPU" else "--num-cpus"
    if here is None or wanted.room(here, free=False) == 0:
        return _fix_here(here, wanted, flag)
    join = f"on another machine: ray start --address={head} {flag}=N"
    smaller = [
        f"-tp {tensor} -pp {pipeline}" if wanted.pipeline_parallel > 1 else f"-tp {tensor}"
        for tensor, pipeline in _smaller(wanted)
        if _best(
            cluster, home_id, replace(wanted, tensor_parallel=tensor, pipeline_parallel=pipeline), None, free=False
        )
    ]
    return f"{join}; or {smaller[0]}" if smaller else join


def _fix_here(here: NodeRoom | None, wanted: Wanted, flag: str) -> str:
    """Of a node that has room for no rank at all: rank 0 is where the server runs."""
    if here is not None and wanted.memory_bytes is not None and here.memory_bytes < wanted.memory_bytes:
        return f"--ram {max(1, here.memory_bytes >> 20)}MiB or less, or start the server on a node with more memory"
    if here is not None and wanted.kind == "CPU" and wanted.threads is not None and here.cpus >= 1:
        return f"--threads {int(here.cpus)} or less, or start the server on a node with more CPUs"
    return f"start the server on a node with {wanted.kind}s, or ray start with {flag} on this one"


def _smaller(wanted: Wanted) -> list[tuple[int, int]]:
    """Sizes with fewer ranks, most first."""
    sizes = [
        (tensor, pipeline)
        for tensor in range(1, wanted.tensor_parallel + 1)
        for pipeline in range(1, wanted.pipeline_parallel + 1)
        if tensor * pipeline < wanted.ranks and wanted.tensor_parallel % tensor == 0
    ]
    return sorted(sizes, key=lambda size: (-size[0] * size[1], -size[0]))
