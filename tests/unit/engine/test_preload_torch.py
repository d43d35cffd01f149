"""What is left out of the import of torch, and where. That engines run so, every test with a server shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.engine.startup.preload_torch import META_KERNELS, skip_meta_kernels
from holdfast.hardware.torch_build import TorchBuild

CPU_BUILD, GPU_BUILD = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0+cu130", "13.0")


@pytest.mark.parametrize(
    ("build", "imported", "left_out"),
    [(CPU_BUILD, False, True), (GPU_BUILD, False, False), (CPU_BUILD, True, False)],
    ids=["CPU build", "GPU build", "torch is there already"],
)
def test_where_meta_kernels_are_left_out(build: TorchBuild, imported: bool, left_out: bool) -> None:
    modules = {"torch": ModuleType("torch")} if imported else {}
    skip_meta_kernels(build, modules)
    assert (META_KERNELS in modules) is left_out


def test_torch_still_has_that_module() -> None:
    """Under another name it would be imported again, unnoticed."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).with_name(META_KERNELS.partition(".")[2] + ".py").is_file()
