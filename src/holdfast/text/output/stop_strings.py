"""Finds stop strings in text that arrives in pieces, character by character, in constant time a character.

Owns the matching alone: the answer never depends on how the text was cut into pieces. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopFound(NamedTuple):
    stop: str
    end: int
    """In the fed text, just behind the stop string's last character."""


class StopMatcher:
    """The stop string that is complete first wins; of two complete at the same character, the longer one."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: ties then need no comparison.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """How many characters at the end of all text fed so far may yet turn out to begin a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool = True) -> StopFound | None:
        """Stops that end in text fed while not `armed` are passed over; they may begin there."""
        for offset, character in enumerate(text):
            found: str | None = None
            for index, stop in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != character:
                    matched = self._fallbacks[index][matched]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    found = found or stop
                    matched = self._fallbacks[index][matched]
                self._matched[index] = matched
            if found is not None and armed:
                return StopFound(found, offset + 1)
        return None


def _fallbacks(stop: str) -> list[int]:
    """Entry n: the longest beginning of `stop` that its first n characters also end with, shorter than n."""
    table = [0, 0]
    for position in range(1, len(stop)):
        length = table[position]
        while length and stop[length] != stop[position]:
            length = table[length]
        table.append(length + 1 if stop[length] == stop[position] else 0)
    return table
