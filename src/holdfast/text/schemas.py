"""JSON schemas as data: their regular expressions, the same in other words that the library knows, and without room
for more properties. Compiles nothing, and refuses nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties", "items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains",
    "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


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
    """The same in words that the library knows: names of properties as patterns of them, and `uniqueItems` left out
    where it asks for nothing."""
    return _everywhere(schema, _rewrite)


def _rewrite(found: dict[str, Any]) -> None:
    if found.get("uniqueItems") is False or (found.get("uniqueItems") is True and found.get("maxItems") in (0, 1)):
        del found["uniqueItems"]
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
