"""The parts of a grammar's text: strings, regular expressions, comments, and what is between them.

One pass, linear in the text whatever a client has sent: where an opening mark has no end, no later one like it is
looked for on the same line. Knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Kind = Literal["string", "regex", "class", "comment", "other"]


def lark_parts(text: str) -> Iterator[tuple[Kind, str]]:
    """Of Lark: "strings", /regular expressions/, and comments from // or # to the end of a line."""
    return _parts(text, {'"': "string"})


def any_parts(text: str) -> Iterator[tuple[Kind, str]]:
    """Of a grammar that may be Lark or GBNF: also 'strings' and [character classes]."""
    return _parts(text, {'"': "string", "'": "string", "[": "class"})


def _parts(text: str, openings: dict[str, Kind]) -> Iterator[tuple[Kind, str]]:
    begun = place = 0
    open_until: dict[str, int] = {}
    """By opening mark: up to where its end was looked for in vain."""
    while place < len(text):
        mark = text[place]
        kind: Kind | None = openings.get(mark)
        if mark == "#" or text.startswith("//", place):
            kind, end = "comment", text.find("\n", place)
            end = len(text) if end < 0 else end
        elif kind is None and mark != "/":
            place += 1
            continue
        else:
            kind, end = kind or "regex", place
            if place >= open_until.get(mark, 0):
                end, closed = _end_of(text, place, "]" if kind == "class" else mark, lines=kind == "class")
                if not closed:
                    open_until[mark], end = end, place
        if end == place:
            place += 1
            continue
        if begun < place:
            yield "other", text[begun:place]
        yield kind, text[place:end]
        begun = place = end
    if begun < len(text):
        yield "other", text[begun:]


def _end_of(text: str, place: int, closing: str, *, lines: bool) -> tuple[int, bool]:
    """Behind the closing mark; or where the line ends without one. `lines`: it may go over several lines."""
    place += 1
    while place < len(text):
        if text[place] == closing:
            return place + 1, True
        if text[place] == "\n" and not lines:
            return place, False
        place += 2 if text[place] == "\\" else 1
    return len(text), False
