"""The lines of a program's output, within bounds: told one by one, and the first and last of them kept.

A log of any length takes the same memory. Knows nothing of what lines mean.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterator

LINE_LIMIT_CHARS = 16 * 1024
"""A line that is longer is told in part: what follows is left out up to its end."""
KEPT_FIRST, KEPT_LAST = 2_000, 6_000
"""Lines: the beginning names engine, version and settings, the end what happened."""
_ENDS = re.compile(r"\r\n|\n|\r")


class Lines:
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


class Kept:
    """The beginning and the end of a log."""

    def __init__(self, first: int = KEPT_FIRST, last: int = KEPT_LAST) -> None:
        self._first: list[str] = []
        self._most_first = first
        self._last: deque[str] = deque(maxlen=last)
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if len(self._first) < self._most_first:
            self._first.append(line)
        else:
            self._last.append(line)

    def __iter__(self) -> Iterator[str]:
        yield from self._first
        yield from self._last
