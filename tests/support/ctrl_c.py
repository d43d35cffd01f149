"""Ctrl-C before a line of a module that is run: whichever it was, what is done afterwards must be right."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any


class Lines:
    """`at`: before which of the lines that are run Ctrl-C comes, counted from 1; 0: before none."""

    def __init__(self, module: ModuleType, at: int = 0) -> None:
        self._file, self._at, self.count = module.__file__, at, 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._at:
                signal.raise_signal(signal.SIGINT)
        return self.trace


@contextlib.contextmanager
def ctrl_c(module: ModuleType, at: int = 0) -> Iterator[Lines]:
    """Within; it goes no further."""
    lines, before = Lines(module, at), sys.gettrace()
    sys.settrace(lines.trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield lines
    finally:
        sys.settrace(before)
