"""What this machine has, read from the kernel: memory as a container sees it, cores, CPU features. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from holdfast.units import MIB, format_bytes

HOLDER_BYTES = 256 * MIB
"""Processes below this are not worth naming when memory is short."""
LARGE_BYTES = 1024 * MIB
"""Of a process of one's own whose pages are not looked at one by one."""


AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
KERNEL_VARIANTS = {
    "amx": AVX512 | {"avx512_vnni", "amx_tile", "amx_int8"},
    "avx512_vnni": AVX512 | {"avx512_vnni"},
    "avx512": AVX512,
    "avx_vnni": AVX2 | {"avx_vnni"},
    "avx2": AVX2,
    "neon_dotprod": frozenset({"asimddp"}),
    "portable": frozenset[str](),
}
"""Variants of the compiled kernels, the faster first, and the CPU features that each uses (setup.py says the same to
the compiler), as Linux spells them: it lists none that the operating system has not enabled."""
_ARCH_PRCTL, _SUPPORTED_STATES, _TILE_DATA = 158, 0x1021, 18
"""The call on x86-64, what it is asked, and the bit of the answer."""
DOT_PRODUCT_FEATURES = frozenset({"avx2", "asimddp"})
"""Without these, none but the portable kernels run."""


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
    """Physical ones, that this process may run on and a container's quota pays for."""
    features: frozenset[str]

    @property
    def fast_bfloat16(self) -> bool:
        return bool(self.features & {"amx_bf16", "avx512_bf16", "bf16"})

    @property
    def fast_block_products(self) -> bool:
        """Whether our compiled products beat expanded weights: those in integers do (measured); the portable ones, in
        floats, do not."""
        return any(needs and needs <= self.features for needs in KERNEL_VARIANTS.values())

    def fast_code_products(self, *, whole_numbers: bool) -> bool:
        """The same for codes and scales of quantized checkpoints. `whole_numbers`: all are multiplied in integers;
        those that become floats have fast products on x86 alone."""
        return self.fast_block_products and (whole_numbers or "avx2" in self.features)

    def copies_matrices(self, dtype: str) -> bool:
        """Whether torch's dense products copy the whole matrix first: those of oneDNN on Arm do, from about ten rows
        on (measured, torch 2.13). Execution leaves float32 to the BLAS, which does not."""
        return "asimd" in self.features and dtype != "float32"


@dataclass(frozen=True, slots=True)
class Resident:
    """RAM that one process holds, its share of files included."""

    now_bytes: int
    peak_bytes: int
    files_bytes: int = 0
    """Of what it holds now, pages of files, above all of libraries: the kernel can drop them."""


def memory(root: Path = Path("/")) -> Memory:
    import psutil  # Where GPUs are named, a plan measures nothing: it need not wait for this.

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


def resident(pid: int | None = None) -> Resident | None:
    """Of this process, or another; None when there is no such process, or the system does not tell."""
    found: dict[str, int] = {}
    try:
        with open(f"/proc/{'self' if pid is None else pid}/status") as status:
            for line in status:
                name, _, value = line.partition(":")
                if name in ("VmRSS", "VmHWM", "RssFile"):
                    found[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError):
        return None
    if "VmRSS" not in found:  # A process that has ended and was not waited for has no memory.
        return None
    return Resident(found["VmRSS"], max(found["VmRSS"], found.get("VmHWM", 0)), found.get("RssFile", 0))


def resident_tree(pid: int) -> Resident | None:
    """Of a process and the children it was forked into: pages that they share are counted once."""
    found = resident(pid)
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            pids = [int(child) for child in children.read().split()]
    except (OSError, ValueError):
        return found
    own = sum(_unshared_bytes(child) for child in pids)
    return None if found is None else Resident(found.now_bytes + own, found.peak_bytes + own, found.files_bytes)


def family_bytes(root: int, but: int) -> int:
    """What a process and all that come from it hold by themselves, all but one. What forks share is nobody's."""
    total, left = 0, [root]
    while left:
        pid = left.pop()
        left += _children(pid)
        if pid != but:
            total += _held_bytes(pid)
    return total


def _held_bytes(pid: int) -> int:
    """Of a large process what the system counts anyway: looking at every page takes 45 ms a GiB, and it cannot map any
    memory meanwhile. What it shares with forks is a small part of it."""
    found = resident(pid)
    if found is not None and found.now_bytes - found.files_bytes > LARGE_BYTES:
        return found.now_bytes - found.files_bytes
    return _unshared_bytes(pid)


def _children(pid: int) -> list[int]:
    """Of all its threads."""
    found = list[int]()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/children") as children:
                found += [int(child) for child in children.read().split()]
    except OSError:
        return found
    return found


