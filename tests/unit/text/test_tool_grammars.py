"""Calls held to a form: what the grammar lets through is a call that its family's reader reads, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from holdfast.errors import GrammarError, RequestError
from holdfast.text.output.reasoning import ReasoningFormat, State
from holdfast.text.tools.call_format import ToolCallFormat
from holdfast.text.tools.events import Arguments, CallBegun, Tool
from holdfast.text.tools.families.mistral import NAMED
from holdfast.text.tools.grammar import MAX_SCHEMA_DEPTH, Freedom, calls_grammar, closed, thoughtful_json
from holdfast.text.tools.prompt import written
from holdfast.text.tools.registry import DIALECTS

BYTES = LLTokenizer("byte")
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
REFERENCES = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": CITY}}
TOOLS = [
    Tool(name="weather", given={}, parameters=CITY),
    Tool(name="route", given={}, parameters=REFERENCES),
    Tool(name="now", given={}, parameters={"type": "object", "properties": {}}),
]
FORMS: dict[str, ToolCallFormat] = {
    name: DIALECTS[name].call_format
    for name in ("hermes", "llama3_json", "mistral", "json", "seed_oss", "granite", "phi4_mini_json", "jamba")
}
GOOD = [
    ("weather", '{"city": "Oslo"}'),
    ("weather", '{"city": "Zürich", "days": 3}'),
    ("route", '{"at": {"city": "Oslo"}}'),
    ("now", "{}"),
]
BAD = [
    ("weather", "{}"),
    ("weather", '{"city": 7}'),
    ("weather", '{"city": "Oslo", "mood": 1}'),
    ("now", '{"city": "Oslo"}'),
    ("nobody", "{}"),
    ("route", '{"at": {}}'),
]


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(form: ToolCallFormat, *, parallel: bool = False, **more: Any) -> str:
    return calls_grammar(form, TOOLS, lambda mark: None, parallel=parallel, **more)


def spelled(form: ToolCallFormat, *calls: tuple[str, str]) -> str:
    return written(form, [(json.dumps(name), arguments) for name, arguments in calls])


@pytest.mark.parametrize("family", FORMS)
def test_good_calls_pass_and_are_read_back(family: str) -> None:
    form = FORMS[family]
    for call in GOOD:
        text = spelled(form, call)
        assert accepts(grammar(form), text), text
        reader = DIALECTS[family].reader([tool.name for tool in TOOLS], None)
        assert [*reader.feed(text), *reader.finish()] == [CallBegun(0, call[0]), Arguments(0, call[1])]
    assert accepts(grammar(NAMED), spelled(NAMED, GOOD[0]))


@pytest.mark.parametrize("family", FORMS)
def test_bad_calls_and_words_do_not_pass(family: str) -> None:
    form = FORMS[family]
    for call in BAD:
        assert not accepts(grammar(form), spelled(form, call)), call
    assert not accepts(grammar(form), "Certainly!")
    assert not accepts(grammar(form), "")


@pytest.mark.parametrize("family", FORMS)
def test_several_calls_only_where_they_may_be(family: str) -> None:
    form = FORMS[family]
    text = spelled(form, *GOOD)
    assert not accepts(grammar(form), text)
    assert accepts(grammar(form, parallel=True), text)
    assert accepts(grammar(form, parallel=True), spelled(form, GOOD[0]))
    assert not accepts(grammar(form, parallel=True), spelled(form, *([GOOD[3]] * 33)))


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize(
    ("state", "before", "good"),
    [
        ("open", "Hm, {<tool_call>?\n</think>\n\n", True),
        ("open", "", False),
        ("undecided", "<think>hm</think>\n", True),
        ("undecided", "", True),
        ("undecided", "hm</think>", False),
        ("assumed", "hm</think>", True),
        ("assumed", "<think>hm</think>", True),
        ("over", "", True),
        ("over", "<think>hm</think>", False),
    ],
)
def test_thoughts_come_first(family: str, state: State, before: str, good: bool) -> None:
    form = FORMS[family]
    made = grammar(form, thinking=ReasoningFormat(), state=state)
    assert accepts(made, before + spelled(form, GOOD[0])) is good


def test_marks_that_are_tokens_are_tokens_in_the_grammar() -> None:
    made = calls_grammar(
        FORMS["hermes"],
        TOOLS,
        {"<tool_call>": 5, "</think>": 6}.get,
        parallel=False,
        thinking=ReasoningFormat(),
        state="open",
    )
    assert '<[5]> "\\n{\\"name\\": "' in made
    assert "thought: THOUGHT <[6]>" in made


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    made = closed({"properties": {"a": {"properties": {"b": {}}}, "c": {"type": "object"}}, "items": [1]})
    assert made["additionalProperties"] is False
    assert made["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in made["properties"]["c"]
    assert closed({"properties": {}, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in closed({"properties": {}, "allOf": [{"properties": {}}]})
    described = {"title": "A", "properties": {"title": {"description": "a property that is named so"}}}
    assert closed(described) == {"properties": {"title": {}}, "additionalProperties": False}


def test_a_schema_without_a_bottom_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH + 2):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="deep") as caught:
        closed(schema)
    assert caught.value.field == "tools"


@pytest.mark.parametrize("family", FORMS)
def test_schemas_are_read_as_those_of_other_answers(family: str) -> None:
    parameters = {
        "properties": {
            "kinds": {"type": "array", "items": {"$ref": "#/$defs/kind"}, "uniqueItems": True},
            "names": {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        },
        "$defs": {"kind": {"enum": ["x", "y"]}},
    }  # fmt: skip
    form, tool = FORMS[family], Tool(name="f", given={}, parameters={"type": "object", **parameters})
    made = calls_grammar(form, [tool], lambda mark: None, parallel=False)
    assert accepts(made, spelled(form, ("f", '{"kinds": ["y", "x"], "names": {"b": 1}}')))
    assert not accepts(made, spelled(form, ("f", '{"kinds": ["y", "y"]}')))
    assert not accepts(made, spelled(form, ("f", '{"names": {"c": 1}}')))


def test_repetitions_within_each_other_are_bounded() -> None:
    held = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1000}){1000}"}}}
    tool = Tool(name="f", given={}, parameters=held)
    with pytest.raises(GrammarError, match="1,000,000") as caught:
        calls_grammar(FORMS["json"], [tool], lambda mark: None, parallel=False)
    assert (caught.value.code, caught.value.field) == ("HF362", "tools")
    # Arguments that are free are held to no pattern.
    calls_grammar(FORMS["hermes"], [tool], lambda mark: None, parallel=False, freedom=Freedom(words=True))


STRICT = [Tool(name="weather", given={}, parameters=CITY, strict=True), TOOLS[2]]


def free(form: ToolCallFormat, tools: list[Tool], **more: Any) -> str:
    return calls_grammar(form, tools, lambda mark: None, **{"parallel": True, "freedom": Freedom(words=True), **more})


@pytest.mark.parametrize("family", FORMS)
def test_a_model_that_may_call_is_held_to_strict_schemas_only(family: str) -> None:
    form = FORMS[family]
    made = free(form, STRICT)
    assert accepts(made, "I need no function for that. < [TOOL")
    assert accepts(made, "")
    assert accepts(made, spelled(form, *GOOD[:2]))
    assert not accepts(made, spelled(form, ("weather", '{"town": "Oslo"}')))
    assert accepts(made, spelled(form, ("now", '{"town": "Oslo"}')))
    assert not accepts(made, spelled(form, ("nobody", "{}")))
    alone = free(form, STRICT, parallel=False)
    assert accepts(alone, spelled(form, GOOD[0]))
    assert not accepts(alone, spelled(form, *GOOD[:2]))


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_words_may_stand_before_calls_that_have_a_mark(family: str) -> None:
    form = FORMS[family]
    made = free(form, STRICT, thinking=ReasoningFormat(), state="open")
    assert accepts(made, "Hm.</think>\n\nLet me see.\n" + spelled(form, *GOOD[:2]))
    assert not accepts(made, "Hm.</think>Let me see.\n" + spelled(form, ("weather", '{"town": "Oslo"}')))


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_an_answer_that_calls_nothing_may_have_a_form_of_its_own(family: str) -> None:
    form = FORMS[family]
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    made = calls_grammar(form, TOOLS, lambda mark: None, parallel=True, freedom=Freedom(schema=schema))
    assert accepts(made, '{"rain": true}')
    assert accepts(made, spelled(form, *GOOD))
    assert not accepts(made, "It rains.")
    assert not accepts(made, '{"rain": 1}')


def test_a_form_stands_behind_the_thoughts() -> None:
    for state, before in (("open", "Hm, {} ...</think>\n\n"), ("undecided", ""), ("undecided", "<think>a</think>")):
        made = thoughtful_json(CITY, ReasoningFormat(), state, lambda mark: None, {"whitespace_flexible": False})
        assert accepts(made, before + '{"city":"Oslo"}')
        assert not accepts(made, before + "Oslo")
