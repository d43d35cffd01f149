"""Whether this installation brought compiled CPU kernels and this CPU can run them. Runs none, and needs no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from holdfast.hardware.probe import processor

OFF_SWITCH = "HOLDFAST_NATIVE"
"""Set to 0: the compiled kernels are not used."""

MODULE = "holdfast.execution.native._kernels"


@cache
def compiled_kernels() -> bool:
    """As far as it can be told without torch, whose threads they also need."""
    return why_no_kernels() is None


def why_no_kernels() -> str | None:
    """Why the compiled kernels cannot be used here; None: nothing speaks against it."""
    if os.environ.get(OFF_SWITCH) == "0":
        return f"{OFF_SWITCH}=0 is set"
    try:
        built_for = _built_for()
    except ImportError as error:
        return f"they were not built when Holdfast was installed, or do not load ({error})"
    missing = missing_features(built_for, processor().features)
    if missing:
        return f"they were built for another CPU: this one has no {missing}; install again with HOLDFAST_NATIVE_ARCH="
    return None


def missing_features(built_for: str, flags: frozenset[str]) -> str:
    """Those of the features built for that the CPU lacks; none when the system does not tell what it has."""
    return " ".join(name for name in built_for.split() if flags and name not in flags)


def _built_for() -> str:
    """Read from the module itself, opened by its path: importing it by name would import torch with its package."""
    folder = Path(__file__).parents[1] / "execution" / "native"
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        spec = importlib.util.spec_from_file_location("_kernels", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules.pop("_kernels", None)
            return str(module.BUILT_FOR)
    raise ImportError(f"there is no _kernels in {folder}")