def _unshared_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A process that is not ours."""

    name: str
    pid: int
    nbytes: int


def largest_holders(most: int = 3, besides: Collection[int] = ()) -> list[MemoryHolder]:
    """The other processes that hold most RAM, the largest first. A container sees only its own. Reads a file of every
    process: on a machine with a thousand that takes tens of milliseconds."""
    import psutil

    found: list[MemoryHolder] = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        held = process.info["memory_info"]
        if held is not None and held.rss >= HOLDER_BYTES and process.pid not in (os.getpid(), *besides):
            found.append(MemoryHolder(str(process.info["name"]), process.pid, held.rss))
    return sorted(found, key=lambda holder: holder.nbytes, reverse=True)[:most]


def memory_holders(most: int = 3) -> tuple[str, ...]:
    """The same for people to read."""
    return tuple(f"{one.name} (pid {one.pid}) {format_bytes(one.nbytes)}" for one in largest_holders(most))


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
    if "amx_tile" in features and not _tiles_can_be_had():
        features = frozenset(name for name in features if not name.startswith("amx_"))
    return Processor(model=model, cores=usable_cores(), features=features)


def _tiles_can_be_had() -> bool:
    """AMX: Linux gives a process the state of tiles when it asks. A sandbox may list the feature and not know the
    call."""
    import ctypes

    supported = ctypes.c_uint64(0)
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.syscall(_ARCH_PRCTL, _SUPPORTED_STATES, ctypes.byref(supported))
    return not failed and bool(supported.value >> _TILE_DATA & 1)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical ones that this process may run on, and no more than a container's CPU quota pays for."""
    cores = _physical(root, os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for folder in _control_group_folders(root, "cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = str(_number(folder / "cpu.cfs_quota_us")), str(_number(folder / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def _physical(root: Path, processors: Iterable[int]) -> int:
    """How many cores these logical processors are: two hyperthreads of a core compute no faster than one. Where the
    system does not tell which belong together, each is a core."""
    cores = set[str]()
    for number in processors:
        folder, siblings = root / f"sys/devices/system/cpu/cpu{number}/topology", f"only {number}"
        for name in ("core_cpus_list", "thread_siblings_list"):
            try:
                siblings = (folder / name).read_text().strip() or siblings
                break
            except OSError:
                continue
        cores.add(siblings)
    return max(1, len(cores))


def _control_group_limit(root: Path) -> tuple[int, int] | None:
    """(limit, in use and not droppable) of the tightest control group above this process; v2, then v1. Beyond
    memory.high, which Kubernetes sets below the limit of a container, nothing is killed, but all of it is slowed down
    until it swaps."""
    shared = _mapped_shared_bytes(root)
    tightest: tuple[int, int] | None = None
    for folder in _control_group_folders(root, "memory"):
        limits = (_number(folder / "memory.max", folder / "memory.limit_in_bytes"), _number(folder / "memory.high"))
        limit = min((one for one in limits if one is not None), default=None)
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= 1 << 60:
            continue
        used -= min(used, _droppable_bytes(folder / "memory.stat", shared))
        if tightest is None or limit - used < tightest[0] - tightest[1]:
            tightest = (limit, used)
    return tightest


def _control_group_folders(root: Path, controller: str) -> list[Path]:
    """Of every group this process is in, from its own up to the mount: a container often sees its own as the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            found.append(level)
            if level == base:
                break
    return found


def _number(*paths: Path) -> int | None:
    """From the first of these files that holds one."""
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _mapped_shared_bytes(root: Path) -> int:
    """Shared memory that this process has mapped."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) * 1024
    return 0


def _droppable_bytes(statistics: Path, shared_bytes: int) -> int:
    """Page cache that the kernel drops before it kills anything of this control group, in the way in which MemAvailable
    counts it of the machine: pages that were read twice (active_file) are dropped as well, only later. A group has no
    watermarks that could say how much of them stays in use: files that programs have mapped do, and what is not written
    yet cannot be dropped. All of that is taken off the active pages. Memory that is shared is counted as mapped files
    where it is mapped, but lies on no list of files: as far as it is known to be mapped, by this process
    (`shared_bytes`), it is not taken off. Of slab_reclaimable nobody knows what is in use: it counts as used."""
    found = dict[str, int]()
    try:
        for line in statistics.read_text().splitlines():
            name, _, value = line.partition(" ")
            found[name] = int(value)
    except (OSError, ValueError):
        pass

    def told(version_1: str, version_2: str) -> int:
        """Of the groups below, too, as usage and limit are: version 1 has these beside the group's own."""
        return found.get(f"total_{version_1}", found.get(version_2, 0))

    mapped = max(0, told("mapped_file", "file_mapped") - min(shared_bytes, told("shmem", "shmem")))
    unwritten = told("dirty", "file_dirty") + told("writeback", "file_writeback")
    active, inactive = told("active_file", "active_file"), told("inactive_file", "inactive_file")
    return inactive + max(0, active - mapped - unwritten)


def filesystem_type(folder: Path) -> str | None:
    """As the system names it (ext4, tmpfs); None: that cannot be told."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        mounted, _, source = line.partition(" - ")
        if mounted.split()[2] == wanted:
            return source.split()[0]
    return None
