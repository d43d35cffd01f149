"""JSON schemas as data: their regular expressions, the same in other words that the library knows, and without room
for more properties. Compiles nothing, and refuses nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import permutations
from math import perm
from typing import Any

WHITESPACE = r"(?:\x20{1,2}|\x0D?\x0A[\x20\x09]{0,32}|\x09)"
"""Between parts of JSON where nothing else is said: a blank or two, or one new line and its indentation, and no room
for a model that has lost its way to write nothing but blanks until its tokens are spent."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties", "items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains",
    "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


MOST_ARRANGED_CHARS = 2560
"""Of all lists that are written out for one schema, in characters: each takes some 43 bytes when it is compiled, and
what a schema may take is counted by how it was sent."""
LEAST_TEXT_CHARS = 4
"""That a text of a list is written with, however short: its quotes, a comma and a blank."""
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_OF_LISTS = frozenset({"type", "items", "uniqueItems", "minItems", "maxItems"})
_DESCRIPTIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def patterns(schema: Any) -> Iterator[str]:
    """Regular expressions of a schema, wherever they stand; level by level, because it may be deep."""
    here = [schema]
    while here:
        one = here.pop()
        if isinstance(one, dict):
            if isinstance(found := one.get("pattern"), str):
                yield found
            if isinstance(named := one.get("patternProperties"), dict):
                yield from named
        here += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def closed_tags(given: Any) -> Any:
    if isinstance(given, list):
        return [closed_tags(one) for one in given]
    if not isinstance(given, dict):
        return given
    return {name: (closed if name in ("schema", "json_schema") else closed_tags)(one) for name, one in given.items()}


def _everywhere(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy with every schema in it changed, the inner ones first."""
    if isinstance(schema, list):
        return [_everywhere(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: _everywhere(one, change) for key, one in value.items()}
        elif name in _SCHEMAS:
            found[name] = _everywhere(value, change)
    change(found)
    return found


def closed(schema: Any) -> Any:
    """With `additionalProperties: false` wherever an object names properties and does not speak of others."""

    def close(found: dict[str, Any]) -> None:
        if "additionalProperties" not in found and isinstance(found.get("properties"), dict):
            found["additionalProperties"] = False

    return _everywhere(schema, close)


def rewritten(schema: Any) -> Any:
    """The same in words that the library knows: counts such as 2.0 as whole numbers, names of properties as patterns of
    them, `uniqueItems` left out where it asks for nothing, and otherwise all the lists there can be, where they are
    few."""
    left_chars = MOST_ARRANGED_CHARS

    def rewrite(found: dict[str, Any]) -> None:
        nonlocal left_chars
        for name in _COUNTS & found.keys():
            if isinstance(found[name], float) and found[name].is_integer():
                found[name] = int(found[name])
        _name_patterns(found)
        unique = found.get("uniqueItems")
        if unique is False or (unique is True and found.get("maxItems") in (0, 1)):
            del found["uniqueItems"]
        elif unique is True and (lists := _arrangements(found, schema, left_chars)) is not None:
            left_chars -= sum(len(text) + LEAST_TEXT_CHARS for one in lists for text in one)
            found.clear()
            found["enum"] = lists

    return _everywhere(schema, rewrite)


def _arrangements(found: dict[str, Any], root: Any, most_chars: int) -> list[list[str]] | None:
    """Every list of different texts that a schema allows; None: they are too many, or not told by their values."""
    texts = _texts(found.get("items"), root)
    if texts is None or found.get("type") != "array" or found.keys() - _OF_LISTS - _DESCRIPTIONS:
        return None
    least, most = found.get("minItems", 0), found.get("maxItems", len(texts))
    if not (type(least) is int and type(most) is int and 0 <= least <= min(most, len(texts))):
        return None
    # Looked at before anything is counted: the number of arrangements may have many thousand digits.
    if least * LEAST_TEXT_CHARS > most_chars:
        return None
    most, chars = min(most, len(texts)), 0
    for count in range(least, most + 1):
        # Each text stands in as many of them as any other.
        chars += perm(len(texts), count) * count * sum(len(text) + LEAST_TEXT_CHARS for text in texts) // len(texts)
        if chars > most_chars:
            return None
    return [list(one) for count in range(least, most + 1) for one in permutations(texts, count)]


def _texts(items: Any, root: Any) -> list[str] | None:
    """The values of a list's items, where they are told and texts; in place or under a name of this schema."""
    reference = items.get("$ref") if isinstance(items, dict) and items.keys() - _DESCRIPTIONS == {"$ref"} else None
    if isinstance(reference, str) and (place := _DEFINITION.fullmatch(reference)) and isinstance(root, dict):
        named = root.get(place[1])
        items = named.get(place[2]) if isinstance(named, dict) else None
    if not isinstance(items, dict) or items.get("type", "string") != "string":
        return None
    kinds = items.keys() - _DESCRIPTIONS - {"type"}
    values = items["enum"] if kinds == {"enum"} else [items["const"]] if kinds == {"const"} else None
    if not isinstance(values, list) or not 0 < len(values) <= MOST_ARRANGED_CHARS:
        return None
    if not all(isinstance(value, str) for value in values):
        return None
    return list(dict.fromkeys(values))


def _name_patterns(found: dict[str, Any]) -> None:
    named, others = found.get("propertyNames"), found.get("additionalProperties", True)
    pattern = _of_names(named) if isinstance(named, dict) else None
    if pattern is not None and others is not False and not {"properties", "patternProperties"} & found.keys():
        del found["propertyNames"]
        found["patternProperties"], found["additionalProperties"] = {pattern: others}, False


def _of_names(schema: dict[str, Any]) -> str | None:
    """What names of properties must look like; None: it is said in some other way."""
    kinds = schema.keys() - {"type", "title", "description"}
    if kinds == {"pattern"} and isinstance(schema["pattern"], str):
        return str(schema["pattern"])
    names = schema.get("enum") if kinds == {"enum"} else [schema["const"]] if kinds == {"const"} else None
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return f"^(?:{'|'.join(_literal(name) for name in names)})$"
    return None


def _literal(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_ ]", lambda found: f"\\x{{{ord(found.group()):x}}}", name)
