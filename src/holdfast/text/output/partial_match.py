"""Marks in text that arrives in pieces. Knows no particular mark."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
