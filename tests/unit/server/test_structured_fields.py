"""The ways to write what an answer must look like, all the same form behind them."""

from __future__ import annotations

import pytest

from holdfast.errors import RequestError
from holdfast.server.request.structured_output import form_of
from holdfast.server.schema.requests import ChatBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def form(**fields):
    return form_of(ChatBody(messages=[], **fields))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema."),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ""),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ""),
        ({"json_schema": SCHEMA}, None),
        ({"guided_json": SCHEMA}, None),
    ],
)
def test_a_schema_is_honoured_however_it_is_written(fields, place):
    wanted = form(**fields)
    assert wanted.json == SCHEMA
    assert wanted.asked_as == (next(iter(fields)) if place is None else f"response_format.{place}schema")


def test_any_object_is_wanted_only_without_a_schema():
    assert form(response_format={"type": "json_object"}).json_object
    assert form(response_format={"type": "json_object", "schema": None}).json_object


def test_a_grammar_of_llama_cpp():
    assert form(grammar='root ::= "a"').grammar == 'root ::= "a"'
    assert form(grammar="") is None
    with pytest.raises(RequestError) as caught:
        form(grammar='root ::= "a"', json_schema=SCHEMA)
    assert caught.value.field == "json_schema"


def test_a_wrong_schema_is_told_where_it_stands():
    with pytest.raises(RequestError) as caught:
        form(response_format={"type": "json_object", "schema": 5})
    assert caught.value.field == "response_format.schema"
