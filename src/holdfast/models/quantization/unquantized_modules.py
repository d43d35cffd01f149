"""Which modules a quantizer left alone: names, and a stranger's patterns, searched within a bounded number of steps.

A pattern is made plainer first (what may come before or after is no reason to try every way), then the steps it can
take on a module's name are counted; patterns that could take too many together are refused before any is searched.
Knows no quantization method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import factorial

MAX_STEPS = 1 << 17
"""On one name, for all patterns together; more than a hundred usual ones."""
_NAME_CHARS = 48
"""A long name of a module."""
_MAX_REPEATS = 4
_MAX_CHOICES = 12

_ANYTHING_TWICE = re.compile(r"(?<!\\)(?:\.\*){2,}")
_ANYTHING_FIRST = re.compile(r"\^?(?:\.\*\??)+(?![*+?{])")
_ANYTHING_LAST = re.compile(r"(?<!\\)\.\*\??\$?$")
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LAZY = re.compile(r"(?<=[*+}])\?|\(\?")
_ONE = "\N{REPLACEMENT CHARACTER}"
"""In place of what takes one character of several, or is counted already."""
_DOT = "\N{MIDDLE DOT}"
"""One that is a dot, and not any character."""
_GROUP = re.compile(r"\((?:\?:)?([^()*+{}]*)\)(\??)(?![*+?{])")
"""Without a repeat in it, and not repeated itself."""
_WHOLE = re.compile(r"\(\?[aiLmsux-]+\)|\(\?P|\\[1-9]")
"""Flags, names and backreferences: what belongs to all of a pattern."""


class UntamedPattern(ValueError):
    """Of patterns: with the one that cannot be read, or that took the last of the steps."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Read once for a model; remembers what it said of a module."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    """As text: the plan that holds them travels to the engine process."""
    lengths: tuple[int, ...]
    """Dotted parts that names have: other runs of a module's parts need not be looked up."""
    tells_numbers: bool = False
    """Whether a module's number, such as that of an expert, may decide."""
    known: dict[str, bool] = field(default_factory=dict)
    known_alike: dict[str, bool] = field(default_factory=dict)

    @staticmethod
    def read(written: Iterable[str]) -> Exceptions:
        """Plain ones name a module or a run of its dotted parts; those with `re:` or a * are patterns."""
        return _read(tuple(dict.fromkeys(written)))

    def hold(self, module: str) -> bool:
        found = self.known.get(module)
        if found is None:
            found = self.known[module] = self._found(module)
        return found

    def alike(self, module: str, experts: int) -> bool:
        """Whether it says the same of all that the name's {expert} stands for. Also remembered: of a model with many
        experts, specs of several quantizations ask it of every layer."""
        if not self.tells_numbers:
            return True
        key = f"{experts} {module}"
        if key not in self.known_alike:
            said = {self.hold(module.replace("{expert}", str(expert))) for expert in range(experts)}
            self.known_alike[key] = len(said) < 2
        return self.known_alike[key]

    def _found(self, module: str) -> bool:
        if any(_compiled(pattern).search(module) for pattern in self.patterns):
            return True
        parts = module.split(".")
        return any(
            ".".join(parts[first : first + length]) in self.names
            for length in self.lengths
            for first in range(len(parts) - length + 1)
        )


@lru_cache(maxsize=16)
def _read(written: tuple[str, ...]) -> Exceptions:
    """Once for the several ways in which one model may be quantized."""
    names: set[str] = set()
    patterns: dict[tuple[str, bool], str] = {}
    steps = 0
    for name in written:
        if not is_pattern(name):
            names.add(name.strip("."))
            continue
        for body, anchored in _plainer(name):
            if (body, anchored) in patterns:
                continue
            steps += _steps(body, anchored=anchored)
            if steps > MAX_STEPS:
                raise UntamedPattern(name)
            patterns[body, anchored] = pattern = f"^(?:{body})" if anchored else body
            try:
                _compiled(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise UntamedPattern(name) from error
    lengths = sorted({name.count(".") + 1 for name in names})
    numbered = bool(patterns) or any(part.isdecimal() for name in names for part in name.split("."))
    return Exceptions(frozenset(names), tuple(patterns.values()), tuple(lengths), numbered)


def is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name


def _plainer(name: str) -> Iterator[tuple[str, bool]]:
    """The patterns that it is one of, without what matches anything at their ends, and whether each must match from the
    beginning."""
    if not name.startswith("re:"):
        yield ".*".join(re.escape(part) for part in re.split(r"\*+", name.strip("*"))), False
        return
    for way in _ways(_ANYTHING_TWICE.sub(".*", name[3:])):
        first = _ANYTHING_FIRST.match(way)
        body = way[first.end() :] if first is not None else way
        if _outermost_choices(body):  # Of one that could not be taken apart: an end may belong to one way only.
            yield way, True
        else:
            yield _ANYTHING_LAST.sub("", body), first is None


def _ways(body: str) -> list[str]:
    """`a|b` is a, or b; but for what is written once for both."""
    if _WHOLE.search(body):
        return [body]
    ends = [-1, *_outermost_choices(body), len(body)]
    return [body[start + 1 : end] for start, end in pairwise(ends)]


def _outermost_choices(body: str) -> list[int]:
    """Where a | stands in no group and no set."""
    depth, found = 0, []
    for place, char in enumerate(_LITERAL.sub(lambda literal: _ONE * len(literal[0]), body)):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            found.append(place)
    return found


def _steps(body: str, *, anchored: bool) -> int:
    """The most that searching a name can take. A repeat tries every length, a choice doubles the ways, and a repeat of
    a group could multiply itself: more than any budget. Of a choice of names no two match at one place unless one
    begins as the other: they are tried, but are no more ways."""
    skeleton = _LITERAL.sub(lambda literal: _DOT if literal[0] == r"\." else _ONE, body)
    ways, tried = 1, 1
    while (group := _GROUP.search(skeleton)) is not None and ways <= MAX_STEPS:
        options = group[1].split("|")
        ways *= _alike(options) * (2 if group[2] else 1)
        tried += len(options)
        skeleton = skeleton[: group.start()] + _ONE + skeleton[group.end() :]
    skeleton = _LAZY.sub("x", skeleton)
    repeats, choices = len(re.findall(r"[*+{]", skeleton)), len(re.findall(r"[|?]", skeleton))
    if re.search(r"\)[*+{]", skeleton) or repeats > _MAX_REPEATS or choices > _MAX_CHOICES or ways > MAX_STEPS:
        return MAX_STEPS + 1
    places = repeats + (0 if anchored else 1)
    lengths: int = _NAME_CHARS**places // factorial(places)
    return (max(_NAME_CHARS, lengths) * ways * tried) << choices


def _alike(options: list[str]) -> int:
    """How many of them can match at one place."""
    if all(re.fullmatch(rf"[\w{_DOT}-]*", option) for option in options):
        return max(sum(option.startswith(other) for other in options) for option in options)
    return len(options) << min(sum(option.count("?") for option in options), _MAX_CHOICES + 8)


@lru_cache(maxsize=4096)  # More than the steps allow in one model; re's own cache is smaller.
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
