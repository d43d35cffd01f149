"""What an answer must look like, as a record: every way to write it, and every way to write it wrongly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.records import Request, SamplingParams
from holdfast.records.structured import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    StructuredOutputsParams,
)
from holdfast.sampling_params import GuidedDecodingParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


class LikePydantic:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize("given", [SCHEMA, msgspec.json.encode(SCHEMA).decode(), LikePydantic])
def test_a_schema_is_kept_as_plain_json(given: Any) -> None:
    made = StructuredOutputsParams(json=given)
    assert made.json == SCHEMA
    assert list(made.json["properties"]) == ["b", "a"]
    assert made.kind == "json"
    assert made.json is not given


def test_names_of_vllm() -> None:
    assert holdfast.GuidedDecodingParams is holdfast.StructuredOutputsParams is GuidedDecodingParams
    older = SamplingParams(guided_decoding=GuidedDecodingParams(regex=r"\d+"))
    newer = SamplingParams(structured_outputs={"regex": r"\d+"})  # type: ignore[arg-type]
    assert older == newer
    assert older.structured_outputs is not None
    assert older.structured_outputs.kind == "regex"
    assert older.replace(n=2).structured_outputs == older.structured_outputs


@pytest.mark.parametrize(
    "given",
    [
        {"json": SCHEMA},
        {"json": True},
        {"regex": "a|b"},
        {"choice": ["x", "y"]},
        {"grammar": "start: /a/"},
        {"json_object": True, "whitespace_pattern": " ?"},
        {"structural_tag": {"structures": [], "triggers": []}},
    ],
)
def test_over_the_wire(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    request = Request(request_id="r", prompt_token_ids=[1], params=params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_numbers_as_keys_become_text_before_they_travel() -> None:
    assert StructuredOutputsParams(json={1: {2: 3}}).json == {"1": {"2": 3}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def around(value: list[Any]) -> list[Any]:
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": SCHEMA, "regex": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": "{"}, "json"),
        ({"json": "[1]"}, "json"),
        ({"json": 3}, "json"),
        ({"json": {"enum": {object()}}}, "json"),
        ({"json": {"enum": around([])}}, "json"),
        ({"json": nested(MAX_DEPTH + 1)}, "json"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": {"const": "x" * MAX_SCHEMA_BYTES}}, "json"),
        ({"json": '{"const": "' + "x" * MAX_SCHEMA_BYTES + '"}'}, "json"),
        ({"regex": 3}, "regex"),
        ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "regex"),
        ({"choice": "abc"}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
        ({"choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, "choice"),
        ({"grammar": ["root"]}, "grammar"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "grammar"),
        ({"json_object": "yes"}, "json_object"),
        ({"structural_tag": "?"}, "structural_tag"),
        ({"json": SCHEMA, "whitespace_pattern": 1}, "whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern"),
        ({"json": SCHEMA, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field_and_shortly(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.field == field
    assert len(str(caught.value)) < 600


def test_whole_numbers_that_no_message_holds() -> None:
    """Bounds are as good as floats; elsewhere they would be another number."""
    given = {
        "type": "integer",
        "minimum": -(1 << 64),
        "properties": {"a": {"maximum": 1 << 64}},
        "enum": [(1 << 64) - 1],
    }
    made = StructuredOutputsParams(json=given)
    assert made.json == {**given, "minimum": -float(1 << 64), "properties": {"a": {"maximum": float(1 << 64)}}}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=StructuredOutputsParams) == made
    for wrong in ({"enum": [1 << 64]}, {"title": 1 << 64}, {"maximum": 10**400}, {"a": [{"b": -(1 << 63) - 1}]}):
        with pytest.raises(RequestError, match="more than 64 bits"):
            StructuredOutputsParams(json=wrong)


def test_as_deep_as_allowed() -> None:
    assert StructuredOutputsParams(json=nested(MAX_DEPTH)).kind == "json"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"guided_decoding": "json"}, "guided_decoding"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "guided_decoding"),
    ],
)
def test_sampling_params_refuse_what_is_no_form(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_a_backend_of_vllm_s_is_taken_and_another_refused() -> None:
    for backend in ("auto", "outlines", "xgrammar:no-fallback"):
        assert StructuredOutputsParams(regex="a", backend=backend).kind == "regex"
    with pytest.raises(UnsupportedOptionError):
        StructuredOutputsParams(regex="a", backend="yacc")
