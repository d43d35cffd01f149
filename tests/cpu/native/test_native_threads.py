"""The threads of the compiled kernels: the pool itself in C, whose threads compute when, and results on any number."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.execution import device, native
from holdfast.execution.native import loading

BEST_VARIANT = True
"""Others: see conftest.py."""
SOURCES = Path(native.__file__).parent
PROMISES = ["units", "nested", "oversubscribed", "slept", "callers", "fork", "stopped"]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    native.share_torch_threads(before)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("parking", [(), ("-DPARK_ON_CONDITION",)], ids=["as built", "condition variables"])
def test_the_pool_keeps_its_promises(parking: tuple[str, ...], tmp_path: Path) -> None:
    """Random regions, regions within regions, more threads than cores, several callers, a fork, an end, a new start."""
    program, harness = tmp_path / "harness", Path(__file__).with_name("pool_harness.c")
    files = (str(harness), str(SOURCES / "parallel.c"))
    subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-pthread", *parking, f"-I{SOURCES}", *files, "-o", str(program)], check=True
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.returncode) == (PROMISES, 0)


def test_a_pool_with_names_that_ends_and_starts_again() -> None:
    """In a process of its own: nothing else has started threads there. A fork has its own, and the end is clean."""
    code = """
import os, sys, torch
from holdfast.execution import native
from holdfast.execution.native.loading import kernels
native.use_own_threads(3)
matrix = native.BlockMatrix(torch.ones(512, 18 * 18, dtype=torch.uint8), "Q4_0")
def names():
    return sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
def use():
    out = torch.empty(64, 512)
    matrix.write(torch.ones(64, 576), out)
    return out
def ours():
    return [name for name in names() if name.startswith("holdfast-")]
first = use()
print(*ours(), torch.get_num_threads())
kernels().stop()
print(len(ours()), bool((use() == first).all()), *ours())
sys.stdout.flush()
child = os.fork()
if child == 0:
    os._exit(0 if not ours() and bool((use() == first).all()) and len(ours()) == 2 else 1)
print(os.waitpid(child, 0)[1], bool((use() == first).all()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env={**os.environ}
    )
    assert done.stdout.splitlines() == ["holdfast-1 holdfast-2 1", "0 True holdfast-1 holdfast-2", "0 True"]


def test_torch_has_one_thread_where_it_hardly_multiplies() -> None:
    with device.compute_threads(3, torch_share=0.0).computing():
        assert (torch.get_num_threads(), native.threads()) == (1, 3)
    with device.compute_threads(2, torch_share=0.5).computing():
        assert (torch.get_num_threads(), native.threads()) == (2, 2)


def test_whoever_shares_the_process_keeps_its_own_number_of_torch_threads() -> None:
    """Also while a model computes in another thread, and where computing fails."""
    torch.set_num_threads(4)
    seen: list[int] = []

    def compute() -> None:
        with native.ComputeThreads(3, own=True).computing():
            with native.ComputeThreads(2, own=False).computing():
                assert (torch.get_num_threads(), native.threads()) == (2, 2)
            assert (torch.get_num_threads(), native.threads()) == (1, 3)
            other = threading.Thread(target=lambda: seen.append(native.threads()))
            other.start()
            other.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compute()
    assert (torch.get_num_threads(), native.threads()) == (4, 4)
    assert seen != [3]


def test_results_are_the_same_on_any_threads() -> None:
    """Bit for bit: on one, several, more than there are cores, and on those that torch has."""
    torch.manual_seed(5)
    matrix = native.BlockMatrix(torch.randint(0, 100, (514, 24 * 18), dtype=torch.uint8), "Q4_0")
    for rows in (1, 3, 70):
        x, results = torch.randn(rows, 768), []
        for count in (1, 2, 3, 16, 0):
            if count:
                native.use_own_threads(count)
            else:
                native.share_torch_threads(2)
            out = torch.ones(rows, 514)
            matrix.add(x, out)
            results.append(out)
        assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)


def test_kernels_ask_for_their_own_number_of_threads() -> None:
    """Torch may have one while the kernels have more."""
    own = Path(loading.__file__).name
    asking = [path.name for path in SOURCES.glob("*.py") if "get_num_threads" in path.read_text() and path.name != own]
    assert asking == []


def test_torch_lends_its_threads_for_a_while() -> None:
    try:
        native.use_own_threads(2)
        with native.torch_threads():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    finally:
        native.share_torch_threads(2)
    with native.torch_threads():
        assert torch.get_num_threads() == 2
