"""Masks of tokens against a slow reference, every kind of form, and every way in which one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabulary import CALL, END, SIZE, VOCABULARY, accepts, allowed_by, small_grammars

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.llguidance_backend import Grammars

GRAMMARS = small_grammars()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ARITHMETIC = 'root ::= term ("+" term)*\nterm ::= "(" root ")" | [0-9]+\n'
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<tool>", "schema": PERSON, "end": "</tool>"}],
    "triggers": ["<tool"],
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": PERSON},
    "any": {"json": {}},
    "object": {"json_object": True, "disable_any_whitespace": True},
    "regex": {"regex": r"(ab|abc)+[0-9]{2,3}(é|日)?"},
    "choice": {"choice": ["yes", "no", "no way", "né", 'a"b\\c\n']},
    "lark": {"grammar": 'start: "ab" num+\nnum: /[0-9]/ | <|call|>'},
    "gbnf": {"grammar": ARITHMETIC},
    "tags": {"structural_tag": TAGS},
}


def form(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_mask_is_the_tokens_that_can_be_consumed(name: str, data: st.DataObject) -> None:
    """At every place of a random walk: a token is in the mask if and only if the matcher takes it."""
    matcher = GRAMMARS.matcher(form(**FORMS[name]))
    for _ in range(12):
        allowed = allowed_by(matcher)
        if matcher.complete:
            assert allowed <= {END}
            return
        assert allowed
        assert matcher.error is None
        takes = {token for token in range(SIZE) if matcher.library.deep_copy().validate_tokens([token]) == 1}
        # What a grammar forces may be cut in one way where there are several: less than all that could be consumed.
        assert allowed <= takes
        if len(allowed) > 3:
            assert allowed == takes
        token = data.draw(st.sampled_from(sorted(allowed)))
        assert matcher.consume(token)


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"json": PERSON}, ['{"name":"ab","age":3}', '{ "name" : "" ,\n  "age": 0 }'],
         ['{"name":"ab"}', '{"name":"abcde","age":1}', '{"name":"ab","age":-1}', "[]"]),
        ({"json": True}, ["1", "[null]", '"x"'], ["nul", "{a}"]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"ab","age":3}'], ['{ "name":"ab","age":3}']),
        ({"json": PERSON, "whitespace_pattern": " ?"}, ['{ "name":"ab","age":3}'], ['{  "name":"ab","age":3}']),
        ({"json": {"properties": {"a": {}}}}, ['{"b":1}'], []),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": True}, ['{"a":1}'], ['{"b":1}']),
        ({"json": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}},
         ["[]", "[[[]],[]]"], ["{}", "[1]"]),
        ({"json": {"propertyNames": {"enum": ["a.b", "é"]}, "additionalProperties": {"type": "null"}}},
         ['{"a.b":null,"é":null}'], ['{"axb":null}', '{"a.b":1}', '{"c":null}']),
        ({"json": {"items": {"type": "object", "propertyNames": {"type": "string", "pattern": "^x[0-9]$"}}}},
         ['[{"x1":[]}]'], ['[{"y":1}]']),
        ({"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}}, ["[1,1]"], ["[a]"]),
        ({"json": {"type": "array", "items": {"enum": ["a", "b", "a"], "type": "string"}, "uniqueItems": True}},
         ["[]", '["a"]', '[ "b", "a" ]'], ['["a","a"]', '["c"]', '["a","b","a"]', "{}"]),
        ({"json": {"$defs": {"k": {"enum": list("abcdefgh")}}, "type": "object", "properties": {"s": {"type": "array",
          "items": {"$ref": "#/$defs/k"}, "uniqueItems": True, "minItems": 1, "maxItems": 2, "title": "S"}}}},
         ['{"s":["h"]}', '{"s":["a","h"]}'], ['{"s":[]}', '{"s":["a","a"]}', '{"s":["a","b","c"]}']),
        ({"json": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}, ['"ab"'], ['""', '"abc"']),
        ({"json": {"type": "integer", "maximum": 2**70, "minimum": 0}}, ["5"], ["-5"]),
        ({"choice": [f"number {at}" for at in range(4096)]}, ["number 4095", "number 0"], ["number 4096"]),
        ({"json_object": True}, ['{"a": [1, {"b": null}]}'], ["[1]", "3"]),
        ({"regex": r"^\d{4}-\d{2}$"}, ["2024-01"], ["2024-1", "x"]),
        ({"choice": ["a", "ab", 'q"\\', "\u2028", "日本"]}, ["a", "ab", 'q"\\', "\u2028", "日本"], ["b", "abc"]),
        ({"grammar": 'start: "a" | "b" start'}, ["a", "bba"], ["b"]),
        ({"structural_tag": TAGS}, ["hello", 'so <tool>{"name":"a","age":1}</tool> and', "< no"],
         ["<tool>{}</tool>", "x <tool>"]),
        ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<|call|>"], "at_least_one": True,
          "stop_after_first": True, "tags": [{"begin": "<|call|>x", "end": "y",
          "content": {"type": "regex", "pattern": "[0-9]/?"}}]}}}, [], ["hello"]),
    ],
)  # fmt: skip
def test_texts_that_have_the_form_and_texts_that_have_not(given: dict[str, Any], good: list[str], bad: list[str]):
    params = form(**given)
    assert [text for text in good if not accepts(GRAMMARS, params, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, params, text)] == []


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    tags = {"structures": [{"begin": "<|call|>", "schema": {"type": "integer"}, "end": "!"}], "triggers": ["<|call|>"]}
    matcher = GRAMMARS.matcher(form(structural_tag=tags))
    assert CALL in allowed_by(matcher)
    assert matcher.consume_all([*b"go ", CALL, *b"12!"])
    assert matcher.library.is_accepting()


def test_what_is_forced_is_written_to_its_end_however_long_it_is() -> None:
    """The masks of a text of 6,600 characters, of which nothing else is possible."""
    matcher, written = GRAMMARS.matcher(form(grammar="start: /(abc){2000}(red){200}yes/")), 0
    while not matcher.complete:
        (token,) = allowed_by(matcher)
        written += len(VOCABULARY.tokens[token])
        assert matcher.consume(token)
    assert written == 6000 + 600 + 3


def test_no_text_of_an_answer_is_a_special_token() -> None:
    matcher = GRAMMARS.matcher(form(regex="(.|\\n)*"))
    assert CALL not in allowed_by(matcher)
    assert END in allowed_by(matcher)


def test_blanks_are_bounded() -> None:
    """A model that has lost its way cannot write nothing but blanks until its tokens are spent."""
    for blanks in (" ", "  ", "\n" + " " * 32, "\r\n\t\t", "\t"):
        assert accepts(GRAMMARS, form(json={}), f"[{blanks}1{blanks}]"), blanks
    for blanks in ("   ", "\n\n", " \n", "\n" + " " * 33):
        assert not accepts(GRAMMARS, form(json={}), f"[{blanks}1]"), blanks


GBNF = [
    ('root ::= "a" [0-9]+ # comment\n  | "b"', ["a1", "a123", "b"], ["a", "c"]),
    ('root ::= [^"\\\\\\x00-\\x1f]* "\\""', ['ab"', '"'], ['a\n"', "a"]),
    ("root ::= [\\u00e9-\\u00eb]{2} \"\\u65e5\" 'x'", ["éê日x"], ["é日x", "aa日x"]),
    ('root ::= word "b"\nword ::= [a-z]+', ["ab", "bb", "abab"], ["a", "b"]),
    ('root ::= list\nlist ::= "[" (list ("," list)*)? "]"', ["[]", "[[],[[]]]"], ["[", "[,]"]),
    ('root ::= word "b" root?\nword ::= [a-z]+', ["ab", "abcb"], ["a"]),
    ('root ::= (\n "a" |\n "b"\n){1,2} .', ["ax", "abé"], ["a", "a\n"]),
    ('root ::= foo Foo start\nfoo ::= "a"\nFoo ::= "b"\nstart ::= ""', ["ab"], ["a", "b"]),
    ('root ::= [a\\-z\\]/]+ "/"', ["a-]//"], ["b/"]),
    ('root ::= x*\nx ::= "a"? "b"+ "c"{2,}', ["", "abcc", "bbccc"], ["ac", "abc"]),
    ("root ::= expr\n" + ARITHMETIC.replace("root", "expr"), ["1+(2+3)"], ["1+", "()"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GBNF)
def test_gbnf_means_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    params = form(grammar=grammar)
    assert [text for text in good if not accepts(GRAMMARS, params, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, params, text)] == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text(alphabet="ab.*+?()[]{}|^$\\/-\"'\n é#&~@", min_size=1, max_size=6), min_size=1, max_size=5),
    st.text(alphabet="ab.*é", max_size=4),
)
def test_choices_and_literals_of_gbnf_mean_themselves(choices: list[str], other: str) -> None:
    spelled = " | ".join(json.dumps(choice) for choice in choices)
    for params in (form(choice=choices), form(grammar=f"root ::= {spelled}")):
        assert all(accepts(GRAMMARS, params, choice) for choice in choices)
        assert accepts(GRAMMARS, params, other) == (other in choices)


def refusal(**given: Any) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.check(form(**given))
    assert len(str(caught.value)) < 700
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "frob"}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"$ref": "http://127.0.0.1/x"}},
        {"json": {"$ref": "#/$defs/none"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}},
        {"json": {"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefgh")}}},
        {"json": {"type": "array", "uniqueItems": True, "items": {"const": "a"}, "minItems": 2}},
        {"json": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/a"}, "$defs": [1]}},
        {"json": {"uniqueItems": True, "items": {"enum": ["a", "b"]}}},
        {"json": {"propertyNames": {"maxLength": 3}}},
        {"json": {"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}},
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"grammar": "start: foo"},
        {"grammar": "start: <|nosuch|>"},
        {"grammar": 'rot ::= "a"'},
        {"grammar": 'root ::= "a'},
        {"grammar": 'root ::= ("a"'},
        {"grammar": "root ::= other"},
        {"grammar": 'root ::= "a"\nroot ::= "b"'},
        {"grammar": "root ::= *"},
        {"grammar": "root ::= []"},
        {"grammar": "root ::= [\\ud800]"},
        {"grammar": "root ::= " + "(" * 200},
        {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
        {"structural_tag": {}},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}},
        {"structural_tag": {"structures": [{"begin": 3, "end": ""}], "triggers": ["<b"]}},
    ],
)
def test_what_cannot_be_read_is_refused(given: dict[str, Any]) -> None:
    assert refusal(**given).code in ("HF361", "HF362")


def test_compiled_grammars_are_shared_and_matchers_are_not() -> None:
    params = form(regex="[ab]{3}")
    first, second = GRAMMARS.matcher(params), GRAMMARS.matcher(params)
    assert first.consume_all(list(b"aba"))
    assert first.complete
    assert not second.complete
    assert allowed_by(second) >= {ord("a"), ord("b")}


def test_a_wrong_token_is_an_error_that_stays() -> None:
    matcher = GRAMMARS.matcher(form(regex="a"))
    assert not matcher.consume(ord("b"))
    assert matcher.error is not None
    assert not matcher.complete


def test_more_ends_than_one() -> None:
    grammars = Grammars(VOCABULARY, [END, CALL], SIZE)
    assert allowed_by(grammars.matcher(form(regex="a*"))) >= {END, CALL}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"regex": r"\d{2}\s\w"}, ["12 a", "12\tZ"], ["٣٣ a", "12\u00a0a", "12 é"]),
        ({"regex": r"[^\d\s]\D\S\W"}, ["éx日é"], ["1xyé", "éx日a"]),
        ({"regex": "a/b\\/c\n"}, ["a/b/c\n"], ["ab"]),
        ({"grammar": r'start: /\d+/ "d" // \w' + "\n"}, ["7d"], ["٣d", "77"]),
        ({"grammar": r"root ::= [0-9] [\t ]"}, ["1 "], ["٣ "]),
        ({"json": {"type": "string", "pattern": r"^\d\w$"}}, ['"1a"'], ['"٣a"', '"1é"']),
        ({"json": PERSON, "whitespace_pattern": r"\s?"}, ['{ "name":"ab",\n"age":3}'], ['{\u00a0"name":"ab","age":3}']),
        ({"structural_tag": {"format": {"type": "regex", "pattern": r"\d"}}}, ["1"], ["٣"]),
    ],
)  # fmt: skip
def test_classes_are_those_of_ascii_wherever_they_are_written(
    given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    params = form(**given)
    assert [text for text in good if not accepts(GRAMMARS, params, text)] == []
    assert [text for text in bad if accepts(GRAMMARS, params, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: "a"', '!start: "a"', '// a comment with ::= in it\n?start: b\nb: "a"',
        '%import common.INT\n?start: INT | "a"',
        'start[lazy]: "a"', '# c\n\nother: "::="\nstart: "a" | other', "x: /[:=]::=/\nstart: x | /a/",
        'root ::= "a" # start: "b"', 'start ::= "b"\nroot ::= "a"', 'root ::= "a" | [:a::=]',
    ],
)  # fmt: skip
def test_lark_and_gbnf_are_told_apart(grammar: str) -> None:
    assert accepts(GRAMMARS, form(grammar=grammar), "a")
    assert not accepts(GRAMMARS, form(grammar=grammar), "b")


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a{1000}){1000}"}, {"regex": "x{400}{400}"}, {"grammar": 'root ::= ("a"{1000}){1000}'},
        {"grammar": "start: /(?:a{999}b){999}/"},
        {"json": {"properties": {"a": {"type": "string", "pattern": "^(a{1,999}b){0,999}$"}}}},
    ],
)  # fmt: skip
def test_counts_within_counts_are_bounded(given: dict[str, Any]) -> None:
    assert refusal(**given).code == "HF362"


def test_counts_that_stand_alone_or_are_few_are_taken() -> None:
    for regex in (r"([a-z]{1,63}\.){1,127}", "a{1,200000}", r"[{1000}]{1000}", r"\{1000}(\(a{9}){9}"):
        GRAMMARS.matcher(form(regex=regex))


@pytest.mark.parametrize("given", [{"json": {"$ref": "#"}}, {"grammar": "start: start"}, {"grammar": "root ::= root"}])
def test_what_nothing_can_be_written_of_says_so(given: dict[str, Any]) -> None:
    error = refusal(**given, asked_as="guided_thing")
    assert error.message == "guided_thing: the grammar matches no output"
    assert error.field == "guided_thing"


def test_no_advice_about_options_that_are_not_there() -> None:
    error = refusal(json={"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]})
    assert "coerce" not in str(error)
    assert "at 1(" not in str(refusal(regex="("))
