"""What this machine is and how fast it could go: no host names, memory of a process tree, physical limits."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict


class Limits(TypedDict):
    read_gb_per_s: float
    fp32_gflop_per_s: float


class Machine(TypedDict):
    cpu: str
    cores: int
    memory_gib: float
    architecture: str
    kernel: str
    native_bfloat16: bool


def _cpu_flags() -> set[str]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def _cpu_name() -> str:
    if shutil.which("lscpu") is None:
        return platform.machine()
    listing = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    found = re.search(r"^Model name:\s*(.+)$", listing, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def describe_machine() -> Machine:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        memory_gib=round(memory_bytes / 2**30, 1),
        architecture=platform.machine(),
        kernel=platform.release().split("-")[0],
        native_bfloat16=bool(_cpu_flags() & {"bf16", "avx512_bf16", "amx_bf16"}),
    )


def machine_slug(machine: Machine) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")


def process_tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command's name may hold spaces and brackets: fields are counted after its closing one.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    tree, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        tree.append(process)
        waiting += children.get(process, [])
    return tree


def peak_rss_bytes(root: int) -> int:
    """Sum of each process's own peak (VmHWM) over the tree: never less than the real common peak."""
    total = 0
    for process in process_tree(root):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


LIMITS_CODE = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
large = torch.ones(1 << 28)
side = 2048
left, right = torch.randn(side, side), torch.randn(side, side)
def best(work):
    work()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
print(large.numel() * 4 / best(large.sum) / 1e9, 2 * side**3 / best(lambda: left @ right) / 1e9)
"""


def measure_limits(threads: int) -> Limits:
    """Reading 1 GiB once, and a 2048-cubed fp32 product: the best of three, in a process that ends afterwards."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    done = subprocess.run(
        ["taskset", "-c", cores, sys.executable, "-c", LIMITS_CODE, str(threads)],
        capture_output=True,
        text=True,
        check=True,
    )
    read, flops = (float(value) for value in done.stdout.split())
    return Limits(read_gb_per_s=read, fp32_gflop_per_s=flops)


def commit() -> str:
    root = Path(__file__).resolve().parents[1]
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def today() -> str:
    return time.strftime("%Y-%m-%d")
