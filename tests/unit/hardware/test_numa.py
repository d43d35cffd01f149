"""NUMA nodes from a simulated /sys, and pages spread by the system itself where it lets this process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.hardware import numa

PAGE = mmap.PAGESIZE


def machine(root: Path, nodes: dict[int, str], memory: str | None) -> Path:
    for number, processors in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    (root / "sys/devices/system/node/possible").write_text("0-7\n")
    (root / "proc/self").mkdir(parents=True)
    if memory is not None:
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{memory}\n")
    return root


@pytest.mark.parametrize(
    ("processors", "memory", "wanted"),
    [
        (range(16), "0-2", (0, 1)),  # Node 2 has memory and no cores.
        ((0, 3, 9), "0-2", (0, 1)),
        ((4, 5, 6), "0-2", (0,)),
        ((8, 15), "0-2", (1,)),
        (range(16), "1", (1,)),
        (range(16), None, (0, 1)),
        ((40,), "0-2", ()),
    ],
)
def test_nodes_of_cores_and_memory_that_the_process_may_use(
    tmp_path: Path, processors: range | tuple[int, ...], memory: str | None, wanted: tuple[int, ...]
) -> None:
    root = machine(tmp_path, {0: "0-7", 1: "8-11,12-15", 2: ""}, memory)
    assert numa.allowed_nodes(root, frozenset(processors)) == wanted


def test_a_system_that_tells_of_no_nodes_has_none(tmp_path: Path) -> None:
    assert numa.allowed_nodes(tmp_path, frozenset({0})) == ()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
    made: list[tuple[int, int, tuple[int, ...]]] = []
    monkeypatch.setattr(numa, "_mbind", lambda *call: made.append(call) or 0)
    numa.numa_nodes.cache_clear()
    yield made
    numa.numa_nodes.cache_clear()


def test_pages_at_the_ends_are_spread_too(calls: list[tuple[int, int, tuple[int, ...]]]) -> None:
    assert numa.spread_pages(10 * PAGE + 1, 3 * PAGE, (0, 1)) == 0
    assert numa.spread_pages(10 * PAGE, 3 * PAGE, (0, 1)) == 0
    assert numa.spread_pages(10 * PAGE + 1, PAGE - 1, (0, 1)) == 0
    assert calls == [(10 * PAGE, 4 * PAGE, (0, 1)), (10 * PAGE, 3 * PAGE, (0, 1))]


@pytest.mark.parametrize(("nodes", "asked"), [((), False), ((1,), False), ((0, 2), True)])
def test_one_node_is_left_alone(
    nodes: tuple[int, ...],
    asked: bool,
    calls: list[tuple[int, int, tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "allowed_nodes", lambda: nodes)
    assert numa.numa_nodes().spread is asked
    assert bool(calls) is asked


def test_a_refusal_is_told(calls: list[tuple[int, int, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "allowed_nodes", lambda: (0, 1))
    monkeypatch.setattr(numa, "_mbind", lambda *call: errno.EPERM)
    found = numa.numa_nodes()
    assert not found.spread
    assert found.refused == f"mbind: {os.strerror(errno.EPERM)}"


@pytest.mark.skipif(sys.platform != "linux", reason="mbind is Linux's")
def test_the_system_spreads_pages() -> None:
    nodes = numa.allowed_nodes()
    if not nodes:
        pytest.skip("the system tells of no nodes")
    with mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        place = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(place)
        failed = numa.spread_pages(address, len(memory), nodes)
        if failed in (errno.EPERM, errno.ENOSYS):
            pytest.skip(f"this sandbox refuses mbind: {os.strerror(failed)}")
        assert failed == 0
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        policies = {int(line.split()[0], 16): line.split()[1] for line in lines}
        del place
        assert memory[:] == b"x" * len(memory)
    assert policies[address].startswith("interleave")


@pytest.mark.skipif(sys.platform != "linux", reason="mbind is Linux's")
def test_matrices_side_by_side_are_one_area_of_memory() -> None:
    """A process may have some 65,000 of them, and a model more experts' planes than half of that."""
    nodes, matrices, size = numa.allowed_nodes(), 16, 5 * PAGE // 2
    if not nodes:
        pytest.skip("the system tells of no nodes")
    with mmap.mmap(-1, matrices * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        place = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(place)
        failed = {numa.spread_pages(address + number * size, size, nodes) for number in range(matrices)}
        if failed & {errno.EPERM, errno.ENOSYS}:
            pytest.skip("this sandbox refuses mbind")
        bounds = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        del place
    within = [int(last, 16) for first, last in bounds if address <= int(first, 16) < address + matrices * size]
    assert failed == {0}
    assert len(within) <= 1
