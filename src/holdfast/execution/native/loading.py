"""Finds the compiled kernels and gives them torch's threads, or says why there are none. Knows none of them."""

from __future__ import annotations

import ctypes
import importlib
import os
from functools import cache
from pathlib import Path
from typing import cast

import torch

from holdfast.execution.native.interface import Kernels
from holdfast.hardware import processor

OFF_SWITCH = "HOLDFAST_NATIVE"
"""Set to 0: the compiled kernels are not used."""


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
    if os.environ.get(OFF_SWITCH) == "0":
        return f"{OFF_SWITCH}=0 is set"
    try:
        module = cast(Kernels, importlib.import_module("holdfast.execution.native._kernels"))
    except ImportError as error:
        return f"they were not built when Holdfast was installed, or do not load ({error})"
    missing = missing_features(module.BUILT_FOR, processor().features)
    if missing:
        return f"they were built for another CPU: this one has no {missing}; install again with HOLDFAST_NATIVE_ARCH="
    parallel = _torch_parallel()
    if parallel is None:
        return "this build of torch has no OpenMP runtime to share threads with"
    module.bind(parallel)
    return module


def missing_features(built_for: str, flags: frozenset[str]) -> str:
    """Those of the features built for that the CPU lacks; none when the system does not tell what it has."""
    return " ".join(name for name in built_for.split() if flags and name not in flags)


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
