"""torch as the engine process imports it: without meta kernels, which whoever needs them still gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.hardware.torch_build import torch_build

CPU_BUILD = """
import inspect, sys
resolved = []
real_path = inspect.os.path.realpath
inspect.os.path.realpath = lambda path, **how: resolved.append(path) or real_path(path, **how)
find_module = inspect.getmodule
from holdfast.engine.startup.preload_torch import META_KERNELS, import_torch

import_torch()
import torch
assert inspect.getmodule is find_module
assert len(resolved) < 50, len(resolved)  # Not those of a thousand modules.
assert META_KERNELS not in sys.modules
assert not hasattr(torch, "_meta_registrations")
drawn = torch.empty(5).uniform_(generator=torch.default_generator.clone_state().manual_seed(5))

import torch._meta_registrations
assert torch._meta_registrations.meta_index_Tensor  # The real ones.
assert torch.equal(drawn, torch.empty(5).uniform_(generator=torch.Generator().manual_seed(5)))
assert torch.zeros(3, 4, device="meta")[torch.zeros(2, dtype=torch.int64, device="meta")].shape == (2, 4)
"""
GPU_BUILD = """
import sys
from holdfast.engine.startup import preload_torch
from holdfast.hardware import torch_build

torch_build.torch_build = lambda: torch_build.TorchBuild("2.13.0", "13.0")
preload_torch.import_torch()
assert preload_torch.META_KERNELS in sys.modules
"""


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_a_cpu_build_is_imported_without_meta_kernels(build: str) -> None:
    found = torch_build()
    if build == "cpu" and (found is None or found.cuda is not None):
        pytest.skip("needs a CPU build of torch")
    code = CPU_BUILD if build == "cpu" else GPU_BUILD
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
