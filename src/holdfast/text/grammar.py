"""From what an answer must look like to a grammar as llguidance takes it. Pure text: compiles and checks nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.gbnf import lark_of_gbnf
from holdfast.text.repeats import MOST, too_many
from holdfast.text.structural_tags import lark_of_tags

WHITESPACE = r"(?:\x20{1,2}|\x0D?\x0A[\x20\x09]{0,32}|\x09)"
"""Between parts of JSON where nothing else is said: a blank or two, or one new line and its indentation, and no room
for a model that has lost its way to write nothing but blanks until its tokens are spent."""
ASCII = "dws"
r"""\d, \w and \s are [0-9], [0-9a-zA-Z_] and the blanks of ASCII, as in a schema's `pattern` and in vLLM's default."""

_QUOTED = re.compile(
    r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\[(?:[^\]\\]|\\.)*\]"""
    r"""|(?://|\#)[^\n]*|/(?:[^/\\\n]|\\.)+/""",
    re.DOTALL,
)
_LARK_PART = re.compile(r""""(?:[^"\\\n]|\\.)*"|//[^\n]*|\#[^\n]*|/(?P<regex>(?:[^/\\\n]|\\.)+)/""")

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
        check_repeats(params.regex, params)
        return LLMatcher.grammar_from_lark(f"start: {lark_regex(params.regex)}")
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(params))
    assert isinstance(params.structural_tag, dict)
    tags = _closed_tags(params.structural_tag) if params.disable_additional_properties else params.structural_tag
    return LLMatcher.grammar_from_lark(lark_of_tags(tags, _options(params), special_id))


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = params.whitespace_pattern
    return {"whitespace_pattern": WHITESPACE if pattern is None else pattern.replace(r"\s", r"[\x20\x0A\x0D\x09]")}


def _of_schema(schema: Any, params: StructuredOutputsParams) -> str:
    for pattern in _patterns(schema):
        check_repeats(pattern, params)
    if params.disable_additional_properties:
        schema = closed(schema)
    try:
        # True is the schema of anything, and so is an empty one, which can carry options.
        plain = {} if schema is True else schema
        return LLMatcher.grammar_from_json_schema(plain, overrides=_options(params))  # type: ignore[arg-type]
    except ValueError as error:
        named = params.asked_as or "json"
        raise GrammarError(f"{named}: {error}", code="HF361", field=named) from None


def _patterns(schema: Any) -> Iterator[str]:
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


def _closed_tags(given: Any) -> Any:
    if isinstance(given, list):
        return [_closed_tags(one) for one in given]
    if not isinstance(given, dict):
        return given
    return {name: (closed if name in ("schema", "json_schema") else _closed_tags)(one) for name, one in given.items()}


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


def lark_regex(regex: str) -> str:
    return f"/{regex_to_lark(regex, use_ascii=ASCII)}/"


def check_repeats(regex: str, params: StructuredOutputsParams) -> None:
    product = too_many(regex)
    if product is not None:
        named = params.asked_as or params.kind
        raise GrammarError(
            f"{named}: repetitions within each other come to {product:,}",
            code="HF362", needed=f"at most {MOST:,}", found=f"{product:,}", fix="smaller repetitions", field=named,
        )  # fmt: skip


def _lark(params: StructuredOutputsParams) -> str:
    """GBNF defines its rules with ::=, which Lark has nowhere outside of quotes."""
    assert params.grammar is not None
    if "::=" in _QUOTED.sub(" ", params.grammar):
        lark = lark_of_gbnf(params.grammar)
        check_repeats(lark, params)
        return lark

    def in_ascii(found: re.Match[str]) -> str:
        if found["regex"] is None:
            return found.group()
        check_repeats(found["regex"], params)
        return lark_regex(found["regex"])

    return _LARK_PART.sub(in_ascii, params.grammar)
