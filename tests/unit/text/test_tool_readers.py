"""Calls and thoughts read out of answers: every family, however the text is cut, and whatever a model writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.text.output.reasoning import FAMILIES, ReasoningFormat, ReasoningReader, State, thinking_of
from holdfast.text.tools.answers import AnswerReader
from holdfast.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning
from holdfast.text.tools.registry import DIALECTS, Dialect, dialect_of

NAMES = ("weather", "add")
FAMILY_NAMES = (
    "hermes", "llama3_json", "mistral", "json", "qwen3_coder", "seed_oss", "granite", "phi4_mini_json", "jamba",
    "pythonic", "olmo3", "xlam",
)  # fmt: skip
PARAMETERS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "warm": {"type": "boolean"},
            "near": {"type": ["number", "null"]},
            "tags": {"type": "array"},
            "mode": {"enum": ["a", "b"]},
        },
    }
}


def read(
    dialect: str | None,
    pieces: Sequence[str],
    *,
    thinking: str | None = None,
    state: State = "open",
    most_calls: int | None = None,
) -> list[Event]:
    """The events, those of a kind that follow each other put together."""
    thoughts = None if thinking is None else ReasoningReader(FAMILIES[thinking], state)
    calls = None if dialect is None else DIALECTS[dialect].reader(NAMES, most_calls, parameters=PARAMETERS)
    reader = AnswerReader(thoughts, calls)
    return joined([event for piece in pieces for event in reader.feed(piece)] + reader.finish())


def joined(events: Sequence[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        same = isinstance(last, type(event)) and not isinstance(event, CallBegun)
        if same and getattr(last, "call", 0) == getattr(event, "call", 0):
            found[-1] = event._replace(text=last.text + event.text)
        else:
            found.append(event)
    return found


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def called(*calls: tuple[str, str]) -> list[Event]:
    return [
        event
        for index, (name, arguments) in enumerate(calls)
        for event in (CallBegun(index, name), Arguments(index, arguments))
    ]


ONE, TWO = '{"city": "Oslo }"}', '{"a": [1, {"b": "\\""}]}'
CALLS = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', [ONE]),
    ("hermes", '<tool_call>{"arguments": %s, "name": "weather"}</tool_call>', [ONE]),
    ("hermes", '\n<tool_call>\n{"name": "weather", "arguments": %s}}\n</tool_call>\n', [ONE]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": %s</tool_call>', [ONE]),
    ("hermes", '<tool_call>{"name":"weather","arguments": %s}, {"name":"add","arguments": %s}</tool_call>', [ONE, TWO]),
    ("hermes", '<tool_call>[{"name":"weather","arguments":%s},{"name":"add","arguments":%s}]</tool_call>', [ONE, TWO]),
    ("hermes", '<tool_call>{"name":"weather","arguments": %s}<tool_call>{"name":"add","arguments": %s}', [ONE, TWO]),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n<tool_call>\n{"id": 7, "name": "add", '
        '"arguments": %s, "x": [1, "]"]}\n</tool_call>',
        [ONE, TWO],
    ),
    ("llama3_json", '{"name": "weather", "parameters": %s}', [ONE]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "weather", "parameters": %s}', [ONE]),
    ("llama3_json", '{"name": "weather", "parameters": %s}; {"name": "add", "parameters": %s}', [ONE, TWO]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": %s}<|python_tag|>{"name": "add", "parameters": %s}\n',
        [ONE, TWO],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": %s, "id": "abcdefghi"}]', [ONE]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]', [ONE, TWO]),
    ("mistral", "[TOOL_CALLS]weather[ARGS]%s[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]%s", [ONE, TWO]),
    ("mistral", "[TOOL_CALLS]weather%s\n[TOOL_CALLS]add %s", [ONE, TWO]),
    ("json", '{"name": "weather", "arguments": %s}', [ONE]),
    ("json", ' ```json\n[{"name": "weather", "parameters": %s},\n {"name":"add","arguments":%s}]\n```\n', [ONE, TWO]),
    ("json", '```\n{"name": "weather", "arguments": %s}\n```', [ONE]),
    ("hermes", '```json\n{\n  "name": "weather",\n  "arguments": %s\n}\n```', [ONE]),
    ("mistral", '{"name": "weather", "arguments": %s}', [ONE]),
    ("json", '{"name": "weather", "arguments": %s}\n{"name": "add", "arguments": %s}', [ONE, TWO]),
    ("qwen3_coder", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', [ONE]),
    ("qwen3_coder", '{"name": "weather", "arguments": %s}', [ONE]),
    ("seed_oss", '<seed:tool_call>\n{"name": "weather", "arguments": %s}\n</seed:tool_call>', [ONE]),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]', [ONE, TWO]),
    ("granite", '<tool_call>[{"arguments": %s, "name": "weather"}]', [ONE]),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": %s}]', [ONE]),
    ("phi4_mini_json", '<|tool_call|>[{"name": "weather", "arguments": %s}]<|/tool_call|>', [ONE]),
    ("jamba", '<tool_calls>[\n{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]\n</tool_calls>',
     [ONE, TWO]),
    ("xlam", '[{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]', [ONE, TWO]),
    ("xlam", '```json\n[{"name": "weather", "arguments": %s}]\n```', [ONE]),
    ("xlam", '[TOOL_CALLS][{"name": "weather", "arguments": %s}]', [ONE]),
    ("xlam", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', [ONE]),
    ("pythonic", '[{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]', [ONE, TWO]),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "form", "arguments"), CALLS)
def test_each_familys_calls(dialect: str, form: str, arguments: list[str]) -> None:
    text = form % tuple(arguments)
    expected = called(*zip(NAMES, arguments, strict=False))
    for size in (1, 2, 7, len(text)):
        assert read(dialect, [text[place : place + size] for place in range(0, len(text), size)]) == expected


TAGGED = """<function=weather>
<parameter=city>
Oslo </b> "x"
and more
</parameter>
<parameter=days>
3
</parameter>
<parameter=warm>True</parameter>
<parameter=near>null</parameter>
<parameter=tags>
['a', 1]
</parameter>
<parameter=mode>a</parameter>
<parameter=other>
{"b": null}
</parameter>
</function>"""
TAGGED_ARGUMENTS = {
    "city": 'Oslo </b> "x"\nand more', "days": 3, "warm": True, "near": None, "tags": ["a", 1], "mode": "a",
    "other": {"b": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        ("qwen3_coder", f"<tool_call>\n{TAGGED}\n</tool_call>", 1),
        ("qwen3_coder", TAGGED, 1),
        ("qwen3_coder", f"<tool_call>{TAGGED}\n{TAGGED}</tool_call>\n<tool_call>{TAGGED}<tool_call>\n{TAGGED}", 4),
        ("qwen3_xml", f"<tool_call>\n{TAGGED.replace('</parameter>' + chr(10), '')}\n</tool_call>", 1),
        ("seed_oss", f"<seed:tool_call>\n{TAGGED}\n</seed:tool_call>", 1),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(dialect: str, text: str, calls: int) -> None:
    expected = read(dialect, [text])
    assert [event.name for event in expected if isinstance(event, CallBegun)] == ["weather"] * calls
    told = [json.loads(event.text) for event in expected if isinstance(event, Arguments)]
    assert told == [TAGGED_ARGUMENTS] * calls
    assert not any(isinstance(event, Content) for event in expected)
    for size in (1, 3, 11):
        assert read(dialect, [text[place : place + size] for place in range(0, len(text), size)]) == expected


def test_a_value_that_is_not_of_its_type_stays_text() -> None:
    text = "<tool_call><function=weather><parameter=days>many</parameter><parameter=near>nan</parameter></function>"
    assert read("qwen3_coder", [text]) == called(("weather", '{"days": "many", "near": "nan"}'))
    # Cut in the middle of a value: what was complete is shown, and the rest is no content.
    events = read("qwen3_coder", [text[:60]])
    assert events == [CallBegun(0, "weather"), Arguments(0, "{")]


def test_strict_tools_are_looked_at_where_no_grammar_holds_them() -> None:
    def fits(name: str, arguments: str) -> bool:
        return isinstance(json.loads(arguments).get("days"), int)

    for value, is_call in (("3", True), ("many", False)):
        text = f"<function=weather><parameter=days>{value}</parameter></function>"
        reader = DIALECTS["qwen3_coder"].reader(NAMES, fits=fits, parameters=PARAMETERS)
        events = joined([*reader.feed(text), *reader.finish()])
        assert events == (called(("weather", '{"days": 3}')) if is_call else [Content(text)])


@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        ("pythonic", "[weather(city='Os)lo', days=-3)]", [("weather", {"city": "Os)lo", "days": -3})]),
        ("pythonic", '[weather(city="a\\"]", tags=[1, (2.5,)]),\n add()]', [
            ("weather", {"city": 'a"]', "tags": [1, [2.5]]}), ("add", {})]),
        ("llama4_pythonic", "<|python_start|>[add(a={'b': True, 'c': null})]<|python_end|>", [
            ("add", {"a": {"b": True, "c": None}})]),
        ("olmo3", "<function_calls>\nweather(city='x')\nadd(a=1)\n</function_calls>", [
            ("weather", {"city": "x"}), ("add", {"a": 1})]),
    ],
)  # fmt: skip
def test_calls_as_python_writes_them(dialect: str, text: str, calls: list[tuple[str, dict]]) -> None:
    expected = read(dialect, [text])
    assert read(dialect, list(text)) == expected
    assert [event.name for event in expected if isinstance(event, CallBegun)] == [name for name, _ in calls]
    told = [json.loads(event.text) for event in expected if isinstance(event, Arguments)]
    assert told == [arguments for _, arguments in calls]
    assert not any(isinstance(event, Content) for event in expected)


@pytest.mark.parametrize(
    "text",
    [
        "[1] as told", "[print(1)]", "[weather(1)]", "[weather(**x)]", "[weather(city=open('x'))]", "[weather(city=1",
        "[weather(a=1, a=2)]", "[weather(a=1e999)]", "[weather(a={1: 2})]", "[weather(a=b'x')]", "[weather(a=1j)]",
        "[weather(a=" + "[" * 500 + "]" * 500 + ")]", "[weather(a=" + "-" * 5000 + "1)]",
    ],
)  # fmt: skip
def test_what_is_no_call_in_python_is_content(text: str) -> None:
    assert read("pythonic", [text]) == read("pythonic", list(text)) == [Content(text)]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": "{\\"city\\": 1}"}]'),
    ],
)
def test_arguments_written_as_a_text_are_the_json_in_it(dialect: str, text: str) -> None:
    assert read(dialect, [text]) == called(("weather", '{"city": 1}'))


@pytest.mark.parametrize("written", ['{"name": "weather"}', '{"name": "weather", "arguments": null}'])
def test_a_call_without_arguments_has_an_empty_object(written: str) -> None:
    assert read("hermes", [f"<tool_call>{written}</tool_call>"]) == called(("weather", "{}"))
    assert read("json", [written]) == called(("weather", "{}"))


def test_content_stands_before_and_behind_calls() -> None:
    text = 'Let me see.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n\nDone.'
    assert read("hermes", [text]) == [Content("Let me see.\n"), *called(("add", "{}")), Content("\n\nDone.")]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "<tool_call>weather(Oslo)</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "argum'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "no"}</tool_call>'),
        ("hermes", '<tool_call>{"name" "weather"}</tool_call>'),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", "a < b and <tool_cal"),
        ("hermes", '{"name": "Bob", "arguments": {"age": 3}}'),
        ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
        ("llama3_json", '{"city": "Oslo"}'),
        ("llama3_json", '<|python_tag|>print("x")'),
        ("llama3_json", 'text {"name": "weather", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]wea ther? {}"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[INST] [TOOL"),
        ("json", "[1, 2, 3]"),
        ("json", "```python\nprint(1)\n```"),
        ("json", '{"name": "weather", "arguments'),
        ("json", " \n "),
        ("qwen3_coder", "<tool_call>weather(Oslo)</tool_call>"),
        ("qwen3_coder", "<function=nobody><parameter=a>1</parameter></function>"),
        ("qwen3_coder", "<tool_call><function=wea\nther>"),
        ("qwen3_coder", "a <function"),
        ("granite", "<|tool_call|>none"),
        ("phi4_mini_json", "functools is a module of Python"),
        ("olmo3", "<function_calls>\nprint(1)\n</function_calls>"),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(dialect: str, text: str) -> None:
    assert read(dialect, [text]) == read(dialect, list(text)) == [Content(text)]


def test_arguments_that_are_no_json_stay_arguments() -> None:
    """A stream has shown their beginning already; the client sees that they do not parse, as with OpenAI."""
    text = '<tool_call>{"name": "add", "arguments": {\'a\': one}}</tool_call>'
    assert read("hermes", [text]) == called(("add", "{'a': one}"))
    assert read("hermes", ['<tool_call>{"name": "add", "arguments": {"a": 1, "b']) == called(("add", '{"a": 1, "b'))


def test_calls_beyond_the_most_that_are_wanted_are_dropped() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>' * 3
    assert read("hermes", [text], most_calls=1) == called(("weather", "{}"))


ALPHABET = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```", "json",
        "<function=weather>", "<parameter=a>", "</parameter>", "</function>", "<|tool_call|>", "functools",
        "<tool_calls>", "<function_calls>", "weather(", "a=", ")", "'", "<seed:tool_call>",
        "<think>", "</think>", '{"name": "weather", "arguments": {"a": ', '{"name": "add", "parameters": ', '"name"',
        '"arguments"', ": ", ", ", "{", "}", "[", "]", '"', "\\", "weather", "null", "7", " ", "\n", "é", "<", "x", ";",
    ]
)  # fmt: skip
TEXTS = st.lists(ALPHABET, max_size=25).map("".join)
CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


@settings(max_examples=examples(120), deadline=None)
@given(text=TEXTS, places=CUTS, dialect=st.sampled_from(FAMILY_NAMES), thinking=st.sampled_from([None, *FAMILIES]))
def test_events_do_not_depend_on_how_the_text_is_cut(
    text: str, places: list[int], dialect: str, thinking: str | None
) -> None:
    for state in ("open", "undecided", "assumed", "over"):
        whole = read(dialect, [text], thinking=thinking, state=state)
        assert read(dialect, cut(text, places), thinking=thinking, state=state) == whole
        assert read(dialect, list(text), thinking=thinking, state=state) == whole


@settings(max_examples=examples(120), deadline=None)
@given(text=TEXTS, dialect=st.sampled_from(FAMILY_NAMES))
def test_nothing_is_lost(text: str, dialect: str) -> None:
    """Without a call the content is the text. With some, what is shown is in the text, piece by piece and in order."""
    events = read(dialect, [text])
    if not any(isinstance(event, CallBegun) for event in events):
        assert events == ([Content(text)] if text else [])
    shown = [event.text for event in events if isinstance(event, Content)]
    place = 0
    for piece in shown:
        place = text.index(piece, place) + len(piece)


@pytest.mark.parametrize("dialect", FAMILY_NAMES)
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "[TOOL_CALLS]a", "{", '{"name": "weather", "arguments": {"a": ', '"', "<", " ", "\\", "[", "`"],
)
def test_hostile_texts_take_work_in_proportion(dialect: str, unit: str) -> None:
    """Nothing is read twice: ten times the text makes about ten times the calls, not a hundred."""

    def work(count: int) -> int:
        reader, steps = DIALECTS[dialect].reader(NAMES, None), 0

        def counted(*_: object) -> None:
            nonlocal steps
            steps += 1

        sys.setprofile(counted)
        try:
            reader.feed(unit * count)
            reader.finish()
        finally:
            sys.setprofile(None)
        return steps

    assert work(10_000 // len(unit)) < 12 * work(1_000 // len(unit)) + 200


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        ("open", "hm</think>\n\nYes", [Reasoning("hm"), Content("\n\nYes")]),
        ("open", "hm, not finished </thi", [Reasoning("hm, not finished </thi")]),
        ("undecided", "\n<think>hm</think>Yes", [Reasoning("hm"), Content("Yes")]),
        ("undecided", "Yes, <think> is a mark", [Content("Yes, <think> is a mark")]),
        ("undecided", "<thi", [Content("<thi")]),
        ("assumed", "hm</think>Yes", [Reasoning("hm"), Content("Yes")]),
        ("assumed", "<think>hm</think>Yes", [Reasoning("hm"), Content("Yes")]),
        ("over", "Yes</think>", [Content("Yes</think>")]),
    ],
)
def test_thoughts_are_told_apart(state: State, text: str, expected: list[Event]) -> None:
    assert read(None, [text], thinking="qwen3", state=state) == expected
    assert read(None, list(text), thinking="qwen3", state=state) == expected


def test_granites_thoughts_are_told_apart_by_its_words() -> None:
    text = "Here is my thought process: hm. Here is my response: Yes"
    for pieces in ([text], list(text)):
        found = read(None, pieces, thinking="granite", state="undecided")
        assert found == [Reasoning(" hm. "), Content(" Yes")]
    assert read(None, ["Here is my cat"], thinking="granite", state="undecided") == [Content("Here is my cat")]


def test_calls_are_looked_for_behind_the_thoughts_only() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = f"I could {call} here.</think>\n\n{call}"
    assert read("hermes", [text], thinking="qwen3") == [Reasoning(f"I could {call} here."), *called(("add", "{}"))]


def test_the_prompt_tells_whether_thoughts_are_open() -> None:
    assert ReasoningFormat().state_behind("<|im_start|>assistant\n<think>\n") == "open"
    assert ReasoningFormat().state_behind("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "over"
    assert ReasoningFormat().state_behind("<|im_start|>assistant\n") == "undecided"
    assert ReasoningFormat(always=True).state_behind("<｜Assistant｜>") == "assumed"


@pytest.mark.parametrize(
    ("template", "dialect", "thinking"),
    [
        ('{{ "<tool_call>" }}', "hermes", None),
        ('{{ "<tool_call>" }}</think>', "hermes", "qwen3"),
        ('{{ "[TOOL_CALLS]" }}', "mistral", None),
        ('{{ "[TOOL_CALLS]" }}[/THINK]', "mistral", "mistral"),
        ('{{ "<|python_tag|>" }}', "llama3_json", None),
        ('{{ "<tool_call>\\n<function=" }}', "qwen3_coder", None),
        ('{{ "<tool_call>\\n<arg_key>" }}', None, None),
        ('{{ "<seed:tool_call>\\n<function=" }}', "seed_oss", None),
        ('{{ "<|tool_call|>" }}', "granite", None),
        ('{{ "[func_name1(params_name1=params_value1)]" }}<|python_tag|>', "pythonic", None),
        ('{{ "<function_calls>" }}', "olmo3", None),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_families_are_told_by_the_template(template: str | None, dialect: str | None, thinking: str | None) -> None:
    found: Dialect | None = dialect_of(template)
    assert (found.name if found else None) == dialect
    assert thinking_of(template) == thinking


def test_mistrals_ids_have_the_length_its_templates_want() -> None:
    made = DIALECTS["mistral"].make_id()
    assert len(made) == 9
    assert made.isalnum()
    assert json.dumps(DIALECTS["hermes"].make_id()).startswith('"call_')


def test_a_call_that_was_cut_is_not_a_call_that_was_made() -> None:
    """Its arguments are no JSON, and a client that is told "tool_calls" reads them."""
    for text, whole in (
        ('<tool_call>{"name": "weather", "arguments": {"city": "', False),
        ('<tool_call>{"name": "weather", "arguments": {}', True),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call><tool_call>{"name": "add", "arguments": {', False),
        ("words", False),
    ):
        reader = AnswerReader(None, DIALECTS["hermes"].reader(NAMES))
        reader.feed(text)
        reader.finish()
        assert reader.called is whole, text


def test_what_a_forced_call_had_begun_is_no_content() -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "weather", "argum', "<tool_c", '{"name": "weat'):
        reader = DIALECTS["hermes"].reader(NAMES, forced=True)
        assert [*reader.feed(text), *reader.finish()] == []


def test_where_marked_calls_are_held_to_a_form_others_are_looked_at() -> None:
    """A model that leaves the mark out has written what no grammar held: a call where it fits, else words."""

    def fits(name: str, arguments: str) -> bool:
        return name == "weather" and isinstance(json.loads(arguments).get("city"), str)

    call, wrong = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "weather", "arguments": {"city": 1}}'
    for text, expected in (
        (call, called(("weather", '{"city": "Rome"}'))),
        (f"```json\n{call}\n```", called(("weather", '{"city": "Rome"}'))),
        ('{"arguments": {"city": "Rome"}, "name": "weather"}', called(("weather", '{"city": "Rome"}'))),
        (wrong, [Content(wrong)]),
        ('{"name": "weather"}', [Content('{"name": "weather"}')]),
        (f"<tool_call>{wrong}</tool_call>", called(("weather", '{"city": 1}'))),
    ):
        for cut in (1, 7, len(text)):
            reader = DIALECTS["hermes"].reader(NAMES, fits=fits)
            events = [event for at in range(0, len(text), cut) for event in reader.feed(text[at : at + cut])]
            assert joined([*events, *reader.finish()]) == expected, text
