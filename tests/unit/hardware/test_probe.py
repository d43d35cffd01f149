"""Memory as a container sees it, from a made-up /proc and /sys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import hardware
from holdfast.hardware import probe
from holdfast.hardware.probe import usable_cores

GIB, MIB = 1 << 30, 1 << 20


def group(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("__", ".")).write_text(content)


def shared(root: Path, mib: int) -> None:
    """So much of it this process has mapped."""
    (root / "proc/self/status").write_text(f"VmRSS:\t1 kB\nRssShmem:\t{mib * 1024} kB\n")


def own_group(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)


def test_without_a_group_the_machine_counts(tmp_path: Path) -> None:
    found = hardware.memory(tmp_path)
    assert found.limited_by == "machine"
    assert 0 < found.available_bytes <= found.total_bytes


def test_the_tightest_group_above_wins_and_page_cache_does_not_count(tmp_path: Path) -> None:
    own_group(tmp_path, "0::/pods/me\n")
    group(tmp_path, "", memory__max="max")
    group(
        tmp_path,
        "pods",
        memory__max=str(GIB),
        memory__current=str(GIB // 2),
        memory__stat=f"anon 1\ninactive_file {GIB // 4}\n",
    )
    group(tmp_path, "pods/me", memory__max=str(2 * GIB), memory__current="0")
    found = hardware.memory(tmp_path)
    assert found.total_bytes == GIB
    assert found.available_bytes == GIB - GIB // 4
    assert found.limited_by == "control group"


@pytest.mark.parametrize(("most", "high", "limit"), [("max", GIB, GIB), (3 * GIB, 2 * GIB, 2 * GIB), (GIB, "max", GIB)])
def test_what_a_group_is_slowed_down_beyond_is_its_limit(
    tmp_path: Path, most: int | str, high: int | str, limit: int
) -> None:
    """As Kubernetes sets it below what a container is killed for."""
    own_group(tmp_path, "0::/me\n")
    group(tmp_path, "me", memory__max=str(most), memory__high=str(high), memory__current=str(GIB // 4))
    found = hardware.memory(tmp_path)
    assert (found.total_bytes, found.available_bytes) == (limit, limit - GIB // 4)


def test_version_one_groups(tmp_path: Path) -> None:
    own_group(tmp_path, "5:cpu:/x\n4:memory:/box\n")
    group(tmp_path, "memory/box", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB + 5))
    assert hardware.memory(tmp_path).available_bytes == 0


def statistics(**mib: int) -> str:
    return "".join(f"{name} {count * MIB}\n" for name, count in mib.items())


@pytest.mark.parametrize(("inactive", "active", "left"), [(70, 0, 87), (40, 30, 83), (0, 70, 83), (69, 1, 86)])
def test_files_that_were_read_twice_are_page_cache_too(tmp_path: Path, inactive: int, active: int, left: int) -> None:
    """A checkpoint is, layers of which are read once more for the host's cores: its pages are called active then. In
    use of these is what programs have mapped, 2 MiB beside shared memory, and what is not written yet, 2 MiB."""
    held = {"anon": 3, "shmem": 38, "file_mapped": 40, "file_dirty": 1, "file_writeback": 1}
    own_group(tmp_path, "0::/box\n")
    shared(tmp_path, 38)
    sizes = {"memory__max": str(128 * MIB), "memory__current": str((3 + 38 + inactive + active) * MIB)}
    group(tmp_path, "box", **sizes, memory__stat=statistics(**held, inactive_file=inactive, active_file=active))
    assert hardware.memory(tmp_path).available_bytes == left * MIB


def test_shared_memory_that_nobody_maps_hides_no_mapped_files(tmp_path: Path) -> None:
    """What a server that sleeps has kept, beside a neighbour whose files are mapped."""
    own_group(tmp_path, "0::/box\n")
    held = {"shmem": 40, "file_mapped": 30, "active_file": 30}
    group(tmp_path, "box", memory__max=str(128 * MIB), memory__current=str(70 * MIB), memory__stat=statistics(**held))
    assert hardware.memory(tmp_path).available_bytes == 58 * MIB


def test_version_one_groups_count_the_page_cache_of_those_below(tmp_path: Path) -> None:
    own_group(tmp_path, "4:memory:/pod/box\n")
    shared(tmp_path, 1)
    below = {"cache": 8, "mapped_file": 3, "shmem": 1, "dirty": 0, "inactive_file": 2, "active_file": 6}
    of_all = {f"total_{name}": count for name, count in below.items()}
    sizes = {"memory__limit_in_bytes": str(16 * MIB), "memory__usage_in_bytes": str(10 * MIB)}
    group(tmp_path, "memory/pod", **sizes, memory__stat=statistics(**dict.fromkeys(below, 0), **of_all))
    group(tmp_path, "memory/pod/box", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="0")
    assert hardware.memory(tmp_path).available_bytes == (16 - 10 + 2 + 6 - 2) * MIB


def test_processor() -> None:
    found = hardware.processor()
    assert found.cores >= 1
    assert found.features


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_that_the_system_does_not_give_are_not_there(monkeypatch: pytest.MonkeyPatch, granted: bool) -> None:
    monkeypatch.setattr(probe, "_tiles_can_be_had", lambda: granted)
    monkeypatch.setattr(Path, "read_text", lambda _: "model name : X\nflags : avx2 amx_tile amx_int8 amx_bf16\n")
    monkeypatch.setattr(probe, "usable_cores", lambda: 2)
    found = probe.processor.__wrapped__()
    assert found.features == {"avx2"} | ({"amx_tile", "amx_int8", "amx_bf16"} if granted else set())


def test_a_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) >= 1
    own_group(tmp_path, "0::/box\n")
    group(tmp_path, "", cpu__max="max 100000")
    group(tmp_path, "box", cpu__max="100000 100000")
    assert usable_cores(tmp_path) == 1


def test_a_quota_of_version_one(tmp_path: Path) -> None:
    own_group(tmp_path, "3:cpu,cpuacct:/box\n")
    group(tmp_path, "cpu/box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert usable_cores(tmp_path) == 1


def test_hyperthreads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight logical processors, four cores; allowed are both of one core, and one of another."""
    for number in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        name = "thread_siblings_list" if number % 4 == 3 else "core_cpus_list"
        (folder / name).write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 3})
    assert usable_cores(tmp_path) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores(tmp_path) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {100, 101})
    assert usable_cores(tmp_path) == 2, "the system does not tell of these"


def test_what_a_folder_lies_on() -> None:
    assert probe.filesystem_type(Path("/proc")) == "proc"


def test_pages_of_a_large_relative_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the server, say: every page of it would be counted once a second."""
    looked = list[int]()
    monkeypatch.setattr(probe, "LARGE_BYTES", 48 << 20)
    monkeypatch.setattr(probe, "_unshared_bytes", lambda pid: looked.append(pid) or 0)
    code = "import sys; held = bytearray(b'x') * (64 << 20); print(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = probe.family_bytes(child.pid, but=0)
        child.communicate()
    assert 64 << 20 <= found < 128 << 20
    assert looked == []
