"""A faster import of torch, for processes that are ours alone. Imports no torch itself, and little else.

Its libraries are loaded beside Python's own work: the system's loader needs no interpreter lock, so the third of a
second that it takes costs nothing where there is a second core. And modules are left out that only torch.compile,
torch.export and tensors without data use: a fifth of the import.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

from holdfast.hardware.torch_build import TorchBuild, torch_build

META_KERNELS = "torch._meta_registrations"
"""Kernels of the "meta" device, in Python, with all the decompositions they need. torch imports it last, for its side
effects alone."""


def preload_torch() -> None:
    """Begins, and returns at once. What cannot be loaded so is said by the import that needs it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return
    library = Path(found.submodule_search_locations[0], "lib", "libtorch_python.so")
    if library.exists():
        threading.Thread(target=_load, args=(library,), name="preload-torch", daemon=True).start()


def skip_meta_kernels(build: TorchBuild | None = None, modules: MutableMapping[str, ModuleType] | None = None) -> None:
    """Before torch is imported, where its build computes on CPUs alone: with others it was not tried. By default: of
    the torch that is installed, and for this process."""
    build, modules = build or torch_build(), sys.modules if modules is None else modules
    if build is not None and build.cuda is None and "torch" not in modules:
        modules[META_KERNELS] = ModuleType(META_KERNELS, "Left out by Holdfast: nothing here computes with it.")


def _load(library: Path) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(library))
