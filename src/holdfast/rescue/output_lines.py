"""The lines of a program's output, within bounds, told one by one. Knows nothing of what they mean."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

LINE_LIMIT_CHARS = 16 * 1024
"""A line that is longer is told in part: what follows is left out up to its end."""
_ENDS = re.compile(r"\r\n|\n|\r")


class OutputLines:
    """From pieces of output to lines. A carriage return ends one too: progress bars are written over themselves."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, piece: bytes) -> None:
        *lines, rest = _ENDS.split(self._rest + self._decoder.decode(piece))
        self._rest = rest[:LINE_LIMIT_CHARS]
        for line in lines:
            self._tell(line)

    def end(self) -> None:
        self._tell(self._rest)
        self._rest = ""

    def _tell(self, line: str) -> None:
        if line.strip():
            self._told(line[:LINE_LIMIT_CHARS])
