"""Patterns with a quick look before them: a regular expression is tried only where a literal part of it stands.

A log has millions of lines and the rules hundreds of patterns; `in` is some hundred times cheaper than a search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

from holdfast.doctor.rules.required_literals import SHORTEST, needed, rarest

Item = TypeVar("Item")


class Pattern:
    __slots__ = ("_compiled", "literals", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.literals = needed(text)
        """One of these is in whatever matches; none: nothing can be said."""
        self._compiled: re.Pattern[str] | None = None

    @property
    def expression(self) -> re.Pattern[str]:
        """Compiled when it is first needed: a log meets few of the hundreds."""
        if self._compiled is None:
            self._compiled = re.compile(self.text)
        return self._compiled

    def search(self, text: str) -> re.Match[str] | None:
        for literal in self.literals:
            if literal in text:
                return self.expression.search(text)
        return None if self.literals else self.expression.search(text)


class Index(Generic[Item]):
    """Which of many things could stand in a text, by their literals: asked once a line, however many there are."""

    def __init__(self, items: Iterable[tuple[Item, tuple[str, ...]]]) -> None:
        self._items: list[Item] = []
        self._always: list[int] = []
        self._literals: dict[str, list[tuple[str, int]]] = {}
        """By a few letters out of each."""
        for number, (item, literals) in enumerate(items):
            self._items.append(item)
            for literal in literals:
                at = rarest(literal.encode("latin-1", "replace"), SHORTEST)
                self._literals.setdefault(literal[at : at + SHORTEST], []).append((literal, number))
            if not literals:
                self._always.append(number)

    def among(self, text: str) -> list[Item]:
        """In their order; some of them may not stand there after all."""
        letters = {text[at : at + SHORTEST] for at in range(len(text) - SHORTEST + 1)}
        found = set(self._always)
        for few in letters & self._literals.keys():
            found.update(number for literal, number in self._literals[few] if literal in text)
        return [self._items[number] for number in sorted(found)]


@cache
def any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    """One search for all of them, however many: what begins alike is looked at once."""
    tree: dict[str, Any] = {}
    for literal in literals:
        node = tree
        for character in literal:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branches(tree))


def _branches(node: dict[str, Any]) -> str:
    if "" in node:  # A shorter one ends here: longer ones add nothing.
        return ""
    parts = [re.escape(character) + _branches(inner) for character, inner in node.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
