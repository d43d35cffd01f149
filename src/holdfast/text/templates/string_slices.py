"""Searching in long texts, a slice at a time: the methods of `str` that would keep every other thread waiting.

Same results as the methods of the same names, for texts of any length; the words looked for must be short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError

from holdfast.text.templates.budget import Budget

SLICE_CHARS = 250_000
"""One call's worth: about a millisecond, 4 ns a character at worst."""
MAX_WORD_CHARS = 64
"""Searching backwards Python compares each place anew, so its time is that of a slice times the word's length."""
MAX_FOUND = 100_000
"""Places of one search."""


def find(budget: Budget, text: str, word: str) -> int:
    return _find_from(budget, text, word, 0)


def _find_from(budget: Budget, text: str, word: str, start: int) -> int:
    for begin in range(start, len(text) + 1, SLICE_CHARS):
        place = text.find(word, begin, begin + SLICE_CHARS + len(word) - 1)
        budget.work(SLICE_CHARS if place < 0 else place - begin)
        if place >= 0:
            return place
    return -1


def rfind(budget: Budget, text: str, word: str) -> int:
    for end in range(len(text), -1, -SLICE_CHARS):
        budget.work(SLICE_CHARS * len(word))
        place = text.rfind(word, max(0, end - SLICE_CHARS - len(word) + 1), end)
        if place >= 0:
            return place
    return -1


def _places(budget: Budget, text: str, word: str, most: int = -1) -> Iterator[int]:
    """Where it is found, none over another; `most` of them, all where that is negative."""
    start = count = 0
    while count != most and (place := _find_from(budget, text, word, start)) >= 0:
        yield place
        count += 1
        if count > MAX_FOUND:
            raise SecurityError(f"more than {MAX_FOUND} matches of a search string")
        budget.step()
        start = place + len(word)


def split(budget: Budget, text: str, sep: str, maxsplit: int = -1) -> list[str]:
    pieces, start = [], 0
    for place in _places(budget, text, sep, maxsplit):
        pieces.append(text[start:place])
        start = place + len(sep)
    return [*pieces, text[start:]]


def replace(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    pieces = split(budget, text, old, count)
    budget.room_for(len(text) + (len(pieces) - 1) * (len(new) - len(old)))
    return new.join(pieces)


def count(budget: Budget, text: str, sub: str) -> int:
    return sum(1 for _ in _places(budget, text, sub))


def partition(budget: Budget, text: str, sep: str) -> tuple[str, str, str]:
    place = find(budget, text, sep)
    return (text, "", "") if place < 0 else (text[:place], sep, text[place + len(sep) :])


def rpartition(budget: Budget, text: str, sep: str) -> tuple[str, str, str]:
    place = rfind(budget, text, sep)
    return ("", "", text) if place < 0 else (text[:place], sep, text[place + len(sep) :])


def rsplit(budget: Budget, text: str, sep: str, maxsplit: int = -1) -> list[str]:
    if maxsplit != 1:
        raise SecurityError("rsplit() of a long string with maxsplit other than 1")
    before, found, behind = rpartition(budget, text, sep)
    return [before, behind] if found else [text]


def index(budget: Budget, text: str, sub: str) -> int:
    return _found(find(budget, text, sub))


def rindex(budget: Budget, text: str, sub: str) -> int:
    return _found(rfind(budget, text, sub))


def _found(place: int) -> int:
    if place < 0:
        raise ValueError("substring not found")
    return place


SEARCHES: dict[str, Callable[..., Any]] = {
    made.__name__: made for made in (find, rfind, index, rindex, count, split, rsplit, partition, rpartition, replace)
}


def strip(budget: Budget, text: str, chars: str | None, name: str) -> str:
    """`name`: strip, lstrip or rstrip. What is stripped is looked at a slice at a time."""
    start, end = 0, len(text)
    size = SLICE_CHARS // (1 if chars is None else 8 + len(chars) // 4)
    while name != "rstrip" and start < end:
        budget.work(size)
        if left := text[start : min(start + size, end)].lstrip(chars):
            start = min(start + size, end) - len(left)
            break
        start = min(start + size, end)
    while name != "lstrip" and start < end:
        budget.work(size)
        if left := text[max(start, end - size) : end].rstrip(chars):
            end = max(start, end - size) + len(left)
            break
        end = max(start, end - size)
    return text[start:end]
