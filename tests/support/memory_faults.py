"""Runs out of memory on purpose, at one place of the code at a time: where torch allocates, and where a kernel is
launched (its code is loaded then). On a GPU and in the interpreter alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Site = tuple[str, int]
"""A file of `holdfast.execution` and a line of it."""


def _site(frame: FrameType | None) -> Site | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if "/holdfast/execution/" in name:
            return name.rsplit("/holdfast/", 1)[1], frame.f_lineno
        frame = frame.f_back
    return None


class MemoryFaults(TorchDispatchMode):
    """Notes every site in `seen`; raises at `site` as often as `times` says."""

    def __init__(self, site: Site | None = None, times: int = 1) -> None:
        super().__init__()
        self.seen: list[Site] = []
        self._site, self.left = site, times

    def meet(self, error: Callable[[], RuntimeError]) -> None:
        site = _site(sys._getframe(1))
        if site is None:
            return
        if site not in self.seen:
            self.seen.append(site)
        if site == self._site and self.left:
            self.left -= 1
            raise error()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd") and _allocates(
            func
        ):
            self.meet(lambda: torch.OutOfMemoryError("CUDA out of memory, on purpose"))
        return func(*args, **(kwargs or {}))


def _allocates(func: Any) -> bool:
    """It returns something that is none of its arguments."""
    return any(result.alias_info is None for result in func._schema.returns)


@contextmanager
def memory_faults(site: Site | None = None, times: int = 1) -> Iterator[MemoryFaults]:
    faults = MemoryFaults(site, times)
    kinds = (JITFunction, InterpretedFunction)
    runs = [kind.run for kind in kinds]

    def failing(run: Any) -> Any:
        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            faults.meet(lambda: RuntimeError("Triton Error [CUDA]: out of memory"))
            return run(self, *args, **kwargs)

        return launch

    try:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = failing(run)
        with faults:
            yield faults
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run
