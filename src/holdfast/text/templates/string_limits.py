"""How long a string becomes, told from the arguments before Python makes it. Knows nothing of Jinja's environment."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

MAX_NUMBER = 1_000_000
"""An argument that may be a width; no prompt is padded to more."""
MAX_PATTERN_CHARS = 10_000
"""Of a pattern that values are formatted into."""

MAX_SPELLED = 250_000
"""Characters that may be written as Python would spell them, with quotes and escapes, which looks at each."""

_SPELLS = re.compile(r"%(?:\([^)]*\))?[^%a-zA-Z]*[ra]")
_DIGITS = re.compile(r"\d+")


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def refuse_numbers(given: tuple[Any, ...], most: int = MAX_NUMBER) -> None:
    for value in given:
        if isinstance(value, int) and abs(value) > most:
            raise SecurityError(f"a width of more than {most}")


def formatted_chars(pattern: str, weight: int, values: Any) -> float:
    """Of `pattern % values`: each place at its widest, with all that is given."""
    _check_pattern(pattern)
    if weight > MAX_SPELLED and (len(pattern) > 200 or _SPELLS.search(pattern)):
        raise SecurityError(f"more than {MAX_SPELLED} characters to escape")
    widest = _widest(pattern)
    if "*" in pattern:
        numbers = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        widest = max([widest, *(value for value in numbers if isinstance(value, int))])
    return len(pattern) + pattern.count("%") * (widest + weight)


def braced_chars(pattern: str, weight: int) -> float:
    """Of pattern.format(...)."""
    _check_pattern(pattern)
    for _, _, spec, conversion in Formatter().parse(pattern):
        if spec and "{" in spec:
            raise SecurityError("a format that takes its width from an argument")
        if conversion and conversion != "s" and weight > MAX_SPELLED:
            raise SecurityError(f"more than {MAX_SPELLED} characters to escape")
    return len(pattern) + pattern.count("{") * (_widest(pattern) + weight)


def _check_pattern(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise SecurityError(f"a pattern of more than {MAX_PATTERN_CHARS} characters")


def _widest(pattern: str) -> int:
    widest = max((int(run) if len(run) < 10 else 10**9 for run in _DIGITS.findall(pattern)), default=0)
    if widest > MAX_NUMBER:
        raise SecurityError(f"a width of more than {MAX_NUMBER}")
    return widest


def replaced_chars(text: str, old: str, new: str) -> float:
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def padded_chars(text: str, given: tuple[Any, ...]) -> float:
    refuse_numbers(given)
    return len(text) + sum(abs(value) for value in given if isinstance(value, int))


def untabbed_chars(text: str, given: tuple[Any, ...]) -> float:
    refuse_numbers(given)
    return len(text) + text.count("\t") * max((value for value in given if isinstance(value, int)), default=8)
