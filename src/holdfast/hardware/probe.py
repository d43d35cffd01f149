"""What this machine has, read from the kernel: memory as a container sees it, cores, CPU features. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    total_bytes: int
    available_bytes: int
    """What can be taken now without swapping or being killed: the least of the machine's and the container's."""
    limited_by: str
    """machine, or the control group that is tighter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    model: str
    cores: int
    """Those this process may run on."""
    features: frozenset[str]

    @property
    def fast_bfloat16(self) -> bool:
        return bool(self.features & {"amx_bf16", "avx512_bf16", "bf16"})


def memory(root: Path = Path("/")) -> Memory:
    machine = psutil.virtual_memory()
    total, available, limited_by = machine.total, machine.available, "machine"
    group = _control_group_limit(root)
    if group is not None:
        limit, used = group
        if limit < total:
            total = limit
        if max(0, limit - used) < available:
            available, limited_by = max(0, limit - used), "control group"
    return Memory(total_bytes=total, available_bytes=available, limited_by=limited_by)


@cache
def processor() -> Processor:
    model, features = "unknown", frozenset[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name in ("flags", "Features") and not features:
                features = frozenset(value.split())
            elif name == "model name" and model == "unknown":
                model = value
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Processor(model=model, cores=cores, features=features)


def _control_group_limit(root: Path) -> tuple[int, int] | None:
    """(limit, in use and not reclaimable) of the tightest control group above this process; v2, then v1."""
    tightest: tuple[int, int] | None = None
    for folder, limit_file, used_file in _control_group_files(root):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None or limit >= 1 << 60:
            continue
        used -= min(used, _statistic(folder / "memory.stat", "inactive_file"))
        if tightest is None or limit - used < tightest[0] - tightest[1]:
            tightest = (limit, used)
    return tightest


def _control_group_files(root: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # A container often sees its own group as the root, so every level up to the mount counts.
        for level in (folder, *folder.parents):
            found.append((level, *names))
            if level == base:
                break
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
