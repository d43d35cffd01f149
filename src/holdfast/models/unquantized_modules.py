"""Which modules a quantizer left alone: names, and a stranger's patterns, searched within a bounded number of steps.

A pattern is made plainer first (what may come before or after is no reason to try every way), then the steps it can
take on a module's name are counted; patterns that could take too many together are refused before any is searched.
Knows no quantization method.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
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
_LITERAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_LAZY = re.compile(r"(?<=[*+}])\?|\(\?")


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

    @staticmethod
    def read(written: Iterable[str]) -> Exceptions:
        """Plain ones name a module or a run of its dotted parts; those with `re:` or a * are patterns."""
        return _read(tuple(dict.fromkeys(written)))

    def hold(self, module: str) -> bool:
        found = self.known.get(module)
        if found is None:
            found = self.known[module] = self._found(module)
        return found

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
        plainer = body, anchored = _plainer(name)
        if plainer not in patterns:
            steps += _steps(body, anchored=anchored)
            if steps > MAX_STEPS:
                raise UntamedPattern(name)
            patterns[plainer] = pattern = f"^(?:{body})" if anchored else body
            try:
                _compiled(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise UntamedPattern(name) from error
    lengths = sorted({name.count(".") + 1 for name in names})
    numbered = bool(patterns) or any(part.isdecimal() for name in names for part in name.split("."))
    return Exceptions(frozenset(names), tuple(patterns.values()), tuple(lengths), numbered)


def is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name


def _plainer(name: str) -> tuple[str, bool]:
    """The pattern without what matches anything at its ends, and whether it must match from the beginning."""
    if not name.startswith("re:"):
        return ".*".join(re.escape(part) for part in re.split(r"\*+", name.strip("*"))), False
    body = _ANYTHING_TWICE.sub(".*", name[3:])
    if "|" in body:  # An end may belong to one of the ways only.
        return body, True
    first = _ANYTHING_FIRST.match(body)
    body = body[first.end() :] if first is not None else body
    return _ANYTHING_LAST.sub("", body), first is None


def _steps(body: str, *, anchored: bool) -> int:
    """The most that searching a name can take. A repeat tries every length, a choice doubles the ways, and a repeat of
    a group could multiply itself: more than any budget."""
    skeleton = _LAZY.sub("x", _LITERAL.sub("x", body))
    repeats, choices = len(re.findall(r"[*+{]", skeleton)), len(re.findall(r"[|?]", skeleton))
    if re.search(r"\)[*+{?]", skeleton) or repeats > _MAX_REPEATS or choices > _MAX_CHOICES:
        return MAX_STEPS + 1
    places = repeats + (0 if anchored else 1)
    ways: int = _NAME_CHARS**places // factorial(places)
    return max(_NAME_CHARS, ways) << choices


@lru_cache(maxsize=4096)  # More than the steps allow in one model; re's own cache is smaller.
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
