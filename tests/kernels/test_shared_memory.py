"""Every kernel fits the shared memory of every GPU there is support for, whether or not such a GPU is here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

CAPABILITIES = {"80", "86", "89", "90", "100", "120"}
SCRIPT = Path(__file__).parent.parent / "support" / "other_gpus.py"


def kernels_that_fit(cases: str, timeout_s: float) -> dict[str, set[str]]:
    """Compiled, by compute capability."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), cases], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    compiled = defaultdict[str, set[str]](set)
    over = []
    for line in done.stdout.splitlines():
        capability, case, kernel, shared, limit = line.split("\t")
        compiled[capability].add(kernel)
        if int(shared) > int(limit):
            over.append(f"{kernel} for {capability} ({case}): {shared} of {limit} bytes")
    assert not over, "\n".join(over)
    return compiled


def test_the_kernels_for_hopper_compile() -> None:
    """The interpreter does not know them."""
    assert kernels_that_fit("hopper", timeout_s=200) == {"90": {"_prefill_hopper", "_expand", "_gated_hopper"}}


@pytest.mark.long
def test_the_largest_kernels_fit_every_gpu() -> None:
    compiled = kernels_that_fit("worst", timeout_s=280)
    assert set(compiled) == CAPABILITIES
    assert all(kernels >= {"_prefill", "_attend"} for kernels in compiled.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_kernel_fits_every_gpu() -> None:
    compiled = kernels_that_fit("all", timeout_s=3500)
    assert set(compiled) == CAPABILITIES
    assert all(len(kernels) >= 20 for kernels in compiled.values())
