"""Formats of structural tags: each by itself and in each other, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from small_vocabulary import accepts, small_grammars

from holdfast.errors import RequestError
from holdfast.records.structured import StructuredOutputsParams

GRAMMARS = small_grammars()


def form(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


CONST = {"type": "const_string", "value": "ab"}
DIGIT = {"type": "regex", "pattern": r"\d"}
LIST = {"type": "grammar", "grammar": 'root ::= "[" (root ("," root)*)? "]"'}
TAG = {"type": "tag", "begin": "<t>", "content": DIGIT, "end": "</t>"}
FREE = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "</u>"]}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (CONST, ["ab"], ["", "abc"]),
    ({"type": "json_schema", "json_schema": {"type": "integer"}}, ["12"], ["a"]),
    ({"type": "any_text"}, ["", "any\n"], []),
    (LIST, ["[[],[]]"], ["[", "[1]"]),
    (DIGIT, ["1"], ["٣"]),
    ({"type": "sequence", "elements": [CONST, DIGIT, LIST, {"type": "any_text"}]},
     ["ab1[]", "ab1[]<t>"], ["ab[]", "1"]),
    ({"type": "or", "elements": [CONST, {"type": "sequence", "elements": [DIGIT, DIGIT]}]},
     ["ab", "12"], ["ab12", "1"]),
    (TAG, ["<t>1</t>"], ["<t></t>", "<t>1", "1"]),
    (FREE, ["<t></t>", "<t>x</v></u>"], ["<t>", "<t>a</t>b", "a"]),
    ({"type": "tags_with_separator", "tags": [TAG, {**TAG, "begin": "<b>"}], "separator": ";"},
     ["", "<t>1</t>", "<t>1</t>;<b>2</t>"], ["<t>1</t>;", "<t>1</t><b>2</t>", "x"]),
    ({"type": "tags_with_separator", "tags": [TAG], "separator": "", "at_least_one": True, "stop_after_first": True},
     ["<t>1</t>"], ["", "<t>1</t><t>1</t>"]),
    ({"type": "triggered_tags", "tags": [TAG, {**TAG, "begin": "<tt>"}], "triggers": ["<t"]},
     ["so", "a <t>1</t> b <tt>2</t>"], ["a <t>x</t>", "<t"]),
    ({"type": "triggered_tags", "tags": [FREE], "triggers": ["<t>"], "at_least_one": True, "stop_after_first": True},
     ["go <t>x</u>"], ["go", "<t>x</t>y"]),
    ({"type": "sequence", "elements": [FREE, {"type": "or", "elements": [CONST, TAG]}]}, ["<t>x</t>ab"], ["<t>x</t>"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "good", "bad"), FORMATS)
def test_formats_of_structural_tags(given: dict[str, Any], good: list[str], bad: list[str]) -> None:
    params = form(structural_tag={"type": "structural_tag", "format": given})
    assert [text for text in good if not accepts(GRAMMARS, params, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, params, text)] == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"type": "qwen_xml_parameter"}, "qwen_xml_parameter"), ({"type": ["or"]}, "or"), (3, "None"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes"), ({"type": "any_text", "max_tokens": 3}, "max_tokens"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, CONST]}, "last"),
        ({**TAG, "content": {"type": "triggered_tags", "tags": [TAG], "triggers": ["<"]}}, "last"),
        ({"type": "or", "elements": []}, "elements"), ({"type": "const_string"}, "value"),
        ({"type": "sequence", "elements": [CONST] * 600}, "512"),
        ({"type": "regex", "pattern": "(a{999}b){999}"}, "998,001"),
    ],
)  # fmt: skip
def test_formats_of_tags_that_are_not_there_are_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        GRAMMARS.matcher(form(structural_tag={"format": given}))
