"""How reports are written: colour, and words broken within a width. Knows no answer."""

from __future__ import annotations

import math
import textwrap

LEAST_WIDTH = 60
_TINY = 1e-9
"""A count that is whole may be this much less once it is divided."""


class Paint:
    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def title(self, text: str) -> str:
        return self(text, "1")


def rounded_down(count: float, places: int = 1) -> float:
    """Of sequences that memory holds: 3.97 of the 4 that were asked for are not 4."""
    unit = math.pow(10, places)
    return max(0.0, math.floor((count + _TINY) * unit) / unit)


def wrapped(text: str, width: int, first: str = "  ", then: str = "    ") -> list[str]:
    """Within the width, but for addresses: one that is cut leads nowhere."""
    found: list[str] = []
    for line in textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False, break_long_words=False
    ):
        if len(line) <= width or "://" in line:
            found.append(line)
        else:
            found += textwrap.wrap(line, width, subsequent_indent=then, break_on_hyphens=False, drop_whitespace=False)
    return found
