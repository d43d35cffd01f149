"""From what an answer must look like to a grammar as llguidance takes it. Pure text: compiles and checks nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.gbnf import lark_of_gbnf
from holdfast.text.structural_tags import lark_of_tags

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between parts of JSON where nothing else is said: enough to indent ten levels, and no room for a model that has lost
its way to write nothing but blanks until its tokens are spent."""

_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:))")

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties", "items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains",
    "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def grammar_of(params: StructuredOutputsParams, special_id: Callable[[str], int | None]) -> str:
    """`special_id`: of a text that is one special token, its id."""
    if params.json is not None:
        return _of_schema(params.json, params)
    if params.json_object:
        return _of_schema({"type": "object"}, params)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(params.grammar))
    assert isinstance(params.structural_tag, dict)
    return LLMatcher.grammar_from_lark(lark_of_tags(params.structural_tag, _options(params), special_id))


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _of_schema(schema: Any, params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        schema = closed(schema)
    try:
        # True is the schema of anything, and so is an empty one, which can carry options.
        plain = {} if schema is True else schema
        return LLMatcher.grammar_from_json_schema(plain, overrides=_options(params))  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(f"json: {error}", code="HF361", field="json") from None


def closed(schema: Any) -> Any:
    """With `additionalProperties: false` wherever an object names properties and does not speak of others."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: closed(one) for key, one in value.items()}
        elif name in _SCHEMAS:
            found[name] = closed(value)
    if "additionalProperties" not in found and isinstance(found.get("properties"), dict):
        found["additionalProperties"] = False
    return found


def _lark(text: str) -> str:
    return text if _LARK.search(text) else lark_of_gbnf(text)
