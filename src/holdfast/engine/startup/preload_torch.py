"""torch in the engine process: its libraries loaded beside Python's own work, and its import without what only compiled
graphs need. Imports little else; knows nothing of the engine."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

META_KERNELS = "torch._meta_registrations"
"""Shapes of every operation's result, in Python, with the reference of each operation: of tensors without memory, which
tracing and compiling use and this engine does not."""


def preload_torch() -> None:
    """Begins, and returns at once: the system's loader needs no interpreter lock, so the third of a second that it
    takes costs nothing where there is a second core. What cannot be loaded so is said by the import that needs it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return
    library = Path(found.submodule_search_locations[0], "lib", "libtorch_python.so")
    if library.exists():
        threading.Thread(target=_load, args=(library,), name="preload-torch", daemon=True).start()


def _load(library: Path) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(library))


def import_torch() -> None:
    """For a process of our own, not a caller's: a quarter of torch's import is registering meta kernels. Whatever
    imports them later gets them. Until then torch.Generator makes none, which is why weights/dummy.py copies one; what
    else a build for GPUs may expect of them was not tried, so it is imported whole."""
    from holdfast.hardware.torch_build import torch_build  # Its package imports more than may come before preloading.

    build = torch_build()
    if "torch" in sys.modules or build is None or build.cuda is not None:
        with _paths_unresolved():
            importlib.import_module("torch")
        return
    sys.modules[META_KERNELS] = types.ModuleType(META_KERNELS)
    try:
        with _paths_unresolved():
            torch = importlib.import_module("torch")
    finally:
        del sys.modules[META_KERNELS]
    vars(torch).pop(META_KERNELS.rpartition(".")[2], None)


@contextlib.contextmanager
def _paths_unresolved() -> Iterator[None]:
    """torch notes in which line an operation is registered, and inspect resolves the path of every module there is to
    find that line's: a tenth of the import. Without the module the line is the same."""
    getmodule = inspect.getmodule

    def getmodule_of_all_but_frames(found: object, file: str | None = None) -> types.ModuleType | None:
        return None if inspect.isframe(found) else getmodule(found, file)

    inspect.getmodule = getmodule_of_all_but_frames  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = getmodule
