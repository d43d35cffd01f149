"""JSON spoiled in ways that mean something: values of wrong kinds and sizes, duplicate names, depth, broken text."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any


class Raw(str):
    """Written as it stands, whatever it is."""


class Pairs(list[tuple[str, Any]]):
    """A table that may hold a name twice."""


HUGE = Raw("9" * 5000)
DEEP = Raw("[" * 3000 + "]" * 3000)
SHALLOW = Raw("[" * 60 + "]" * 60)
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    255,
    65536,
    1 << 24,
    1 << 31,
    (1 << 32) - 1,
    1 << 33,
    (1 << 63) - 1,
    1 << 64,
    -(1 << 63),
    10**40,
    0.5,
    -0.0,
    1e308,
    Raw("1e400"),
    Raw("-1e400"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw("-Infinity"),
    HUGE,
    Raw("-" + HUGE),
    Raw("0." + HUGE),
    Raw("1e99999"),
)
TEXTS: tuple[Any, ...] = (
    "",
    "a",
    "\0",
    "\x1b[2J",
    "²",
    "../../etc/passwd",
    "é" * 3,
    "a" * 5000,
    "☃" * 70000,
    Raw('"\\ud800"'),
    "{{ 1 }}",
    "null",
    "1",
    HUGE + "",
    "a.b",
    "^(a+)+$",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], [[]], {"": None}, DEEP, SHALLOW, [0] * 5000)


def dump(value: Any) -> str:
    """JSON, with what no JSON library would write."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ", ".join(f"{json.dumps(str(name))}: {dump(one)}" for name, one in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value)


def spoil(document: dict[str, Any], random: Random, special: tuple[Any, ...] = ()) -> Any:
    """A copy with one to three changes. `special`: values that hurt this document in particular."""
    changed = copy.deepcopy(document)
    for _ in range(random.randint(1, 3)):
        changed = _spoil_once(changed, random, special)
    return changed


def spoiled_bytes(document: dict[str, Any], random: Random, special: tuple[Any, ...] = ()) -> bytes:
    """The same, and now and then what is not even JSON."""
    raw = dump(spoil(document, random, special)).encode("utf-8", "surrogatepass")
    roll = random.random()
    if roll < 0.04:
        return raw[: random.randrange(len(raw))]
    if roll < 0.06:
        place = random.randrange(len(raw))
        return raw[:place] + bytes([random.randrange(256)]) + raw[place:]
    if roll < 0.08:
        return raw.decode("utf-8", "replace").encode(random.choice(["utf-16", "utf-32", "utf-8-sig"]), "replace")
    return raw


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for name, one in value.items():
            found += _places(one, (*path, name))
    elif type(value) is list:
        for place, one in enumerate(value[:40]):
            found += _places(one, (*path, place))
    return found


def _spoil_once(document: Any, random: Random, special: tuple[Any, ...]) -> Any:
    places = _places(document)
    if not places:
        return copy.deepcopy(random.choice((*OTHERS, *NUMBERS)))
    path = random.choice(places)
    holder: Any = document
    for step in path[:-1]:
        holder = holder[step]
    last, change = path[-1], random.random()
    if change < 0.1:
        del holder[last]
    elif change < 0.2 and isinstance(holder, list):
        holder[last:last] = [copy.deepcopy(holder[last])] * random.choice((1, 3, 100))
    elif change < 0.2:
        twice = Pairs([*holder.items(), (last, copy.deepcopy(random.choice((*NUMBERS, *OTHERS))))])
        return _put(document, path[:-1], twice)
    elif change < 0.28 and isinstance(holder, dict):
        holder[str(random.choice((*TEXTS, "constructor", "9" * 5000, "-1", "²")))] = holder.pop(last)
    else:
        value = random.choice(random.choice((NUMBERS, TEXTS, OTHERS, special or NUMBERS)))
        holder[last] = copy.deepcopy(value)  # Later changes may be made within it.
    return document


def _put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return document
