"""The end of a process of ours, once its work is closed. Knows nothing of the work."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Ends the process as the interpreter would, threads, exit handlers and output in its order, but without taking
    itself and torch's libraries apart, half a second of computing, before the system takes back all of it anyway."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Closed, of a reader that is gone, or None.
            stream.flush()
    os._exit(code)
