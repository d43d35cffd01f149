"""Answers of a form over HTTP, from a real server: each way to ask, streams, refusals, and a death of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from deadlines import PATIENCE_S
from pydantic import BaseModel, ConfigDict, Field

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
EXPLODES = {"allOf": [{"anyOf": [{"minLength": way + at} for way in range(9)]} for at in range(9)]}
ATTEMPTS = 9
"""To kill an engine in the middle of a short answer."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=5)
    age: int


@pytest.fixture(scope="module")
def server(module_server: Callable[..., Any], tiny_arguments: list[str]) -> Any:
    """Random weights: what has a form here has it by force."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return module_server(*tiny_arguments, "--max-num-seqs", "8", "--chat-template", template).wait_ready()


def chat(server: Any, **body: Any) -> httpx.Response:
    asked = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 120,
        "seed": 3,
        "temperature": 1.0,
        **body,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120)


def answer(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
        {"structured_outputs": {"json": SCHEMA}, "guided_decoding_backend": "xgrammar"},
    ],
)
def test_every_way_to_ask_for_a_schema(server: Any, body: dict[str, Any]) -> None:
    text, reason = answer(chat(server, **body))
    assert reason == "stop"
    Person.model_validate_json(text)


def test_other_forms_on_both_endpoints(server: Any) -> None:
    assert answer(chat(server, guided_choice=["red", "green"]))[0] in ("red", "green")
    assert re.fullmatch(r"\d{3}", answer(chat(server, guided_regex=r"\d{3}"))[0])
    assert re.fullmatch(r"(ab)+a?", answer(chat(server, guided_grammar='root ::= "ab" | "ab" root', max_tokens=8))[0])
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    assert answer(chat(server, response_format=tags, max_tokens=5))[1] in ("length", "stop")
    assert answer(chat(server, response_format={"type": "text"}, max_tokens=3))[1] == "length"
    asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 20, "structured_outputs": {"choice": ["x", "yy"]}}
    done = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
    assert [choice["text"] in ("x", "yy") for choice in done["choices"]] == [True] * 4
    text, reason = answer(chat(server, response_format={"type": "json_object"}, max_tokens=4))
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    assert answer(chat(server, guided_regex="[a-z]{200}", max_tokens=4))[1] == "length"


def test_the_openai_client_parses_into_a_model(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "Who?"}], response_format=Person, max_tokens=120, seed=1
    )
    assert isinstance(found.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"guided_regex": "("}, "HF361", "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}}, "HF361",
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"grammar": "start: <|nosuch|>"}}, "HF361", "structured_outputs.grammar"),
        ({"guided_grammar": 'root ::= ("a"{1000}){1000}'}, "HF362", "guided_grammar"),
        ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": "x"}, None, "guided_whitespace_pattern"),
        ({"guided_json": EXPLODES}, "HF362", "guided_json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_is_a_400_also_for_a_stream(server: Any, body, code, param, stream: bool) -> None:
    refused = chat(server, stream=stream, **body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["holdfast"]["code"] if code else None, error["param"]) == (code, param)


def test_an_engine_that_dies_in_mid_answer_goes_on_with_the_form(server: Any) -> None:
    form = {"guided_regex": "([a-z][0-9]){150}", "stream": True, "max_tokens": 400}
    asked = {"messages": [{"role": "user", "content": "Go."}], "seed": 5, "temperature": 1.0, **form}
    for _ in range(ATTEMPTS):
        text, reason, killed = told_with_a_death(server, asked)
        assert reason == "stop"
        assert re.fullmatch("([a-z][0-9]){150}", text)
        if killed:
            break
    assert killed


def told_with_a_death(server: Any, asked: dict[str, Any]) -> tuple[str, str, bool]:
    """The answer, why it ended, and whether the engine was killed in the middle of it."""
    text, reason, tried, killed = "", "", False, False
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S) as events:
        for line in events.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content") or ""
            if len(text) > 40 and not tried:
                tried, killed = True, server.kill_engine()
            reason = choice["finish_reason"]
    return text, reason, killed
