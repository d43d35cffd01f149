"""Of a regular expression, the plain text without which it cannot match. Knows no log and no rule.

A small reader of its own: the parser of `re` is private and may change with any version of Python. What it does not
understand it says nothing of, so a literal that is named is always needed, and some that are needed are not named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHORTEST = 3
"""Characters of a literal that is worth looking for."""
LONG_ENOUGH = 6
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_COMMON = b"etaoinsrhldcumfpgwybvkxjqz"
_EVERYWHERE = (
    b'requests| completions|server|serve|HTTP/1.1|File "|read|error|Error|ERROR|.py:|.py", line|prompt|model|token|chat'
    b"|version|status|INFO|DEBUG|WARNING|memory|engine|worker|process|could|would|failed|length|size |number|cache"
    b"|sampling|param|batch|loading|available|device|value|tokens/s|throughput|Running|Waiting|usage|generat|timeout"
)
"""Words of lines that say nothing: a literal is not looked for by these, where there is more of it."""
_ZERO_WIDTH = "bBAZ"
_CLASSES = "dDwWsS"
_PLAIN_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_LOOK = re.compile(r"\(\?<?[=!]")


@dataclass(slots=True)
class _Item:
    """One step of a sequence: text, branches, or (neither) anything at all."""

    text: str = ""
    branches: list[list[_Item]] = field(default_factory=list)
    least: int = 1
    once: bool = True


class _Unknown(Exception):
    """Something this reader does not understand."""


def needed(expression: str) -> tuple[str, ...]:
    """Such that every match holds at least one of them; empty where nothing can be said."""
    try:
        branches, end = _branches(expression, 0)
    except _Unknown:
        return ()
    if end != len(expression):
        return ()
    return tuple(dict.fromkeys(_of_branches(branches) or ()))


def rarest(literal: bytes, size: int) -> int:
    """Where those bytes of it begin that stand least often in what people and programs write."""
    return min(range(len(literal) - size + 1), key=lambda at: _commonness(literal[at : at + size]))


def _commonness(part: bytes) -> int:
    """Letters by how often they are written; what is no small letter is rare."""
    worn = sum(part[at : at + 4] in _EVERYWHERE for at in range(max(1, len(part) - 3)))
    return 200 * worn + sum(
        30 if one == 32 else max(0, 26 - _COMMON.find(one)) if one in _COMMON else 2 for one in part
    )


def _branches(text: str, at: int) -> tuple[list[list[_Item]], int]:
    branches: list[list[_Item]] = [[]]
    while at < len(text) and text[at] != ")":
        if text[at] == "|":
            branches.append([])
            at += 1
            continue
        item, at = _item(text, at)
        found = _QUANTIFIER.match(text, at)
        if found is not None and item is not None:
            item.least = 1 if found[0][0] == "+" else int(found[1] or 0) if found[0][0] == "{" else 0
            item.once = False
            at = found.end()
        if item is not None:
            branches[-1].append(item)
    return branches, at


def _item(text: str, at: int) -> tuple[_Item | None, int]:
    """None for what takes up no room."""
    character = text[at]
    if character == "\\":
        return _escaped(text[at + 1 : at + 2]), at + 2
    if character == "[":
        end = text.find("]", at + (3 if text[at + 1 : at + 2] == "^" else 2))
        while end > 0 and text[end - 1] == "\\" and text[end - 2] != "\\":
            end = text.find("]", end + 1)
        if end < 0:
            raise _Unknown
        return _Item(), end + 1
    if character == "(":
        return _group(text, at)
    if character in "^$":
        return None, at + 1
    return (_Item() if character == "." else _Item(text=character)), at + 1


def _escaped(character: str) -> _Item | None:
    if character and character in _ZERO_WIDTH:
        return None
    if character in _CLASSES:
        return _Item()
    if character == "t":
        return _Item(text="\t")
    if not character or character.isalnum():
        raise _Unknown
    return _Item(text=character)


def _group(text: str, at: int) -> tuple[_Item | None, int]:
    looks = _LOOK.match(text, at)
    opened = looks or _PLAIN_GROUP.match(text, at)
    if opened is None:
        raise _Unknown  # Flags change what the letters mean.
    branches, end = _branches(text, opened.end())
    if end >= len(text):
        raise _Unknown
    return (None if looks else _Item(branches=branches)), end + 1


def _of_branches(branches: list[list[_Item]]) -> list[str] | None:
    each = [_of_sequence(branch) for branch in branches]
    if any(one is None for one in each):
        return None
    return [literal for one in each for literal in one or ()]


def _of_sequence(items: list[_Item]) -> list[str] | None:
    best: list[str] | None = None
    run = ""
    for item in [*_flat(items), _Item()]:
        if item.text and item.least:
            run += item.text
            if item.once:
                continue
        best, run = _better(best, [run] if len(run) >= SHORTEST else None), ""
        if item.branches and item.least:
            best = _better(best, _of_branches(item.branches))
    return best


def _flat(items: list[_Item]) -> list[_Item]:
    """Groups that stand once and have no choice in them are as good as what they hold."""
    flat: list[_Item] = []
    for item in items:
        alone = item.once and len(item.branches) == 1
        flat += _flat(item.branches[0]) if alone else [item]
    return flat


def _better(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    """Long ones rule out more; among those that are long enough, fewer."""
    if one is None or other is None:
        return one if other is None else other
    return other if _worth(other) > _worth(one) else one


def _worth(literals: list[str]) -> tuple[int, int]:
    return min(LONG_ENOUGH, *map(len, literals)), -len(literals)
