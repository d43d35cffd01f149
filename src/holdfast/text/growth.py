"""How long a string becomes, told from the arguments before Python makes it. Knows nothing of Jinja's environment."""

from __future__ import annotations

import re
from typing import Any

from jinja2.exceptions import SecurityError

MAX_NUMBER = 1_000_000
"""An argument that may be a width; no prompt is padded to more."""

_DIGITS = re.compile(rb"\d+")


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def refuse_numbers(given: tuple[Any, ...]) -> None:
    for value in given:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"a width beyond {MAX_NUMBER}")


def formatted_chars(pattern: str | bytes, weight: int, values: Any, *, mark: str = "%") -> float:
    """Of `pattern % values`, or of pattern.format(): each place at its widest, with all that is given."""
    raw = pattern.encode(errors="replace") if isinstance(pattern, str) else pattern
    places = raw.count(mark.encode())
    widest = max((int(run) if len(run) < 10 else 10**9 for run in _DIGITS.findall(raw)), default=0)
    if b"*" in raw:
        numbers = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        widest = max([widest, *(value for value in numbers if isinstance(value, int))])
    return len(raw) + places * (widest + weight)


def check_method(owner: Any, name: str, given: tuple[Any, ...]) -> float:
    """At least as long as what the method makes; raises for what no prompt needs and nobody can bound."""
    refuse_numbers(given)
    if name == "striptags" or (name in ("encode", "decode") and given):
        raise SecurityError(f"{name}() with arguments is not for templates")
    if not isinstance(owner, str | bytes):
        return 0
    length = len(owner)
    if name in ("ljust", "rjust", "center", "zfill"):
        return length + sum(value for value in given if isinstance(value, int))
    if name == "expandtabs":
        tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
        return length + tabs * max((value for value in given if isinstance(value, int)), default=8)
    if name == "replace" and len(given) > 1 and all(isinstance(value, str | bytes) for value in given[:2]):
        return length + (owner.count(given[0]) if given[0] else length + 1) * len(given[1])
    if name == "join" and given:
        return sum(len(item) if hasattr(item, "__len__") else 0 for item in given[0]) + length * len(given[0])
    if name == "translate" and given and isinstance(given[0], dict):
        return length * max((len(text) for text in given[0].values() if isinstance(text, str)), default=1)
    return length
