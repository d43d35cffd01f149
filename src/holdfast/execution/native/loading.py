"""Finds the compiled kernels and gives them torch's threads, or says why there are none. Knows none of them."""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from pathlib import Path
from typing import cast

import torch

from holdfast.execution.native.interface import Kernels
from holdfast.hardware.kernels import MODULE, KernelChoice, kernel_choice


def available() -> bool:
    return why_not() is None


def why_not() -> str | None:
    """Why the compiled kernels cannot be used here; None when they can."""
    found = _find()
    return found if isinstance(found, str) else None


def kernels() -> Kernels:
    """The module; a RuntimeError with the reason when there is none."""
    found = _find()
    if isinstance(found, str):
        raise RuntimeError(f"the compiled kernels cannot be used: {found}")
    return found


@cache
def _find() -> Kernels | str:
    choice = kernel_choice()
    if not isinstance(choice, KernelChoice):
        return choice
    try:
        module = cast(Kernels, importlib.import_module(MODULE + choice.variant))
    except ImportError as error:
        return f"they were not built when Holdfast was installed, or failed to load ({error})"
    parallel = _torch_parallel()
    if parallel is None:
        return "this build of torch has no OpenMP runtime to share threads with"
    module.bind(parallel)
    return module


def _torch_parallel() -> int | None:
    """Address of GOMP_parallel in the very runtime torch uses: looked up through torch's own library, because
    several OpenMP runtimes may be loaded and a second pool would fight with torch's for the cores."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Already loaded: this opens the same one again, and looks a name up in all it depends on.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
