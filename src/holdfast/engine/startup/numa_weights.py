"""Weights on a machine with several NUMA nodes: spread over all while they are loaded. Loads nothing itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from holdfast.hardware import numa

log = logging.getLogger("holdfast")


@contextlib.contextmanager
def spread_over_nodes() -> Iterator[None]:
    """What this thread loads within. Threads of all nodes read it: left to itself, all would lie on one node, and one
    memory controller would serve every core. A policy that the user has set (numactl) holds."""
    nodes = numa.memory_nodes()
    if len(nodes) == 1 or numa.thread_policy() not in (None, numa.DEFAULT):
        yield
        return
    with numa.interleaved(nodes) as spread:
        if spread:
            log.info("weights are spread over %d NUMA nodes", len(nodes))
        else:
            log.warning(
                "weights may lie on one of %d NUMA nodes: set_mempolicy is not allowed here; "
                "`numactl --interleave=all holdfast serve`, or docker's --cap-add SYS_NICE, spreads them",
                len(nodes),
            )
        yield
