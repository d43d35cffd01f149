"""Finds the compiled kernels, or says why there are none; knows whose threads they compute with. Knows no kernel."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch

from holdfast.execution.native.interface import Kernels
from holdfast.hardware.kernels import MODULE, KernelChoice, kernel_choice


class _Current(threading.local):
    """Of the thread that computes."""

    own_threads: int | None = None
    """Of the kernels' pool; None: as many as torch has."""


_current = _Current()


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """How many threads a model computes with, and whose: the kernels' own while torch has one, for models that torch
    hardly multiplies; or torch's for both."""

    count: int
    own: bool

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """So it is within, in the calling thread. Afterwards torch has the number that it had before: the process may
        be somebody else's program."""
        own_before, torch_before = _current.own_threads, torch.get_num_threads()
        if self.own:
            use_own_threads(self.count)
        else:
            share_torch_threads(self.count)
        try:
            yield
        finally:
            _current.own_threads = own_before
            torch.set_num_threads(torch_before)


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


def threads() -> int:
    """How many the kernels compute with. Asked at each call: asking torch makes its number hold in a new thread."""
    own = _current.own_threads
    return torch.get_num_threads() if own is None else own


def use_own_threads(count: int) -> None:
    """The kernels compute with a pool of their own, torch with one thread, when the calling thread computes."""
    kernels().share(0)
    torch.set_num_threads(1)
    _current.own_threads = count


@contextlib.contextmanager
def torch_threads() -> Iterator[None]:
    """Within it torch computes with as many threads as the kernels: for the little that is much work for it."""
    own = _current.own_threads
    if own is None:
        yield
        return
    torch.set_num_threads(own)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def share_torch_threads(count: int) -> None:
    """When the calling thread computes, torch has `count` threads, and so have the kernels, where there are any: the
    same ones, or, where torch has no OpenMP runtime that can be shared, a pool beside them."""
    torch.set_num_threads(count)
    _current.own_threads = None
    if available():
        kernels().share(_torch_parallel() or 0)


@cache
def _find() -> Kernels | str:
    choice = kernel_choice()
    if not isinstance(choice, KernelChoice):
        return choice
    try:
        module = cast(Kernels, importlib.import_module(MODULE + choice.variant))
    except ImportError as error:
        return f"they were not built when Holdfast was installed, or failed to load ({error})"
    atexit.register(module.stop)
    return module


@cache
def _torch_parallel() -> int | None:
    """Address of GOMP_parallel in the very runtime torch uses: looked up through torch's own library, because
    several OpenMP runtimes may be loaded."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Already loaded: this opens the same one again, and looks a name up in all it depends on.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
