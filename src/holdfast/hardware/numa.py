"""NUMA nodes that this process computes on, and pages spread over them. Knows addresses, no tensors.

Rows of a matrix are handed to whichever thread asks next, so no page has a node that it is read from: pages take turns
(mbind), and every node's memory is read at the same rate. A policy of the loading thread would not do: it would hold
for whatever that thread allocates, and for nodes whose cores this process may not use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE, _MOVE = 3, 2


@dataclass(frozen=True, slots=True)
class NumaNodes:
    """`numbers`: those with cores that this process may use and memory that it may have. `refused`: why pages cannot be
    spread over them."""

    numbers: tuple[int, ...]
    refused: str | None = None

    @property
    def spread(self) -> bool:
        return len(self.numbers) > 1 and self.refused is None


def allowed_nodes(root: Path = Path("/"), processors: frozenset[int] | None = None) -> tuple[int, ...]:
    """`processors`: of this process, by default those that it may run on."""
    if processors is None:
        processors = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    memory = _allowed_memory(root)
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name.removeprefix("node"))
            if processors & _listed((folder / "cpulist").read_text()) and (memory is None or number in memory):
                found.append(number)
    return tuple(sorted(found))


def spread_pages(address: int, length: int, nodes: tuple[int, ...]) -> int:
    """The pages of these bytes take turns among the nodes, those that are there already too. 0, or the error's number.

    Pages at the ends that are shared with neighbours are among them: matrices that lie side by side, as experts do,
    then have one policy. With pages between them that have another, each would be two areas of memory, and a process
    may have some 65,000. Fewer bytes than a page are left alone."""
    page = mmap.PAGESIZE
    first, last = address // page * page, -(-(address + length) // page) * page
    return _mbind(first, last - first, nodes) if length >= page else 0


@cache
def numa_nodes() -> NumaNodes:
    """Of this process. Where there are several, the system is asked once whether it lets pages be spread."""
    nodes = allowed_nodes()
    if len(nodes) < 2:
        return NumaNodes(nodes)
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as trial:
        place = ctypes.c_char.from_buffer(trial)
        failed = spread_pages(ctypes.addressof(place), len(trial), nodes)
        del place
    return NumaNodes(nodes, None if not failed else f"mbind: {os.strerror(failed)}")


def _mbind(address: int, length: int, nodes: tuple[int, ...]) -> int:
    number = _MBIND.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)(*(sum(1 << node % 64 for node in nodes if node // 64 == i) for i in range(words)))
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(_INTERLEAVE),
        mask,
        ctypes.c_ulong(64 * words + 1),
        ctypes.c_uint(_MOVE),
    )
    return ctypes.get_errno() if failed else 0


def _allowed_memory(root: Path) -> frozenset[int] | None:
    """Nodes whose memory the process may have; None: the system does not tell."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.partition(":")[2] for line in lines if line.startswith("Mems_allowed_list:")]
    return _listed(found[0]) if found else None


def _listed(text: str) -> frozenset[int]:
    """Of a list like "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)
