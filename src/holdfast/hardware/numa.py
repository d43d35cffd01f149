"""Memory of a machine with several NUMA nodes: which there are, and allocations spread over them. Linux; elsewhere
there is one node. Knows no weights and no threads."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_NODES = 1024
DEFAULT, INTERLEAVE = 0, 3
"""Policies, as linux/mempolicy.h numbers them."""
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""set_mempolicy and get_mempolicy by architecture: libc has no functions for them."""


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Nodes that have memory and that this process may take it from; of one where the system does not tell."""
    there = _numbers(_text(root / "sys/devices/system/node/has_memory"))
    allowed = there
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            allowed = _numbers(line.partition(":")[2])
    return tuple(sorted(there & allowed)) or (0,)


@contextlib.contextmanager
def interleaved(nodes: tuple[int, ...]) -> Iterator[bool]:
    """What this thread touches first within lies on these nodes in turn, page by page. False: the system does not allow
    it (containers often do not), or another policy was set, which holds."""
    spread = thread_policy() == DEFAULT and _set_policy(INTERLEAVE, nodes)
    try:
        yield spread
    finally:
        if spread:
            _set_policy(DEFAULT, ())


def thread_policy() -> int | None:
    """None: the system does not tell."""
    found = ctypes.c_int(0)
    return found.value if _call(1, ctypes.byref(found), None, 0, None, 0) else None


def _set_policy(policy: int, nodes: tuple[int, ...]) -> bool:
    mask = (ctypes.c_uint64 * (MOST_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    return _call(0, policy, mask if nodes else None, MOST_NODES if nodes else 0)


def _call(which: int, *arguments: object) -> bool:
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return False
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *arguments)) == 0


def _numbers(text: str) -> set[int]:
    """Of a list such as 0-3,8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit() and (last or first).strip().isdigit():
            found.update(range(int(first), min(int(last or first), MOST_NODES - 2) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
