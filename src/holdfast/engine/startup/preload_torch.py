"""torch's libraries, loaded beside Python's own work: the system's loader needs no interpreter lock, so the third of a
second that it takes costs nothing where there is a second core. Imports no torch itself, and little else."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from pathlib import Path


def preload_torch() -> None:
    """Begins, and returns at once. What cannot be loaded so is said by the import that needs it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return
    library = Path(found.submodule_search_locations[0], "lib", "libtorch_python.so")
    if library.exists():
        threading.Thread(target=_load, args=(library,), name="preload-torch", daemon=True).start()


def _load(library: Path) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(library))
