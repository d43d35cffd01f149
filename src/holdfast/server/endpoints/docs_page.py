"""/docs: the document of the API for people, one page without scripts and without anything from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .5rem; border: 1px solid #8884; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top; }
summary { cursor: pointer; margin: .4rem 0; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""


def page(document: dict[str, Any]) -> str:
    """HTML. Everything in it is escaped."""
    title = f"{document['info']['title']} {document['info']['version']}"
    operations = "".join(
        _operation(path, method, found)
        for path, methods in document["paths"].items()
        for method, found in methods.items()
    )
    schemas = "".join(_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>Machine-readable version: <a href=openapi.json>openapi.json</a></p>"
        f"<h2>Paths</h2>{operations}<h2>Bodies</h2>{schemas}</html>"
    )


def _operation(path: str, method: str, found: dict[str, Any]) -> str:
    rows = [("query", parameter["name"], _kind(parameter["schema"])) for parameter in found["parameters"]]
    if "requestBody" in found:
        content = found["requestBody"]["content"]["application/json"]
        rows.append(("body", "", _kind(content["schema"])))
    for status, answer in found["responses"].items():
        kinds = (f"{name}: {_kind(content['schema'])}" for name, content in answer["content"].items())
        rows.append(("answer", status, ", ".join(kinds)))
    return (
        f"<details><summary><code>{escape(method.upper())} {escape(path)}</code> {escape(found['summary'])}</summary>"
        f"{_table(rows)}</details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (field, "required" if field in required else "", _kind(kind))
        for field, kind in schema.get("properties", {}).items()
    ]
    shown = _table(rows) if rows else f"<pre>{escape(json.dumps(schema, indent=1))}</pre>"
    return f"<details id={escape(name)}><summary><code>{escape(name)}</code></summary>{shown}</details>"


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = ("".join(f"<td><code>{escape(cell)}</code>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}' for line in cells)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " | ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    limits = [f"{name} {schema[name]}" for name in ("minimum", "exclusiveMaximum", "maxLength") if name in schema]
    return ", ".join([str(schema.get("type", "anything")), *limits])
