"""Patterns with a quick look before them: a regular expression is tried only where a literal part of it stands.

A log has millions of lines and the rules hundreds of patterns; `in` is some hundred times cheaper than a search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

SHORTEST = 2
"""Characters of a literal that is worth looking for."""

LONG_ENOUGH = 6


class Pattern:
    __slots__ = ("expression", "literals")

    def __init__(self, text: str) -> None:
        self.expression = re.compile(text)
        self.literals: tuple[str, ...] = tuple(_literals(_parser.parse(text)) or ())
        """One of these is in whatever matches; none: nothing can be said."""

    def search(self, text: str) -> re.Match[str] | None:
        for literal in self.literals:
            if literal in text:
                return self.expression.search(text)
        return None if self.literals else self.expression.search(text)


def _literals(parsed: Any) -> list[str] | None:
    """Such that every match holds at least one; None where there are no such, or only short ones."""
    best: list[str] | None = None
    run = ""
    for operation, argument in [*parsed, (None, None)]:
        if operation is _constants.LITERAL:
            run += chr(argument)
            continue
        best, run = _better(best, [run] if len(run) >= SHORTEST else None), ""
        if operation is _constants.SUBPATTERN and not argument[1] and not argument[2]:
            best = _better(best, _literals(argument[3]))
        elif operation is _constants.BRANCH:
            branches = [_literals(branch) for branch in argument[1]]
            if all(branch is not None for branch in branches):
                best = _better(best, [literal for branch in branches for literal in branch or ()])
        elif operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and argument[0] >= 1:
            best = _better(best, _literals(argument[2]))
    return best


def any_of(literals: Iterable[str]) -> re.Pattern[str]:
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


def _better(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    """Long ones rule out more; among those that are long enough, fewer."""
    if one is None or other is None:
        return one if other is None else other
    return other if _worth(other) > _worth(one) else one


def _worth(literals: list[str]) -> tuple[int, int]:
    return min(LONG_ENOUGH, *map(len, literals)), -len(literals)
