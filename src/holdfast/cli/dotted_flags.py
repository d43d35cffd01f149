"""Flags of one part of a table, as vLLM takes them: --structured-outputs-config.disable_any_whitespace true. Words in,
words out; which parts there are is `config`'s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

TABLES = (
    "--structured-outputs-config",
    "--hf-overrides",
    "--override-generation-config",
    "--default-chat-template-kwargs",
    "--rope-scaling",
)


def joined(words: Sequence[str]) -> list[str]:
    """All parts of a table as one JSON object, where the first of them stood; a part without a value is true."""
    found: list[str] = []
    tables: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        table, dot, part = name.replace("_", "-").partition(".")
        if not dot or table not in TABLES:
            found.append(word)
            continue
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("-") else "true"
        if table not in tables:
            tables[table], places[table] = {}, len(found)
            found.append("")
        _set(tables[table], part.replace("-", "_").split("."), _value(value))
    for table, place in places.items():
        found[place] = f"{table}={json.dumps(tables[table])}"
    return found


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """--hf-overrides.rope_parameters.factor 4: in a table of the table."""
    for step in path[:-1]:
        if not isinstance(table.get(step), dict):
            table[step] = {}
        table = table[step]
    table[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
