"""From what an answer must look like to a grammar as llguidance takes it. Pure text: compiles and checks nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.syntax.gbnf import lark_of_gbnf
from holdfast.text.structured.syntax.lark_scanner import any_parts, lark_parts
from holdfast.text.structured.syntax.regex_limits import check_repeats
from holdfast.text.structured.syntax.schemas import WHITESPACE, closed, closed_tags, patterns, rewritten
from holdfast.text.structured.syntax.structural_tags import lark_of_tags

ASCII = "dws"
r"""\d, \w and \s are [0-9], [0-9a-zA-Z_] and the blanks of ASCII, as in a schema's `pattern` and in vLLM's default."""


def grammar_of(params: StructuredOutputsParams, special_id: Callable[[str], int | None]) -> str:
    """`special_id`: of a text that is one special token, its id."""
    if params.json is not None:
        return _of_schema(params.json, params)
    if params.json_object:
        return _of_schema({"type": "object"}, params)
    if params.regex is not None:
        check_repeats(params.regex, params.asked_as or "regex")
        return LLMatcher.grammar_from_lark(f"start: {lark_regex(params.regex)}")
    if params.choice is not None:
        # One terminal: as a rule, thousands of them would be more than a parser takes.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice)))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(params))
    assert isinstance(params.structural_tag, dict)
    tags = closed_tags(params.structural_tag) if params.disable_additional_properties else params.structural_tag
    return LLMatcher.grammar_from_lark(lark_of_tags(tags, _options(params), special_id))


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = params.whitespace_pattern
    return {"whitespace_pattern": WHITESPACE if pattern is None else pattern.replace(r"\s", r"[\x20\x0A\x0D\x09]")}


def _of_schema(schema: Any, params: StructuredOutputsParams) -> str:
    named = params.asked_as or params.kind
    for pattern in patterns(schema):
        check_repeats(pattern, named)
    schema = rewritten(schema)
    if params.disable_additional_properties:
        schema = closed(schema)
    try:
        # True is the schema of anything, and so is an empty one, which can carry options.
        # As text, in which numbers are as large as they like.
        plain = json.dumps({} if schema is True else schema)
        return LLMatcher.grammar_from_json_schema(plain, overrides=_options(params))  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(f"{named}: {error}", code="HF361", field=named) from None


def lark_regex(regex: str) -> str:
    return f"/{regex_to_lark(regex, use_ascii=ASCII)}/"


def _lark(params: StructuredOutputsParams) -> str:
    """GBNF defines its rules with ::=, which Lark has nowhere outside of quotes."""
    assert params.grammar is not None
    named = params.asked_as or "grammar"
    if "::=" in " ".join(part for kind, part in any_parts(params.grammar) if kind == "other"):
        lark = lark_of_gbnf(params.grammar)
        check_repeats(lark, named)
        return lark
    return "".join(
        _in_ascii(part[1:-1], named) if kind == "regex" else part for kind, part in lark_parts(params.grammar)
    )


def _in_ascii(regex: str, named: str) -> str:
    check_repeats(regex, named)
    return lark_regex(regex)
